"""`python -m surgetank.workflow.execute.runner`: starts tasks on one node of a Slurm job, for an executor on another one (nodes.py).
Not for users.

It reads lines of JSON on standard input, and writes what happens on standard output. When the input ends, so do its tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from . import orphans
from .nodes import ALIVE_EVERY_S
from .processes import Job, Lines, Processes, task_environment
from .settings import memory_here
from .signals import Signals
from .spawn import Exit, Spawner


class Teller:
    """Writes what is heard of tasks."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.name = descriptor, ""
        self._waiting: list[bytes] = []
        self._ended: list[int] = []
        self._writing = threading.Lock()

    def tell(self, **what: Any) -> None:
        self._waiting.append(json.dumps(what).encode() + b"\n")

    def flush(self) -> None:
        text = b"".join(self._waiting)
        self._waiting.clear()
        self._write(text)

    def say_alive(self) -> None:
        """As long as the executor listens."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(ALIVE_EVERY_S)
                self._write(b'{"alive": true}\n')

    def _write(self, text: bytes) -> None:
        with self._writing:
            while text:
                text = text[os.write(self.descriptor, text) :]

    def logs_to(self, task: str, named: str) -> None:
        self.tell(logs_to=[task, f"{self.name}/{named}"])

    def settled(self, task: str, exit_: Exit) -> None:
        self.tell(settled=[task, exit_.code, exit_.began_ns, exit_.ended_ns, exit_.cpu_s, exit_.memory_bytes_max])

    def not_begun(self, task: str) -> None:
        self.tell(not_begun=task)

    def signalled(self, number: int) -> None:
        self.tell(signalled=number)

    def over(self, ticket: int) -> None:
        self._ended.append(ticket)
        self.tell(over=ticket)

    def ended(self) -> list[int]:
        """Tickets of which no process is left since the last call."""
        some, self._ended = self._ended, []
        return some


class Runner:
    def __init__(self, output: int) -> None:
        self.teller = Teller(output)
        self.spawner = Spawner()
        self.processes: Processes | None = None
        self.directory = ""
        self._input = Lines(0)
        # Cores and memory that are free, and what waits for them: a ticket, its need, and its jobs.
        self._free = [0.0, 0.0]
        self._waiting: deque[tuple[int, list[float], list[Job]]] = deque()
        self._needs: dict[int, list[float]] = {}

    def run(self) -> None:
        self.spawner.watch(0, self._read)
        with Signals() as arrived:
            self.spawner.watch(arrived.descriptor, arrived.take)
            self._serve(arrived)

    def _serve(self, arrived: Signals) -> None:
        # (The pool may keep this thread waiting for longer than a runner may be silent.)
        threading.Thread(target=self.teller.say_alive, daemon=True).start()
        try:
            while not self._input.ended:
                for child, exit_ in self.spawner.wait(60.0 if self.processes is None else self.processes.patience_s):
                    if self.processes is not None:
                        self.processes.ended(child, exit_)
                if self.processes is not None:
                    self.processes.look()
                    self._start_what_fits(self.processes)
                # (The executor says what is to be done.)
                for number in arrived.drain():
                    self.teller.signalled(number)
                self.teller.flush()
        except BrokenPipeError:
            pass
        finally:
            if self.processes is not None:
                self.processes.signal_all(signal.SIGKILL)
                orphans.end(self.directory)
                self.processes.close()

    def _read(self) -> None:
        for line in self._input.read():
            self._do(json.loads(line))

    def _do(self, what: dict[str, Any]) -> None:
        if self.processes is None:
            self._begin(what)
        elif "start" in what:
            self._waiting.append((what["start"], what["room"], [Job(**job) for job in what["jobs"]]))
        elif "room" in what:
            self._free = what["room"]
        elif "signal" in what:
            for ticket, _, jobs in self._waiting:
                for job in jobs:
                    self.teller.not_begun(job.task)
                self.teller.over(ticket)
            self._waiting.clear()
            self.processes.signal_all(signal.Signals(what["signal"]))

    def _start_what_fits(self, processes: Processes) -> None:
        """In the order in which it came."""
        self._give_back()
        while self._waiting and all(
            of <= free + 1e-9 for of, free in zip(self._waiting[0][1], self._free, strict=True)
        ):
            ticket, need, jobs = self._waiting.popleft()
            self._free = [free - of for free, of in zip(self._free, need, strict=True)]
            self._needs[ticket] = need
            processes.start(ticket, jobs)
            self._give_back()

    def _give_back(self) -> None:
        for ticket in self.teller.ended():
            # (One that had not begun has no room.)
            if (need := self._needs.pop(ticket, None)) is not None:
                self._free = [free + of for free, of in zip(self._free, need, strict=True)]

    def _begin(self, what: dict[str, Any]) -> None:
        self.directory, self.teller.name = what["directory"], what["name"]
        os.chdir(self.directory)
        # (Of an executor that was killed.)
        orphans.end(self.directory)
        logs = Path(what["logs"], what["name"])
        logs.mkdir(exist_ok=True)
        environment = task_environment(self.directory, what["run"], what["python_path"])
        self.processes = Processes(self.spawner, logs, environment, what["grace_s"], self.teller)
        cores = min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE", "1000000")))
        self.teller.tell(ready={"node": os.uname().nodename, "cores": cores, "memory_bytes": memory_here()})


if __name__ == "__main__":
    # (What a library prints must not disturb the lines.)
    output = os.dup(1)
    os.dup2(2, 1)
    Runner(output).run()
    sys.exit(0)
