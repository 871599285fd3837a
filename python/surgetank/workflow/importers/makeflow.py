"""Makeflow's classic language: `outputs : inputs`, one command below, variables and categories. JX and JSON are not
read.

`MAKEFLOW_OUTPUTS` are final. No file is temporary, because Makeflow collects garbage only on request at its start.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..graph import File, Task, Workflow
from ..problem import Problem
from .own import _SIZE
from .paths import inside, measure, read

_VARIABLE = re.compile(r"^(?:export\s+)?(?P<name>@?[A-Za-z_]\w*)\s*(?P<how>\+?=)\s*(?P<value>.*)$")
_NAME = re.compile(r"\$(?:\((\w+)\)|\{(\w+)\}|(\w+)|(\$))")
_WORD = re.compile(r'"([^"]*)"|\'([^\']*)\'|(\S+)')


@dataclass
class _State:
    path: Path
    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    # For each category; "default" is the initial one.
    categories: dict[str, dict[str, str]] = field(default_factory=dict)
    category: str = "default"
    sizes: dict[str, int] = field(default_factory=dict)

    def expand(self, text: str, number: int, *, strict: bool = True) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2] or match[3]
            if match[4]:
                return "$"
            if name in self.variables:
                return self.variables[name]
            if name in os.environ:
                return os.environ[name]
            if strict:
                raise Problem(f"the variable {name!r} has no value", where=f"{self.path}:{number}")
            return match[0]

        return _NAME.sub(value, text)

    def set(self, match: re.Match[str], number: int) -> None:
        value = self.expand(match["value"].strip(), number, strict=False)
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        name = match["name"].lstrip("@")
        if match["how"] == "+=":
            value = f"{self.variables.get(name, '')} {value}".strip()
        if name == "CATEGORY":
            self.category = value
        elif name in ("CORES", "MEMORY", "DISK"):
            self.categories.setdefault(self.category, {})[name] = value
        else:
            self.variables[name] = value


def load(path: Path) -> Workflow:
    """The graph of a Makeflow file in the classic language."""
    text = read(path, "the Makeflow file")
    if text.lstrip().startswith(("{", "[")):
        raise Problem(
            "the file is in Makeflow's JX or JSON, which is not supported",
            where=path,
            remedy="write it in the classic language",
        )
    state = _State(path, path.absolute().parent)
    lines = _joined(text)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    at = 0
    while at < len(lines):
        number, line = lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0] in "\t ":
            raise Problem("a command has no rule above it", where=f"{path}:{number}", why=line.strip())
        if line.startswith(".") and line.split()[0] in (".MAKEFLOW", ".SIZE", ".UMBRELLA"):
            _directive(state, line, number)
        elif match := _VARIABLE.match(line):
            state.set(match, number)
        elif ":" in line:
            task, at = _rule(state, lines, at, number, line)
            if task.id in places:
                raise Problem(f"{task.id!r} is made twice", where=f"{path}:{number}", why=f"first at {places[task.id]}")
            tasks.append(task)
            places[task.id] = f"{path}:{number}"
        else:
            raise Problem("neither a rule nor a variable", where=f"{path}:{number}", why=line.strip())
    if not tasks:
        raise Problem("there is no rule", where=path)
    return _workflow(state, tasks, places)


def _joined(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers; lines that end in a backslash are joined."""
    lines: list[tuple[int, str]] = []
    waiting: tuple[int, str] | None = None
    for number, line in enumerate(text.split("\n"), 1):
        start, before = waiting or (number, "")
        whole = before + (line.lstrip() if before else line)
        waiting = (start, whole[:-1] + " ") if whole.endswith("\\") else None
        if waiting is None:
            lines.append((start, whole.rstrip("\r")))
    return lines + ([waiting] if waiting else [])


