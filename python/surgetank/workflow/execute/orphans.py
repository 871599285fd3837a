"""Processes that an executor left behind when it was killed: they could still write what the next one makes again.

They are known by a variable in their environment, which every descendant of a task inherits; numbers of processes would be used again.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "SURGETANK_WORKFLOW_RUN"
WAIT_S_MAX = 10.0


def mark(directory: str, run: str) -> str:
    """What `VARIABLE` is for the tasks of a run."""
    return f"{directory}:{run}"


def end(directory: str) -> int:
    """Kills all that runs of `directory` left, and waits until they are gone; how many there were. The caller holds the lock."""
    seen: set[int] = set()
    until = time.monotonic() + WAIT_S_MAX
    while True:
        # One that was just forked shows up in the next look.
        left = _find(directory)
        if not left or time.monotonic() > until:
            return len(seen)
        for pid in left:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.01)


def _find(directory: str) -> list[int]:
    wanted = b"\0" + f"{VARIABLE}={directory}:".encode(errors="surrogateescape")
    spared = _ancestors()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in spared:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:
                environment = b"\0" + stream.read()
        except OSError:
            continue
        if wanted in environment and _is_alive(name):
            found.append(int(name))
    return found


def _is_alive(name: str) -> bool:
    try:
        with open(f"/proc/{name}/stat", "rb") as stream:
            return stream.read().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _ancestors() -> set[int]:
    """We and those above us."""
    found = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as stream:
                pid = int(stream.read().rsplit(b")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            break
    return found
