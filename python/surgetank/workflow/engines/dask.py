"""Dask in a pool: tasks run where their input files are.

The scheduler asks the agent for the location of a task's files at the moment at which the task becomes ready: its inputs are there
then, wherever other tasks made them. It prefers the worker for which the time to wait and the time to move the missing bytes
are shortest. The danger that this avoids: all tasks queue at the node that has the data, while others idle. So only the load
above a fair share of what is ready counts as time to wait.
"""

from __future__ import annotations

import asyncio
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

logger = logging.getLogger(__name__)
# The scheduler does nothing else meanwhile. After an error it goes on without locations for a time.
PATIENCE_S, PAUSE_S = 2.0, 30.0
FILES_MAX = 1000


class SurgetankLocations(SchedulerPlugin):
    """`client.register_plugin(SurgetankLocations())`, on a scheduler that was started with `surgetank run --pool NAME -- dask scheduler`.

    Files of a task are its arguments that are `pathlib.Path`, or text with a slash, below the directory of the scheduler, also in lists
    and dictionaries. `dask.annotate(files=[…])` names others. Tasks with restrictions of their own are left alone.
    """

    name = "surgetank-locations"

    def __init__(self, directory: str | None = None, state: str | None = None) -> None:
        self.directory, self.state = directory, state
        self.nodes: dict[str, str] = {}
        self.decided: set[Any] = set()
        self.pause_until = 0.0
        self.asking: set[asyncio.Task[None]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.directory = os.path.abspath(self.directory or ".")
        for worker in list(scheduler.workers):
            await self._ask_node(worker)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        # (It answers once it is accepted.)
        asking = asyncio.ensure_future(self._ask_node(worker))
        self.asking.add(asking)
        asking.add_done_callback(self.asking.discard)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        self.nodes.pop(worker, None)

    async def _ask_node(self, worker: str) -> None:
        try:
            function = dumps(os.uname)  # type: ignore[no-untyped-call]
            message = {"op": "run", "function": function, "wait": True}
            answer = (await self.scheduler.broadcast(msg=message, workers=[worker]))[worker]["result"]
            if isinstance(answer, Serialized):
                answer = deserialize(answer.header, answer.frames)  # type: ignore[no-untyped-call]
            self.nodes[worker] = str(answer[1])
        except Exception as why:
            logger.warning("the node of %s is not known, so it is not preferred for any file: %s", worker, why)

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **_: Any) -> None:
        known = (scheduler.tasks.get(key) for key in tasks)
        self._decide([ts for ts in known if ts and ts.state == "released" and not ts.dependencies])

    def transition(self, key: Any, start: str, finish: str, *args: Any, **_: Any) -> None:
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "memory":
            self._decide([waiter for waiter in ts.dependents if waiter.state == "waiting" and not waiter.waiting_on])
        elif finish == "waiting" and not ts.waiting_on and key not in self.decided:
            self._decide([ts])
        elif finish in ("processing", "forgotten"):
            # (If it runs again, its files may be elsewhere.)
            self.decided.discard(key)

    def _decide(self, ready: list[TaskState]) -> None:
        free = [ts for ts in ready if ts.key in self.decided or not _is_restricted(ts) or ts.loose_restrictions]
        files = {ts: list(self._files(ts)) for ts in free}
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
                for node in {copy["node"] for copy in answer["copies"]}:
                    on[node] = on.get(node, 0) + answer["size_bytes"]
            if not on:
                continue

            def cost(ws: WorkerState, ts: TaskState = ts, total: int = total, on: dict[str, int] = on) -> float:
                waits = max(0.0, load[ws] + seconds[ts] / ws.nthreads - fair)
                return waits + float(total - on.get(self.nodes.get(ws.address, ""), 0)) / self.scheduler.bandwidth

            best = min(workers, key=cost)
            load[best] += seconds[ts] / best.nthreads
            ts.worker_restrictions, ts.loose_restrictions = {best.address}, True
            self.decided.add(ts.key)

    def _locate(self, paths: set[str]) -> dict[str, dict[str, Any]] | None:
        if not paths or time.monotonic() < self.pause_until:
            return None
        try:
            answers = locate(sorted(paths), self.state, PATIENCE_S)
        except AgentError as why:
            logger.warning("tasks run without regard to their files for %.0f s: %s", PAUSE_S, why)
            self.pause_until = time.monotonic() + PAUSE_S
            return None
        return {answer["path"]: answer for answer in answers if "error" not in answer}

    def _files(self, ts: TaskState) -> Iterator[str]:
        annotated = (ts.annotations or {}).get("files")
        for count, path in enumerate(_paths(annotated if annotated is not None else ts.run_spec)):
            whole = os.path.abspath(os.path.join(self.directory or "", path))
            if count < FILES_MAX and whole.startswith(str(self.directory) + "/"):
                yield whole


def _is_restricted(ts: TaskState) -> bool:
    return bool(ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions)


def _paths(value: Any) -> Iterator[str]:
    """Paths in a task, or in an argument."""
    if isinstance(value, os.PathLike):
        yield os.fspath(value)
    elif isinstance(value, str):
        if "/" in value and "\n" not in value and len(value) < 4096:
            yield value
    elif isinstance(value, dict):
        yield from _paths_of(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _paths_of(value)
    elif hasattr(value, "args") and hasattr(value, "kwargs"):
        yield from _paths_of((*value.args, *value.kwargs.values()))
    elif hasattr(value, "value") and type(value).__name__ == "DataNode":
        yield from _paths(value.value)


def _paths_of(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from _paths(value)