def _directive(state: _State, line: str, number: int) -> None:
    words = line.split()
    where = f"{state.path}:{number}"
    if words[0] == ".MAKEFLOW" and words[1:2] == ["CATEGORY"] and len(words) == 3:
        state.category = words[2]
    elif words[0] == ".MAKEFLOW" and words[1:2] in (["CORES"], ["MEMORY"], ["DISK"]) and len(words) == 3:
        state.categories.setdefault(state.category, {})[words[1]] = words[2]
    elif words[0] == ".SIZE" and len(words) == 3 and (match := _SIZE.fullmatch(words[2])):
        bytes_ = int(float(match[1]) * 1024 ** " KMGTP".index(match[2].upper() or " "))
        state.sizes[inside(state.expand(words[1], number), state.directory)] = bytes_
    elif words[0] == ".SIZE":
        raise Problem(f"{line!r} is no size of a file", where=where, remedy=".SIZE name 10M")


def _rule(state: _State, lines: list[tuple[int, str]], at: int, number: int, head: str) -> tuple[Task, int]:
    outputs, _, inputs = state.expand(head, number).partition(":")
    made, read_ = _names(outputs, state.directory), _names(inputs, state.directory)
    where = f"{state.path}:{number}"
    if not made:
        raise Problem("a rule without outputs", where=where)
    own: dict[str, str] = {}
    while at < len(lines) and lines[at][1].strip() and (match := _VARIABLE.match(lines[at][1].strip())) and (
        lines[at][1][0] in "\t @" and lines[at][1].strip().startswith("@")
    ):  # fmt: skip
        own[match["name"].lstrip("@")] = state.expand(match["value"].strip("\"' "), lines[at][0], strict=False)
        at += 1
    while at < len(lines) and lines[at][1] and not lines[at][1].strip():
        at += 1
    if at >= len(lines) or not lines[at][1].strip() or lines[at][1][0] not in "\t ":
        raise Problem("a rule has no command", where=where, remedy="write the command below the rule, after a tab")
    if at + 1 < len(lines) and lines[at + 1][1].strip() and lines[at + 1][1][0] in "\t ":
        raise Problem("a rule has two commands", where=f"{state.path}:{lines[at + 1][0]}", remedy="join them by `&&`")
    command = state.expand(lines[at][1].strip(), lines[at][0], strict=False)
    command = re.sub(r"^LOCAL\s+", "", command)
    if command.startswith("MAKEFLOW "):
        raise Problem(
            "a workflow inside a workflow is not supported", where=f"{state.path}:{lines[at][0]}", why=command
        )
    resources = {
        **state.categories.get("default", {}),
        **state.categories.get(own.get("CATEGORY", state.category), {}),
        **own,
    }
    task = Task(
        made[0],
        os.path.basename(re.split(r"[\s;|<>&]+", command.strip("({ "))[0]) or made[0],
        read_,
        made,
        command=command,
        cores=_number(resources.get("CORES")) or 1.0,
        # In MB of 2²⁰ bytes, as Work Queue counts.
        memory_bytes=int(_number(resources.get("MEMORY")) * 2**20) or None,
    )
    return task, at + 1


def _names(text: str, directory: Path) -> list[str]:
    """Names of files; for `here->there` the local one."""
    words = (match[1] or match[2] or match[3] for match in _WORD.finditer(text))
    return list(dict.fromkeys(inside(word.split("->")[0], directory) for word in words if word))


def _number(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def _workflow(state: _State, tasks: list[Task], places: dict[str, str]) -> Workflow:
    files = {name: File(name, state.sizes.get(name)) for task in tasks for name in (*task.inputs, *task.outputs)}
    made = {name for task in tasks for name in task.outputs}
    for name in _names(state.variables.get("MAKEFLOW_OUTPUTS", ""), state.directory):
        if name in files:
            files[name].final = True
    for task in tasks:
        for name in task.inputs:
            if name not in made and not (state.directory / name).exists():
                raise Problem(
                    f"no rule makes {name!r}, and the file does not exist", where=places[task.id],
                    remedy="create it, or correct its name",
                )  # fmt: skip
    measure((file for name, file in files.items() if name not in made), state.directory)
    return Workflow.of(state.path.stem, str(state.path), tasks, files.values(), places=places)
