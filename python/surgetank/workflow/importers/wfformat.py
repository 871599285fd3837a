"""WfFormat 1.5 (WfCommons): https://github.com/wfcommons/WfFormat, the structure of a workflow and, in instances, its
execution.

Facts that WfFormat cannot express are under `surgetank` next to `workflow`, where its schema allows additions: files
without a size, temporary and final ones, retries, images, a shell's text. Names with characters that the schema
forbids are written with `#` and two hexadecimal digits per byte; their original form is there, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .. import jsontext
from ..graph import File, Task, Workflow
from ..problem import Problem

VERSIONS = ("1.5", "1.4")


def load(path: Path) -> Workflow:
    """The graph of a WfFormat file; runtimes, cores and memory are those of the recorded execution."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem("the workflow cannot be read", where=path, why=error) from None
    try:
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise Problem("the file is not JSON", where=f"{path}:{error.lineno}", why=error.msg) from None
    return of(described, path)


def of(described: Any, path: Path) -> Workflow:
    """The graph of a WfFormat document that is parsed already; `path` is for messages."""
    reader = _Reader(path)
    top = reader.object(described, "the document")
    version = str(top.get("schemaVersion"))
    if version not in VERSIONS:
        raise Problem(
            f"schemaVersion {version} is not supported",
            where=path,
            remedy=f"convert it to WfFormat {VERSIONS[0]} (`wfcommons` does)",
        )
    workflow = reader.object(top.get("workflow"), "workflow")
    specification = reader.object(workflow.get("specification"), "workflow.specification")
    executed = {}
    if "execution" in workflow:
        execution = reader.object(workflow["execution"], "workflow.execution")
        for entry in reader.sequence(execution.get("tasks", []), "workflow.execution.tasks"):
            executed[reader.text(entry, "id", "an executed task")] = entry
    files = [reader.file(entry) for entry in reader.sequence(specification.get("files", []), "specification.files")]
    tasks = [
        reader.task(entry, executed)
        for entry in reader.sequence(specification.get("tasks"), "workflow.specification.tasks")
    ]
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise Problem(f"the file {file.path!r} is listed twice", where=path)
        seen.add(file.path)
    _without_implied(tasks)
    incomplete = _restore(reader, top.get("surgetank"), tasks, files)
    return Workflow.of(str(top.get("name") or path.stem), str(path), tasks, files, incomplete=incomplete)


def _without_implied(tasks: list[Task]) -> None:
    """Keeps in `after` only the parents that no file implies."""
    maker = {output: task.id for task in tasks for output in task.outputs}
    for task in tasks:
        implied = {maker.get(path) for path in task.inputs}
        task.after = [parent for parent in task.after if parent not in implied]


