"""Facts derived from the graph: the pattern of each file, its lifetime, its expected size, and the bytes that live at
once.

Patterns are those of WOSS, section 2.1 (papers/woss.txt). *Scatter* and *gather* concern regions of one file, which
no description states; they are never derived here. Unknown facts yield no derived ones (`File.readers_unknown`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from statistics import median

from .graph import Workflow
from .problem import Problem


class Pattern(StrEnum):
    """How a file passes from its maker to its readers."""

    PRIVATE = "private input"  # not made by a task, read by one
    BROADCAST = "broadcast"  # one file, several readers
    PIPELINE = "pipeline"  # one task's output is the next one's input
    REDUCE = "reduce"  # one task reads what several have made
    DISTRIBUTE = "distribute"  # one task reads the outputs of several
    RESULT = "result"  # no task reads it
    UNREAD = "unread input"  # no task reads it
    UNKNOWN = "unknown"  # no task makes or reads it


class Lifetime(StrEnum):
    """How long a file is needed."""

    TASK = "task"  # temporary, and only its maker uses it
    WORKFLOW = "workflow"  # temporary: until its last reader has ended
    FOREVER = "forever"


class Persist(StrEnum):
    """Which outputs go to the store; the user's choice."""

    FINAL = "final"  # results; with it the user declares files between tasks temporary
    ALL = "all"  # every file that is not declared temporary
    WHEN_CONSUMED = "when-consumed"  # like `all`; a task's outputs when all its children have ended (PerSSD, P3)


@dataclass(slots=True)
class Facts:
    """The derived facts of one file. `readers` are the tasks that still have to read it; before a run, all of its
    readers."""

    pattern: Pattern
    lifetime: Lifetime
    size_bytes: int | None
    # The source of the size: "description", "history", "history of its kind", or none.
    size_from: str | None
    maker: str | None
    readers: list[str]
    # Files that should be on one node, for the task that reads them together (WOSS's collocation).
    group: str | None = None

    @property
    def disposable(self) -> bool:
        """The file may be removed after its last reader."""
        return self.lifetime is not Lifetime.FOREVER


def derive(
    workflow: Workflow,
    persist: Persist = Persist.ALL,
    history: Iterable[Workflow] = (),
) -> dict[str, Facts]:
    """The facts of every file; `history` are earlier executions of the workflow, the latest first, for sizes."""
    patterns = _patterns(workflow)
    sizes = _Sizes(workflow, list(history))
    facts: dict[str, Facts] = {}
    for path in workflow.files:
        pattern, group = patterns[path]
        size, size_from = sizes.of(path)
        facts[path] = Facts(
            pattern=pattern,
            lifetime=lifetime_of(workflow, path, persist),
            size_bytes=size,
            size_from=size_from,
            maker=workflow.producer.get(path),
            readers=workflow.readers[path],
            group=group,
        )
    return facts


def _patterns(workflow: Workflow) -> dict[str, tuple[Pattern, str | None]]:
    found: dict[str, tuple[Pattern, str | None]] = {}
    # Reader → kind of maker → makers, for files that only this reader reads.
    gathered: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    # Maker → kind of reader → readers, the same way.
    spread: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    single: list[tuple[str, str, str]] = []
    for path, file in workflow.files.items():
        maker, readers = workflow.producer.get(path), workflow.readers[path]
        if file.readers_unknown:
            found[path] = (Pattern.UNKNOWN, None)
        elif len(readers) > 1:
            found[path] = (Pattern.BROADCAST, None)
        elif maker is None:
            found[path] = (Pattern.PRIVATE if readers else Pattern.UNREAD, None)
        elif not readers:
            found[path] = (Pattern.RESULT, None)
        else:
            reader = readers[0]
            gathered[reader][workflow.tasks[maker].kind].add(maker)
            spread[maker][workflow.tasks[reader].kind].add(reader)
            single.append((path, maker, reader))
    for path, maker, reader in single:
        if len(gathered[reader][workflow.tasks[maker].kind]) > 1:
            found[path] = (Pattern.REDUCE, reader)
        elif len(spread[maker][workflow.tasks[reader].kind]) > 1:
            found[path] = (Pattern.DISTRIBUTE, None)
        else:
            found[path] = (Pattern.PIPELINE, None)
    return found


def lifetime_of(workflow: Workflow, path: str, persist: Persist) -> Lifetime:
    """How long the file is needed; `FINAL` covers files between tasks only if all tasks are known."""
    file = workflow.files[path]
    if path not in workflow.producer or file.final or file.readers_unknown:
        return Lifetime.FOREVER
    if path.startswith("/"):
        return Lifetime.FOREVER  # outside the workflow's directory, where other programs may use it: it must stay
    if path in workflow.tasks[workflow.producer[path]].inputs:
        return Lifetime.FOREVER  # changed in place: there is no other copy
    readers = workflow.readers[path]
    named = persist is Persist.FINAL and bool(readers) and not workflow.incomplete
    if not file.temporary and not named:
        return Lifetime.FOREVER
    return Lifetime.WORKFLOW if readers else Lifetime.TASK


