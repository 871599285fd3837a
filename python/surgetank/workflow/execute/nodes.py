"""The nodes of a Slurm job, and the runner on each of them (runner.py), which starts tasks there.

One step of `srun` per node stays for the whole run: a step per task would cost more than short tasks take. Runner and executor
write lines of JSON to each other, through the standard input and output of `srun`. So Slurm authenticates both, and no port is
opened. The danger that this avoids: tasks that go on after their executor. A runner whose input has ended ends its tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..agent import binary
from ..problem import Problem
from . import logs
from .processes import IDLE_S, Heard, Job, Lines
from .ready import Need
from .settings import Settings
from .spawn import Child, Exit, Spawner, kill_group

# Agents start on all nodes meanwhile, and join the pool.
START_S_MAX = 180.0
# A runner says that often that it lives; one that is silent for longer counts as lost. Slurm itself may notice only later.
ALIVE_EVERY_S, SILENT_S_MAX = 3.0, 30.0
# Lines of the executor and of a runner may wait 40 ms for each other on their way (delayed acknowledgements of TCP).
AHEAD_S = 0.2
# So long `srun` has to end its step.
END_S_MAX = 10.0
MODULE = "surgetank.workflow.execute.runner"
# What `srun` would take for itself: a step has all that the job has on its node.
NOT_FOR_STEPS = (
    "SLURM_MEM_PER_",
    "SLURM_NTASKS",
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SRUN_",
)


class Node:
    """A step of `srun` with a runner. `name`: Slurm's; `node`: as `uname -n` there."""

    ahead_s = AHEAD_S

    def __init__(
        self, name: str, spawner: Spawner, words: list[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.node, self.logs_in, self.log, self.spawner = name, "", name, log, spawner
        self.cores, self.memory_bytes = 0.0, 0
        self.heard: Heard | None = None
        self.exit: Exit | None = None
        self.tasks = 0
        self.heard_s = time.monotonic()
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        self._signal_at_s = 0.0
        self._to_write: deque[bytes] = deque()
        its_input, ours_in = os.pipe()
        ours_out, its_output = os.pipe()
        try:
            with open(log, "ab") as stream:
                self.child = spawner.start(words, environment, its_output, stream.fileno(), stdin=its_input)
        except OSError:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        os.set_blocking(ours_in, False)
        self._input: int | None = ours_in
        self._output: Lines | None = Lines(ours_out)
        spawner.watch(ours_out, self._read)

    def start(self, ticket: int, jobs: list[Job], need: Need) -> None:
        self.tasks += len(jobs)
        room = [need.cores, need.memory_bytes]
        self.send({"start": ticket, "room": room, "jobs": [asdict(job) for job in jobs]})

    def signal_all(self, number: signal.Signals) -> None:
        self.send({"signal": int(number)})

    def send(self, what: dict[str, Any]) -> None:
        self._to_write.append(json.dumps(what).encode() + b"\n")
        self.write()

    def write(self) -> None:
        """As much as the pipe takes; each turn of the engine writes more."""
        while self._to_write and self._input is not None:
            line = self._to_write[0]
            try:
                written = os.write(self._input, line)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # (Its end is heard by the spawner.)
                self._to_write.clear()
                return
            if written < len(line):
                self._to_write[0] = line[written:]
            else:
                self._to_write.popleft()

    def close(self) -> None:
        """The runner ends its tasks, and its agent drains."""
        if self._input is not None:
            os.close(self._input)
            self._input = None

    def look(self) -> None:
        """Ends the step of a runner that is silent."""
        now_s = time.monotonic()
        if self.exit is None and self.node and now_s - self.heard_s > SILENT_S_MAX and now_s > self._signal_at_s:
            kill_group(self.child.pid, self._signals.pop(0) if len(self._signals) > 1 else self._signals[0])
            self._signal_at_s = now_s + END_S_MAX

    def ended(self, exit_: Exit) -> None:
        self._read()
        self.exit = exit_
        self.close()
        if self._output is not None:
            self.spawner.unwatch(self._output.descriptor)
            os.close(self._output.descriptor)
            self._output = None

    def words(self) -> str:
        """How it ended, and what it wrote last."""
        how = "" if self.exit is None else self.exit.words()
        if self._signal_at_s:
            how = f"it was silent for {SILENT_S_MAX:.0f} s"
        return "\n".join([f"{self.name}: {how}", *(f"    | {line}" for line in logs.tail(str(self.log)))])

    def _read(self) -> None:
        for line in self._output.read() if self._output is not None else ():
            self.heard_s = time.monotonic()
            # (Something else may have written there.)
            with contextlib.suppress(ValueError):
                what = json.loads(line)
                if isinstance(what, dict):
                    self._hear(what)

    def _hear(self, what: dict[str, Any]) -> None:
        match what:
            case {"ready": {"node": str(node), "cores": cores, "memory_bytes": memory}}:
                self.node, self.cores, self.memory_bytes = node, float(cores), int(memory)
            case {"settled": [task, code, began_ns, ended_ns, cpu_s, memory]} if self.heard:
                self.heard.settled(task, Exit(code, began_ns, ended_ns, cpu_s, memory))
            case {"not_begun": task} if self.heard:
                self.heard.not_begun(task)
            case {"over": ticket} if self.heard:
                self.heard.over(ticket)
            case {"signalled": number} if self.heard:
                self.heard.signalled(number)
            case {"logs_to": [task, named]} if self.heard:
                self.heard.logs_to(task, named)


class Nodes:
    """All nodes of the job. `directory`: of the run, for logs; `orphans`: mark of the run's processes."""

    def __init__(self, settings: Settings, spawner: Spawner, directory: Path, run: str) -> None:
        self.settings, self.spawner = settings, spawner
        (directory / "nodes").mkdir(exist_ok=True)
        environment = _environment(settings.environment)
        first = {
            "directory": settings.directory,
            "run": run,
            "logs": os.path.abspath(directory),
            "python_path": settings.python_path,
            "grace_s": settings.grace_s,
        }
        self.all: list[Node] = []
        for name in names(settings.environment):
            log = directory / "nodes" / f"{name}.err"
            node = Node(name, spawner, _step(name, settings), environment, log)
            node.send(first | {"name": name})
            self.all.append(node)

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Until each runner answers. Those that do not are left out; an error if none does."""
        until_s = time.monotonic() + START_S_MAX
        while any(node.exit is None and not node.node for node in self.all) and time.monotonic() < until_s:
            for child, exit_ in self.spawner.wait(IDLE_S):
                self.ended(child, exit_)
            self.look()
        for node in self.all:
            if node.node and node.exit is None:
                continue
            if node.exit is None:
                kill_group(node.child.pid, signal.SIGTERM)
            say(f"no task runs on this node: {node.words()}")
        if not self.usable():
            raise Problem(
                "on no node of the job could tasks be started",
                where=self.settings.directory,
                why=self.all[0].words() if self.all else "the job has no nodes",
                remedy="see the lines above; try `srun --overlap surgetank run -- true` in the job",
                code=1,
            )

    def usable(self) -> list[Node]:
        return [node for node in self.all if node.node and node.exit is None]

    def ended(self, child: Child, exit_: Exit) -> Node | None:
        """The node whose step this was."""
        node = next((node for node in self.all if node.child.pid == child.pid), None)
        if node is not None:
            node.ended(exit_)
        return node

    def look(self) -> None:
        for node in self.all:
            node.write()
            node.look()

    def close(self, stopped: Callable[[], list[int]]) -> list[Node]:
        """Lets the agents of all nodes drain, and waits for them; `stopped` returns signals to this process. The nodes that did
        not end with 0."""
        for node in self.all:
            node.close()
        asked = False
        while any(node.exit is None for node in self.all):
            for child, exit_ in self.spawner.wait(IDLE_S):
                self.ended(child, exit_)
            if stopped():
                for node in self.all:
                    if node.exit is None:
                        kill_group(node.child.pid, signal.SIGKILL if asked else signal.SIGTERM)
                asked = True
        return [node for node in self.all if node.exit is not None and node.exit.code]


def names(environment: Mapping[str, str]) -> list[str]:
    """The nodes of the Slurm job that this process is in."""
    listed = environment.get("SLURM_JOB_NODELIST")
    if not environment.get("SLURM_JOB_ID") or not listed:
        raise Problem(
            "--on slurm works in a Slurm job, and this is none",
            why="SLURM_JOB_ID and SLURM_JOB_NODELIST are not set",
            remedy="submit a script with `sbatch --nodes=N`, or begin with `salloc --nodes=N`",
        )
    words = ["scontrol", "show", "hostnames", listed]
    try:
        asked = subprocess.run(words, env=dict(environment), capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Problem("the nodes of the job are not known", why=str(error), code=1) from None
    if asked.returncode:
        raise Problem("the nodes of the job are not known", why=asked.stderr.strip(), code=1)
    return asked.stdout.split()


def _step(name: str, settings: Settings) -> list[str]:
    words = ["srun", "--overlap", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none"]
    words += ["--unbuffered", "--chdir=/", "--quiet"]
    if not settings.bare:
        words += [binary(), "run", "--over", settings.over, *settings.serve, *settings.at_exit]
        words += ["--state", settings.state] if settings.state is not None else []
        words.append("--")
    return [*words, sys.executable, "-P", "-m", MODULE]


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The user's, without what the executor's own run has set, so that the node's agent serves the runner."""
    kept = {key: value for key, value in given.items() if not key.startswith(NOT_FOR_STEPS)}
    package = str(Path(__file__).resolve().parents[3])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [package, given.get("PYTHONPATH")]))}
