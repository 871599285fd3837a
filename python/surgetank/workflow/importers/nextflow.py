"""Nextflow: the graph of a past run, from its trace file, its work directories and, if those are gone, its DAG.

Nextflow's graph arises while it runs, so nothing is known before. Each task has its own directory. Its inputs there
are links into the directories of their makers (or to inputs outside); its outputs are plain files. So the
directories show the true readers. Without them, the DOT file of `-with-dag` shows which processes follow which. No
file is temporary: `-resume` needs the contents of the work directories.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..graph import File, Task, Workflow
from ..problem import Problem
from .paths import inside, measure, read

NEEDED = ("task_id", "hash", "name", "status")
# The fields that a trace needs for all facts.
FIELDS = (*NEEDED, "process", "exit", "workdir", "realtime", "cpus", "memory", "container", "attempt")
_DONE = ("COMPLETED", "CACHED")
_NODE = re.compile(r"^\s*(?P<id>\w+)\s*\[(?P<rest>.*)\]\s*;?\s*$")
_EDGE = re.compile(r"^\s*(?P<from>\w+)\s*->\s*(?P<to>\w+)\s*(?:\[.*\])?\s*;?\s*$")
_LABEL = re.compile(r'(?<![a-z])label="(?P<label>[^"]*)"')
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "PB": 2**50}
_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass
class _Row:
    line: int
    values: dict[str, str]

    def get(self, name: str) -> str:
        value = self.values.get(name) or ""
        return "" if value == "-" else value

    @property
    def process(self) -> str:
        return self.get("process") or re.sub(r" \(.*\)$", "", self.get("name"))


@dataclass
class _Found:
    """The contents of a task's directory."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def load(path: Path, *, dag: Path | None = None, work: Path | None = None, directory: Path | None = None) -> Workflow:
    """The graph of a run from its trace; `work` is its work directory (next to it), `dag` the DOT of `-with-dag`."""
    rows = _rows(path)
    directory = (directory or path.absolute().parent).absolute()
    parents = _processes(dag) if dag else {}
    done = [row for row in rows if row.get("status") in _DONE]
    if not done:
        raise Problem("the trace has no completed task", where=path)
    incomplete: list[str] = []
    if len(done) < len(rows):
        incomplete.append(f"{len(rows) - len(done)} tasks were not completed and are left out")
    tasks: list[Task] = []
    files: dict[str, File] = {}
    places: dict[str, str] = {}
    gone = 0
    for row in done:
        task = _task(row)
        if task.id in places:
            task.id = f"{task.id} #{row.get('task_id')}"
        place = _directory(row, work or directory / "work")
        found = _look(place, directory) if place else None
        if found is None:
            gone += 1
        else:
            task.inputs, task.outputs = found.inputs, found.outputs
            task.command = _script(place) if place else None
        tasks.append(task)
        places[task.id] = f"{path}:{row.line}"
    _within(tasks)
    for task in tasks:
        for name in (*task.inputs, *task.outputs):
            files.setdefault(name, File(name))
    if gone:
        incomplete.append(
            f"the work directories of {gone} tasks do not exist any more: the files of these tasks are unknown"
        )
        for file in files.values():
            file.readers_unknown = True
        if dag:
            _after(tasks, parents)
    # All files exist by now, so sizes are those of the run.
    measure(files.values(), directory)
    return Workflow.of(directory.name, str(path), tasks, files.values(), incomplete=incomplete, places=places)


def _rows(path: Path) -> list[_Row]:
    lines = read(path, "the trace").splitlines()
    names = lines[0].split("\t")
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise Problem(
            f"the file is not a trace of Nextflow: it lacks {', '.join(missing)}", where=f"{path}:1",
            remedy="run with `-with-trace` and trace.fields = '" + ",".join(FIELDS) + "'",
        )  # fmt: skip
    rows = []
    for number, values in enumerate(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE), 2):
        if not values:
            continue
        if len(values) != len(names):
            raise Problem(f"the line has {len(values)} values instead of {len(names)}", where=f"{path}:{number}")
        rows.append(_Row(number, dict(zip(names, values, strict=True))))
    return rows


def _task(row: _Row) -> Task:
    attempt = row.get("attempt")
    return Task(
        id=row.get("name"),
        kind=row.process,
        runtime_s=_seconds(row.get("realtime")),
        cores=float(row.get("cpus") or 1) if re.fullmatch(r"[\d.]*", row.get("cpus")) else 1.0,
        memory_bytes=_bytes(row.get("memory")),
        # The attempt shows that this many are allowed; the trace does not have the limit.
        retries=max(0, int(attempt) - 1) if attempt.isdigit() else 0,
        image=row.get("container") or None,
    )


