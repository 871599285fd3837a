"""A run, in the process that sees the mount (or the bare directory): checks, reserve, stage-in, tasks, stage-out,
release."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import hints
from ..agent import Agent, lost
from ..graph import Workflow
from ..problem import Problem
from . import graphfile, journal, orphans, peak, persist, plan, resume
from .engine import Engine, Tally
from .losses import Losses, readable
from .next_read import NextReads
from .nodes import Nodes
from .progress import Progress, choose
from .settings import NOT_DURABLE, Settings
from .signals import Signals
from .spawn import Spawner
from .stamp import Stamp, remove, stamp

HOME = Path(journal.HOME)


def run(workflow: Workflow, settings: Settings) -> dict[str, Any]:
    """The report of the run; its `exit` is the exit code. The current directory becomes the workflow's."""
    begun_s = time.monotonic()
    os.chdir(settings.directory)
    progress = choose(settings.progress)
    agent = None if settings.bare else Agent(state=settings.state)
    check(workflow, settings)
    HOME.mkdir(exist_ok=True)
    with _lock():
        orphans.end(settings.directory)
        past = _past(settings)
        losses = Losses(agent, settings.over)
        present = readable if losses.in_pool else stamp
        missing = absent(workflow, settings, present)
        book = journal.Journal(HOME, past)
        (book.directory / "graph.json").write_text(json.dumps(graphfile.to_json(workflow)))
        steps: list[dict[str, Any]] = []
        drop = persist.droppable(workflow, settings.persist, settings.persist_named, settings.directory, settings.over)
        tally = Tally()
        spawner = Spawner()
        nodes: Nodes | None = None
        try:
            with _step(steps, "reserve", book):
                reserve(workflow, settings, agent, drop, progress)
            if missing:
                progress.step(f"stage-in: {len(missing)} inputs from {settings.inputs_from}")
                for path in filter(lost, missing):
                    # (Else it looks complete.)
                    remove(path)
                with _step(steps, "stage-in", book):
                    copy(
                        settings,
                        [(_join(settings.inputs_from, path), _join(settings.directory, path)) for path in missing],
                    )
            decision = resume.decide(workflow, past, present, drop)
            if settings.on == "slurm" and decision.run:
                nodes = Nodes(settings, spawner, book.directory, book.run)
                nodes.wait_until_ready(progress.say)
            next_reads = None
            if agent is not None:
                next_reads = NextReads(workflow, _cores(settings, nodes), decision.run, drop)
                placed = hints.gathered(workflow, decision.run) if nodes is not None else ()
                refused = agent.hint([*hints.held_back(workflow, settings.persist, drop), *next_reads.hints(), *placed])
                if refused is not None:
                    progress.say(f"the agent did not take all hints; those files are written to the store: {refused}")
            planned = plan.make(workflow, decision, settings, drop, missing)
            (book.directory / "plan.json").write_text(json.dumps(planned.as_json()))
            engine = Engine(
                workflow, settings, decision, book, drop, progress, agent, spawner, nodes, next_reads, present
            )
            tally = engine.tally
            for step in planned.steps:
                if step.kind == "prefetch":
                    for path in step.files:
                        engine.errands.ask("prefetch", path)
            engine.run()
            before = engine.attempts
            while tally.stopped_by is None and losses.are_new(failed=bool(tally.failed)):
                # (This run's results, too. An input that is lost makes no result of it bad.)
                book.flush()
                now = resume.decide(workflow, journal.load(HOME), present, drop, decision.sources)
                again = [id_ for id_ in now.run if id_ in tally.done or id_ in decision.done]
                if (not again and not tally.failed) or (nodes is not None and not nodes.usable()):
                    break
                for id_ in again:
                    tally.done.pop(id_, None)
                    decision.done.pop(id_, None)
                    decision.run[id_] = now.run[id_]
                tally.again += [id_ for id_ in again if id_ not in tally.again]
                progress.say(
                    f"a node of the pool was lost; the tasks that made what is lost run again: {_named(again)}"
                )
                engine = Engine(
                    workflow, settings, now, book, drop, progress, agent, spawner, nodes, None, present, before
                )
                engine.run()
                tally.add(engine.tally)
                before = engine.attempts
            code = tally.code
            out = next((step for step in planned.steps if step.kind == "stage-out"), None)
            if out is not None and code == 0:
                progress.step(f"stage-out: {out.what}")
                if agent is not None and (left := agent.wait(_before(workflow, settings, decision, out.files))):
                    progress.say(f"files of an earlier run are not in the store: {left}")
                    code = NOT_DURABLE
                # Under the mount this step ends with the last drain of `surgetank run` (launch.py).
                if settings.results_to is not None:
                    with _step(steps, "stage-out", book):
                        stage_out(settings, settings.results_to, out.files)
            if nodes is not None and (undrained := _drained(nodes, progress)):
                code = code or undrained
        finally:
            progress.end()
            with _step(steps, "release", book):
                book.close()
        report = _report(workflow, settings, planned, decision, tally, book, steps, code)
        report["seconds"] = round(time.monotonic() - begun_s, 3)
        (book.directory / "report.json").write_text(json.dumps(report))
    return report


