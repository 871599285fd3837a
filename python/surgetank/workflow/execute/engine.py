"""The loop that starts tasks where they fit, handles those that have ended, and drops files that no task needs any more.

A task's life: waiting → ready → placed (host.py) → running (processes.py) → done, failed or killed. Outputs are removed before each
attempt and after one that failed. A file is dropped only when the journal has the success of its last reader.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..agent import Agent
from ..derive import Persist
from ..graph import Task, Workflow
from . import logs, orphans
from .errands import Errands
from .host import Host, Hosts
from .journal import Journal, Record, log_name
from .next_read import NextReads
from .nodes import Node, Nodes
from .processes import IDLE_S, Job, Processes, task_environment
from .progress import Progress
from .ready import Need, Ready, priorities
from .resume import Decision
from .settings import TASK_FAILED, Settings
from .signals import Signals
from .spawn import Child, Exit, Spawner, kill_group
from .stamp import Stamp, remove, stamp

AHEAD_EVERY_S = 0.25
# Tasks known to take longer are not clustered.
SHORT_S = 2.0
# A task without any known time takes so long.
UNKNOWN_S = 1.0
# Slurm ends what a lost step has left on its node.
LOST_S = 1.0


@dataclass(slots=True)
class Started:
    """Tasks that were started together, and have not ended."""

    host: Host
    need: Need
    left: list[str]


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
    """`drop`: files that may be removed after their last reader; `agent`: None without a mount; `nodes`: None if tasks run here;
    `before`: attempts of an engine before this one."""

    def __init__(
        self,
        workflow: Workflow,
        settings: Settings,
        decision: Decision,
        journal: Journal,
        drop: Collection[str],
        progress: Progress,
        agent: Agent | None,
        spawner: Spawner,
        nodes: Nodes | None = None,
        next_reads: NextReads | None = None,
        present: Callable[[str], Stamp | None] = stamp,
        before: dict[str, int] | None = None,
    ) -> None:
        self.workflow, self.settings, self.decision = workflow, settings, decision
        self.journal, self.drop, self.progress, self.agent = journal, drop, progress, agent
        self.spawner, self.nodes = spawner, nodes
        self.next_reads, self.present = next_reads, present
        self.tally = Tally()
        self.environment = task_environment(settings.directory, journal.run, settings.python_path)
        self.here = Processes(spawner, journal.directory, self.environment, settings.grace_s, self)
        self.hosts = self._make_hosts()
        self._priority = priorities(workflow)
        run = decision.run
        self._parents_left = {id_: sum(p in run for p in workflow.parents[id_]) for id_ in run}
        self._children_left = {id_: sum(c in run for c in workflow.children[id_]) for id_ in workflow.tasks}
        self._readers_left = {path: sum(r in run for r in readers) for path, readers in workflow.readers.items()}
        self._before = before or {}
        self.attempts: dict[str, int] = dict(self._before)
        self._inputs: dict[str, dict[str, Stamp]] = {}
        self._started: dict[int, Started] = {}
        # Ready tasks without a place; and those that get one at a later time.
        self._fresh: list[str] = []
        self._held: list[tuple[float, str]] = []
        self._drops: list[str] = []
        self._stopping = False
        self._kill_at_s: float | None = None
        # By kind of task: times, and bytes of a file.
        self._seconds: dict[str, list[float]] = {}
        self._bytes: dict[str, list[int]] = {}
        self.errands = self._make_errands()

    def run(self) -> Tally:
        """Runs all tasks; returns when none runs any more."""
        with Signals() as arrived:
            self.spawner.watch(arrived.descriptor, arrived.take)
            self._begin()
            while True:
                self._start_what_fits()
                self.errands.go_on()
                self.journal.flush()
                if not self._started and (self._stopping or not self._held):
                    break
                for child, exit_ in self.spawner.wait(self.here.patience_s):
                    self._ended(child, exit_)
                self.here.look()
                if self.nodes is not None:
                    self.nodes.look()
                for number in arrived.drain():
                    self._stop(number)
                if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                    self._signal_all(signal.SIGKILL)
                    self._kill_at_s = None
                self._after_turn()
            self._finish()
            self.spawner.unwatch(arrived.descriptor)
        return self.tally

    def _make_hosts(self) -> Hosts:
        settings, by_kind = self.settings, self.settings.cluster > 1
        hosts = [Host(self.here, Ready(settings.jobs, settings.memory_bytes, by_kind))]
        if self.nodes is not None:
            hosts = []
            for node in self.nodes.usable():
                node.heard = self
                cores, memory = settings.of_node(node.cores, node.memory_bytes)
                node.send({"room": [cores, memory]})
                hosts.append(Host(node, Ready(cores, memory, by_kind)))
        directory = None if self.agent is None else settings.directory
        return Hosts(
            hosts, self.workflow, self._expected_s, self._expected_bytes, self.progress.say, directory, settings.state
        )

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
        running = sum(len(one.left) for one in self._started.values())
        self.progress.update(len(self.tally.done), running, self.tally.made_bytes)

    def _finish(self) -> None:
        if self._stopping or self.tally.failed:
            orphans.end(self.settings.directory)
        until_s = time.monotonic() + self.settings.grace_s
        while self.errands.busy and not self._stopping and time.monotonic() < until_s:
            self.errands.go_on()
            for child, exit_ in self.spawner.wait(IDLE_S):
                self._ended(child, exit_)
            if set(self.errands.groups.values()) == {"prefetch"}:
                break
        for group in self.errands.groups:
            kill_group(group, signal.SIGKILL)
        self.here.close()
        self.journal.flush()

    # Starting.

    def _push(self, id_: str) -> None:
        self._fresh.append(id_)

    def _start_what_fits(self) -> None:
        now_s = time.monotonic()
        self._fresh += [id_ for at_s, id_ in self._held if at_s <= now_s]
        self._held = [(at_s, id_) for at_s, id_ in self._held if at_s > now_s]
        while not self._stopping:
            fresh, self._fresh = self._fresh, []
            self.hosts.place(fresh, self._priority)
            for host in self.hosts.all:
                while not self._stopping and (next_ := host.ready.pop(self._beyond(host))) is not None:
                    self._start_on(host, *next_)
            if not self._fresh and not self.hosts.steal(self._priority):
                break

    def _beyond(self, host: Host) -> float:
        """How much work is sent to the place beyond what it has room for: only tasks known to be short, because others cannot take
        them."""
        id_ = host.ready.first() if host.place.ahead_s else None
        if id_ is None:
            return 0.0
        task = self.workflow.tasks[id_]
        is_known = task.runtime_s is not None or task.kind in self._seconds
        if not is_known or (seconds := self._expected_s(task)) > SHORT_S:
            return 0.0
        return max(host.place.ahead_s / max(seconds, 1e-3), 1 / host.ready.cores)

    def _start_on(self, host: Host, id_: str, need: Need) -> None:
        several = [id_]
        if self.settings.cluster > 1 and self._is_short(self.workflow.tasks[id_]):
            slots = max(1, int(host.ready.cores_free / need.cores) + 1)
            share = -(-(host.ready.like(need) + 1) // slots)
            several += host.ready.more_like(need, min(self.settings.cluster, share) - 1)
        prepared = [id_ for id_ in several if self._prepare(id_)]
        if not prepared:
            host.ready.give_back(need)
            return
        self.tally.processes += 1
        ticket = self.tally.processes
        self._started[ticket] = Started(host, need, prepared)
        host.place.start(ticket, [self._job(id_) for id_ in prepared], need)

    def _is_short(self, task: Task) -> bool:
        seen = self._seconds.get(task.kind)
        expected = sum(seen) / len(seen) if seen else task.runtime_s
        return expected is None or expected <= SHORT_S

    def _expected_s(self, task: Task) -> float:
        seen = self._seconds.get(task.kind)
        return sum(seen) / len(seen) if seen else task.runtime_s or UNKNOWN_S

    def _expected_bytes(self, path: str) -> int:
        seen = self._bytes.get(self.workflow.tasks[self.workflow.producer[path]].kind)
        return self.workflow.files[path].size_bytes or (sum(seen) // len(seen) if seen else 0)

    def _job(self, id_: str) -> Job:
        task = self.workflow.tasks[id_]
        above = dict.fromkeys(filter(None, map(os.path.dirname, task.outputs)))
        return Job(id_, self._words(task), log_name(id_, self.attempts[id_]), list(above))

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

    # Ending.

    def _ended(self, child: Child, exit_: Exit) -> None:
        if self.errands.ended(child, exit_.code) or self.here.ended(child, exit_):
            return
        if self.nodes is not None and (node := self.nodes.ended(child, exit_)) is not None:
            self._lost(node)

    def _lost(self, node: Node) -> None:
        """Its tasks get other places."""
        host = next((host for host in self.hosts.all if host.place is node), None)
        if host is None:
            return
        tasks = self.hosts.lost(host)
        running = [id_ for one in self._started.values() if one.host is host for id_ in one.left]
        self._started = {ticket: one for ticket, one in self._started.items() if one.host is not host}
        self.progress.say(f"a node ended during the run, and its tasks run on others: {node.words()}")
        for id_ in running:
            self._inputs.pop(id_, None)
            # (It did not fail.)
            self.attempts[id_] -= 1
            self.journal.say("killed", task=id_, at_ns=time.time_ns())
            if self._stopping:
                self.tally.killed.append(id_)
        if self.hosts.all:
            at_s = time.monotonic() + LOST_S
            self._held += [(at_s, id_) for id_ in tasks]
            return
        for id_ in running:
            self.tally.failed[id_] = "it ran on the last node of the job, which ended"
        self._stopping_new()

    # What is heard of tasks (`processes.Heard`).

    def logs_to(self, task: str, named: str) -> None:
        self.journal.say("log", task=task, attempt=self.attempts[task], named=named)

    def over(self, ticket: int) -> None:
        if (started := self._started.pop(ticket, None)) is not None:
            started.host.ready.give_back(started.need)

    def not_begun(self, task: str) -> None:
        self._is_at(task)
        self.hosts.over(task)
        self.attempts[task] -= 1
        self._push(task)

    def settled(self, task: str, exit_: Exit) -> None:
        self._is_at(task)
        self._settle(task, exit_)

    def signalled(self, number: int) -> None:
        # (Each node says so. A signal of this process comes first.)
        if self.tally.stopped_by is None:
            self._stop(number)

    def _is_at(self, task: str) -> None:
        for started in self._started.values():
            if task in started.left:
                started.left.remove(task)

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
            self.hosts.over(id_)
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
        self.hosts.over(task.id, ((path, size) for path, (size, _) in outputs.items()))
        self._seconds.setdefault(task.kind, []).append((exit_.ended_ns - exit_.began_ns) / 1e9)
        self._bytes.setdefault(task.kind, []).extend(size for size, _ in outputs.values())
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
        beside = self.hosts.of[id_].place.logs_in
        self.hosts.over(id_)
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
        base = str(self.journal.directory / beside / f"{log_name(id_, attempt)}.err")
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
        for host in self.hosts.all:
            host.place.signal_all(number)

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
