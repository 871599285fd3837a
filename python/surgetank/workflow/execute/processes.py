"""The processes of tasks on one machine: starts them, waits for all that a task has started, and ends them.

A task's life here: running → (leaderless: its first process has ended, children of it have not) → settled. Several short
tasks may share one process (cluster.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from . import logs, orphans
from .ready import Need
from .spawn import Child, Exit, Spawner, group_lives, kill_group

LOOK_AGAIN_S = 0.02
IDLE_S = 0.2
# Logs of tasks that run longer get their names while the tasks run.
LOG_NAMED_S = 0.5
CLUSTER_PROGRAM = str(Path(__file__).with_name("cluster.py"))


@dataclass(slots=True)
class Job:
    """A task that can be started."""

    task: str
    words: list[str]
    # The name of its logs.
    log: str
    # Of its outputs.
    directories: list[str]


class Heard(Protocol):
    """What is heard of tasks. `ticket`: of the jobs that were started together."""

    def logs_to(self, task: str, named: str) -> None: ...

    def settled(self, task: str, exit_: Exit) -> None: ...

    def not_begun(self, task: str) -> None:
        """It shared a process, which ended before."""

    def over(self, ticket: int) -> None:
        """No process of these jobs is left. Heard last."""

    def signalled(self, number: int) -> None:
        """The place got this signal."""


class Lines:
    """Lines from a descriptor that does not block."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self.ended = descriptor, False
        self._incomplete = b""

    def read(self) -> list[bytes]:
        """Those that are complete by now."""
        parts = [self._incomplete]
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self.descriptor, 1 << 16):
                parts.append(some)
            self.ended = True
        *lines, self._incomplete = b"".join(parts).split(b"\n")
        return lines


@dataclass(slots=True)
class Running:
    """One process: a task, or several short ones."""

    ticket: int
    tasks: list[str]
    pair: logs.Pair | None
    # For a cluster: its results, and the number of ended tasks.
    results: Lines | None = None
    settled: int = 0
    began_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class LeaderlessGroup:
    """The leader of its process group has ended, and other members have not."""

    running: Running
    group: int
    exit: Exit
    until_s: float
    signals: list[signal.Signals]


