"""Starts processes and reports their ends: `posix_spawn` and pidfds in one epoll, without threads or signals.

Each process leads its own group, so that a Ctrl-C at the terminal reaches only the executor, and a task ends with
all its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Actions that Python changes for itself, or that the starter ignores, are not passed on.
DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP]
PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class Exit:
    """`code` in a shell's form: 128 + N for signal N."""

    code: int
    began_ns: int
    ended_ns: int
    cpu_s: float = 0.0
    memory_bytes_max: int = 0

    def words(self) -> str:
        if self.code == 127:
            return "the program was not found (exit code 127)"
        if self.code > 128:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(self.code - 128).name}"
        return f"exit code {self.code}"


@dataclass(slots=True)
class Child:
    pid: int
    pidfd: int
    began_ns: int


class Spawner:
    def __init__(self) -> None:
        # Orphans of tasks become children of this process, which can wait for them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._epoll = select.epoll()
        self._children: dict[int, Child] = {}
        self._watched: dict[int, Callable[[], None]] = {}

    def start(
        self,
        words: list[str],
        environment: Mapping[str, str],
        out: int,
        err: int,
        keep: Mapping[int, int] | None = None,
        stdin: int | None = None,
    ) -> Child:
        """Raises OSError if the program cannot be started. `keep` are descriptors for it: its number → this process's."""
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
        if stdin is None:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        else:
            actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
        actions += [(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)]
        for number, ours in (keep or {}).items():
            actions.append((os.POSIX_SPAWN_DUP2, ours, number))
        began_ns = time.time_ns()
        pid = os.posix_spawnp(
            words[0],
            words,
            environment,
            file_actions=actions,
            setpgroup=0,
            setsigmask=[],
            setsigdef=DEFAULT_SIGNALS,
        )
        pidfd = os.pidfd_open(pid)
        child = Child(pid, pidfd, began_ns)
        self._children[pidfd] = child
        self._epoll.register(pidfd, select.EPOLLIN)
        return child

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Makes `wait` call `ready` when the descriptor is readable."""
        self._watched[descriptor] = ready
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        del self._watched[descriptor]

    def wait(self, timeout_s: float) -> list[tuple[Child, Exit]]:
        """The children that have ended; returns early for watched descriptors, too."""
        ended = []
        for descriptor, _ in self._epoll.poll(timeout_s):
            if descriptor in self._watched:
                self._watched[descriptor]()
            elif (child := self._children.pop(descriptor, None)) is not None:
                ended.append((child, self._reap(child)))
        return ended

    def _reap(self, child: Child) -> Exit:
        _, status, usage = os.wait4(child.pid, 0)
        ended_ns = time.time_ns()
        self._epoll.unregister(child.pidfd)
        os.close(child.pidfd)
        code = os.waitstatus_to_exitcode(status)
        return Exit(
            code if code >= 0 else 128 - code,
            child.began_ns,
            ended_ns,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * 1024,
        )


def group_lives(group: int) -> bool:
    """Whether a process of the group is left; reaps those that have ended."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
