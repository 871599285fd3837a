"""The one graph that every importer makes and every other part reads: tasks, files, readers and writers.

A graph states what is *known*; an unknown fact is `None` or a flag, never a guess. `Workflow` checks itself when it
is made: names are unique, every file of a task is listed, each file has at most one writer, there is no cycle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from .problem import Problem


@dataclass(slots=True)
class File:
    """A file of the workflow; `path` is relative to the workflow's directory, or absolute if it is outside."""

    path: str
    size_bytes: int | None = None
    # The engine or the user declares it temporary: it may be removed after its last reader.
    temporary: bool = False
    # The engine or the user declares that it must be kept.
    final: bool = False
    # Its readers are not known before a later evaluation (checkpoint, scatter, conditional): it is kept.
    readers_unknown: bool = False


@dataclass(slots=True)
class Task:
    """One execution of a program. `command` is a vector, or a shell's text if the engine has no vector."""

    id: str
    kind: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    # Earlier tasks without a file in between.
    after: list[str] = field(default_factory=list)
    command: list[str] | str | None = None
    runtime_s: float | None = None
    cores: float = 1.0
    memory_bytes: int | None = None
    retries: int = 0
    image: str | None = None
    # Name of the preferred tier for its outputs (PerSSD's tier 0, 1 or both).
    tier: str | None = None


@dataclass
class Workflow:
    """`source` names the engine and its file; `known` says how much of the graph that is (see `Known`)."""

    name: str
    source: str
    tasks: dict[str, Task]
    files: dict[str, File]
    # Why the graph is incomplete ("2 checkpoints are not evaluated yet"); empty: it is complete.
    incomplete: list[str] = field(default_factory=list)
    # The place in the description, for messages: task id → "FILE:LINE".
    places: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, name: str, source: str, tasks: Iterable[Task], files: Iterable[File] = (), **rest: object) -> Workflow:
        """From lists; files that only tasks name are added without a size."""
        by_id: dict[str, Task] = {}
        for task in tasks:
            if task.id in by_id:
                raise Problem(f"two tasks are called {task.id!r}", where=source, remedy="give each task its own id")
            by_id[task.id] = task
        by_path = {file.path: file for file in files}
        for task in by_id.values():
            for path in (*task.inputs, *task.outputs):
                if path not in by_path:
                    by_path[path] = File(path)
        return cls(name, source, by_id, by_path, **rest)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises `Problem` if the graph contradicts itself."""
        for path in self.files:
            parts = PurePosixPath(path).parts
            if not path or "\0" in path or ".." in parts:
                raise Problem(
                    f"the file {path!r} is not a path below the workflow's directory",
                    where=self.source,
                    remedy="write it without `..`, relative to the directory or absolute",
                )
        for task in self.tasks.values():
            for path in (*task.inputs, *task.outputs):
                if path not in self.files:
                    raise Problem(f"task {task.id!r} names the file {path!r}, which is not listed", where=self.at(task))
            for other in task.after:
                if other not in self.tasks:
                    raise Problem(f"task {task.id!r} comes after {other!r}, which does not exist", where=self.at(task))
        _ = self.producer
        _ = self.order

    def at(self, task: Task) -> str:
        """The place of a task in the description, for messages."""
        return self.places.get(task.id, self.source)

    @cached_property
    def producer(self) -> dict[str, str]:
        """File → the task that writes it."""
        made: dict[str, str] = {}
        for task in self.tasks.values():
            for path in task.outputs:
                if made.setdefault(path, task.id) != task.id:
                    raise Problem(
                        f"both {made[path]!r} and {task.id!r} write {path!r}",
                        where=self.at(task),
                        remedy="let one task make each file",
                    )
        return made

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """File → the tasks that read it and do not write it, each once."""
        read: dict[str, list[str]] = {path: [] for path in self.files}
        for task in self.tasks.values():
            for path in dict.fromkeys(task.inputs):
                if self.producer.get(path) != task.id:
                    read[path].append(task.id)
        return read

    @cached_property
    def parents(self) -> dict[str, list[str]]:
        """Task → the tasks that must end before it."""
        before: dict[str, list[str]] = {}
        for task in self.tasks.values():
            mine = dict.fromkeys(task.after)
            for path in task.inputs:
                maker = self.producer.get(path)
                if maker is not None and maker != task.id:
                    mine[maker] = None
            before[task.id] = list(mine)
        return before

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Task → the tasks that wait for it."""
        after: dict[str, list[str]] = {task: [] for task in self.tasks}
        for task, parents in self.parents.items():
            for parent in parents:
                after[parent].append(task)
        return after

    @cached_property
    def order(self) -> list[str]:
        """The tasks, parents first, otherwise in the order of the description."""
        sorter = TopologicalSorter(self.parents)
        try:
            sorter.prepare()
        except CycleError as error:
            round_ = [str(task) for task in error.args[1]][::-1]
            raise Problem(
                "the tasks wait for each other: " + " → ".join(round_),
                where=self.places.get(round_[0], self.source),
                remedy="remove one of these dependencies",
            ) from None
        place = {task: number for number, task in enumerate(self.tasks)}
        order: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=place.__getitem__)
            order.extend(ready)
            sorter.done(*ready)
        return order

    def inputs(self) -> Iterator[File]:
        """Files that no task makes and a task reads."""
        return (file for path, file in self.files.items() if path not in self.producer and self.readers[path])

    def descendants(self, task: str) -> set[str]:
        """Every task that waits for `task`, directly or not."""
        found: set[str] = set()
        waiting = [task]
        while waiting:
            for child in self.children[waiting.pop()]:
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found


def name_files(workflow: Workflow, final: Iterable[str], temporary: Iterable[str]) -> None:
    """Marks files that the user names by globs (as in the shell: `*` crosses no slash, `**` does); final takes
    precedence. A glob that matches no file is an error."""
    for globs, mark in ((temporary, "temporary"), (final, "final")):
        for glob in globs:
            matches = matcher(glob)
            found = [file for path, file in workflow.files.items() if matches(path)]
            if not found:
                raise Problem(f"no file of the workflow matches {glob!r}", where=workflow.source)
            for file in found:
                file.final, file.temporary = mark == "final", mark == "temporary"


def matcher(glob: str) -> Callable[[str], object]:
    """A function that returns whether a path matches."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?(?:\][^\]]*|[^\]!][^\]]*)\])", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    written = []
    for part in parts:
        if part in meaning:
            written.append(meaning[part])
        elif part.startswith("[") and part.endswith("]"):
            inside = part[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            written.append("[" + ("^" + inside[1:] if inside.startswith("!") else inside.replace("^", "\\^", 1)) + "]")
        else:
            written.append(re.escape(part))
    try:
        return re.compile("".join(written), re.DOTALL).fullmatch
    except re.error as error:
        raise Problem(f"{glob!r} is not a glob", why=error) from None