class _Reader:
    """Takes values out of JSON, and reports which one has a wrong type."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, what: str) -> Problem:
        return Problem(what, where=self.path, remedy="the shape is that of WfFormat 1.5's JSON schema")

    def object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(f"{what} is not an object")
        return value

    def sequence(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(f"{what} is not a list")
        return value

    def text(self, entry: Any, key: str, what: str) -> str:
        value = self.object(entry, what).get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{what} has no {key}")
        return value

    def texts(self, entry: dict[str, Any], key: str, what: str) -> list[str]:
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(f"{key} of {what} is not a list of names")
        return value

    def number(self, entry: dict[str, Any], key: str, what: str) -> float | None:
        value = entry.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**63:
            raise self.wrong(f"{key} of {what} is {value!r}, not a number from 0")
        return value

    def file(self, entry: Any) -> File:
        path = self.text(entry, "id", "a file")
        size = self.number(entry, "sizeInBytes", f"the file {path!r}")
        return File(path, None if size is None else int(size))

    def task(self, entry: Any, executed: dict[str, Any]) -> Task:
        id_ = self.text(entry, "id", "a task")
        what = f"task {id_!r}"
        run = executed.get(id_, {})
        command = run.get("command") or {}
        words: list[str] | None = None
        if isinstance(command, dict) and isinstance(command.get("program"), str):
            words = [command["program"], *self.texts(command, "arguments", what)]
        name = entry.get("name")
        memory = self.number(run, "memoryInBytes", what)
        return Task(
            id=id_,
            kind=_kind(name if isinstance(name, str) else id_, words),
            inputs=list(dict.fromkeys(self.texts(entry, "inputFiles", what))),
            outputs=list(dict.fromkeys(self.texts(entry, "outputFiles", what))),
            after=self.texts(entry, "parents", what),
            command=words,
            runtime_s=self.number(run, "runtimeInSeconds", what),
            cores=self.number(run, "coreCount", what) or 1.0,
            memory_bytes=None if memory is None else int(memory),
        )


def _kind(name: str, words: list[str] | None) -> str:
    """Instances number their tasks (`mProject_ID0000001`); the kind is their common part."""
    if words and name.startswith(words[0]):
        return words[0]
    return name.split("_ID")[0] or name


# The keys of our own part for a task and for a file, with their types.
_OF_TASK: dict[str, tuple[type, ...]] = {
    "id": (str,), "kind": (str,), "command": (str, list), "runtime_s": (int, float), "cores": (int, float),
    "memory_bytes": (int,), "retries": (int,), "image": (str,), "tier": (str,),
}  # fmt: skip
_OF_FILE: dict[str, tuple[type, ...]] = {
    "path": (str,), "size_bytes": (int,), "temporary": (bool,), "final": (bool,), "readers_unknown": (bool,),
}  # fmt: skip
_FORBIDDEN = {"id": r"[^0-9a-zA-Z_.-]", "path": r"[^0-9a-zA-Z_./:-]"}


def dump(workflow: Workflow, path: Path) -> None:
    """Writes the graph as WfFormat 1.5, from which `load` makes the same one."""
    try:
        jsontext.write_whole(path, dumps(workflow))
    except OSError as error:
        raise Problem("the workflow cannot be written", where=path, why=error, code=1) from None


def dumps(workflow: Workflow) -> str:
    """The same as text."""
    return jsontext.dumps(described(workflow), indent=2) + "\n"


def described(workflow: Workflow) -> dict[str, Any]:
    """The document that `dump` writes."""
    ids = _allowed(workflow.tasks, "id")
    names = _allowed(workflow.files, "path")
    tasks = [
        {
            "name": task.kind,
            "id": ids[task.id],
            "parents": [ids[one] for one in workflow.parents[task.id]],
            "children": [ids[one] for one in workflow.children[task.id]],
            "inputFiles": [names[one] for one in task.inputs],
            "outputFiles": [names[one] for one in task.outputs],
        }
        for task in workflow.tasks.values()
    ]
    files = [
        {"id": names[file.path], "sizeInBytes": file.size_bytes}
        for file in workflow.files.values()
        if file.size_bytes is not None
    ]
    document: dict[str, Any] = {
        "name": workflow.name or "workflow",
        "schemaVersion": VERSIONS[0],
        "workflow": {"specification": {"tasks": tasks, "files": files}},
    }
    executed = [_executed(task, ids[task.id]) for task in workflow.tasks.values() if task.runtime_s is not None]
    if executed:
        makespan = _makespan(workflow)
        document["workflow"]["execution"] = {"makespanInSeconds": makespan, "executedAt": "unknown", "tasks": executed}
    # Lost facts are those that a reader could not restore without our part.
    plain = of(document, Path("dump"))
    ours = {
        "tasks": _lost(((ids[t.id], t, plain.tasks[ids[t.id]]) for t in workflow.tasks.values()), _OF_TASK),
        "files": _lost(((names[f.path], f, plain.files.get(names[f.path])) for f in workflow.files.values()), _OF_FILE),
        "incomplete": workflow.incomplete,
    }
    if any(ours.values()):
        document["surgetank"] = {key: value for key, value in ours.items() if value}
    return document


def _allowed(names: Iterable[str], what: str) -> dict[str, str]:
    """Name → the form that the schema's pattern allows; a different one if two names would become the same."""

    def encode(match: re.Match[str]) -> str:
        return "".join(f"#{byte:02x}" for byte in match[0].encode("utf-8", "surrogateescape"))

    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        written = re.sub(_FORBIDDEN[what], encode, name)
        found[name] = written
        taken.add(written)
    if len(taken) < len(found):
        raise Problem("two names become the same in WfFormat", remedy="rename those with special characters")
    return found


