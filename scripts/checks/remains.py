"""What a run of the suite leaves behind: processes, mounts, loop devices and files.

As root the suite has its own process and mount namespaces and its own /dev/shm, so that everything in them is its own, whatever
else runs on the machine. Without root its processes are recognised by a variable in their environment; nothing is mounted then.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

MARK = "SURGETANK_SUITE"
SHARED_MEMORY = Path("/dev/shm")
# An agent that has nothing left to do, and a program that was killed, may take a while on a loaded machine.
PATIENCE_S = 60.0


class Before:
    """What was there when the suite began."""

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


def await_nothing(look: Callable[[], list[str]], patience_s: float = PATIENCE_S) -> list[str]:
    """What is still there when the last process ends, or the patience does."""
    until = time.monotonic() + patience_s
    while True:
        found = look()
        if not any(line.startswith("process ") for line in found) or time.monotonic() >= until:
            return found
        time.sleep(0.1)


def processes(own: bool, mark: str) -> list[str]:
    """`own`: all but the first of this process namespace and this one. Otherwise those with the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (1, os.getpid()):
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            # (A zombie has no words: it has ended.)
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
    """Tests' own directories. Locks and records beside them stay."""
    place = target / "tmp"
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []


def made(path: Path) -> tuple[Path, int, int]:
    """Another value when the directory was removed and made again: what an earlier suite left does not hide it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return path, 0, 0
    return path, found.st_ino, found.st_ctime_ns


def content(path: Path) -> str:
    """What a directory has: its name is random."""
    return " with " + ", ".join(sorted(one.name for one in path.iterdir())[:5]) if path.is_dir() else ""


def is_javas(path: Path) -> bool:
    """Every Java machine has one for its user, and leaves it."""
    return path.name.startswith("hsperfdata_")
