"""A workload: the verbs that all programs of this folder share, its stages, and the execution of their tasks.

usage: NAME inputs DIR --size S                                        makes the inputs of the first stage; the same each time
       NAME run DIR --size S [--processes N] [--stage K]               one line of JSON a stage: {"stage", "tasks", "seconds", …}
       NAME check DIR --size S [--processes N]                         compares the outputs with a computation of its own
       NAME describe --size S [--processes N]                          JSON: stages, files and bytes, final files
       NAME record DIR --size S                                        runs it and records the amounts that `describe` gives for this size

A stage is a list of tasks; each task is one process with its own command line, started in DIR. At most N of them run at a time, and a
stage begins when the one before it has ended. The workload syncs nothing: the measurement decides when data is safe. The output of a task
is shown only if it fails, and a failed task ends the run. Patterns are those of surgetank's rules, from the root of DIR.
"read_bytes" and "written_bytes" are the kernel's counts of the tasks' system calls (rchar, wchar). They include pipes and the programs'
own files, but not mapped files.

The danger that it avoids: a run that did nothing and looks quick. Therefore `check` never relies on a stage's own report.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = HERE / "tasks"
# The Python of scripts/setup, with numpy and mpi4py.
PYTHON = str(HERE.parents[1] / ".cache/venv/bin/python")
RECORDED = HERE / "recorded.json"


@dataclass(frozen=True)
class Task:
    words: tuple[str, ...]
    below: str = "."
    """Its working directory, below the workload's directory."""
    output: str | None = None
    """The file for its output."""
    report: Callable[[str], dict] | None = None
    """Values for the stage's line, from its output."""


@dataclass(frozen=True)
class Stage:
    name: str
    tasks: Callable[[Path, int], list[Task]]
    """The tasks, from the directory after the earlier stages, and the number of processes."""
    reads: tuple[str, ...]
    """Patterns."""
    writes: tuple[str, ...]
    mapped: tuple[str, ...] = ()
    """Files that every task maps, without system calls to read."""
    folders: tuple[str, ...] = ()
    """Directories that are made first."""


@dataclass(frozen=True)
class Workload:
    name: str
    programs: dict[str, str]
    """Program (or a file that it needs) → Debian's package."""
    sizes: dict[str, object]
    inputs: Callable[[Path, object], None]
    stages: Callable[[object], list[Stage]]
    check: Callable[[Path, object, int], Iterator[str]]
    """Yields each error."""
    given: tuple[str, ...]
    """Patterns of the files that `inputs` makes."""
    final: tuple[str, ...]
    """Patterns of the files that a scientist would keep."""
    processes: Callable[[object], int] = field(default=lambda _: os.cpu_count() or 1)
    size: Callable[[str], object] | None = None
    """Reads a size that has no name."""
    amounts: Callable[[object, int], list[dict]] | None = None
    """Files and bytes of each stage, if they can be computed; otherwise recorded.json has them."""
    numpy: bool = False
    """Whether `inputs` and `check` need numpy."""


def matching(place: Path, patterns: tuple[str, ...]) -> set[Path]:
    return {path for pattern in patterns for path in place.glob(pattern) if path.is_file()}


def python(name: str, *words: object) -> tuple[str, ...]:
    """A task of this folder: only Python's standard library, without the user's packages."""
    return (sys.executable, "-I", "-S", str(TASKS / name), *map(str, words))


def perform(place: Path, task: Task) -> dict:
    with open(place / task.output, "wb") if task.output else open(os.devnull, "wb") as output:
        done = subprocess.run(
            task.words,
            cwd=place / task.below,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output if task.output else subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )
    printed = (done.stdout or b"").decode(errors="replace")
    # (Montage reports an error in its output; not all versions also set an exit code.)
    if done.returncode or '[struct stat="ERROR"' in printed:
        output = (printed + done.stderr.decode(errors="replace")).strip()
        raise RuntimeError(f"{' '.join(task.words)}\nended with {done.returncode}:\n{output[-2000:]}")
    return task.report(printed) if task.report else {}