def _cores(settings: Settings, nodes: Nodes | None) -> float:
    """Of all places."""
    if nodes is None:
        return settings.jobs
    return sum(settings.of_node(node.cores, node.memory_bytes)[0] for node in nodes.usable())


def _drained(nodes: Nodes, progress: Progress) -> int:
    """Waits until the agents of all nodes have drained; an exit code if one could not."""
    progress.step("the agents of all nodes drain")
    with Signals() as arrived:
        nodes.spawner.watch(arrived.descriptor, arrived.take)
        before = {id(node) for node in nodes.all if node.exit is not None}
        bad = [node for node in nodes.close(arrived.drain) if id(node) not in before]
        nodes.spawner.unwatch(arrived.descriptor)
    for node in bad:
        progress.say(f"the agent of a node did not end well: {node.words()}")
    return NOT_DURABLE if bad else 0


def _past(settings: Settings) -> journal.Past:
    if settings.fresh:
        # In any state.
        with contextlib.suppress(Exception):
            journal.name_logs(HOME, journal.load(HOME))
        return journal.Past()
    past = journal.load(HOME)
    journal.name_logs(HOME, past)
    return past


def check(workflow: Workflow, settings: Settings) -> None:
    """Reports before the run what would certainly make a task fail."""
    for task in workflow.tasks.values():
        if not task.command:
            raise Problem(
                f"task {task.id!r} has no command",
                where=workflow.at(task),
                remedy="this description has no commands; its engine can run it, or `surgetank workflow replay`",
            )
        words = [task.command] if isinstance(task.command, str) else task.command
        if any("\0" in word for word in (task.id, *words)):
            raise Problem(f"task {task.id!r} has a NUL in its command or id", where=workflow.at(task))
        if settings.memory_named and (task.memory_bytes or 0) > settings.memory_bytes:
            raise Problem(
                f"task {task.id!r} wants {plan.words_of(task.memory_bytes or 0)} of memory,"
                f" and --memory is {plan.words_of(settings.memory_bytes)}",
                where=workflow.at(task),
                remedy="give it a larger --memory",
            )


def absent(workflow: Workflow, settings: Settings, present: Callable[[str], Stamp | None] = stamp) -> list[str]:
    """Inputs that must be staged in; an error if there is no source for them."""
    inputs = [file.path for file in workflow.inputs()]
    missing = [path for path in inputs if not os.path.exists(path) or present(path) is None]
    staged = [path for path in missing if settings.inputs_from is not None and not os.path.isabs(path)]
    gone = [path for path in missing if path not in staged]
    if gone:
        named = ", ".join(repr(path) for path in gone[:5]) + (" …" if len(gone) > 5 else "")
        raise Problem(
            f"{len(gone)} input files are missing: {named}",
            where=settings.directory,
            why="no task of the workflow makes them",
            remedy="put them there, or give their place with --inputs-from, or the right directory with --dir",
        )
    return staged


def reserve(
    workflow: Workflow, settings: Settings, agent: Agent | None, drop: Collection[str], progress: Progress
) -> None:
    """Checks just before the first task that the directory is ready and has room."""
    if agent is not None and agent.status(settings.over) is None:
        raise Problem("no agent serves the directory", where=settings.over, remedy="try again, or --bare", code=1)
    # On the mount this is the store's room, minus the files that wait for it. A quota counts if the file system reports
    # it to `df`.
    room = os.statvfs(".")
    free = room.f_bavail * room.f_frsize
    goes = [path for path in workflow.producer if not (agent is not None and path in drop)]
    expected = sum(workflow.files[path].size_bytes or 0 for path in goes)
    if expected > free:
        where = "the store" if agent is not None else settings.directory
        progress.say(
            f"{plan.words_of(expected)} are to be written to {where}, and {plan.words_of(free)} are free there: the space may not suffice"
        )


