"""Recognises a file without reading it, by size and time of change; and removes outputs."""

from __future__ import annotations

import os
import shutil
import stat

# Size in bytes, time of change in ns.
Stamp = tuple[int, int]


def stamp(path: str) -> Stamp | None:
    """The stamp of a file, or of a directory's whole content; None: it does not exist."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISDIR(found.st_mode):
        return found.st_size, found.st_mtime_ns
    size, changed = 0, found.st_mtime_ns
    for above, directories, files in os.walk(path):
        for name in (*directories, *files):
            inner = os.lstat(os.path.join(above, name))
            size += inner.st_size if stat.S_ISREG(inner.st_mode) else 0
            changed = max(changed, inner.st_mtime_ns)
    return size, changed


def remove(path: str) -> bool:
    """Removes a file, a link or a whole directory; False: it did not exist. A link's target stays."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (IsADirectoryError, PermissionError):
        if os.path.islink(path) or not os.path.isdir(path):
            raise
        shutil.rmtree(path)
    return True