def transferred() -> tuple[int, int]:
    """Bytes read and written by system calls, of this process and of all children for which it has waited."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["rchar"]), int(words["wchar"])


def run(workload: Workload, place: Path, size: object, processes: int, only: int | None) -> Iterator[dict]:
    for number, stage in enumerate(workload.stages(size), 1):
        if only not in (None, number):
            continue
        before, began = transferred(), time.monotonic()
        for folder in stage.folders:
            (place / folder).mkdir(parents=True, exist_ok=True)
        tasks = stage.tasks(place, processes)
        with ThreadPoolExecutor(processes) as pool:
            stage_reports = list(pool.map(lambda task: perform(place, task), tasks))
        seconds, after = time.monotonic() - began, transferred()
        line: dict = {"stage": stage.name, "tasks": len(tasks), "seconds": round(seconds, 4)}
        line |= {"read_bytes": after[0] - before[0], "written_bytes": after[1] - before[1]}
        for one in stage_reports:
            line |= one
        yield line


def record(workload: Workload, place: Path, word: str, size: object, processes: int) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    lines = list(run(workload, place, size, processes, None))
    found = []
    for stage, line in zip(workload.stages(size), lines, strict=True):
        amounts = {"tasks": line["tasks"]}
        for kind, patterns in (("in", stage.reads + stage.mapped), ("out", stage.writes)):
            files = matching(place, patterns)
            amounts |= {f"files_{kind}": len(files), f"bytes_{kind}": sum(path.stat().st_size for path in files)}
        # (The reads of the programs' own files and of pipes are noise that would differ each time.)
        amounts["bytes_read"] = round(line["read_bytes"], -5)
        amounts["bytes_mapped"] = line["tasks"] * sum(path.stat().st_size for path in matching(place, stage.mapped))
        found.append(amounts)
    recorded.setdefault(workload.name, {})[word] = found
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def amounts_of(workload: Workload, word: str, size: object, processes: int) -> list[dict]:
    return workload.amounts(size, processes) if workload.amounts else json.loads(RECORDED.read_text())[workload.name][word]


def compare(workload: Workload, place: Path, word: str, size: object, processes: int) -> Iterator[str]:
    """Compares the directory with the output of `describe`. Intermediate files may be absent from the store, but only all files of a pattern."""
    stages = workload.stages(size)
    known = matching(place, workload.given + tuple(pattern for stage in stages for pattern in stage.writes))
    yield from (f"{path} belongs to no stage" for path in place.rglob("*") if not path.is_dir() and path not in known)
    yield from (f"no {pattern}" for pattern in workload.final if not matching(place, (pattern,)))
    for stage, stage_report in zip(stages, amounts_of(workload, word, size, processes), strict=True):
        files = matching(place, stage.writes)
        amount = sum(path.stat().st_size for path in files)
        # (The text of a program that computes with floating point numbers may be some characters longer on another processor.)
        if files and (len(files) != stage_report["files_out"] or abs(amount - stage_report["bytes_out"]) > stage_report["bytes_out"] / 100):
            yield f"{stage.name} wrote {len(files)} files of {amount} bytes, not {stage_report['files_out']} of {stage_report['bytes_out']}"


def describe(workload: Workload, word: str, size: object, processes: int) -> dict:
    stages, amounts = workload.stages(size), amounts_of(workload, word, size, processes)
    written = [pattern for stage in stages for pattern in stage.writes]
    rooted = lambda patterns: [f"/{pattern}" for pattern in dict.fromkeys(patterns)]
    return {
        "workload": workload.name,
        "size": word,
        "processes": processes,
        "programs": workload.programs,
        "inputs": rooted(workload.given),
        "intermediate": rooted(pattern for pattern in written if pattern not in workload.final),
        "final": rooted(workload.final),
        "stages": [
            {"stage": stage.name, **amount, "reads": rooted(stage.reads + stage.mapped), "writes": rooted(stage.writes)}
            for stage, amount in zip(stages, amounts, strict=True)
        ],
    }


def missing(workload: Workload) -> list[str]:
    search = os.environ.get("PATH", os.defpath).split(os.pathsep)
    lacking = [name for name in workload.programs if not any(Path(folder, name).exists() for folder in search)]
    return sorted({f"{name} (Debian: {workload.programs[name]})" for name in lacking})


def main(workload: Workload) -> int:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["inputs", "run", "check", "describe", "record"])
    parser.add_argument("place", metavar="DIR", nargs="?", type=Path)
    parser.add_argument("--size", required=True, help=", ".join(workload.sizes))
    parser.add_argument("--processes", type=int)
    parser.add_argument("--stage", type=int, metavar="K", help="only this stage, counted from 1")
    words = parser.parse_args()
    if words.size in workload.sizes:
        size = workload.sizes[words.size]
    else:
        size = workload.size and workload.size(words.size)
    if size is None:
        parser.error(f"no size {words.size}: there are {', '.join(workload.sizes)}")
    processes = words.processes or workload.processes(size)
    if words.verb == "describe":
        print(json.dumps(describe(workload, words.size, size, processes), indent=1))
        return 0
    if words.place is None or not words.place.is_dir():
        parser.error(f"{words.verb} needs a directory that exists")
    place = words.place.resolve()
    if lacking := missing(workload):
        print(f"{workload.name}: missing: {', '.join(lacking)}; scripts/setup bench installs all", file=sys.stderr)
        return 2
    if workload.numpy and words.verb in ("inputs", "check") and sys.prefix != str(Path(PYTHON).parents[1]):
        # Also where this file is started by the system's Python.
        if not os.access(PYTHON, os.X_OK):
            print(f"{workload.name}: no Python with numpy at {PYTHON}: scripts/setup bench makes it", file=sys.stderr)
            return 2
        return subprocess.run([PYTHON, *sys.argv], check=False).returncode
    if words.verb == "check":
        wrong = list(compare(workload, place, words.size, size, processes))
        try:
            wrong += workload.check(place, size, processes)
        except (OSError, ValueError) as error:
            wrong.append(f"an output is missing or cannot be read: {error}")
        for what in wrong[:20]:
            print(f"{workload.name}: {what}", file=sys.stderr)
        return 1 if wrong else 0
    try:
        if words.verb == "inputs":
            workload.inputs(place, size)
        elif words.verb == "record":
            record(workload, place, words.size, size, processes)
        else:
            for line in run(workload, place, size, processes, words.stage):
                print(json.dumps(line), flush=True)
    except (RuntimeError, OSError) as error:
        print(f"{workload.name}: {error}", file=sys.stderr)
        return 1
    return 0
