"""The tasks to run: those that are missing, changed, or needed again by one of these.

A task's *derivation* stands for its command and all of its sources, down to the stamps of the files that no task
makes. A record with today's derivation is valid as long as its outputs are unchanged. A droppable file may be
missing, unless a task that reads it has to run. Then its maker runs again, and its makers, as far as needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..graph import Task, Workflow
from .journal import Past, Record
from .stamp import Stamp


@dataclass
class Decision:
    """`run`: task → reason, parents first; `done`: results of earlier runs that are still valid."""

    run: dict[str, str]
    done: dict[str, Record]
    derivations: dict[str, str]
    sources: dict[str, Stamp] = field(default_factory=dict)


def derivations(workflow: Workflow, sources: dict[str, Stamp]) -> dict[str, str]:
    """Task → a digest of its command and sources."""
    made: dict[str, str] = {}
    for id_ in workflow.order:
        task = workflow.tasks[id_]
        parts: list[object] = [task.command, task.image, task.outputs]
        parts += [made[parent] for parent in task.after]
        for path in task.inputs:
            maker = workflow.producer.get(path)
            if maker is None:
                parts.append((path, sources.get(path)))
            elif maker != id_:
                parts.append((path, made[maker]))
        made[id_] = hashlib.blake2b(ascii(parts).encode(), digest_size=16).hexdigest()
    return made


def decide(
    workflow: Workflow,
    past: Past,
    present: Callable[[str], Stamp | None],
    droppable: Collection[str],
    before: dict[str, Stamp] | None = None,
) -> Decision:
    """The tasks to run, from the facts of `past` and the files that are `present`. `before`: stamps of inputs that are not
    there any more, and were when the run began."""
    sources: dict[str, Stamp] = {}
    for file in workflow.inputs():
        found = present(file.path) or (before or {}).get(file.path)
        if found is not None:
            sources[file.path] = found
    today = derivations(workflow, sources)
    good = _good_records(workflow, past, today, sources)
    run: dict[str, str] = {}
    known = {id_ for id_, _ in past.records}
    for id_ in reversed(workflow.order):
        record = good.get(id_)
        if record is None:
            reason = "its command or something it reads has changed" if id_ in known else "it was never completed"
            run[id_] = "it was interrupted" if id_ in past.open_tasks else reason
            continue
        why = _why_again(workflow, workflow.tasks[id_], record, present, droppable, run)
        if why is not None:
            run[id_] = why
    return Decision(
        {id_: run[id_] for id_ in workflow.order if id_ in run},
        {id_: record for id_, record in good.items() if id_ not in run},
        today,
        sources,
    )


def _good_records(
    workflow: Workflow, past: Past, today: dict[str, str], sources: dict[str, Stamp]
) -> dict[str, Record]:
    """The latest record of each task that was made from today's sources."""
    made: dict[str, set[Stamp]] = {}
    good: dict[str, Record] = {}
    for id_ in workflow.order:
        several = past.records.get((id_, today[id_]), [])
        for record in several:
            for path, stamp in record.outputs.items():
                made.setdefault(path, set()).add(stamp)
        for record in reversed(several):
            if _saw_what_was_made(workflow, record, sources, made):
                good[id_] = record
                break
    return good


def _saw_what_was_made(
    workflow: Workflow, record: Record, sources: dict[str, Stamp], made: dict[str, set[Stamp]]
) -> bool:
    """Whether the inputs were unchanged between their making and this task."""
    for path, stamp in record.inputs.items():
        if path not in workflow.producer:
            if sources.get(path) != stamp:
                return False
        elif stamp not in made.get(path, ()):
            return False
    return True


def _why_again(
    workflow: Workflow,
    task: Task,
    record: Record,
    present: Callable[[str], Stamp | None],
    droppable: Collection[str],
    run: dict[str, str],
) -> str | None:
    for path in task.outputs:
        needed = [reader for reader in workflow.readers[path] if reader in run]
        if path in droppable and not needed:
            continue
        found = present(path)
        if found == record.outputs.get(path):
            continue
        state = "is missing" if found is None else "has been changed"
        return f"{path!r} {state}" + (f" and {needed[0]!r} needs it" if path in droppable else "")
    return None
