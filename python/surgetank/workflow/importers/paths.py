"""Names of files in the graph's form, and the sizes of existing ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..graph import File
from ..problem import Problem


def read(path: Path, what: str = "the workflow") -> str:
    """The text of a description, or a `Problem` with the reason if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise Problem(f"{what} is not UTF-8", where=f"{path}:{line}", why=error) from None
    except OSError as error:
        raise Problem(f"{what} cannot be read", where=path, why=error.strerror or error) from None
    if not text.strip():
        raise Problem(f"{what} is empty", where=path)
    return text


def inside(name: str, directory: Path) -> str:
    """`name`, as written by a task in `directory`, in the graph's form: relative below it, otherwise absolute."""
    top = os.path.normpath(os.path.abspath(directory))
    full = os.path.normpath(os.path.join(top, name))
    return os.path.relpath(full, top) if full.startswith(top.rstrip("/") + "/") else full


def measure(files: Iterable[File], directory: Path) -> None:
    """Sets sizes of existing regular files; the caller must leave out files that a task will make."""
    for file in files:
        if file.size_bytes is None:
            path = directory / file.path
            try:
                if path.is_file():
                    file.size_bytes = path.stat().st_size
            except OSError:
                continue
