"""Processes that a killed executor left: they could still write files that the next executor makes again.

A variable in their environment identifies them, because every descendant of a task inherits it; process ids are
reused.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "SURGETANK_WORKFLOW_RUN"
WAIT_S_MAX = 10.0


def mark(directory: str, run: str) -> str:
    """The value of `VARIABLE` for the tasks of a run."""
    return f"{directory}:{run}"


def end(directory: str) -> int:
    """Kills all processes that runs of `directory` left, and waits until they have ended; returns their number. The
    caller holds the lock."""
    seen: set[int] = set()
    until = time.monotonic() + WAIT_S_MAX
    while True:
        # A process that was just forked shows up in the next search.
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
    """This process and its ancestors."""
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
