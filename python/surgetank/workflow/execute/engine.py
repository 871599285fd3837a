"""The loop that runs the tasks: starts those that fit, handles those that have ended, drops files that no task needs
any more.

A task's life: waiting → ready → running → (leaderless: it has ended, children of it have not) → done, failed or
killed. Outputs are removed before each attempt and after one that failed. A file is dropped only when the journal
has the success of its last reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..agent import Agent
from ..derive import Persist
from ..graph import Task, Workflow
from . import logs, orphans
from .errands import Errands
from .journal import Journal, Record, log_name
from .next_read import NextReads
from .progress import Progress
from .ready import Need, Ready, priorities
from .resume import Decision
from .settings import TASK_FAILED, Settings
from .spawn import Child, Exit, Spawner, group_lives, kill_group
from .stamp import Stamp, remove, stamp

LOOK_AGAIN_S = 0.02
IDLE_S = 0.2
AHEAD_EVERY_S = 0.25
# Logs of tasks that run longer get their names while the tasks run.
LOG_NAMED_S = 0.5
# Tasks known to take longer are not clustered.
SHORT_S = 2.0
CLUSTER_PROGRAM = str(Path(__file__).with_name("cluster.py"))


@dataclass(slots=True)
class Running:
    """One process of the executor: a task, or several short ones."""

    tasks: list[str]
    need: Need
    pair: logs.Pair | None
    # For a cluster: the descriptor of its results, an incomplete line from it, and the number of ended tasks.
    results: int | None = None
    incomplete_line: bytes = b""
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


@dataclass
class Tally:
    """The result of a run."""

    done: dict[str, Record] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    retried: int = 0
    processes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    made_bytes: int = 0
    stopped_by: int | None = None
    # Tasks that ran again because a node of the pool was lost with their outputs.
    again: list[str] = field(default_factory=list)

    def add(self, later: Tally) -> None:
        """The result of an engine after this one, which tried what had failed."""
        self.done |= later.done
        self.failed = later.failed
        self.killed = later.killed
        self.retried += later.retried
        self.processes += later.processes
        self.dropped |= later.dropped
        self.made_bytes += later.made_bytes
        self.stopped_by = later.stopped_by

    @property
    def code(self) -> int:
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return TASK_FAILED if self.failed else 0


class Engine:
    """`drop`: files that may be removed after their last reader; `agent`: None without a mount; `before`: attempts of an
    engine before this one."""

    def __init__(
        self,
        workflow: Workflow,
        settings: Settings,
        decision: Decision,
        journal: Journal,
        drop: Collection[str],
        progress: Progress,
        agent: Agent | None,
        next_reads: NextReads | None = None,
        present: Callable[[str], Stamp | None] = stamp,
        before: dict[str, int] | None = None,
    ) -> None:
        self.workflow, self.settings, self.decision = workflow, settings, decision
        self.journal, self.drop, self.progress, self.agent = journal, drop, progress, agent
        self.next_reads, self.present = next_reads, present
        self.tally = Tally()
        self.spawner = Spawner()
        self.ready = Ready(settings.jobs, settings.memory_bytes, by_kind=settings.cluster > 1)
        self.logs = logs.Logs(journal.directory)
        self.environment = task_environment(settings, journal.run)
        self._priority = priorities(workflow)
        run = decision.run
        self._parents_left = {id_: sum(p in run for p in workflow.parents[id_]) for id_ in run}
        self._children_left = {id_: sum(c in run for c in workflow.children[id_]) for id_ in workflow.tasks}
        self._readers_left = {path: sum(r in run for r in readers) for path, readers in workflow.readers.items()}
        self._before = before or {}
        self.attempts: dict[str, int] = dict(self._before)
        self._inputs: dict[str, dict[str, Stamp]] = {}
        self._running: dict[int, Running] = {}
        self._leaderless: list[LeaderlessGroup] = []
        self._drops: list[str] = []
        self._directories: set[str] = set()
        self._stopping = False
        self._kill_at_s: float | None = None
        self._seconds: dict[str, list[float]] = {}
        self.errands = self._make_errands()

    def run(self) -> Tally:
        """Runs all tasks; returns when none runs any more."""
        with _Signals() as arrived:
            self.spawner.watch(arrived.descriptor, arrived.take)
            self._begin()
            while True:
                self._start_what_fits()
                self.errands.go_on()
                self.journal.flush()
                if not self._running and not self._leaderless:
                    break
                for child, exit_ in self.spawner.wait(LOOK_AGAIN_S if self._leaderless else IDLE_S):
                    self._ended(child, exit_)
                self._look_at_leaderless()
                for number in arrived.drain():
                    self._stop(number)
                if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                    self._signal_all(signal.SIGKILL)
                    self._kill_at_s = None
                self._after_turn()
            self._finish()
            self.spawner.unwatch(arrived.descriptor)
        return self.tally

    # Begin and end.

    def _begin(self) -> None:
        expected = [
            self.workflow.files[p].size_bytes for t in self.decision.run for p in self.workflow.tasks[t].outputs
        ]
        self.progress.begin(len(self.decision.run), sum(size or 0 for size in expected))
        for id_ in self.decision.run:
            if self._parents_left[id_] == 0:
                self._push(id_)
        for id_ in self.decision.done:
            # Removals that a killed run had not reached.
            for path in self.workflow.tasks[id_].outputs:
                if path in self.drop and self._readers_left[path] == 0 and os.path.lexists(path):
                    self._drops.append(path)
            if self.settings.persist is Persist.WHEN_CONSUMED and self._children_left[id_] == 0:
                self._persist(id_)
        self._after_turn()

    def _after_turn(self) -> None:
        self.journal.flush()
        if self._drops:
            for path in self._drops:
                if remove(path):
                    at_ns = time.time_ns()
                    self.tally.dropped[path] = at_ns
                    self.journal.say("drop", path=path, at_ns=at_ns)
            self._drops.clear()
            self.journal.flush()
        for one in self._running.values():
            if one.pair is not None and time.monotonic() - one.began_s > LOG_NAMED_S:
                self.logs.name(one.pair)
        running = sum(len(one.tasks) - one.settled for one in self._running.values())
        self.progress.update(len(self.tally.done), running, self.tally.made_bytes)

    def _finish(self) -> None:
        if self._stopping or self.tally.failed:
            orphans.end(self.settings.directory)
        until_s = time.monotonic() + self.settings.grace_s
        while self.errands.busy and not self._stopping and time.monotonic() < until_s:
            self.errands.go_on()
            for child, exit_ in self.spawner.wait(IDLE_S):
                self.errands.ended(child, exit_.code)
            if set(self.errands.groups.values()) == {"prefetch"}:
                break
        for group in self.errands.groups:
            kill_group(group, signal.SIGKILL)
        self.logs.close()
        self.journal.flush()

    # Starting.

    def _push(self, id_: str) -> None:
        self.ready.push(self.workflow.tasks[id_], self._priority[id_])

    def _start_what_fits(self) -> None:
        while not self._stopping and (next_ := self.ready.pop()) is not None:
            id_, need = next_
            several = [id_]
            if self.settings.cluster > 1 and self._is_short(self.workflow.tasks[id_]):
                slots = max(1, int(self.ready.cores_free / need.cores) + 1)
                share = -(-(self.ready.like(need) + 1) // slots)
                several += self.ready.more_like(need, min(self.settings.cluster, share) - 1)
            self._start(several, need)

    def _is_short(self, task: Task) -> bool:
        seen = self._seconds.get(task.kind)
        expected = sum(seen) / len(seen) if seen else task.runtime_s
        return expected is None or expected <= SHORT_S

    def _start(self, several: list[str], need: Need) -> None:
        prepared = [id_ for id_ in several if self._prepare(id_)]
        if not prepared:
            self.ready.give_back(need)
            return
        pair = None
        try:
            if len(prepared) == 1:
                id_ = prepared[0]
                pair = self.logs.open(log_name(id_, self.attempts[id_]))
                self.journal.say("log", task=id_, attempt=self.attempts[id_], named=pair.named)
                words = self._words(self.workflow.tasks[id_])
                child = self.spawner.start(words, self._environment(id_), pair.out, pair.err)
                running = Running(prepared, need, pair)
            else:
                child, running = self._start_cluster(prepared, need)
        except (OSError, ValueError) as error:
            if pair is not None:
                os.write(pair.err, f"it could not be started: {error}\n".encode(errors="replace"))
                self.logs.done(pair, keep=True)
            now = time.time_ns()
            self.ready.give_back(need)
            for id_ in prepared:
                self._settle(id_, Exit(127 if isinstance(error, FileNotFoundError) else 126, now, now))
            return
        self.tally.processes += 1
        self._running[child.pid] = running

    def _prepare(self, id_: str) -> bool:
        """Removes old outputs; False: the task cannot run."""
        task = self.workflow.tasks[id_]
        self.attempts[id_] = self.attempts.get(id_, 0) + 1
        self.journal.say("start", task=id_, attempt=self.attempts[id_], at_ns=time.time_ns())
        inputs: dict[str, Stamp] = {}
        for path in task.inputs:
            if self.workflow.producer.get(path) == id_:
                continue
            found = self.present(path)
            if found is None:
                self._fail(id_, f"its input {path!r} no longer exists", None)
                return False
            inputs[path] = found
        self._inputs[id_] = inputs
        self._clear(task)
        for path in task.outputs:
            above = os.path.dirname(path)
            if above and above not in self._directories:
                os.makedirs(above, exist_ok=True)
                self._directories.add(above)
        return True

    def _clear(self, task: Task) -> None:
        for path in task.outputs:
            if path not in task.inputs and remove(path):
                self.journal.say("gone", path=path, at_ns=time.time_ns())

    def _words(self, task: Task) -> list[str]:
        command = task.command
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command or [])
        if task.image is not None and self.settings.images:
            words = [
                "apptainer",
                "exec",
                "--bind",
                self.settings.over,
                "--pwd",
                self.settings.directory,
                task.image,
                *words,
            ]
        return words

    def _environment(self, id_: str) -> dict[str, str]:
        return {**self.environment, "SURGETANK_WORKFLOW_TASK": id_}

    def _start_cluster(self, several: list[str], need: Need) -> tuple[Child, Running]:
        jobs = []
        for id_ in several:
            base = log_name(id_, self.attempts[id_])
            jobs.append(
                {
                    "words": self._words(self.workflow.tasks[id_]),
                    "environment": {"SURGETANK_WORKFLOW_TASK": id_},
                    "out": self.logs.path(base, "out"),
                    "err": self.logs.path(base, "err"),
                }
            )
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
        os.set_blocking(ours, False)
        running = Running(several, need, None, ours)
        self.spawner.watch(ours, lambda: self._read_results(running))
        return child, running

    # Ending.

    def _read_results(self, running: Running) -> None:
        assert running.results is not None
        with contextlib.suppress(BlockingIOError):
            while some := os.read(running.results, 1 << 16):
                running.incomplete_line += some
        *lines, running.incomplete_line = running.incomplete_line.split(b"\n")
        for line in lines:
            number, code, began_ns, ended_ns, cpu_s, memory_bytes = json.loads(line)
            running.settled = number + 1
            self._settle(running.tasks[number], Exit(code, began_ns, ended_ns, cpu_s, memory_bytes))

    def _ended(self, child: Child, exit_: Exit) -> None:
        if self.errands.ended(child, exit_.code):
            return
        running = self._running.pop(child.pid)
        if not group_lives(child.pid):
            self._over(running, exit_)
            return
        failed = exit_.code != 0
        wait_s = 0.0 if failed else self.settings.grace_s
        signals = [signal.SIGKILL] if failed else [signal.SIGTERM, signal.SIGKILL]
        self._leaderless.append(LeaderlessGroup(running, child.pid, exit_, time.monotonic() + wait_s, signals))

    def _look_at_leaderless(self) -> None:
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

    def _over(self, running: Running, exit_: Exit) -> None:
        """No process of it is left."""
        self.ready.give_back(running.need)
        if running.results is None:
            if running.pair is not None:
                self.logs.done(running.pair, keep=exit_.code != 0)
            self._settle(running.tasks[0], exit_)
            return
        self._read_results(running)
        self.spawner.unwatch(running.results)
        os.close(running.results)
        left = running.tasks[running.settled :]
        for number, id_ in enumerate(left):
            if number == 0:
                self._settle(id_, exit_ if exit_.code else Exit(1, exit_.began_ns, exit_.ended_ns))
            else:
                # The task had not begun.
                self.attempts[id_] -= 1
                self._push(id_)

    def _settle(self, id_: str, exit_: Exit) -> None:
        task = self.workflow.tasks[id_]
        outputs: dict[str, Stamp] = {}
        why = None if exit_.code == 0 else exit_.words()
        if why is None:
            for path in task.outputs:
                found = stamp(path)
                if found is None:
                    why = f"it succeeded but did not make {path!r}, an output in its description"
                    break
                outputs[path] = found
        if why is None:
            self._succeed(task, exit_, outputs)
        elif self._stopping and exit_.code > 128:
            self._clear(task)
            self.tally.killed.append(id_)
            self.journal.say("killed", task=id_, at_ns=exit_.ended_ns)
        else:
            self._fail(id_, why, exit_)

    def _succeed(self, task: Task, exit_: Exit, outputs: dict[str, Stamp]) -> None:
        record = Record(
            task.id,
            self.decision.derivations[task.id],
            self.journal.run,
            self.attempts[task.id],
            exit_.began_ns,
            exit_.ended_ns,
            self._inputs.pop(task.id),
            outputs,
            exit_.cpu_s,
            exit_.memory_bytes_max,
        )
        self.journal.done(record)
        self.tally.done[task.id] = record
        self.tally.made_bytes += sum(size for size, _ in outputs.values())
        self._seconds.setdefault(task.kind, []).append((exit_.ended_ns - exit_.began_ns) / 1e9)
        for path in outputs:
            if path in self.drop and self._readers_left[path] == 0:
                self._drops.append(path)
        if self.next_reads is not None:
            for path in self.next_reads.read(task.id, task.inputs):
                self.errands.ask("next", path)
        for path in dict.fromkeys(task.inputs):
            if self.workflow.producer.get(path) == task.id:
                continue
            self._readers_left[path] -= 1
            if self._readers_left[path] == 0:
                if path in self.drop:
                    self._drops.append(path)
                elif path not in self.workflow.producer and not self.workflow.files[path].readers_unknown:
                    self.errands.ask("evict", path)
        when_consumed = self.settings.persist is Persist.WHEN_CONSUMED
        for parent in self.workflow.parents[task.id]:
            self._children_left[parent] -= 1
            if when_consumed and self._children_left[parent] == 0:
                self._persist(parent)
        if when_consumed and self._children_left[task.id] == 0:
            self._persist(task.id)
        for child in self.workflow.children[task.id]:
            if child in self._parents_left:
                self._parents_left[child] -= 1
                if self._parents_left[child] == 0:
                    self._push(child)

    def _persist(self, id_: str) -> None:
        for path in self.workflow.tasks[id_].outputs:
            self.errands.ask("persist", path)

    def _fail(self, id_: str, why: str, exit_: Exit | None) -> None:
        task = self.workflow.tasks[id_]
        attempt = self.attempts[id_]
        if exit_ is not None:
            self._clear(task)
        self.journal.say("failed", task=id_, attempt=attempt, why=why, at_ns=time.time_ns())
        in_place = [path for path in task.outputs if path in task.inputs]
        attempts = 1 + (task.retries if self.settings.retries is None else self.settings.retries)
        if attempt - self._before.get(id_, 0) < attempts and exit_ is not None and not in_place and not self._stopping:
            self.tally.retried += 1
            self.progress.say(f"task {id_!r} failed: {why}; attempt {attempt + 1} of {attempts} follows")
            self._push(id_)
            return
        self.tally.failed[id_] = why
        base = self.logs.path(log_name(id_, attempt), "err")
        lines = [f"task {id_!r} failed: {why}" + (f", attempt {attempt} of {attempts}" if attempts > 1 else "")]
        lines.append(f"  at:   {self.workflow.at(task)}")
        if exit_ is not None:
            lines.append(f"  log:  {base} (and .out beside it)")
            lines += [f"    | {line}" for line in logs.tail(base)]
        if in_place:
            lines.append(f"  NOT safe: {in_place[0]!r} is changed in place and may be half changed; restore it first")
        self.progress.say("\n".join(lines))
        if not self.settings.keep_going:
            self._stopping_new()

    # Stopping.

    def _stopping_new(self) -> None:
        """No new task starts; running ones may end."""
        self._stopping = True

    def _stop(self, number: int) -> None:
        first = self.tally.stopped_by is None
        self._stopping = True
        if first:
            self.tally.stopped_by = number
            name = signal.Signals(number).name
            self.progress.say(f"{name}: no new tasks; those that run have {self.settings.grace_s:.0f} s to end")
            self._signal_all(signal.SIGTERM)
            self._kill_at_s = time.monotonic() + self.settings.grace_s
        else:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for group in (*self._running, *(one.group for one in self._leaderless)):
            kill_group(group, number)

    def _make_errands(self) -> Errands:
        if self.agent is None:
            return Errands({}, self._start_errand)
        agent = self.agent
        commands = {"prefetch": agent.prefetch_words, "evict": agent.evict_words}
        if self.settings.persist is Persist.WHEN_CONSUMED:
            commands["persist"] = lambda paths: agent.hint_words(paths, "copy")
        if (next_reads := self.next_reads) is not None:
            listed = self.journal.directory / "next-reads.jsonl"
            commands["next"] = lambda paths: next_reads.words(agent, listed, paths)
        return Errands(commands, self._start_errand, {"next": AHEAD_EVERY_S})

    def _start_errand(self, words: list[str]) -> Child | None:
        with open(self.journal.directory / "errands.err", "ab") as log:
            try:
                return self.spawner.start(words, self.environment, log.fileno(), log.fileno())
            except OSError:
                return None


class _Signals:
    """Makes SIGINT, SIGTERM and SIGHUP readable from a descriptor."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> _Signals:
        self._ours, its = socket.socketpair()
        self._its = its
        for end in (self._ours, its):
            end.setblocking(False)
        self.descriptor = self._ours.fileno()
        self._arrived: list[int] = []
        self._before = {number: signal.signal(number, lambda *_: None) for number in self.NUMBERS}
        self._wakeup = signal.set_wakeup_fd(its.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._ours.close()
        self._its.close()

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._arrived += [number for number in self._ours.recv(64) if number in self.NUMBERS]

    def drain(self) -> list[int]:
        some, self._arrived = self._arrived, []
        return some


def task_environment(settings: Settings, run: str) -> dict[str, str]:
    environment = dict(os.environ)
    if settings.python_path is None:
        environment.pop("PYTHONPATH", None)
    else:
        environment["PYTHONPATH"] = settings.python_path
    environment[orphans.VARIABLE] = orphans.mark(settings.directory, run)
    return environment
