"""Finds what a run of the suite leaves behind: processes, mounts, loop devices and files.

As root the suite has its own process and mount namespaces and its own /dev/shm. So everything in them belongs to the suite, whatever
else runs on the machine. Without root a variable in their environment identifies the suite's processes; the suite mounts nothing then.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

MARK = "SURGETANK_SUITE"
SHARED_MEMORY = Path("/dev/shm")
# An idle agent and a killed program may need this long to end on a loaded machine.
TIMEOUT_S = 60.0


class Before:
    """The state before the suite began."""

    def __init__(self, target: Path, temporary: Path, own: bool) -> None:
        self.target, self.temporary, self.own = target, temporary, own
        self.mounts = mounts()
        self.directories = set(map(made, directories(target)))
        self.memory = set(SHARED_MEMORY.iterdir())

    def remains(self) -> list[str]:
        found = [f"mount {path}" for path in sorted(mounts() - self.mounts)]
        found += [f"loop device {line}" for line in loops() if str(self.target) in line or str(self.temporary) in line]
        found += [f"directory {path}" for path in directories(self.target) if made(path) not in self.directories and path.exists()]
        found += [f"file {path}{content(path)}" for path in sorted(self.temporary.iterdir()) if not is_javas(path)]
        if self.own:
            found += [f"file {path}" for path in sorted(set(SHARED_MEMORY.iterdir()) - self.memory)]
        return processes(self.own, str(self.temporary)) + found


def await_nothing(look: Callable[[], list[str]], timeout_s: float = TIMEOUT_S) -> list[str]:
    """Waits until the last process ends, at most `timeout_s`; returns what is left."""
    until = time.monotonic() + timeout_s
    while True:
        found = look()
        if not any(line.startswith("process ") for line in found) or time.monotonic() >= until:
            return found
        time.sleep(0.1)


def processes(own: bool, mark: str) -> list[str]:
    """With `own`, all but this process and the first one of the namespace. Otherwise those with the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (1, os.getpid()):
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            # (A zombie has ended, and has no words.)
            if words and (own or f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")):
                found.append(f"process {entry.name}: {words[:200]}")
        except OSError:
            continue
    return found


def mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split(" ")[4] for line in lines}


def loops() -> list[str]:
    try:
        listed = subprocess.run(["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return listed.stdout.splitlines()


def directories(target: Path) -> list[Path]:
    """The tests' own directories. Locks and records beside them may stay."""
    place = target / "tmp"
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []


def made(path: Path) -> tuple[Path, int, int]:
    """Differs if the directory was removed and made again, so that a directory of the same name from an earlier suite does not hide it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return path, 0, 0
    return path, found.st_ino, found.st_ctime_ns


def content(path: Path) -> str:
    """The names in a directory, because its own name is random."""
    return " with " + ", ".join(sorted(one.name for one in path.iterdir())[:5]) if path.is_dir() else ""


def is_javas(path: Path) -> bool:
    """Every Java virtual machine makes this directory for its user, and leaves it."""
    return path.name.startswith("hsperfdata_")
