"""WfFormat 1.5 (WfCommons): https://github.com/wfcommons/WfFormat, a workflow's specification and, in instances, its execution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..graph import File, Task, Workflow
from ..problem import Problem

VERSIONS = ("1.5", "1.4")


def load(path: Path) -> Workflow:
    """The graph of a WfFormat file; runtimes, cores and memory are those of the execution it records."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Problem("the workflow cannot be read", where=path, why=error) from None
    try:
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise Problem("this is not JSON", where=f"{path}:{error.lineno}", why=error.msg) from None
    return of(described, path)


def of(described: Any, path: Path) -> Workflow:
    """The graph of a WfFormat document that is parsed already; `path` is for messages."""
    reader = _Reader(path)
    top = reader.object(described, "the document")
    version = str(top.get("schemaVersion"))
    if version not in VERSIONS:
        raise Problem(
            f"schemaVersion {version} is not read here",
            where=path,
            remedy=f"convert it to WfFormat {VERSIONS[0]} (`wfcommons` does)",
        )
    workflow = reader.object(top.get("workflow"), "workflow")
    specification = reader.object(workflow.get("specification"), "workflow.specification")
    executed = {}
    if "execution" in workflow:
        execution = reader.object(workflow["execution"], "workflow.execution")
        for entry in reader.list(execution.get("tasks", []), "workflow.execution.tasks"):
            executed[reader.text(entry, "id", "an executed task")] = entry
    files = [reader.file(entry) for entry in reader.list(specification.get("files", []), "specification.files")]
    tasks = [
        reader.task(entry, executed) for entry in reader.list(specification.get("tasks"), "workflow.specification.tasks")
    ]
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise Problem(f"the file {file.path!r} is listed twice", where=path)
        seen.add(file.path)
    _without_implied(tasks)
    return Workflow.of(str(top.get("name") or path.stem), str(path), tasks, files)


def _without_implied(tasks: list[Task]) -> None:
    """`after` keeps only the parents that no file explains."""
    maker = {output: task.id for task in tasks for output in task.outputs}
    for task in tasks:
        implied = {maker.get(path) for path in task.inputs}
        task.after = [parent for parent in task.after if parent not in implied]


class _Reader:
    """Takes values out of JSON, and says which one is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, what: str) -> Problem:
        return Problem(what, where=self.path, remedy="the shape is that of WfFormat 1.5's JSON schema")

    def object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(f"{what} is not an object")
        return value

    def list(self, value: Any, what: str) -> list[Any]:
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
    """Instances number their tasks (`mProject_ID0000001`); the kind is what they have in common."""
    if words and name.startswith(words[0]):
        return words[0]
    return name.split("_ID")[0] or name