class Processes:
    """`directory`: for the logs; `grace_s`: so long children have after the end of a task."""

    def __init__(
        self, spawner: Spawner, directory: Path, environment: Mapping[str, str], grace_s: float, heard: Heard
    ) -> None:
        self.node = self.logs_in = ""
        self.ahead_s = 0.0
        self.spawner, self.environment, self.grace_s, self.heard = spawner, environment, grace_s, heard
        self.logs = logs.Logs(directory)
        self._running: dict[int, Running] = {}
        self._leaderless: list[LeaderlessGroup] = []
        self._directories: set[str] = set()

    @property
    def patience_s(self) -> float:
        """So long `Spawner.wait` may take."""
        return LOOK_AGAIN_S if self._leaderless else IDLE_S

    def start(self, ticket: int, jobs: list[Job], _: Need | None = None) -> None:
        """What cannot be started is settled at once."""
        pair = None
        try:
            self._make_directories(jobs)
            if len(jobs) == 1:
                pair = self.logs.open(jobs[0].log)
                self.heard.logs_to(jobs[0].task, pair.named)
                environment = {**self.environment, **_own(jobs[0])}
                child = self.spawner.start(jobs[0].words, environment, pair.out, pair.err)
                running = Running(ticket, [jobs[0].task], pair)
            else:
                child, running = self._start_cluster(ticket, jobs)
        except (OSError, ValueError) as error:
            if pair is not None:
                os.write(pair.err, f"it could not be started: {error}\n".encode(errors="replace"))
                self.logs.done(pair, keep=True)
            now = time.time_ns()
            for job in jobs:
                self.heard.settled(job.task, Exit(127 if isinstance(error, FileNotFoundError) else 126, now, now))
            self.heard.over(ticket)
            return
        self._running[child.pid] = running

    def ended(self, child: Child, exit_: Exit) -> bool:
        """Whether the child was a process of tasks."""
        running = self._running.pop(child.pid, None)
        if running is None:
            return False
        if not group_lives(child.pid):
            self._over(running, exit_)
            return True
        failed = exit_.code != 0
        wait_s = 0.0 if failed else self.grace_s
        signals = [signal.SIGKILL] if failed else [signal.SIGTERM, signal.SIGKILL]
        self._leaderless.append(LeaderlessGroup(running, child.pid, exit_, time.monotonic() + wait_s, signals))
        return True

    def look(self) -> None:
        """At children that outlive their tasks, and at logs that need their names."""
        still = []
        for one in self._leaderless:
            if not group_lives(one.group):
                self._over(one.running, one.exit)
                continue
            if time.monotonic() >= one.until_s:
                if not one.signals:
                    self._over(one.running, one.exit)
                    continue
                kill_group(one.group, one.signals.pop(0))
                one.until_s = time.monotonic() + 1.0
            still.append(one)
        self._leaderless = still
        for running in self._running.values():
            if running.pair is not None and time.monotonic() - running.began_s > LOG_NAMED_S:
                self.logs.name(running.pair)

    def signal_all(self, number: signal.Signals) -> None:
        for group in (*self._running, *(one.group for one in self._leaderless)):
            kill_group(group, number)

    def close(self) -> None:
        for running in self._running.values():
            if running.pair is not None:
                self.logs.name(running.pair)
        self.logs.close()

    def _make_directories(self, jobs: list[Job]) -> None:
        for job in jobs:
            for directory in job.directories:
                if directory not in self._directories:
                    os.makedirs(directory, exist_ok=True)
                    self._directories.add(directory)

    def _start_cluster(self, ticket: int, several: list[Job]) -> tuple[Child, Running]:
        jobs = [
            {
                "words": job.words,
                "environment": _own(job),
                "out": self.logs.path(job.log, "out"),
                "err": self.logs.path(job.log, "err"),
            }
            for job in several
        ]
        listed = os.memfd_create("cluster")
        ours, its = os.pipe()
        try:
            os.write(listed, json.dumps(jobs).encode())
            os.lseek(listed, 0, os.SEEK_SET)
            words = [sys.executable, "-I", "-S", CLUSTER_PROGRAM]
            with open(os.devnull, "wb") as nowhere:
                child = self.spawner.start(
                    words, self.environment, nowhere.fileno(), nowhere.fileno(), {3: its}, stdin=listed
                )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(listed)
            os.close(its)
        running = Running(ticket, [job.task for job in several], None, Lines(ours))
        self.spawner.watch(ours, lambda: self._read_results(running))
        return child, running

    def _read_results(self, running: Running) -> None:
        assert running.results is not None
        for line in running.results.read():
            number, code, began_ns, ended_ns, cpu_s, memory_bytes = json.loads(line)
            running.settled = number + 1
            self.heard.settled(running.tasks[number], Exit(code, began_ns, ended_ns, cpu_s, memory_bytes))

    def _over(self, running: Running, exit_: Exit) -> None:
        """No process of it is left."""
        if running.results is None:
            if running.pair is not None:
                self.logs.done(running.pair, keep=exit_.code != 0)
            self.heard.settled(running.tasks[0], exit_)
            self.heard.over(running.ticket)
            return
        self._read_results(running)
        self.spawner.unwatch(running.results.descriptor)
        os.close(running.results.descriptor)
        for number, task in enumerate(running.tasks[running.settled :]):
            if number == 0:
                self.heard.settled(task, exit_ if exit_.code else Exit(1, exit_.began_ns, exit_.ended_ns))
            else:
                self.heard.not_begun(task)
        self.heard.over(running.ticket)


def _own(job: Job) -> dict[str, str]:
    return {"SURGETANK_WORKFLOW_TASK": job.task}


def task_environment(directory: str, run: str, python_path: str | None) -> dict[str, str]:
    """This process's environment, with the user's PYTHONPATH and the mark of the run."""
    environment = dict(os.environ)
    if python_path is None:
        environment.pop("PYTHONPATH", None)
    else:
        environment["PYTHONPATH"] = python_path
    environment[orphans.VARIABLE] = orphans.mark(directory, run)
    return environment
