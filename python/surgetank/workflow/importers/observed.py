"""A graph without a description: the accesses of programs in a run under Surgetank (`surgetank report --json`).

A traced run (`surgetank run --trace`) has the reads and writes of each process (`processes[].files`). Without a
trace the run is one task and its files are the outputs, because nothing else is known. Processes that wrote the same
file, or each other's inputs, or formed one pipeline, are one task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from ..graph import File, Task, Workflow
from ..problem import Problem
from .paths import inside, read


def load(path: Path) -> Workflow:
    """The graph of a run, from its record."""
    text = read(path, "the record")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Problem("the file is not JSON", where=f"{path}:{error.lineno}", why=error.msg) from None
    if not isinstance(record, dict) or record.get("format") != 1 or not isinstance(record.get("processes"), list):
        raise Problem("the file is not a record of a run", where=path, remedy="surgetank report --json RUN > FILE")
    directory = Path(_text(record.get("directory")) or "/")
    name = str(record.get("id") or path.stem)
    files = {file.path: file for file in _files(record, directory)}
    processes = [one for one in record["processes"] if isinstance(one, dict)]
    incomplete = _left_out(record)
    if record.get("traced"):
        tasks = _tasks(processes, directory)
        # Hints need a whole graph; a process that is missing in the record may have read any file.
        if incomplete:
            for task in tasks:
                for one in (*task.inputs, *task.outputs):
                    files.setdefault(one, File(one)).readers_unknown = True
    else:
        incomplete.append(
            "the record does not say which process read and wrote which file (`surgetank run --trace` does): "
            "the run is one task"
        )
        for file in files.values():
            file.readers_unknown = True
        ended = record.get("command_ended_us")
        runtime = ended / 1e6 if isinstance(ended, (int, float)) else None
        kind = (str(record.get("command") or "run").split() or ["run"])[0]
        tasks = [
            Task(
                name, Path(kind).name, outputs=list(files), command=str(record.get("command") or ""), runtime_s=runtime
            )
        ]
    if not tasks:
        raise Problem("no process of this run read or wrote in the directory", where=path)
    return Workflow.of(name, str(path), tasks, files.values(), incomplete=incomplete)


def _left_out(record: dict[str, Any]) -> list[str]:
    """Data that the record says it lacks."""
    found = []
    lists = [("processes_total", "processes", "processes")]
    if not record.get("traced"):
        lists.append(("files_total", "files", "files"))
    for key, there, what in lists:
        total, listed = record.get(key), len(record.get(there) or [])
        if isinstance(total, int) and total > listed:
            found.append(f"{total - listed} of {total} {what} are not in the record")
    for key, what in (
        ("processes_lost", "processes were not counted"),
        ("processes_disbelieved", "processes are not believed"),
    ):
        if record.get(key):
            found.append(f"{record[key]} {what}")
    if record.get("accesses_left_out"):
        found.append("some files of some processes are not in the record")
    agents = record.get("agents")
    if isinstance(agents, int) and agents > 1:
        found.append("the agent was killed in the run: accesses of its last seconds are not in the record")
    if record.get("counting_ended"):
        found.append("counting ended before the run did")
    return found


def _text(value: Any) -> str | None:
    """A path in the record's form: text, or an array of bytes that are not UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 256 for one in value):
        return bytes(value).decode("utf-8", "surrogateescape")
    return None


def _files(record: dict[str, Any], directory: Path) -> Iterator[File]:
    """Written files; in a traced run all used ones, by their last names."""
    listed = list(record.get("files") or [])
    if record.get("traced"):
        used = [one.get("files") or [] for one in record["processes"] if isinstance(one, dict)]
        listed = [entry for entries in used for entry in entries]
    for entry in listed:
        path = _text(entry.get("path")) if isinstance(entry, dict) else None
        if path:
            size = entry.get("size_bytes")
            yield File(inside(path, directory), size if isinstance(size, int) else None)


