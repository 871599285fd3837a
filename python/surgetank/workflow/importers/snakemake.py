"""Snakemake 9: its own scheduler interface shows the jobs before the first one runs (see `plugins/`).

Snakemake runs as a separate process, builds its DAG, passes it to our plugin and ends. It starts no job, creates no
environment and takes no lock. Like `snakemake -n` it runs the Python code of the Snakefile itself and creates a
`.snakemake` directory. Rules that do nothing and have no output (`all`) are not tasks: their inputs are final.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..graph import File, Task, Workflow
from ..problem import Problem
from .asked import ask
from .paths import inside, measure, read

PLUGINS = Path(__file__).parent / "plugins"
# The wordings of a place in its errors: `in file "/a/Snakefile", line 3`, `in line 3 of /a/Snakefile`, and, if the
# error report itself fails, `File "/a/Snakefile", line 3` of the traceback.
_PLACES = (
    re.compile(r'in file "?(?P<file>[^",\n]+)"?, line (?P<line>\d+)'),
    re.compile(r"in line (?P<line>\d+) of (?P<file>\S+?):?$", re.MULTILINE),
    re.compile(r'File "(?P<file>[^"\n]*(?:Snakefile|\.smk))", line (?P<line>\d+)'),
)
_TRACEBACK = re.compile(r"^\s+(?:File \".*\", line \d+, in |[\^~ ]+$)|^Traceback |^During handling of", re.MULTILINE)
_TIMEOUT_S = 600


def load(
    path: Path,
    *,
    directory: Path | None = None,
    arguments: Sequence[str] = (),
    everything: bool = True,
    cores: int | None = None,
) -> Workflow:
    """The graph of a Snakefile.

    `arguments` are further ones for `snakemake` (`--configfile`, targets). With `everything` the graph is the whole
    workflow, otherwise the jobs that are still to run and their inputs: so it is imported again when a checkpoint
    ends. Threads are limited to `cores` (those of this machine) as Snakemake itself does.
    """
    if importlib.util.find_spec("snakemake") is None:
        raise Problem(
            "Snakemake is not installed beside Surgetank", where=path, remedy="pip install 'surgetank[snakemake]'"
        )
    read(path, "the Snakefile")
    directory = directory or home(path)
    described = _ask(path, directory, arguments, everything, cores)
    if everything and not described["jobs"]:
        raise Problem("the Snakefile has no target", where=path, remedy="let its first rule name the wanted files")
    return workflow_of(described["jobs"], path, directory)


def home(path: Path) -> Path:
    """The directory in which Snakemake is started for a Snakefile: above `workflow/`, the layout of its own best
    practices."""
    parent = path.absolute().parent
    return parent.parent if parent.name == "workflow" else parent


def _ask(path: Path, directory: Path, arguments: Sequence[str], everything: bool, cores: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="surgetank-import-") as scratch:
        out = Path(scratch) / "graph.json"
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(path.absolute())]
        command += ["--scheduler", "surgetank-import", "--scheduler-surgetank-import-out", str(out)]
        # A profile may request environments, which Snakemake would create before it calls the plugin: modules need no
        # preparation.
        command += ["--software-deployment-method", "env-modules"]
        command += ["--executor", "local", "--nolock", "--rerun-incomplete", "--nocolor"]
        command += ["--cores", str(cores or "all")]
        command += ["--forceall"] if everything else []
        command += arguments
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        ended = ask(command, directory, environment, _TIMEOUT_S, where=path, what="Snakemake did not report its jobs")
        if not out.exists():
            raise _refused(path, ended.stderr or ended.stdout)
        described: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return described


def _refused(path: Path, message: str) -> Problem:
    """Snakemake's own message, and the place in it."""
    place = next((found for pattern in _PLACES if (found := pattern.search(message))), None)
    where: str | Path = f"{place['file']}:{place['line']}" if place else path
    errors = re.findall(r"^\w*(?:Error|Exception)\b.*$", message, re.MULTILINE)
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    # Snakemake's message is at its end; if it ends in a traceback, the first error is the cause.
    message = errors[0] if errors and _TRACEBACK.search(message) else "\n        ".join(lines[-12:])
    if "invalid choice: 'surgetank-import'" in message or "unrecognized arguments: --scheduler-surgetank" in message:
        return Problem(
            "this Snakemake has no interface for schedulers", where=path, why=message,
            remedy="pip install 'surgetank[snakemake]' (Snakemake from 9.12)",
        )  # fmt: skip
    return Problem(
        "Snakemake cannot make its graph", where=where, why=message, remedy="`snakemake -n` has to work first"
    )


