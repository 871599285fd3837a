"""CWL 1.2 (and older versions that cwltool upgrades to it), read and checked by cwltool's own loader.

CWL leaves some facts open before a run. One is the place of a step's output (a scratch directory with a random
name). Others are the number of outputs behind a `scatter` or in a list, and whether a `when` is true. Files between
steps are therefore named `STEP/OUTPUT`, and unknown facts are listed in `Workflow.incomplete`. Sub-workflows are
opened; `OUTER/INNER` are their steps.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote, urldefrag, urlparse

from ..graph import File, Task, Workflow
from ..problem import Problem
from .paths import inside, measure, read

_PLACE = re.compile(r"(?:file://)?(?P<file>/[^\s:]+\.\w+|[\w./+-]+\.\w+):(?P<line>\d+):\d+:")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def load(path: Path, *, job: Path | None = None) -> Workflow:
    """The graph of a CWL document, a workflow or a tool; `job` is the input object's file, for names and sizes."""
    if importlib.util.find_spec("cwltool") is None:
        raise Problem("cwltool is not installed beside Surgetank", where=path, remedy="pip install 'surgetank[cwl]'")
    read(path, "the CWL document")
    tool = _tool(path)
    values = _job(job) if job else {}
    opened = _Opened(path.absolute().parent)
    sources: dict[str, list[str]] = {}
    for entry in tool.tool["inputs"]:
        name = _fragment(entry["id"])
        value = values.get(name, entry.get("default"))
        sources[entry["id"]] = opened.given(
            value, (job or path).absolute().parent, _reads_files(entry["type"]) and name
        )
    if job is None and any(sources.values()):
        opened.incomplete.append("the input files are unknown without the input object's file")
    if hasattr(tool, "steps"):
        outside = opened.workflow(tool, "", sources, _Doubt())
        for name in outside:
            opened.files[name].final = True
    else:
        opened.alone(tool, path, sources)
    if opened.between:
        opened.incomplete.append(
            f"cwltool chooses the places of {opened.between} files when it makes them: STEP/OUTPUT stands for them"
        )
    made = {output for task in opened.tasks for output in task.outputs}
    measure((file for name, file in opened.files.items() if name not in made), opened.directory)
    return Workflow.of(
        path.stem, str(path), opened.tasks, opened.files.values(), incomplete=opened.incomplete, places=opened.places
    )


def _tool(path: Path) -> Any:
    from cwltool.context import LoadingContext
    from cwltool.load_tool import load_tool
    from cwltool.workflow import default_make_tool

    context = LoadingContext({"construct_tool_object": default_make_tool})
    # Ontologies are fetched from their addresses, and contain nothing needed here.
    context.skip_schemas = True
    logger = logging.getLogger("cwltool")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return load_tool(str(path.absolute()), context)
    except RecursionError:
        raise Problem("the CWL document contains itself", where=path) from None
    except Exception as error:
        text = _COLOUR.sub("", str(error)) or type(error).__name__
        # From the outside in: the last one is the closest.
        place = next(reversed(list(_PLACE.finditer(text))), None)
        where: str | Path = f"{_same(place['file'], path)}:{place['line']}" if place else path
        if place is None and (mark := getattr(error, "problem_mark", None)):
            where = f"{path}:{mark.line + 1}"
        raise Problem(
            "cwltool refuses the document", where=where, why=text[:2000], remedy=f"cwltool --validate {path}"
        ) from None
    finally:
        logger.setLevel(level)


def _same(file: str, path: Path) -> str:
    """cwltool shortens names relative to the working directory."""
    return str(path) if os.path.basename(unquote(file)) == path.name else unquote(file)


