"""Dask in a pool: tasks run where their input files are.

The scheduler asks the agent for the location of a task's files at the moment at which the task becomes ready: its inputs are there
then, wherever other tasks made them. It prefers the worker for which the time to wait and the time to move the missing bytes
are shortest (placing.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize
from distributed.scheduler import TaskState, WorkerState

from ...client import AgentError, locate
from ..placing import cost_s

logger = logging.getLogger(__name__)
# The scheduler does nothing else meanwhile. After an error it goes on without locations for a time.
PATIENCE_S, PAUSE_S = 2.0, 30.0
# A worker that joins is asked for the name of its node.
NODE_S, NODE_TRIES = 10.0, 6
# Of a task: files, and values in its arguments that are looked at.
FILES_MAX, VALUES_MAX = 1000, 10_000


class SurgetankLocations(SchedulerPlugin):
    """`client.register_plugin(SurgetankLocations())`, on a scheduler that was started with `surgetank run --pool NAME -- dask scheduler`.

    Files of a task are its arguments that are `pathlib.Path`, or text with a slash, below the directory of the scheduler, also in lists
    and dictionaries. `dask.annotate(files=[…])` names others. Tasks with restrictions of their own are left alone.
    """

    name = "surgetank-locations"

    def __init__(self, directory: str | None = None, state: str | None = None) -> None:
        self.directory, self.state = directory, state
        self.nodes: dict[str, str] = {}
        # Tasks that were asked about and have not begun since, and the worker that each is to take.
        self.asked_about: set[Any] = set()
        self.chosen: dict[Any, str] = {}
        self.pause_until = 0.0
        self.asking: set[asyncio.Task[None]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.directory = os.path.realpath(self.directory or ".")
        here = list(scheduler.workers)
        await asyncio.gather(*(self._asked_node(worker) for worker in here))
        # (Those that failed, and those that came meanwhile.)
        for worker in list(scheduler.workers):
            if worker not in self.nodes:
                self.add_worker(scheduler, worker)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        # (It answers once it is accepted.)
        asking = asyncio.ensure_future(self._ask_node(worker))
        self.asking.add(asking)
        asking.add_done_callback(self.asking.discard)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        self.nodes.pop(worker, None)

    async def _ask_node(self, worker: str) -> None:
        for _ in range(NODE_TRIES):
            if worker not in self.scheduler.workers or await self._asked_node(worker):
                return
            await asyncio.sleep(NODE_S)

    async def _asked_node(self, worker: str) -> bool:
        try:
            function = dumps(os.uname)  # type: ignore[no-untyped-call]
            message = {"op": "run", "function": function, "wait": True}
            asked = self.scheduler.broadcast(msg=message, workers=[worker])
            answer = (await asyncio.wait_for(asked, NODE_S))[worker]["result"]
            if isinstance(answer, Serialized):
                answer = deserialize(answer.header, answer.frames)  # type: ignore[no-untyped-call]
            self.nodes[worker] = str(answer[1])
            return True
        except Exception as why:
            logger.warning("the node of %s is not known, so it is preferred for no file: %r", worker, why)
            return False

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **_: Any) -> None:
        known = (scheduler.tasks.get(key) for key in tasks)
        self._decide([ts for ts in known if ts and ts.state == "released" and not ts.dependencies])

    def transition(self, key: Any, start: str, finish: str, *args: Any, **_: Any) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "memory":
            self._decide([waiter for waiter in ts.dependents if waiter.state == "waiting" and not waiter.waiting_on])
        elif finish == "waiting" and not ts.waiting_on and key not in self.asked_about:
            self._decide([ts])
        elif finish == "processing":
            # (If it runs again, its files may be elsewhere.)
            self.asked_about.discard(key)
        elif finish == "forgotten":
            self.asked_about.discard(key)
            self.chosen.pop(key, None)

    def _decide(self, ready: list[TaskState]) -> None:
        free = [ts for ts in ready if not self._is_restricted(ts)]
        for ts in free:
            self.asked_about.add(ts.key)
            if self.chosen.pop(ts.key, None):
                ts.worker_restrictions, ts.loose_restrictions = None, False
        files = {ts: paths for ts in free if (paths := list(self._files(ts)))}
        located = self._locate({path for paths in files.values() for path in paths})
        if located is None:
            return
        workers = [ws for ws in self.scheduler.running if ws.nthreads]
        threads = sum(ws.nthreads for ws in workers)
        if not threads:
            return
        seconds = {ts: self.scheduler._get_prefix_duration(ts.prefix) for ts in ready}
        load = {ws: ws.occupancy / ws.nthreads for ws in workers}
        fair = (sum(ws.occupancy for ws in workers) + sum(seconds.values())) / threads
        for ts, paths in files.items():
            total, on = 0, dict[str, int]()
            for answer in (located[path] for path in paths if path in located):
                total += answer["size_bytes"]
                # (No name: that member did not answer.)
                for node in {copy["node"] for copy in answer["copies"]} - {""}:
                    on[node] = on.get(node, 0) + answer["size_bytes"]
            if not on.keys() & {self.nodes.get(ws.address) for ws in workers}:
                continue

            def cost(ws: WorkerState, ts: TaskState = ts, total: int = total, on: dict[str, int] = on) -> float:
                moved = total - on.get(self.nodes.get(ws.address, ""), 0)
                return cost_s(load[ws], seconds[ts] / ws.nthreads, fair, moved, self.scheduler.bandwidth)

            best = min(workers, key=cost)
            load[best] += seconds[ts] / best.nthreads
            ts.worker_restrictions, ts.loose_restrictions = {best.address}, True
            self.chosen[ts.key] = best.address

    def _is_restricted(self, ts: TaskState) -> bool:
        """By its user."""
        own = ts.worker_restrictions and ts.worker_restrictions != {self.chosen.get(ts.key)}
        return bool(own or ts.host_restrictions or ts.resource_restrictions)

    def _locate(self, paths: set[str]) -> dict[str, dict[str, Any]] | None:
        if not paths or time.monotonic() < self.pause_until:
            return None
        try:
            answers = locate(sorted(paths), self.state, PATIENCE_S, resolve=False)
        except (AgentError, ValueError) as why:
            logger.warning("tasks run without regard to their files for %.0f s: %s", PAUSE_S, why)
            self.pause_until = time.monotonic() + PAUSE_S
            return None
        return {answer["path"]: answer for answer in answers if "error" not in answer}

    def _files(self, ts: TaskState) -> Iterator[str]:
        annotated = (ts.annotations or {}).get("files")
        named = _paths(annotated if annotated is not None else ts.run_spec, [VALUES_MAX])
        for path in itertools.islice(named, FILES_MAX):
            whole = os.path.abspath(os.path.join(self.directory or "", path))
            if whole.startswith(str(self.directory) + "/") and "\0" not in whole:
                yield whole


def _paths(value: Any, left: list[int]) -> Iterator[str]:
    """Paths in a task, or in an argument. `left`: so many values are still looked at."""
    left[0] -= 1
    if left[0] < 0:
        return
    if isinstance(value, os.PathLike):
        yield os.fspath(value)
    elif isinstance(value, str):
        if "/" in value and "://" not in value and "\n" not in value and len(value) < 4096:
            yield value
    elif isinstance(value, dict):
        yield from _paths_of(value.values(), left)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _paths_of(value, left)
    elif hasattr(value, "args") and hasattr(value, "kwargs"):
        yield from _paths_of((*value.args, *value.kwargs.values()), left)
    elif hasattr(value, "value") and type(value).__name__ == "DataNode":
        yield from _paths(value.value, left)


def _paths_of(values: Iterable[Any], left: list[int]) -> Iterator[str]:
    for value in values:
        if left[0] <= 0:
            return
        yield from _paths(value, left)