def copy(settings: Settings, pairs: list[tuple[str, str]]) -> None:
    """Copies through `surgetank stage-in`, which resumes; source and destination are full names."""
    for pair in pairs:
        if any("\t" in name or "\n" in name for name in pair):
            raise Problem("a name with a tab or a line break cannot be staged", where=pair[0])
    program = Agent(state=settings.state).program
    words = [program, "stage-in", "-q", "--manifest", "-"] + (
        [] if settings.state is None else ["--state", settings.state]
    )
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    done = subprocess.run(words, input=os.fsencode(text), stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise Problem(
            "files could not be staged", why=done.stderr.decode(errors="replace").strip(), code=done.returncode
        )


def _before(workflow: Workflow, settings: Settings, decision: resume.Decision, results: list[str]) -> list[str]:
    """Results of earlier runs, for which the last drain of this run does not wait."""
    inside = (path for path in results if not os.path.isabs(path))
    return [_join(settings.directory, path) for path in inside if workflow.producer[path] in decision.done]


def stage_out(settings: Settings, target: str, paths: list[str]) -> None:
    """Copies results to the user's destination."""
    inside = [path for path in paths if not os.path.isabs(path)]
    copy(settings, [(_join(settings.directory, path), _join(target, path)) for path in inside])


def _join(place: str | None, path: str) -> str:
    return f"{(place or '').rstrip('/')}/{path}"


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One executor per directory."""
    with open(HOME / "lock", "a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            raise Problem(
                "another executor works in this directory",
                where=Path.cwd(),
                why=f"process {stream.read().strip() or 'unknown'} holds {HOME / 'lock'}",
                remedy="wait for it, or stop it",
                code=1,
            ) from None
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


@contextlib.contextmanager
def _step(steps: list[dict[str, Any]], kind: str, book: journal.Journal) -> Iterator[None]:
    """An auxiliary task, for the report."""
    entry: dict[str, Any] = {"step": kind, "began_ns": time.time_ns(), "ended_ns": None, "ok": False}
    steps.append(entry)
    try:
        yield
        entry["ok"] = True
    finally:
        entry["ended_ns"] = time.time_ns()
        book.say("step", **entry)
        book.flush()


def _report(
    workflow: Workflow,
    settings: Settings,
    planned: plan.Plan,
    decision: resume.Decision,
    tally: Tally,
    book: journal.Journal,
    steps: list[dict[str, Any]],
    code: int,
) -> dict[str, Any]:
    left = [id_ for id_ in decision.run if id_ not in tally.done]
    return {
        "format": 1,
        "workflow": workflow.name,
        "source": workflow.source,
        "run": book.run,
        "directory": settings.directory,
        "exit": code,
        "tasks": {
            "total": len(workflow.tasks),
            "done_before": len(decision.done.keys() - tally.done),
            "done": len(tally.done),
            "failed": tally.failed,
            "killed": tally.killed,
            "left": len(left),
            "retried": tally.retried,
            "again": tally.again,
            "processes": tally.processes,
        },
        "persist": settings.persist.value,
        "made_bytes": tally.made_bytes,
        "dropped": sorted(tally.dropped),
        "peak": asdict(peak.of_journal(workflow, journal.events(book.directory), book.run)),
        "steps": steps,
        "results": planned.results,
        "mark": settings.mark,
        "state": settings.state,
    }


def _named(tasks: list[str]) -> str:
    named = ", ".join(repr(id_) for id_ in tasks[:10]) + (" …" if len(tasks) > 10 else "")
    return named or "none"


def farewell(report: dict[str, Any]) -> str:
    """The final message to the user: what was done, what is safe, how to continue."""
    tasks = report["tasks"]
    total, good = tasks["total"], tasks["done"] + tasks["done_before"]
    lines = [f"{good} of {total} tasks are done, {tasks['done']} of them now, in {report['seconds']:.1f} s"]
    if tasks["failed"] or tasks["killed"] or good < total:
        if tasks["failed"]:
            lines[0] += f"; failed: {', '.join(repr(id_) for id_ in list(tasks['failed'])[:5])}"
        lines.append("  safe:  outputs of finished tasks; outputs of failed or stopped tasks were removed")
        lines.append("  go on: the same command again runs only what is missing or has changed")
    return "surgetank workflow: " + "\n".join(lines)
