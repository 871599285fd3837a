"""Inside Snakemake's process: starts it again under the mount, and sends hints from the graph before the first job.

Snakemake runs the jobs, and removes temp() files itself after their last reader. With `persist = final`, files
between jobs become temp() in its graph, so Snakemake removes them by its own rules. Files that it has not removed at
the end go to the store: an agent that keeps a file for a future job never discards it.

The danger: an intermediate is gone and Snakemake needs it. This code removes only files that a killed Snakemake
would have removed, before any job runs. Files with unknown facts are drained.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from snakemake_interface_common.exceptions import WorkflowError  # type: ignore[import-untyped, unused-ignore]
from snakemake_interface_scheduler_plugins.registry import (  # type: ignore[import-untyped, unused-ignore]
    SchedulerPluginRegistry,
)

from .. import hints
from ..agent import Agent, binary, mounted
from ..derive import Persist
from ..execute import persist as persistence
from ..graph import Workflow
from ..importers.paths import inside
from ..importers.plugins.snakemake_scheduler_plugin_surgetank_import import described
from ..importers.snakemake import task_id, workflow_of
from ..problem import Problem

# Instructs the plugin in the Snakemake under the mount; no process below that one sees it.
VARIABLE = "SURGETANK_SNAKEMAKE"
RUNS_NOTHING = {"-n", "--dry-run", "--dryrun", "--unlock"}


def enter(persist: str | None, started_in: str) -> NoReturn:
    """Replaces this process by the same command under the mount of the current directory, which is the workflow's."""
    try:
        wanted = Persist(persist or "all")
    except ValueError:
        raise Problem(f"storage-surgetank-persist: {persist!r} is not final, all or when-consumed") from None
    words = again(sys.orig_argv, sys.argv)
    if not mounted("."):
        # If no job runs, an earlier run's files for this one stay for the next.
        at_exit = "leave" if RUNS_NOTHING & set(sys.argv) else "drain"
        words = [binary(), "run", "--over", os.getcwd(), "--keep-at-exit", at_exit, "--", *words]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _take_away_log(os.getcwd())
    os.chdir(started_in)
    os.execve(words[0], words, {**os.environ, VARIABLE: wanted.value})


def _take_away_log(directory: str) -> None:
    """This process has begun a log and writes nothing to it."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith(f"{directory}/.snakemake/log/") and os.stat(path).st_size == 0:
                os.unlink(path)


def again(original: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The words that start this Snakemake again, on plain files."""
    if "snakemake" not in Path(arguments[0]).parts[-2:]:
        raise Problem(
            "Snakemake was started by another program, which cannot be started again under the mount",
            why=f"{arguments[0]} is not `snakemake`",
            remedy="start that program with `surgetank run -- …`, without default-storage-provider",
        )
    words = [sys.executable, *original[1:]]
    # Before separated targets; after all other words, as the last one counts.
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], "--default-storage-provider", "none", *words[at:]]


def _held_back(path: str) -> bool:
    try:
        return os.getxattr(path, "user.surgetank.state") == b"kept" and os.path.isfile(path)
    except OSError:
        return False


def observe(persist: str) -> None:
    """Attaches an observer to the chosen scheduler."""
    observer = Observer(Persist(persist))
    for plugin in SchedulerPluginRegistry().plugins.values():
        plugin.scheduler = _observed(plugin.scheduler, observer)


def _observed(scheduler: Any, observer: Observer) -> Any:
    class Observed(scheduler):  # type: ignore[misc]
        def __post_init__(self) -> None:
            super().__post_init__()
            observer.begin(self.dag, self.logger)

        def select_jobs(self, selectable_jobs: Any, remaining_jobs: Any, *rest: Any) -> Any:
            observer.look(remaining_jobs)
            return super().select_jobs(selectable_jobs, remaining_jobs, *rest)

    return Observed


