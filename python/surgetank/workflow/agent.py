"""Requests to the agent: hints by its socket; waiting, prefetching, evicting and staging through the `surgetank` binary.

Every command is a vector of words; none goes through a shell. Long lists are split so that no command line is too
long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import client
from .problem import Problem

# Linux accepts 128 KiB per word and 2 MiB in all, the environment included.
WORDS_BYTES_MAX = 1 << 19


def binary() -> str:
    """The program: `SURGETANK_BINARY`, the one next to this Python, or the one on the path."""
    named = os.environ.get("SURGETANK_BINARY")
    beside = Path(sys.executable).parent / "surgetank"
    found = named or (str(beside) if os.access(beside, os.X_OK) else shutil.which("surgetank"))
    if found is None:
        raise Problem(
            "the program `surgetank` was not found",
            remedy="install it, set SURGETANK_BINARY, or use --bare to run without it",
            code=1,
        )
    return found


def mounted(directory: str) -> bool:
    """Whether this process sees it through Surgetank, by any door."""
    try:
        return bool(os.getxattr(directory, "user.surgetank.state"))
    except OSError:
        return False


def lost(path: str) -> bool:
    """Whether the content of this file was only on a node of the pool that is lost."""
    try:
        return os.getxattr(path, "user.surgetank.state") == b"lost"
    except OSError:
        return False


@dataclass
class Agent:
    """The agent that serves the current directory; `state` as `--state`."""

    program: str = field(default_factory=binary)
    state: str | None = None

    def hint(self, hints: list[dict[str, Any]]) -> str | None:
        """Sends hints for each `path` (keys as in docs/hints.md); returns the agent's refusals, or None."""
        try:
            client.hint_each(hints, self.state)
        except (client.AgentError, OSError) as why:
            return str(why)
        return None

    def wait(self, paths: Iterable[str]) -> str:
        """Waits until these are durable; returns the message about those that are not."""
        messages = (_message(words) for words in self.wait_words(paths))
        return "\n".join(filter(None, messages))

    def hint_words(self, paths: Iterable[str], mode: str) -> Iterator[list[str]]:
        """The same as commands, for callers that start them."""
        # A name such as `a=b` must not count as a hint.
        named = (path if path.startswith("/") else f"./{path}" for path in paths)
        return self._commands(["hint"], named, [f"mode={mode}"])

    def hint_file_words(self, listed: Path) -> list[str]:
        """Takes hints from a file of JSON lines."""
        return [self.program, "hint", *self._state(), "--from", str(listed)]

    def wait_words(self, paths: Iterable[str]) -> Iterator[list[str]]:
        return self._commands(["wait", "-q"], paths)

    def prefetch_words(self, paths: Iterable[str]) -> Iterator[list[str]]:
        return self._commands(["prefetch"], (_literal(path) for path in paths))

    def evict_words(self, paths: Iterable[str]) -> Iterator[list[str]]:
        return self._commands(["evict"], paths)

    def status(self, directory: str) -> dict[str, Any] | None:
        """The status of the agent that serves `directory`; None: no agent does."""
        words = [self.program, "status", "--json", *self._state(), "--", directory]
        asked = subprocess.run(words, capture_output=True, check=False)
        try:
            answer = json.loads(asked.stdout) if asked.returncode == 0 else []
        except ValueError:
            answer = []
        return answer[0] if answer else None

    def records(self) -> list[dict[str, Any]]:
        """The records of runs (docs/report.md), the newest last."""
        words = [self.program, "report", "--list", "--json", *self._state()]
        asked = subprocess.run(words, capture_output=True, check=False)
        try:
            answer = json.loads(asked.stdout) if asked.returncode == 0 else []
        except ValueError:
            answer = []
        return answer if isinstance(answer, list) else []

    def _state(self) -> list[str]:
        return [] if self.state is None else ["--state", self.state]

    def _commands(self, verb: list[str], paths: Iterable[str], first: Iterable[str] = ()) -> Iterator[list[str]]:
        head = [self.program, *verb, *self._state(), "--", *first]
        some: list[str] = []
        size = 0
        for path in paths:
            length = len(os.fsencode(path)) + 9
            if some and size + length > WORDS_BYTES_MAX:
                yield head + some
                some, size = [], 0
            some.append(path)
            size += length
        if some:
            yield head + some


def _message(words: list[str]) -> str:
    """Empty on success."""
    ran = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return "" if ran.returncode == 0 else ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"


def _literal(path: str) -> str:
    """`prefetch` takes globs: this one matches the one file."""
    return escaped(path)


def escaped(path: str) -> str:
    """A glob that matches exactly this path."""
    return "".join("\\" + char if char in "*?[]{}\\!" else char for char in path)
