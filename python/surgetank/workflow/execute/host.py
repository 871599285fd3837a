"""Places where tasks run: this machine, or nodes. Each has its own queue, cores and memory.

A task gets its place when it becomes ready: its inputs are there then, and the agent knows where. An idle place later takes
tasks from a busy one if bringing their inputs takes less time than the queue there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...client import AgentError, locate
from ..graph import Task, Workflow
from ..placing import cost_s
from .processes import Job
from .ready import Need, Ready

# A link between nodes, in bytes per second, until transfers are measured: 10 Gbit/s.
LINK_BYTES_PER_S = 1.25e9
# The tasks of the queue that an idle place looks at.
STEAL_FROM = 8
# The executor does nothing else meanwhile. After an error it goes on without locations for a time.
PATIENCE_S, PAUSE_S = 5.0, 30.0


class Place(Protocol):
    """Starts tasks. `node`: its name as in locations. `logs_in`: the directory of their logs, below the run's."""

    node: str
    logs_in: str
    # So much work is sent ahead, so that the way to the place costs no time between two tasks.
    ahead_s: float

    def start(self, ticket: int, jobs: list[Job], need: Need) -> None: ...

    def signal_all(self, number: signal.Signals) -> None: ...


@dataclass(eq=False)
class Host:
    """A place, its queue, and its work: expected seconds per core of what waits and runs there."""

    place: Place
    ready: Ready
    load_s: float = 0.0
    # Cores of the tasks that wait and run here.
    cores: float = 0.0
    # Each of these tasks: its load and its cores.
    _each: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, task: Task, seconds: float) -> None:
        cores = self.ready.need(task).cores
        self._each[task.id] = seconds * cores / self.ready.cores, cores
        self._count(task.id, 1)

    def leave(self, task: str) -> None:
        self._count(task, -1)
        del self._each[task]

    def is_free_for(self, task: Task) -> bool:
        return self.cores + self.ready.need(task).cores <= self.ready.cores

    def _count(self, task: str, sign: int) -> None:
        load_s, cores = self._each[task]
        self.load_s += sign * load_s
        self.cores += sign * cores


@dataclass(slots=True)
class Inputs:
    """Bytes of a task's inputs: all, and those on each node."""

    total: int = 0
    on: dict[str, int] = field(default_factory=dict)

    def missing(self, node: str) -> int:
        return self.total - self.on.get(node, 0)