def workflow_of(jobs: list[dict[str, Any]], path: Path, directory: Path) -> Workflow:
    """Tasks and files of the jobs that the plugin wrote."""
    files: dict[str, File] = {}
    targets = [job for job in jobs if job["does_nothing"] and not job["outputs"]]
    working = [job for job in jobs if not (job["does_nothing"] and not job["outputs"])]
    ids = {job["number"]: task_id(job, directory) for job in working}
    for job in working:
        for entry in (*job["inputs"], *job["outputs"]):
            _note(files, entry, directory)
        for name in (*job["logs"], *([job["benchmark"]] if job["benchmark"] else [])):
            files.setdefault(inside(name, directory), File(inside(name, directory)))
    for job in targets:
        for entry in job["inputs"]:
            file = _note(files, entry, directory)
            # A placeholder for unknown files is not a target itself.
            if "checkpoint_target" not in entry["flags"]:
                file.final, file.temporary = True, False
    tasks = [_task(job, ids, directory) for job in sorted(working, key=lambda job: ids[job["number"]])]
    incomplete = _updated(working, tasks, files, ids, directory) + _unevaluated(jobs, files)
    made = {output for task in tasks for output in task.outputs}
    measure((file for name, file in files.items() if name not in made), directory)
    places = {ids[job["number"]]: f"{job['file']}:{job['line']}" for job in working if job["file"]}
    return Workflow.of(directory.name, str(path), tasks, files.values(), incomplete=incomplete, places=places)


def task_id(job: dict[str, Any], directory: Path) -> str:
    """The same at every import, unlike Snakemake's numbers."""
    made = [
        *(entry["path"] for entry in job["outputs"]),
        *([job["benchmark"]] if job["benchmark"] else []),
        *job["logs"],
    ]
    return f"{job['rule']}:{inside(made[0], directory)}" if made else str(job["rule"])


def _note(files: dict[str, File], entry: dict[str, Any], directory: Path) -> File:
    path = inside(entry["path"], directory)
    file = files.setdefault(path, File(path))
    flags = entry["flags"]
    # A pipe is not a file that can be kept.
    file.temporary |= bool({"temp", "pipe", "service"} & set(flags))
    # Snakemake itself would remove a file of another storage provider there.
    file.final |= bool({"protected", "report", "storage_object"} & set(flags))
    return file


def _task(job: dict[str, Any], ids: dict[int, str], directory: Path) -> Task:
    resources = job["resources"]
    memory = resources.get("mem_mb")
    outputs = (
        [entry["path"] for entry in job["outputs"]] + job["logs"] + ([job["benchmark"]] if job["benchmark"] else [])
    )
    task = Task(
        id=ids[job["number"]],
        kind=job["rule"],
        # The output of an unevaluated checkpoint has no file name yet.
        inputs=list(
            dict.fromkeys(inside(entry["path"], directory) for entry in job["inputs"] if entry["path"] != "<TBD>")
        ),
        outputs=list(dict.fromkeys(inside(name, directory) for name in outputs)),
        # With an unevaluated checkpoint's output as a placeholder, this is not the command that will run.
        command=None if any("checkpoint_target" in entry["flags"] for entry in job["inputs"]) else job["command"],
        cores=float(job["threads"] or 1),
        # Snakemake's MB are 10⁶ bytes.
        memory_bytes=int(memory * 1_000_000) if isinstance(memory, (int, float)) and memory > 0 else None,
        retries=max(0, job["retries"] or 0),
        image=job["image"],
    )
    task.after = [ids[number] for number in job["dependencies"] if number in ids and number != job["number"]]
    return task


def _updated(
    jobs: list[dict[str, Any]], tasks: list[Task], files: dict[str, File], ids: dict[int, str], directory: Path
) -> list[str]:
    """`update()` rewrites a file that another job made: the graph has it once, as its first maker's, and keeps it."""
    again: set[tuple[str, str]] = set()
    makers: dict[str, int] = {}
    for task in tasks:
        for path in task.outputs:
            makers[path] = makers.get(path, 0) + 1
    for job in jobs:
        for entry in job["outputs"]:
            path = inside(entry["path"], directory)
            if "update" in entry["flags"] and makers[path] > 1:
                again.add((ids[job["number"]], path))
    for task in tasks:
        mine = [path for path in task.outputs if (task.id, path) in again]
        task.outputs = [path for path in task.outputs if path not in mine]
        task.inputs = list(dict.fromkeys(task.inputs + mine))
        for path in mine:
            files[path].readers_unknown = True
    _without_implied(tasks)
    return [
        f"{path} is updated in place by {task}: the graph does not distinguish its versions"
        for task, path in sorted(again)
    ]


def _without_implied(tasks: list[Task]) -> None:
    maker = {output: task.id for task in tasks for output in task.outputs}
    for task in tasks:
        implied = {maker.get(path) for path in task.inputs}
        task.after = list(dict.fromkeys(parent for parent in task.after if parent not in implied))


def _unevaluated(jobs: list[dict[str, Any]], files: dict[str, File]) -> list[str]:
    """Jobs that a checkpoint will add may read any file that a rule can name: until then no file's readers are known."""
    waiting = sorted({job["rule"] for job in jobs if any("checkpoint_target" in e["flags"] for e in job["inputs"])})
    if not waiting:
        return []
    for file in files.values():
        file.readers_unknown = True
    checkpoints = sorted({job["rule"] for job in jobs if job["checkpoint"]})
    checkpoint, reading = ", ".join(checkpoints) or "?", ", ".join(waiting)
    return [
        f"checkpoint {checkpoint} is not evaluated yet: the inputs of {reading} and the added jobs are unknown until"
        + " it is done; import again then"
    ]