def _job(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        values = YAML(typ="safe").load(read(path, "the input object"))
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise Problem("the input object is not YAML", where=f"{path}{line}", why=error.problem) from None
    except YAMLError as error:
        raise Problem("the input object is not YAML", where=path, why=error) from None
    if not isinstance(values, dict):
        raise Problem("the input object is not a mapping", where=path)
    return values


@dataclass(frozen=True)
class _Doubt:
    """Why the number of a step's runs is unknown, in the words of the message; empty: once."""

    why: str = ""


@dataclass
class _Opened:
    """The results so far, while sub-workflows are opened."""

    directory: Path
    tasks: list[Task] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    between: int = 0
    maker: dict[str, str] = field(default_factory=dict)
    # Output of a step → the tasks that it comes from, for outputs that are a value and not a file.
    value_makers: dict[str, list[str]] = field(default_factory=dict)

    def given(self, value: Any, beside: Path, name: str | bool) -> list[str]:
        """The files in a value of the input object; `name` stands for the file of an input without a value."""
        found: list[str] = []
        if value is None and isinstance(name, str):
            self.files.setdefault(name, File(name))
            return [name]
        if isinstance(value, list):
            for one in value:
                found += self.given(one, beside, False)
        elif isinstance(value, dict) and value.get("class") in ("File", "Directory"):
            path = self.place(value, beside)
            if path is not None:
                size = value.get("size")
                self.files.setdefault(path, File(path, size if isinstance(size, int) else None))
                found.append(path)
            for one in (*(value.get("secondaryFiles") or []), *(value.get("listing") or [])):
                found += self.given(one, beside, False)
        elif isinstance(value, dict):
            for one in value.values():
                found += self.given(one, beside, False)
        return found

    def place(self, value: dict[str, Any], beside: Path) -> str | None:
        """Name of a File or Directory; a literal (`contents`) has none."""
        where = value.get("location") or value.get("path")
        if not isinstance(where, str) or where.startswith("_:"):
            return None
        parsed = urlparse(where)
        if parsed.scheme in ("", "file"):
            name = unquote(parsed.path) if parsed.scheme else where
            return inside(str(beside / name), self.directory)
        return where

    def workflow(self, tool: Any, prefix: str, sources: dict[str, list[str]], doubt: _Doubt) -> list[str]:
        """Adds the steps; `sources` has the files behind each input. Returns those behind each output."""
        for step in _ordered(tool.steps):
            self.step(step, prefix, sources, doubt)
        return [name for entry in tool.tool["outputs"] for name in _behind(entry.get("outputSource"), sources)]

    def step(self, step: Any, prefix: str, sources: dict[str, list[str]], doubt: _Doubt) -> None:
        name = prefix + _fragment(step.tool["id"]).split("/")[-1]
        repeated = [what for what in ("scatter", "when") if step.tool.get(what)]
        for what in repeated:
            why = "how many times it runs" if what == "scatter" else "whether it runs"
            self.incomplete.append(f"step {name} has a `{what}`: {why} is unknown until its inputs exist")
        mine = _Doubt(" and ".join(repeated)) if repeated else doubt
        inner: dict[str, list[str]] = {}
        for entry in step.tool["in"]:
            found = list(_behind(entry.get("source"), sources))
            found += self.given(entry.get("default"), self.directory, False) if not found else []
            inner[_fragment(entry["id"]).split("/")[-1]] = list(dict.fromkeys(found))
        if mine.why:
            for path in (path for found in inner.values() for path in found):
                self.files[path].readers_unknown = True
        tool = step.embedded_tool
        if hasattr(tool, "steps"):
            self.inner(tool, step, name, inner, sources, mine)
            return
        task = self.task(tool, name, [path for found in inner.values() for path in found])
        for entry in tool.tool["outputs"]:
            sources[_output(step, entry)] = self.made(task, entry, mine)
            self.value_makers[_output(step, entry)] = [name]
        makers = [one for entry in step.tool["in"] for one in _behind(entry.get("source"), self.value_makers)]
        implied = {self.maker.get(path) for path in task.inputs}
        task.after = [one for one in dict.fromkeys(makers) if one not in implied]
        self.tasks.append(task)
        self.places[name] = _line(step.tool) or _file(step.tool["id"])

    def inner(
        self, tool: Any, step: Any, name: str, given: dict[str, list[str]], sources: dict[str, list[str]], doubt: _Doubt
    ) -> None:
        own = {entry["id"]: given.get(_fragment(entry["id"]).split("/")[-1], []) for entry in tool.tool["inputs"]}
        for entry in step.tool["in"]:
            inner = f"{tool.tool['id']}/" if "#" in tool.tool["id"] else f"{tool.tool['id']}#"
            self.value_makers[inner + _fragment(entry["id"]).split("/")[-1]] = _behind(
                entry.get("source"), self.value_makers
            )
        self.workflow(tool, name + "/", own, doubt)
        for entry in tool.tool["outputs"]:
            sources[_output(step, entry)] = list(_behind(entry.get("outputSource"), own))
            self.value_makers[_output(step, entry)] = list(_behind(entry.get("outputSource"), self.value_makers))

    def task(self, tool: Any, name: str, inputs: list[str]) -> Task:
        requirements = [*tool.hints, *tool.requirements]
        resources = _required(requirements, "ResourceRequirement")
        cores = resources.get("coresMin", resources.get("coresMax"))
        memory = resources.get("ramMin", resources.get("ramMax"))
        docker = _required(requirements, "DockerRequirement")
        image = docker.get("dockerPull") or docker.get("dockerImageId")
        # An expression is evaluated for each run of a step, and not known before.
        return Task(
            id=name,
            kind=_program(tool) or name.split("/")[-1],
            inputs=list(dict.fromkeys(inputs)),
            cores=float(cores) if _number(cores) else 1.0,
            memory_bytes=int(memory * 2**20) if _number(memory) else None,
            image=image if isinstance(image, str) else None,
        )

    def made(self, task: Task, entry: dict[str, Any], doubt: _Doubt) -> list[str]:
        if not _reads_files(entry["type"]):
            return []
        path = f"{task.id}/{_fragment(entry['id']).split('/')[-1]}"
        self.files[path] = File(path, readers_unknown=bool(doubt.why))
        self.between += 1
        task.outputs.append(path)
        self.maker[path] = task.id
        if _is_list(entry["type"]):
            self.incomplete.append(f"the number of files behind {path} is unknown until a task makes them")
        return [path]

    def alone(self, tool: Any, path: Path, sources: dict[str, list[str]]) -> None:
        """A document that is a tool and not a workflow: one task, all of whose outputs are results."""
        task = self.task(tool, path.stem, [name for found in sources.values() for name in found])
        for entry in tool.tool["outputs"]:
            for name in self.made(task, entry, _Doubt()):
                self.files[name].final = True
        self.tasks.append(task)
        self.places[task.id] = f"{path}:1"


def _ordered(steps: list[Any]) -> list[Any]:
    """Steps after those whose outputs they name; cwltool has refused cycles already."""
    ids = {step.tool["id"]: step for step in steps}
    done: dict[str, Any] = {}

    def visit(step: Any, under: frozenset[str]) -> None:
        own = step.tool["id"]
        if own in done:
            return
        if own in under:
            raise Problem("the steps wait for each other", where=_line(step.tool) or _file(own))
        for entry in step.tool["in"]:
            source = entry.get("source") or []
            for one in [source] if isinstance(source, str) else source:
                other = ids.get(one.rsplit("/", 1)[0])
                if other is not None:
                    visit(other, under | {own})
        done[own] = step

    for step in steps:
        visit(step, frozenset())
    return list(done.values())


def _behind(source: Any, sources: dict[str, list[str]]) -> list[str]:
    names = [source] if isinstance(source, str) else source or []
    return [path for name in names for path in sources.get(name, [])]


def _output(step: Any, entry: dict[str, Any]) -> str:
    return f"{step.tool['id']}/{_fragment(entry['id']).split('/')[-1]}"


def _fragment(uri: str) -> str:
    """`main/step/output` of `file:///x.cwl#main/step/output`."""
    return urldefrag(uri).fragment or os.path.basename(uri)


def _file(uri: str) -> str:
    return unquote(urlparse(urldefrag(uri).url).path)


def _line(entry: Any) -> str | None:
    mark = getattr(entry, "lc", None)
    return f"{_file(entry['id'])}:{mark.line + 1}" if mark is not None and mark.line is not None else None


def _reads_files(type_: Any) -> bool:
    """Whether a value of this CWL type contains files."""
    if isinstance(type_, str):
        return type_ in ("File", "Directory", "stdout", "stderr", "Any")
    if isinstance(type_, list):
        return any(_reads_files(one) for one in type_)
    if isinstance(type_, dict):
        fields = type_.get("fields") or []
        return _reads_files(type_.get("items")) or any(_reads_files(one.get("type")) for one in fields) or (
            isinstance(type_.get("type"), (dict, list)) and _reads_files(type_["type"])
        )  # fmt: skip
    return False


def _is_list(type_: Any) -> bool:
    if isinstance(type_, list):
        return any(_is_list(one) for one in type_)
    return isinstance(type_, dict) and type_.get("type") in ("array", "record")


def _required(requirements: list[dict[str, Any]], class_: str) -> dict[str, Any]:
    """The last one wins: requirements over hints, the tool's over the workflow's."""
    found = [entry for entry in requirements if entry.get("class") == class_]
    return found[-1] if found else {}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _program(tool: Any) -> str | None:
    command = tool.tool.get("baseCommand")
    first = command[0] if isinstance(command, list) and command else command
    return os.path.basename(first) if isinstance(first, str) and first else None
