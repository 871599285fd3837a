"""Messages to the agent during a run: hints, prefetching, evicting. No task waits for them, and at most one of a kind
runs at a time. Names that gather meanwhile go together, so that 10,000 files are not 10,000 commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from .spawn import Child


@dataclass
class Errands:
    """`commands` yields the command lines of a kind; `start` starts one of them."""

    commands: Mapping[str, Callable[[list[str]], Iterator[list[str]]]]
    start: Callable[[list[str]], Child | None]
    # The minimum of seconds between two of a kind.
    every_s: Mapping[str, float] = field(default_factory=dict)
    failed: int = 0
    _waiting: dict[str, list[str]] = field(default_factory=dict)
    _under_way: dict[int, str] = field(default_factory=dict)
    _words: dict[str, list[list[str]]] = field(default_factory=dict)
    _not_before_s: dict[str, float] = field(default_factory=dict)

    def ask(self, sort: str, path: str) -> None:
        if sort in self.commands:
            self._waiting.setdefault(sort, []).append(path)

    def go_on(self) -> None:
        """Starts every command that may start."""
        for sort, make in self.commands.items():
            if sort in self._under_way.values():
                continue
            if sort in self.every_s and self._waiting.get(sort):
                if time.monotonic() < self._not_before_s.get(sort, 0.0):
                    continue
                self._not_before_s[sort] = time.monotonic() + self.every_s[sort]
            if not self._words.get(sort) and self._waiting.get(sort):
                self._words[sort] = list(make(self._waiting.pop(sort)))
            if self._words.get(sort):
                child = self.start(self._words[sort].pop(0))
                if child is None:
                    self.failed += 1
                else:
                    self._under_way[child.pid] = sort

    def ended(self, child: Child, code: int) -> bool:
        """Whether the child was one of these commands."""
        sort = self._under_way.pop(child.pid, None)
        if sort is None:
            return False
        self.failed += code != 0
        return True

    @property
    def groups(self) -> dict[int, str]:
        """The running commands: process group → kind."""
        return dict(self._under_way)

    @property
    def busy(self) -> bool:
        return bool(self._under_way or any(self._waiting.values()) or any(self._words.values()))
