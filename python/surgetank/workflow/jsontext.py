"""JSON that is valid text for any names of files. Python holds bytes that are not UTF-8 as lone surrogates; as escapes
they are valid JSON, and read back unchanged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return re.sub(r"[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def is_text(path: str) -> bool:
    """Otherwise the path has bytes that are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def hint_line(hint: dict[str, Any]) -> str:
    """A line for `surgetank hint`, which expects a path that is not text as its bytes."""
    path = hint["path"]
    return json.dumps({**hint, "path": path if is_text(path) else list(os.fsencode(path))}, ensure_ascii=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Writes atomically: the old content stays until all of the new one is written."""
    # (Writes the target of a link, not the link.)
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
