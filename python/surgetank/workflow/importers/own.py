"""Surgetank's own description (`surgetank: 1`), for users without an engine; docs/workflows.md explains every key."""

from __future__ import annotations

import re
from pathlib import Path

from ..graph import File, Task, Workflow
from . import marked
from .marked import Marked
from .paths import inside, measure

VERSION = 1
_TOP = ("surgetank", "name", "defaults", "tasks", "files")
_DEFAULTS = ("cores", "memory", "retries", "image", "tier", "runtime")
_TASK = ("command", "inputs", "outputs", "after", "kind", *_DEFAULTS)
_FILE = ("size", "temporary", "final")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?\s*", re.IGNORECASE)
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)?\s*")
_SECONDS = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def load(path: Path) -> Workflow:
    """The graph of a description in Surgetank's YAML; names of files are relative to its directory."""
    document = marked.load(path)
    document.only(_TOP)
    if document.get("surgetank") != VERSION or document.get("surgetank") is True:
        raise document.wrong(f"`surgetank: {VERSION}` must be at the top", "surgetank")
    if document.get("defaults") is not None:
        document.only(_DEFAULTS, "defaults")
    directory = path.absolute().parent
    names = document.mapping("tasks")
    if not names:
        raise document.wrong("there are no tasks", "tasks")
    tasks = [_task(document, name, directory) for name in names]
    listed = document.mapping("files") if document.get("files") is not None else {}
    files = {file.path: file for file in (_file(document, name, directory) for name in listed)}
    for task in tasks:
        for name in (*task.inputs, *task.outputs):
            files.setdefault(name, File(name))
    used = {name for task in tasks for name in (*task.inputs, *task.outputs)}
    for name in listed:
        if inside(name, directory) not in used:
            raise document.wrong(f"no task reads or writes the file {name!r}", "files", name)
    made = {name for task in tasks for name in task.outputs}
    measure((file for name, file in files.items() if name not in made), directory)
    places = {name: document.at("tasks", name) for name in names}
    return Workflow.of(str(document.get("name") or path.stem), str(path), tasks, files.values(), places=places)


def _task(document: Marked, name: str, directory: Path) -> Task:
    place = ("tasks", name)
    document.only(_TASK, *place)
    command = document.get(*place, "command")
    if isinstance(command, list):
        command = _texts(document, *place, "command")
    elif command is not None and not isinstance(command, str):
        raise document.wrong("command is neither a list of words nor a line for the shell", *place, "command")
    if not command:
        raise document.wrong(f"task {name!r} has no command", *place, "command")
    kind = document.get(*place, "kind")
    first = command[0] if isinstance(command, list) else name
    memory = _default(document, name, "memory")
    runtime = _default(document, name, "runtime")
    return Task(
        id=name,
        kind=str(kind) if kind else Path(first).name,
        inputs=list(dict.fromkeys(inside(one, directory) for one in _texts(document, *place, "inputs"))),
        outputs=list(dict.fromkeys(inside(one, directory) for one in _texts(document, *place, "outputs"))),
        after=_texts(document, *place, "after"),
        command=command,
        runtime_s=None if runtime is None else _duration(document, *runtime),
        cores=_positive(document, name, "cores") or 1.0,
        memory_bytes=None if memory is None else size(document, *memory),
        retries=int(_whole(document, name, "retries")),
        image=_word(document, name, "image"),
        tier=_word(document, name, "tier"),
    )


def _default(document: Marked, name: str, key: str) -> tuple[str, ...] | None:
    """The place of the task's value: in the task, or in the defaults."""
    for place in (("tasks", name, key), ("defaults", key)):
        if document.get(*place) is not None:
            return place
    return None


def _positive(document: Marked, name: str, key: str) -> float | None:
    place = _default(document, name, key)
    value = None if place is None else document.get(*place)
    if place is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        raise document.wrong(f"{key} is {value!r}, not a number above 0", *place)
    return float(value)


def _whole(document: Marked, name: str, key: str) -> int:
    place = _default(document, name, key)
    value = 0 if place is None else document.get(*place)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise document.wrong(f"{key} is {value!r}, not a whole number from 0", *(place or ()))
    return value


def _word(document: Marked, name: str, key: str) -> str | None:
    place = _default(document, name, key)
    return None if place is None else document.text(*place)


def _texts(document: Marked, *place: str) -> list[str]:
    values = document.sequence(*place)
    for number, value in enumerate(values):
        if isinstance(value, (dict, list)) or value is None or isinstance(value, bool) or value == "":
            raise document.wrong(
                f"{place[-1]} has {value!r} in it, which is not text", *place, number, remedy="put it in quotes"
            )
    return [str(value) for value in values]


def _file(document: Marked, name: str, directory: Path) -> File:
    place = ("files", name)
    document.only(_FILE, *place)
    flags = {}
    for key in ("temporary", "final"):
        flags[key] = document.get(*place, key)
        if flags[key] not in (None, True, False):
            raise document.wrong(f"{key} is {flags[key]!r}, not true or false", *place, key)
    if flags["temporary"] and flags["final"]:
        raise document.wrong(f"the file {name!r} cannot be temporary and final", *place)
    bytes_ = None if document.get(*place, "size") is None else size(document, *place, "size")
    return File(inside(name, directory), bytes_, temporary=bool(flags["temporary"]), final=bool(flags["final"]))


def size(document: Marked, *place: str) -> int:
    """Bytes of `1G` (powers of 1024, as in all of Surgetank; `1GiB` is the same), or of a plain number."""
    value = document.get(*place)
    match = _SIZE.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None:
        raise document.wrong(f"{place[-1]} is {value!r}, not a size", *place, remedy="such as 500M, 1.5G or bytes")
    return int(float(match[1]) * 1024 ** " KMGTP".index(match[2].upper() or " "))


def _duration(document: Marked, *place: str) -> float:
    value = document.get(*place)
    match = _TIME.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None:
        raise document.wrong(f"{place[-1]} is {value!r}, not a time", *place, remedy="such as 90, 90s, 5min or 2h")
    return float(match[1]) * _SECONDS[match[2]]