def _directory(row: _Row, work: Path) -> Path | None:
    if row.get("workdir"):
        place = Path(row.get("workdir"))
        if place.is_dir():
            return place
    hash_ = row.get("hash")
    if not re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]+", hash_):
        return None
    found = [place for place in (work / hash_[:2]).glob(hash_[3:] + "*") if place.is_dir()]
    return found[0] if len(found) == 1 else None


def _look(place: Path, directory: Path) -> _Found | None:
    """Links are inputs, plain files are outputs; `.command.*` belongs to Nextflow."""
    if not (place / ".command.sh").exists():
        return None
    found = _Found()
    for entry in _walk(place):
        if entry.is_symlink():
            # One step only: a link that another task made is that task's output.
            target = os.path.join(entry.parent, os.readlink(entry))
            target = os.path.normpath(target)
            if not target.startswith(f"{os.path.normpath(place)}/"):
                found.inputs.append(inside(target, directory))
                continue
        found.outputs.append(inside(str(entry), directory))
    found.inputs = list(dict.fromkeys(found.inputs))
    return found


def _walk(place: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(place):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        for name in sorted(names + links):
            if top != str(place) or not (name.startswith(".command.") or name == ".exitcode"):
                yield Path(top, name)


def _within(tasks: list[Task]) -> None:
    """A task that reads another task's directory reads the files in it."""
    made = {name: task.id for task in tasks for name in task.outputs}
    below: dict[str, list[str]] = {}
    for name in made:
        parent = os.path.dirname(name)
        while parent and parent != "/":
            below.setdefault(parent, []).append(name)
            parent = os.path.dirname(parent)
    for task in tasks:
        inputs = [one for name in task.inputs for one in ([name] if name in made else below.get(name, [name]))]
        task.inputs = list(dict.fromkeys(inputs))


def _script(place: Path) -> list[str] | None:
    script = place / ".command.sh"
    return ["bash", "-ue", str(script)] if script.exists() else None


def _processes(dag: Path) -> dict[str, set[str]]:
    """Process → the processes before it, without operators."""
    if dag.suffix not in (".dot", ".gv"):
        raise Problem("the DAG is not in DOT form", where=dag, remedy="-with-dag dag.dot")
    labels: dict[str, str] = {}
    before: dict[str, set[str]] = {}
    lines = read(dag, "the DAG").splitlines()
    if not lines[0].lstrip().startswith("digraph"):
        raise Problem("the file is not a DOT file", where=f"{dag}:1")
    for line in lines:
        if edge := _EDGE.match(line):
            before.setdefault(edge["to"], set()).add(edge["from"])
        elif node := _NODE.match(line):
            label = _LABEL.search(node["rest"])
            if label and label["label"] and "shape=" not in node["rest"]:
                labels[node["id"]] = label["label"]
    found: dict[str, set[str]] = {}
    for node_id, name in labels.items():
        waiting, seen = list(before.get(node_id, ())), set()
        while waiting:
            other = waiting.pop()
            if other in seen:
                continue
            seen.add(other)
            if other in labels:
                found.setdefault(name, set()).add(labels[other])
            else:
                waiting.extend(before.get(other, ()))
    return found


def _after(tasks: list[Task], parents: dict[str, set[str]]) -> None:
    """Without files, all tasks of a process come after all of the processes before it: more order than the run had."""
    of: dict[str, list[str]] = {}
    for task in tasks:
        of.setdefault(task.kind, []).append(task.id)
        of.setdefault(task.kind.split(":")[-1], of[task.kind])
    for task in tasks:
        if not task.inputs:
            before = parents.get(task.kind) or parents.get(task.kind.split(":")[-1]) or set()
            task.after = [
                one
                for name in sorted(before)
                for one in of.get(name, of.get(name.split(":")[-1], []))
                if one != task.id
            ]


def _seconds(text: str) -> float | None:
    if re.fullmatch(r"\d+", text):
        return int(text) / 1000
    parts = re.findall(r"([\d.]+)\s*(ms|s|m|h|d)\b", text)
    return sum(float(number) * _TIMES[unit] for number, unit in parts) if parts else None


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"([\d.]+)\s*([KMGTP]?B)?", text)
    return int(float(match[1]) * _UNITS[match[2] or "B"]) if match else None