def _wrote(access: dict[str, Any]) -> bool:
    return bool((access.get("write") or {}).get("bytes"))


def _only_opened(access: dict[str, Any]) -> bool:
    # (A process that maps a file for writing has it open for reading, too.)
    return "write" in access and not _wrote(access) and "read" not in access


def _names(
    process: dict[str, Any], key: str, directory: Path, chosen: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[str]:
    """The files that it reads (`key` = "reads") or writes."""
    used = [one for one in process.get("files") or [] if isinstance(one, dict) and one.get(key) and chosen(one)]
    return list(dict.fromkeys(inside(path, directory) for one in used if (path := _text(one.get("path")))))


def _pipelines(processes: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Children of one process, with pipes between them, that lived at the same time."""
    of: dict[int, list[tuple[int, int, int]]] = {}
    for number, one in enumerate(processes):
        parent, begun, ended = one.get("pipeline"), one.get("begun_us"), one.get("ended_us")
        if isinstance(parent, int) and parent and isinstance(begun, int):
            of.setdefault(parent, []).append((begun, ended if isinstance(ended, int) else begun, number))
    for members in of.values():
        members.sort()
        together, until = [members[0][2]], members[0][1]
        for begun, ended, number in members[1:]:
            if begun > until:
                yield together
                together, until = [], ended
            together.append(number)
            until = max(until, ended)
        yield together


def _tasks(processes: list[dict[str, Any]], directory: Path) -> list[Task]:
    """One task for every group of processes that cannot be separated."""
    active = [(one, _names(one, "reads", directory), _names(one, "writes", directory)) for one in processes]
    active = [entry for entry in active if entry[1] or entry[2]]
    group = list(range(len(active)))

    def join(members: list[int]) -> None:
        chosen = {group[one] for one in members}
        for number, value in enumerate(group):
            if value in chosen:
                group[number] = min(chosen)

    # A process that opened a file for writing only and wrote nothing, while another process wrote: a shell that
    # redirects its children's output.
    wrote = {path for process, _, _ in active for path in _names(process, "writes", directory, _wrote)}
    idle = [set(_names(process, "writes", directory, _only_opened)) & wrote for process, _, _ in active]
    active = [
        (process, reads, [path for path in written if path not in left])
        for (process, reads, written), left in zip(active, idle, strict=True)
    ]
    writers: dict[str, list[int]] = {}
    for number, (_, _, written) in enumerate(active):
        for path in written:
            writers.setdefault(path, []).append(number)
    for numbers in writers.values():
        join(numbers)
    for numbers in _pipelines([one for one, _, _ in active]):
        join(numbers)
    while True:
        before: dict[int, set[int]] = {value: set() for value in group}
        for number, (_, reads, _) in enumerate(active):
            for path in reads:
                before[group[number]] |= {group[one] for one in writers.get(path, [])} - {group[number]}
        try:
            TopologicalSorter(before).prepare()
            break
        except CycleError as error:
            join([int(one) for one in error.args[1]])
    tasks: dict[int, Task] = {}
    for number, (process, reads, written) in enumerate(active):
        task = tasks.get(group[number])
        if task is None:
            program = str(process.get("program") or "process")
            command = process.get("command")
            task = Task(
                f"{program}:{number}", program, command=command if isinstance(command, str) and command else None
            )
            tasks[group[number]] = task
        begun, ended = process.get("begun_us"), process.get("ended_us")
        if isinstance(begun, int) and isinstance(ended, int):
            task.runtime_s = max(task.runtime_s or 0.0, (ended - begun) / 1e6)
        task.inputs += [path for path in reads if path not in task.inputs]
        task.outputs += [path for path in written if path not in task.outputs]
    for task in tasks.values():
        # A file that a group both wrote and read is internal.
        task.inputs = [path for path in task.inputs if path not in task.outputs]
    return list(tasks.values())