class Hosts:
    """`seconds`: how long a task is expected to take. `size`: the expected bytes of a file. `directory`: of the workflow; without it no
    file is located. `state`: as of `locate`."""

    def __init__(
        self,
        hosts: list[Host],
        workflow: Workflow,
        seconds: Callable[[Task], float],
        size: Callable[[str], int],
        say: Callable[[str], None],
        directory: str | None = None,
        state: str | None = None,
    ) -> None:
        self.all, self.workflow, self.seconds, self.size, self.say = hosts, workflow, seconds, size, say
        self.directory, self.state = directory, state
        # The place of each task that waits or runs.
        self.of: dict[str, Host] = {}
        self._inputs: dict[str, Inputs] = {}
        # Bytes of inputs that each task that is not ready yet has on each node.
        self._gathered: dict[str, dict[str, int]] = {}
        self._pause_until_s = 0.0

    def place(self, fresh: Sequence[str], priority: dict[str, tuple[int, int]]) -> None:
        """Puts tasks that have become ready into queues."""
        tasks = [self.workflow.tasks[id_] for id_ in fresh]
        located = self._locate(tasks) if len(self.all) > 1 else {}
        cores = sum(host.ready.cores for host in self.all)
        work_s = sum(host.load_s * host.ready.cores for host in self.all)
        work_s += sum(self.seconds(task) * min(task.cores, cores) for task in tasks)
        for task in sorted(tasks, key=lambda task: priority[task.id]):
            self._inputs[task.id] = _inputs(task, located)
            fair_s = work_s / cores
            host = min(self._able(task), key=lambda host: (self._cost_s(host, task, fair_s), host.load_s))
            self._put(host, task, priority)

    def steal(self, priority: dict[str, tuple[int, int]]) -> bool:
        """An idle place takes one task from the place with the most work. Whether one did."""
        if len(self.all) < 2:
            return False
        for thief in self.all:
            if thief.ready.count or thief.ready.cores_free <= 0:
                continue
            victim = max((host for host in self.all if host.ready.count), key=lambda host: host.load_s, default=None)
            if victim is None or victim is thief:
                continue
            some = (self.workflow.tasks[id_] for id_ in victim.ready.last(STEAL_FROM))
            able = [task for task in some if thief in self._able(task) and thief.ready.fits(thief.ready.need(task))]
            if not able:
                continue
            task = min(able, key=lambda task: self._moved(thief, task))
            own_s = self.seconds(task) * thief.ready.need(task).cores / thief.ready.cores
            if victim.load_s > thief.load_s + own_s + self._moved(thief, task) / LINK_BYTES_PER_S:
                victim.ready.remove(task)
                victim.leave(task.id)
                self._put(thief, task, priority)
                return True
        return False

    def over(self, task: str, sizes: Iterable[tuple[str, int]] = ()) -> None:
        """It waits and runs no more. `sizes`: bytes of the files that it made."""
        host = self.of.pop(task)
        host.leave(task)
        self._inputs.pop(task, None)
        for path, size in sizes:
            for reader in self.workflow.readers[path]:
                on = self._gathered.setdefault(reader, {})
                on[host.place.node] = on.get(host.place.node, 0) + size

    def lost(self, host: Host) -> list[str]:
        """A place that runs nothing any more; the tasks that waited or ran there."""
        self.all.remove(host)
        tasks = [task for task, at in self.of.items() if at is host]
        for task in tasks:
            del self.of[task]
        return tasks

    def _put(self, host: Host, task: Task, priority: dict[str, tuple[int, int]]) -> None:
        self.of[task.id] = host
        host.take(task, self.seconds(task))
        host.ready.push(task, priority[task.id])

    def _able(self, task: Task) -> list[Host]:
        """Places that are large enough. (If none is, the task runs alone.)"""
        some = [
            host
            for host in self.all
            if host.ready.cores >= task.cores and host.ready.memory_bytes >= (task.memory_bytes or 0)
        ]
        return some or self.all

    def _cost_s(self, host: Host, task: Task, fair_s: float) -> float:
        moved = self._moved(host, task)
        if host.is_free_for(task):
            return moved / LINK_BYTES_PER_S
        own_s = self.seconds(task) * host.ready.need(task).cores / host.ready.cores
        return cost_s(host.load_s, own_s, fair_s, moved, LINK_BYTES_PER_S)

    def _moved(self, host: Host, task: Task) -> int:
        """Bytes that come to the place for the task, and bytes that it makes for a reader whose other inputs are elsewhere."""
        node = host.place.node
        moved = self._inputs[task.id].missing(node)
        for path in task.outputs:
            for reader in self.workflow.readers[path]:
                gathered = self._gathered.get(reader)
                if gathered and max(gathered, key=lambda at: gathered[at]) != node:
                    moved += self.size(path)
        return moved

    def _locate(self, tasks: list[Task]) -> dict[str, dict[str, Any]]:
        paths = {path for task in tasks for path in task.inputs if not os.path.isabs(path)}
        if not paths or self.directory is None or time.monotonic() < self._pause_until_s:
            return {}
        names = sorted(paths)
        try:
            whole = [os.path.join(self.directory, path) for path in names]
            answers = locate(whole, self.state, PATIENCE_S, resolve=False)
        except (AgentError, OSError, ValueError) as why:
            self.say(f"for {PAUSE_S:.0f} s tasks are placed without regard to their files: {why}")
            self._pause_until_s = time.monotonic() + PAUSE_S
            return {}
        return {path: answer for path, answer in zip(names, answers, strict=True) if "error" not in answer}


def _inputs(task: Task, located: dict[str, dict[str, Any]]) -> Inputs:
    found = Inputs()
    for path in dict.fromkeys(task.inputs):
        if (answer := located.get(path)) is None:
            continue
        found.total += answer["size_bytes"]
        # (No name: that member did not answer.)
        for node in {copy["node"] for copy in answer["copies"]} - {""}:
            found.on[node] = found.on.get(node, 0) + answer["size_bytes"]
    return found