def _executed(task: Task, id_: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": id_, "runtimeInSeconds": task.runtime_s}
    if isinstance(task.command, list) and task.command and all(task.command):
        entry["command"] = {"program": task.command[0], "arguments": task.command[1:]}
    if task.cores >= 1:
        entry["coreCount"] = task.cores
    if task.memory_bytes is not None:
        entry["memoryInBytes"] = task.memory_bytes
    return entry


def _makespan(workflow: Workflow) -> float:
    """The length of the longest path through the graph: a lower bound, because a graph does not have the real duration."""
    ended: dict[str, float] = {}
    for task in workflow.order:
        begun = max((ended[parent] for parent in workflow.parents[task]), default=0.0)
        ended[task] = begun + (workflow.tasks[task].runtime_s or 0.0)
    return max(ended.values(), default=0.0)


def _lost(
    entries: Iterable[tuple[str, Task | File, Task | File | None]], known: dict[str, tuple[type, ...]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, ours, plain in entries:
        default = plain if plain is not None else File(key)
        differs = {name: getattr(ours, name) for name in known if getattr(ours, name) != getattr(default, name)}
        if differs:
            found[key] = differs
    return found


def _restore(reader: _Reader, ours: Any, tasks: list[Task], files: list[File]) -> list[str]:
    """Restores what `dump` wrote under `surgetank`."""
    if ours is None:
        return []
    ours = reader.object(ours, "surgetank")
    listed = {file.path for file in files}
    named = dict.fromkeys(name for task in tasks for name in (*task.inputs, *task.outputs) if name not in listed)
    files.extend(File(name) for name in named)
    of_tasks = reader.object(ours.get("tasks", {}), "surgetank.tasks")
    of_files = reader.object(ours.get("files", {}), "surgetank.files")
    files.extend(File(name) for name in of_files if name not in listed and name not in named)
    ids = {key: _checked(reader, key, entry, _OF_TASK).get("id", key) for key, entry in of_tasks.items()}
    names = {key: _checked(reader, key, entry, _OF_FILE).get("path", key) for key, entry in of_files.items()}
    for number, task in enumerate(tasks):
        task = replace(task, **of_tasks.get(task.id, {}))
        task.inputs, task.outputs = (
            [names.get(one, one) for one in task.inputs],
            [names.get(one, one) for one in task.outputs],
        )
        task.after = [ids.get(one, one) for one in task.after]
        tasks[number] = task
    files[:] = [replace(file, **of_files.get(file.path, {})) for file in files]
    return reader.texts(ours, "incomplete", "surgetank")


def _checked(reader: _Reader, key: str, entry: Any, known: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    for name, value in reader.object(entry, f"surgetank's part of {key!r}").items():
        types = known.get(name)
        right = value is None or (types is not None and isinstance(value, types))
        if isinstance(value, list):
            right = right and all(isinstance(one, str) for one in value)
        if types is None or not right or (isinstance(value, bool) and bool not in types):
            raise reader.wrong(f"{name} of {key!r} is {value!r} in the section `surgetank`")
    return dict(entry)


assert set(_OF_FILE) == {one.name for one in fields(File)}, "a file's new field is lost in WfFormat"
