"""Uses Snakemake's own scheduler plugin interface to read, not to schedule: writes the jobs as JSON and ends Snakemake.

It runs inside Snakemake's process (`surgetank.workflow.importers.snakemake` starts it), so it imports nothing from
this package. Snakemake creates it after the DAG is built and before any job runs; it ends Snakemake before the first
job. Inputs, outputs, flags and dependencies come from the scheduler's interface, names and threads from the
executor's. Facts that neither has (`_private`) may be missing in another version and are then `None`.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Optional

from snakemake_interface_scheduler_plugins.base import SchedulerBase  # type: ignore[import-untyped, unused-ignore]
from snakemake_interface_scheduler_plugins.settings import (  # type: ignore[import-untyped, unused-ignore]
    SchedulerSettingsBase,
)

FLAGS = (
    "temp",
    "protected",
    "directory",
    "pipe",
    "service",
    "checkpoint_target",
    "update",
    "before_update",
    "report",
    "storage_object",
)


@dataclass
class SchedulerSettings(SchedulerSettingsBase):  # type: ignore[misc, unused-ignore]
    # Snakemake makes an option of the annotation: it must be a type and not text, so `__future__` annotations must not
    # be used here.
    out: Optional[str] = field(default=None, metadata={"help": "Where the graph is written", "required": True})  # noqa: UP045


class Scheduler(SchedulerBase):  # type: ignore[misc, unused-ignore]
    def __post_init__(self) -> None:
        out = self.settings.out
        with Path(out + ".part").open("w", encoding="utf-8") as file:
            json.dump({"jobs": list(described(self.dag).values())}, file)
        os.rename(out + ".part", out)
        raise SystemExit(0)

    def select_jobs(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise SystemExit("an import runs no jobs")


def described(dag: Any, *, whole: bool = True) -> dict[Any, dict[str, Any]]:
    """Each job with its facts. Without `whole`, only those that the graph needs: this evaluates no code of the
    Snakefile, so a Snakemake that continues may call it."""
    jobs = _with_dependencies(dag)
    return {job: _job(dag, job, number, jobs, whole) for job, number in jobs.items()}


def _with_dependencies(dag: Any) -> dict[Any, int]:
    """The jobs to run, and the finished jobs whose files they read, numbered."""
    waiting = list(dag.needrun_jobs())
    found: dict[Any, int] = {}
    while waiting:
        job = waiting.pop()
        if job not in found:
            found[job] = len(found)
            waiting.extend(_dependencies(dag, job))
    return found


def _dependencies(dag: Any, job: Any) -> Iterable[Any]:
    # The DAG of 9.12 only has `dependencies`, the name that the interface's own documentation still uses.
    if hasattr(dag, "job_dependencies"):
        return list(dag.job_dependencies(job))
    return list(dag.dependencies[job])


def _job(dag: Any, job: Any, number: int, jobs: dict[Any, int], whole: bool) -> dict[str, Any]:
    rule: Any = getattr(job, "rule", None)
    facts = {
        "number": number,
        "rule": job.name,
        "inputs": [_file(file) for file in job.input],
        "outputs": [_file(file) for file in job.output],
        "logs": [str(file) for file in job.log],
        "benchmark": str(job.benchmark) if job.benchmark else None,
        "resources": {},
        "threads": 1,
        "dependencies": [jobs[other] for other in _dependencies(dag, job)],
        "checkpoint": _private(lambda: bool(job.is_checkpoint)),
        "does_nothing": _private(lambda: bool(job.is_norun)),
        "retries": None,
        "image": None,
        "command": None,
        "file": None,
        "line": None,
    }
    if whole:
        facts |= {
            "resources": {
                name: value for name, value in job.scheduler_resources.items() if isinstance(value, (int, float, str))
            },
            "threads": job.threads,
            "retries": _private(lambda: int(job.restart_times)),
            "image": _private(lambda: job.container_img_url),
            "command": _private(lambda: job.shellcmd),
            "file": _private(lambda: str(rule.snakefile)),
            "line": _private(lambda: int(rule.workflow.linemaps[rule.snakefile][rule.lineno])),
        }
    return facts


def _file(file: Any) -> dict[str, Any]:
    flags = getattr(file, "flags", {})
    return {"path": str(file), "flags": [flag for flag in FLAGS if flags.get(flag)]}


def _private(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception:
        return None
