"""`surgetank workflow replay`: repeats a recorded execution, with sizes and times scaled, as a benchmark.

The tasks are synthetic (`replay_task.py`); the graph, the sizes and the times are the instance's. Every file's
content follows from its name, and every reader verifies it. At the end the replay reads from the store, past the
mount, all files that must be there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import content, replay_task
from .execute.cli import Load, Verbs, add_execution, settings_of
from .execute.launch import launch
from .execute.persist import droppable
from .execute.plan import words_of
from .execute.settings import NOT_DURABLE, Settings, size_of
from .graph import Task, Workflow, name_files
from .importers import wfformat
from .problem import Problem

PROGRAM = str(Path(replay_task.__file__).resolve())


def add_replay(subparsers: Verbs, load: Load = wfformat.load) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="Replay a recorded execution with scaled sizes and times",
        description="Replays a WfFormat instance: each task reads and verifies its inputs, takes its time, writes its outputs.",
    )
    parser.add_argument("description", type=Path, metavar="FILE", help="the instance")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--size-scale", type=float, default=1.0, metavar="F", help="sizes times this [default: 1]")
    scale.add_argument("--total", metavar="SIZE", help="sizes scaled so that all files together have this")
    parser.add_argument("--time-scale", type=float, default=0.0, metavar="F", help="run times times this [default: 0]")
    parser.add_argument("--cpu", choices=["busy", "sleep"], default="sleep", help="how a task spends its time")
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted replay instead of beginning again"
    )
    add_execution(parser)
    parser.set_defaults(do=lambda args: _replay(args, load))
    return parser


def scaled(workflow: Workflow, size_scale: float, time_scale: float, cpu: str) -> Workflow:
    """The workflow to run: the same graph with synthetic commands."""
    sizes = {path: _scaled(file.size_bytes, size_scale) for path, file in workflow.files.items()}
    if any(path.startswith("/") for path in sizes):
        raise Problem("files outside the workflow's directory are not replayed", where=workflow.source)
    tasks = []
    for task in workflow.tasks.values():
        words = [sys.executable, "-P", PROGRAM, cpu, repr((task.runtime_s or 0.0) * time_scale)]
        for kind, paths in (("r", task.inputs), ("w", task.outputs)):
            for path in paths:
                if kind == "w" or path not in task.outputs:
                    words += [kind, path, str(sizes[path])]
        tasks.append(replace(task, command=words, memory_bytes=None, image=None))
    files = [replace(file, size_bytes=sizes[path]) for path, file in workflow.files.items()]
    return Workflow.of(workflow.name, workflow.source, tasks, files, incomplete=workflow.incomplete)


def scale_for(workflow: Workflow, total: int) -> float:
    known = sum(file.size_bytes or 0 for file in workflow.files.values())
    if known == 0:
        raise Problem("no file of the instance has a size", where=workflow.source, remedy="use --size-scale")
    return total / known


def moved(workflow: Workflow) -> tuple[int, int]:
    """Bytes that the tasks read and write, when each reads all of its inputs once."""

    def size(paths: list[str]) -> int:
        return sum(workflow.files[path].size_bytes or 0 for path in paths)

    return sum(size(_read_by(task)) for task in workflow.tasks.values()), sum(
        size(task.outputs) for task in workflow.tasks.values()
    )


def _read_by(task: Task) -> list[str]:
    return [path for path in task.inputs if path not in task.outputs]


def make_inputs(workflow: Workflow, root: str) -> None:
    """Creates inputs in the store, before the clock starts."""
    for file in workflow.inputs():
        path = os.path.join(root, file.path)
        if content.verify(path, file.path, file.size_bytes or 0) is not None:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            content.write(path, file.path, file.size_bytes or 0)


def verify_store(workflow: Workflow, settings: Settings, root: str) -> tuple[int, int, list[str]]:
    """The number and bytes of outputs that are correct in the store, and the errors."""
    drop = droppable(workflow, settings.persist, settings.persist_named, settings.directory, settings.over)
    wrong: list[str] = []
    count = size = 0
    for path in workflow.producer:
        whole = os.path.join(root, path)
        if path in drop:
            if os.path.lexists(whole):
                wrong.append(f"{path!r} was to be dropped, and is in the store")
            continue
        expected = workflow.files[path].size_bytes or 0
        error = content.verify(whole, path, expected)
        if error is not None:
            wrong.append(error)
        else:
            count, size = count + 1, size + expected
    return count, size, wrong


def store_root(settings: Settings, store: str | None) -> str:
    """The directory of the files without the mount."""
    if store is None or settings.bare:
        return settings.directory
    if "://" in store and not store.startswith("file://"):
        raise Problem("a replay verifies the files in the store, which must be a directory", where=store)
    return os.path.join(store.removeprefix("file://"), os.path.relpath(settings.directory, settings.over))


def _scaled(size: int | None, scale: float) -> int:
    # A file that was not empty keeps at least one byte.
    return 0 if not size else max(1, round(size * scale))


def _replay(args: argparse.Namespace, load: Load) -> int:
    instance = load(args.description)
    name_files(instance, args.final, args.temporary)
    scale = args.size_scale if args.total is None else scale_for(instance, size_of(args.total))
    workflow = scaled(instance, scale, args.time_scale, args.cpu)
    settings = settings_of(args)
    settings.fresh = not args.resume
    os.makedirs(settings.directory, exist_ok=True)
    root = store_root(settings, args.store)
    make_inputs(workflow, root)
    report = launch(workflow, settings)
    result = summary(workflow, settings, root, report)
    print(json.dumps({**report, "replay": result}, indent=1) if args.json else text(workflow, result))
    return int(result["exit"])


def summary(workflow: Workflow, settings: Settings, root: str, report: dict[str, Any]) -> dict[str, Any]:
    read, written = moved(workflow)
    code = int(report["exit"])
    count, size, wrong = verify_store(workflow, settings, root) if code == 0 else (0, 0, [])
    drained = ((report.get("surgetank") or {}).get("summary") or {}).get("drain") or {}
    return {
        "exit": NOT_DURABLE if wrong else code,
        "seconds": report.get("seconds"),
        "read_bytes": read,
        "written_bytes": written,
        # Includes all files under the directory, the executor's journal among them.
        "store_bytes": written if settings.bare else drained.get("bytes"),
        "verified_files": count,
        "verified_bytes": size,
        "wrong": wrong,
        "tier_bytes_max": report.get("tier_bytes_max", {}),
        "peak": report.get("peak"),
        "drain_tail_ms": drained.get("tail_ms"),
    }


def text(workflow: Workflow, result: dict[str, Any]) -> str:
    def words(size: int | None) -> str:
        return "unknown" if size is None else words_of(size)

    lines = [
        f"{workflow.name}: {len(workflow.tasks)} tasks in {result['seconds']} s, exit code {result['exit']}",
        f"  read and verified    {words(result['read_bytes'])}",
        f"  written              {words(result['written_bytes'])}",
        f"  reached the store    {words(result['store_bytes'])}",
        f"  verified there       {result['verified_files']} files, {words(result['verified_bytes'])}",
    ]
    for name, size in result["tier_bytes_max"].items():
        lines.append(f"  peak of tier {name:<7} {words(size)}")
    if result["peak"]:
        peak = result["peak"]
        lines.append(
            f"  peak of live bytes   {words(peak['executed_bytes'])}; with lifetimes {words(peak['with_lifetimes_bytes'])},"
            f" without {words(peak['without_lifetimes_bytes'])}"
        )
    lines += [f"  WRONG: {one}" for one in result["wrong"][:10]]
    return "\n".join(lines)
