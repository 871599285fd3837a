"""When each file is read next: the agent uses it when it has to make room (hint `next_read`, docs/hints.md).

The number is the place of the reading task in the planned order. The executor sends it for every file before the
first task. While the tasks run it sends updates for files that one of several readers has read, a few times a second
at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import jsontext
from ..agent import Agent
from ..derive import schedule
from ..graph import Workflow


class NextReads:
    def __init__(self, workflow: Workflow, cores: float, run: Collection[str], drop: Collection[str]) -> None:
        """`run`: tasks that have not ended; `drop`: files that are removed after their last reader anyway."""
        place = {span.task: number for number, span in enumerate(schedule(workflow, cores))}
        self._left: dict[str, set[str]] = {}
        self._place = {task: place[task] for task in run}
        for path, readers in workflow.readers.items():
            if path.startswith("/") or path in drop or workflow.files[path].readers_unknown:
                continue
            left = {reader for reader in readers if reader in self._place}
            if left:
                self._left[path] = left

    def hints(self) -> Iterator[dict[str, Any]]:
        """For all files, before the first task."""
        for path in self._left:
            yield self._of(path)

    def read(self, task: str, paths: Iterable[str]) -> Iterator[str]:
        """The task has ended; yields the files with a new hint."""
        for path in paths:
            left = self._left.get(path)
            if left is not None and task in left:
                left.remove(task)
                yield path

    def _of(self, path: str) -> dict[str, Any]:
        places = [self._place[reader] for reader in self._left[path]]
        return {"path": path, "next_read": min(places) if places else "never"}

    def words(self, agent: Agent, listed: Path, paths: Iterable[str]) -> Iterator[list[str]]:
        """The command that sends the hints; it reads `listed`, which must not change before the command has ended."""
        listed.write_text("".join(jsontext.hint_line(self._of(path)) for path in dict.fromkeys(paths)))
        yield agent.hint_file_words(listed)
