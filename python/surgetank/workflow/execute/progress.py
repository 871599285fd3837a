"""The user's view of a run, on standard error: two bars on a terminal, otherwise a line periodically."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from .plan import words_of

LINE_EVERY_S = 5.0
BARS_EVERY_S = 0.2


class Progress:
    """Lines. `total_bytes` may be 0: not known."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self.stream, self.quiet = stream, quiet
        self.total = self.total_bytes = 0
        self._next_s = 0.0

    def begin(self, total: int, total_bytes: int) -> None:
        self.total, self.total_bytes = total, total_bytes
        self._next_s = time.monotonic() + LINE_EVERY_S

    def update(self, done: int, running: int, made_bytes: int) -> None:
        if self.quiet or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LINE_EVERY_S
        of = f" of {words_of(self.total_bytes)}" if self.total_bytes else ""
        self.say(f"{done} of {self.total} tasks done, {running} running, {words_of(made_bytes)}{of} made")

    def step(self, text: str) -> None:
        """An auxiliary task begins."""
        if not self.quiet:
            self.say(text)

    def say(self, text: str) -> None:
        print(f"surgetank workflow: {text}", file=self.stream, flush=True)

    def end(self) -> None:
        """No bars after this."""


class Bars(Progress):
    """Uses rich, on a terminal; drawn by the executor's own loop, without a thread."""

    def __init__(self, stream: TextIO, rich: Any) -> None:
        super().__init__(stream, quiet=False)
        console = rich.console.Console(file=stream)
        columns = rich.progress
        self._bars = columns.Progress(
            columns.TextColumn("{task.description:>7}"),
            columns.BarColumn(),
            columns.TextColumn("{task.fields[amount]}"),
            columns.TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )
        self._console = console
        self._lines: list[Any] = []

    def begin(self, total: int, total_bytes: int) -> None:
        super().begin(total, total_bytes)
        self._lines = [
            self._bars.add_task("tasks", total=max(total, 1), amount=""),
            self._bars.add_task("bytes", total=total_bytes or None, amount=""),
        ]
        self._bars.start()

    def update(self, done: int, running: int, made_bytes: int) -> None:
        if time.monotonic() < self._next_s or not self._lines:
            return
        self._next_s = time.monotonic() + BARS_EVERY_S
        self._bars.update(self._lines[0], completed=done, amount=f"{done}/{self.total}, {running} running")
        of = f" of {words_of(self.total_bytes)}" if self.total_bytes else ""
        self._bars.update(self._lines[1], completed=made_bytes, amount=f"{words_of(made_bytes)}{of}")
        self._bars.refresh()

    def say(self, text: str) -> None:
        # Names of files may contain any text: no markup.
        self._console.print(f"surgetank workflow: {text}", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def end(self) -> None:
        self._bars.stop()


def choose(wanted: bool) -> Progress:
    """Bars if they can be drawn."""
    if wanted and sys.stderr.isatty():
        try:
            import rich.console
            import rich.progress
        except ImportError:
            return Progress(sys.stderr, quiet=False)
        return Bars(sys.stderr, rich)
    return Progress(sys.stderr, quiet=not wanted)
