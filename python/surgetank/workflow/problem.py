"""Errors in the words of the command line: what failed, where, why, what to try."""

from __future__ import annotations

from pathlib import Path


class Problem(Exception):
    """A description, plan or run that cannot be used; `str()` is the user's message.

    `where` is a file or `FILE:LINE`; `code` the exit code, as in docs/exit-codes.md. 2: the input is wrong. 1:
    Surgetank or the machine failed. 3: a file is not durable.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        why: object = None,
        remedy: str | None = None,
        code: int = 2,
    ) -> None:
        self.what, self.where, self.why, self.remedy, self.code = what, where, why, remedy, code
        lines = [what if where is None else f"{where}: {what}"]
        if why is not None:
            lines.append(f"  why:  {why}")
        if remedy is not None:
            lines.append(f"  try:  {remedy}")
        super().__init__("\n".join(lines))