class _Sizes:
    def __init__(self, workflow: Workflow, history: list[Workflow]) -> None:
        self.workflow = workflow
        self.known: dict[str, int] = {}
        self.alike: dict[tuple[str, str], list[int]] = defaultdict(list)
        for earlier in history:
            for path, file in earlier.files.items():
                if file.size_bytes is None:
                    continue
                self.known.setdefault(path, file.size_bytes)
                if path in earlier.producer:
                    self.alike[_like(earlier, path)].append(file.size_bytes)

    def of(self, path: str) -> tuple[int | None, str | None]:
        stated = self.workflow.files[path].size_bytes
        if stated is not None:
            return stated, "description"
        if path in self.known:
            return self.known[path], "history"
        if path in self.workflow.producer and (alike := self.alike.get(_like(self.workflow, path))):
            return int(median(alike)), "history of its kind"
        return None, None


def _like(workflow: Workflow, path: str) -> tuple[str, str]:
    return workflow.tasks[workflow.producer[path]].kind, "".join(PurePosixPath(path).suffixes[-2:])


@dataclass(slots=True)
class Span:
    """The time when a task ran, or is planned to run, in seconds from the start."""

    task: str
    begin_s: float
    end_s: float


def precedence(workflow: Workflow) -> dict[str, int]:
    """Task → its place in the queue of ready tasks: the deepest in the graph first, otherwise in the order of the
    description. A started branch ends before another one starts, so fewer bytes live at once."""
    depth: dict[str, int] = {}
    for task in workflow.order:
        depth[task] = 1 + max((depth[parent] for parent in workflow.parents[task]), default=-1)
    ordered = sorted(workflow.order, key=lambda task: -depth[task])
    return {task: number for number, task in enumerate(ordered)}


def schedule(workflow: Workflow, cores: float) -> list[Span]:
    """A list schedule: a task begins when its parents have ended and its cores are free, in the order of `precedence`.
    Tasks of unknown runtime take a second."""
    place = precedence(workflow)
    waits = {task: len(parents) for task, parents in workflow.parents.items()}
    ready = [(place[task], task) for task, count in waits.items() if count == 0]
    heapq.heapify(ready)
    running: list[tuple[float, int, str]] = []
    free, now, spans = cores, 0.0, []
    while ready or running:
        while ready:
            task = workflow.tasks[ready[0][1]]
            need = min(task.cores, cores)
            if need > free:
                break
            heapq.heappop(ready)
            free -= need
            runtime = 1.0 if task.runtime_s is None else task.runtime_s
            spans.append(Span(task.id, now, now + runtime))
            heapq.heappush(running, (now + runtime, place[task.id], task.id))
        now, _, done = heapq.heappop(running)
        free += min(workflow.tasks[done].cores, cores)
        for child in workflow.children[done]:
            waits[child] -= 1
            if waits[child] == 0:
                heapq.heappush(ready, (place[child], child))
    return spans


def peak_live_bytes(
    workflow: Workflow, facts: Mapping[str, Facts], spans: Sequence[Span], *, lifetimes: bool, inputs: bool = False
) -> int:
    """The most bytes of the workflow's outputs that are needed at once (with `inputs`, also of its inputs).

    An output lives from its maker's begin. With `lifetimes` a disposable file ends with its last reader (or its
    maker, if it has none). Every other file lives to the end, whether it is in the store already or not. An input,
    if counted, lives from its first reader to its last with `lifetimes`, else from the start. Files of unknown size
    count as zero.
    """
    when = {span.task: span for span in spans}
    missing = [task for task in workflow.tasks if task not in when]
    if missing:
        raise Problem(f"the schedule has no {missing[0]!r}", where=workflow.source)
    lives: list[Life] = []
    for fact in facts.values():
        if not fact.size_bytes or (fact.maker is None and not (inputs and fact.readers)):
            continue
        begin = 0.0 if fact.maker is None else when[fact.maker].begin_s
        if fact.maker is None and lifetimes:
            begin = min(when[reader].begin_s for reader in fact.readers)
        end = None
        if lifetimes and (fact.disposable or fact.maker is None):
            users = [*fact.readers, *([] if fact.maker is None else [fact.maker])]
            end = max(when[user].end_s for user in users)
        lives.append((begin, end, fact.size_bytes))
    return live_bytes_max(lives)


# The begin of a file, its end (None: it stays), and its bytes.
Life = tuple[float, float | None, int]


def live_bytes_max(lives: Iterable[Life]) -> int:
    """A file that ends at an instant makes room for one that begins at it: tasks follow each other."""
    changes: list[tuple[float, int]] = []
    for begin, end, size in lives:
        changes.append((begin, size))
        if end is not None:
            changes.append((end, -size))
    live = most = 0
    for _, change in sorted(changes):
        live += change
        most = max(most, live)
    return most
