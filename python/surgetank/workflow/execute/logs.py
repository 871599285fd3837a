"""A pair of logs for each task, `TASK.out` and `TASK.err`. A short task without output leaves its pair to the next
task. A pair gets its name only when it must keep it. Creating, naming and removing two files for each of 10,000
silent tasks would cost more than the tasks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Pair:
    base: str
    out: int
    err: int
    # The current name: `base`, or a name that no task's log has.
    named: str


class Logs:
    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._blank: list[Pair] = []
        self._count = 0

    def path(self, base: str, end: str) -> str:
        return os.path.join(self._directory, f"{base}.{end}")

    def open(self, base: str) -> Pair:
        if self._blank:
            pair = self._blank.pop()
            pair.base = base
            return pair
        self._count += 1
        # `:` is quoted in the names of tasks.
        named = f"running:{self._count}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        out, err = (os.open(self.path(named, end), flags, 0o666) for end in ("out", "err"))
        return Pair(base, out, err, named)

    def name(self, pair: Pair) -> None:
        """Gives it the task's own name, so that a user can find it."""
        if pair.named != pair.base:
            for end in ("out", "err"):
                os.rename(self.path(pair.named, end), self.path(pair.base, end))
            pair.named = pair.base

    def done(self, pair: Pair, keep: bool) -> None:
        """The task has ended; `keep` its logs even if they are empty."""
        if not keep and os.fstat(pair.out).st_size == 0 and os.fstat(pair.err).st_size == 0:
            self._blank.append(pair)
            return
        self.name(pair)
        os.close(pair.out)
        os.close(pair.err)

    def close(self) -> None:
        for pair in self._blank:
            for end, descriptor in (("out", pair.out), ("err", pair.err)):
                os.unlink(self.path(pair.named, end))
                os.close(descriptor)
        self._blank.clear()


def is_unnamed(named: object) -> bool:
    """Whether this is a name that no task's log has: a journal may contain any text."""
    return isinstance(named, str) and re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?running:[0-9]+", named) is not None


def tail(path: str, lines: int = 10) -> list[str]:
    """The last lines of a log, for a message."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 8192))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
        for line in text.splitlines()[-lines:]
    ]
