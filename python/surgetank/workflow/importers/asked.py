"""Runs an engine's own program for its graph: without input, with its output kept, and with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..problem import Problem


def ask(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], timeout_s: float, *, where: Path, what: str
) -> subprocess.CompletedProcess[str]:
    """Returns any exit code. `what`: the message if the program did not start or did not end."""
    try:
        return subprocess.run(
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Problem(what, where=where, why=error, code=1) from None