class Observer:
    """Knows the graph as far as Snakemake does; a checkpoint adds jobs, and then the observer reads it again."""

    def __init__(self, persist: Persist, agent: Agent | None = None) -> None:
        self.persist = persist
        self.agent = agent or Agent()
        self.directory = Path.cwd()
        self.dag: Any = None
        self.logger: Any = None
        self.workflow = Workflow.of("none", "Snakefile", [])
        # id() of a job → its task; Snakemake's own hash of a job is slow for so many.
        self._tasks: dict[int, str] = {}
        self._jobs: dict[str, Any] = {}
        self._unfinished: set[str] = set()
        # By id(): jobs that waited at the last look, and those that have begun and are not known to have ended.
        self._left: set[int] = set()
        self._begun: set[int] = set()
        self._children_left: dict[str, int] = {}
        self._prefetched: set[str] = set()
        self._prefetching: list[subprocess.Popen[bytes]] = []

    def begin(self, dag: Any, logger: Any) -> None:
        """Runs before the first job; the DAG is complete except for jobs that wait for checkpoints."""
        if self.dag is not None:
            return
        self.dag, self.logger = dag, logger
        workflow = getattr(dag, "workflow", None)
        if not getattr(workflow, "local_exec", True):
            raise WorkflowError(
                "the executor runs jobs on other machines, which do not have Surgetank's mount. Run the jobs here, or leave out"
                " `default-storage-provider: surgetank`."
            )
        if getattr(workflow, "dryrun", False) or getattr(workflow, "touch", False):
            return
        self.directory = Path.cwd()
        self._learn()

    def look(self, remaining: Iterable[Any]) -> None:
        """Runs each time jobs are chosen: takes in new jobs, and files consumed since."""
        left = set(map(id, remaining))
        if not left <= self._tasks.keys():
            self._learn()
        if self.persist is Persist.WHEN_CONSUMED:
            # (This runs for each job, and most jobs wait: it examines only those that have left the queue.)
            self._begun = (self._begun | self._left - left) - left
            self._left = left
            gone = [task for one in self._begun if (task := self._tasks[one]) in self._unfinished]
            done = [task for task in gone if self.dag.finished(self._jobs[task])]
            self._begun.difference_update(id(self._jobs[task]) for task in done)
            self._hand_over(done)

    def _learn(self) -> None:
        jobs = described(self.dag, whole=False)
        known = {id(job): task_id(job_facts, self.directory) for job, job_facts in jobs.items()}
        self._tasks = known
        self._jobs = {known[id(job)]: job for job in jobs}
        self._left, self._begun = set(), set()
        try:
            self.workflow = workflow_of(list(jobs.values()), Path("Snakefile"), self.directory)
        except Problem as problem:
            self.workflow = Workflow.of("none", "Snakefile", [])
            self.logger.warning(
                f"Surgetank: the agent did not take the hints, so all files are written to the store: {problem}"
            )
            return
        to_run = {id(job) for job in self.dag.needrun_jobs()}
        self._unfinished = {task for task in self.workflow.tasks if id(self._jobs[task]) in to_run}
        self._left = {id(self._jobs[task]) for task in self._unfinished}
        self._children_left = {
            task: sum(child in self._unfinished for child in children)
            for task, children in self.workflow.children.items()
        }
        drop = persistence.droppable(self.workflow, self.persist, named=True)
        self._declare_temporary(drop)
        # The agent keeps files that Snakemake removes itself, whichever job reads them: those that it leaves go to the
        # store at the end.
        held = drop | {path for path in self.workflow.producer if self.workflow.files[path].temporary}
        # (For consumed files an earlier look has sent every hint.)
        refused = self.agent.hint(
            [
                hint
                for hint in hints.held_back(self.workflow, self.persist, held)
                if (maker := self.workflow.producer[hint["path"]]) in self._unfinished or self._children_left[maker]
            ]
        )
        if refused is not None:
            self.logger.warning(
                f"Surgetank: the agent did not take all hints; those files are written to the store: {refused}"
            )
        self._prefetch()

    def _declare_temporary(self, drop: set[str]) -> None:
        """Declares them to Snakemake too: it removes them, and prefers jobs that allow it."""
        if self.persist is not Persist.FINAL:
            return
        for job in self._jobs.values():
            for file in (*job.output, *job.input):
                if inside(str(file), self.directory) in drop:
                    file.flags["temp"] = True
        # All readers have ended, and Snakemake was killed before it removed the file: no later job would trigger the
        # removal. (An earlier run wanted the files that are in the store there.)
        for path in drop:
            users = {self.workflow.producer[path], *self.workflow.readers[path]}
            if self.workflow.readers[path] and not users & self._unfinished and _held_back(path):
                self.logger.info(f"Removing temporary output {path}, which an earlier run left.")
                os.unlink(path)

    def _hand_over(self, finished: list[str]) -> None:
        """PerSSD's rule: a job's outputs go to the store when all its children have ended."""
        consumed = []
        for task in finished:
            self._unfinished.discard(task)
            for parent in self.workflow.parents[task]:
                self._children_left[parent] -= 1
                if self._children_left[parent] == 0:
                    consumed += self.workflow.tasks[parent].outputs
            if self._children_left[task] == 0:
                consumed += self.workflow.tasks[task].outputs
        temporary = {path for path in consumed if self.workflow.files[path].temporary}
        self.agent.hint([{"path": path, "mode": "copy"} for path in consumed if path not in temporary])

    def _prefetch(self) -> None:
        """Prefetches files that jobs read and no job makes, in the order of their first readers; no job waits for it."""
        inputs = [
            path
            for task in self.workflow.order
            if task in self._unfinished
            for path in self.workflow.tasks[task].inputs
            if self.workflow.producer.get(path) not in self._unfinished and not os.path.isabs(path)
        ]
        new = [path for path in dict.fromkeys(inputs) if path not in self._prefetched and os.path.exists(path)]
        self._prefetched.update(new)
        for words in self.agent.prefetch_words(new):
            with contextlib.suppress(OSError):
                self._prefetching.append(
                    subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
