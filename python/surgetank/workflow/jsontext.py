"""JSON that is text whatever names of files are in it. Python has bytes that are no UTF-8 as lone surrogates; written as escapes
they are JSON, and come back the same."""

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
    """Otherwise it is bytes that are no UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def hint_line(hint: dict[str, Any]) -> str:
    """A line for `surgetank hint`, which wants a path that is no text as its bytes."""
    path = hint["path"]
    return json.dumps({**hint, "path": path if is_text(path) else list(os.fsencode(path))}, ensure_ascii=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """All of it, or what was there before stays."""
    # (What a link leads to, and not the link.)
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
