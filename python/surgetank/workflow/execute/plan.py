"""The mapper: turns the abstract workflow into an executable one, with auxiliary tasks.

reserve → stage-in, prefetch → the tasks → stage-out → release. They appear in the plan, in the progress and in the
report; release happens however the other steps end.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from ..graph import Workflow
from .resume import Decision
from .settings import Settings

AUXILIARY = ("reserve", "stage-in", "prefetch", "stage-out", "release")


@dataclass
class Step:
    id: str
    # One of `AUXILIARY`, or `task`.
    kind: str
    what: str
    files: list[str] = field(default_factory=list)
    # None: not known before the file exists.
    size_bytes: int | None = None
    after: list[str] = field(default_factory=list)
    command: list[str] | str | None = None
    why: str = ""


@dataclass
class Plan:
    workflow: str
    directory: str
    steps: list[Step]
    # The number of tasks that earlier runs did.
    done: int
    dropped: list[str]
    results: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        tasks = [step for step in self.steps if step.kind == "task"]
        lines = [f"{self.workflow}: {len(tasks)} tasks to run, {self.done} done already, in {self.directory}"]
        for step in self.steps:
            lines.append(
                f"{step.kind:<9} {step.id!r}: {step.what}" if step.kind == "task" else f"{step.kind:<9} {step.what}"
            )
            if step.why:
                lines.append(f"{'':<9}   because {step.why}")
        return "\n".join(lines)


def make(
    workflow: Workflow, decision: Decision, settings: Settings, drop: Collection[str], missing: Collection[str]
) -> Plan:
    """`missing` are inputs that do not exist yet and are staged in."""
    place = "directory" if settings.bare else "reservation"
    made = [path for id_ in decision.run for path in workflow.tasks[id_].outputs]
    results = [path for path in workflow.files if path in workflow.producer and path not in drop]
    expected = _size(workflow, made)
    steps = [Step("reserve", "reserve", f"{place} {settings.over}: {_bytes(expected)} to be made", [], expected)]
    before = ["reserve"]
    if missing:
        what = f"{len(missing)} inputs from {settings.inputs_from}, {_bytes(_size(workflow, missing))}"
        steps.append(Step("stage-in", "stage-in", what, sorted(missing), _size(workflow, missing), ["reserve"]))
        before = ["stage-in"]
    wanted = _prefetched(workflow, decision, settings, missing)
    if wanted:
        what = f"{len(wanted)} inputs into the tiers, {_bytes(_size(workflow, wanted))}, in the background"
        steps.append(Step("prefetch", "prefetch", what, wanted, _size(workflow, wanted), ["reserve"]))
    last = []
    for id_, why in decision.run.items():
        task = workflow.tasks[id_]
        parents = [parent for parent in workflow.parents[id_] if parent in decision.run]
        if not any(child in decision.run for child in workflow.children[id_]):
            last.append(id_)
        what = f"{task.kind}, {len(task.inputs)} files in, {len(task.outputs)} out"
        steps.append(
            Step(id_, "task", what, task.outputs, _size(workflow, task.outputs), parents or before, task.command, why)
        )
    target = settings.results_to or ("" if settings.bare else "the store")
    if target:
        what = f"{len(results)} files to {target}, {_bytes(_size(workflow, results))}"
        steps.append(Step("stage-out", "stage-out", what, results, _size(workflow, results), last or before))
    what = f"{len(drop)} intermediate files dropped after their last reader"
    what += "" if settings.bare else "; tiers given back, mount taken away"
    steps.append(Step("release", "release", what, sorted(drop), None, ["stage-out"] if target else last or before))
    return Plan(workflow.name, settings.directory, steps, len(decision.done), sorted(drop), results)


def _prefetched(workflow: Workflow, decision: Decision, settings: Settings, missing: Collection[str]) -> list[str]:
    """Inputs in the store that a task will read. On several nodes none: each task reads its inputs to its own node."""
    if settings.bare or not settings.prefetch or settings.on == "slurm":
        return []
    return [
        path
        for path in decision.sources
        if path not in missing
        and not os.path.isabs(path)
        and any(reader in decision.run for reader in workflow.readers[path])
    ]


def _size(workflow: Workflow, paths: Collection[str]) -> int | None:
    """The total size; None if one is not known."""
    sizes = [workflow.files[path].size_bytes for path in paths]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _bytes(size: int | None) -> str:
    return "of unknown size" if size is None else words_of(size)


def words_of(size: int) -> str:
    """A size for people: `1.5 GiB`."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
