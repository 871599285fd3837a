"""A workload: the verbs that all programs of this folder share, its stages, and how their tasks are run.

usage: NAME inputs DIR --size S                                        makes what the first stage reads; the same each time
       NAME run DIR --size S [--processes N] [--stage K]               one line of JSON a stage: {"stage", "tasks", "seconds", …}
       NAME check DIR --size S [--processes N]                         compares the outputs with a computation of its own
       NAME describe --size S [--processes N]                          JSON: stages, files and bytes, what is final
       NAME record DIR --size S                                        runs it and notes down what `describe` tells of this size

A stage is a list of tasks; each task is one process with words of its own, started in DIR. At most N of them run at a time, and a
stage begins when the one before it has ended. Nothing is synced: who measures decides when data is safe. What a task prints is
shown only if it fails, and a task that fails ends the run. Patterns are those of surgetank's rules, from the root of DIR.
"read_bytes" and "written_bytes" are what the kernel counted in system calls of the tasks (rchar, wchar: pipes and the programs'
own files too; a mapped file not).

The danger: a run that did nothing and looks quick. Therefore `check` never believes what a stage says of itself.
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
    """Where it starts, below the directory."""
    output: str | None = None
    """The file that takes what it prints."""
    told: Callable[[str], dict] | None = None
    """What its print says for the stage's line."""


@dataclass(frozen=True)
class Stage:
    name: str
    tasks: Callable[[Path, int], list[Task]]
    """Of the directory as the stages before left it, and the number of processes."""
    reads: tuple[str, ...]
    """Patterns."""
    writes: tuple[str, ...]
    mapped: tuple[str, ...] = ()
    """Read by every task, and not by system calls."""
    folders: tuple[str, ...] = ()
    """Made first."""


@dataclass(frozen=True)
class Workload:
    name: str
    programs: dict[str, str]
    """Program (or a file that it needs): Debian's package."""
    sizes: dict[str, object]
    inputs: Callable[[Path, object], None]
    stages: Callable[[object], list[Stage]]
    check: Callable[[Path, object, int], Iterator[str]]
    """Each thing that is wrong."""
    given: tuple[str, ...]
    """Patterns of what `inputs` makes."""
    final: tuple[str, ...]
    """Patterns of what a scientist would keep."""
    processes: Callable[[object], int] = field(default=lambda _: os.cpu_count() or 1)
    size: Callable[[str], object] | None = None
    """Reads a size that has no name."""
    amounts: Callable[[object, int], list[dict]] | None = None
    """Files and bytes of each stage where they can be computed; elsewhere they were recorded."""
    numpy: bool = False
    """`inputs` and `check` need it."""


def matching(place: Path, patterns: tuple[str, ...]) -> set[Path]:
    return {path for pattern in patterns for path in place.glob(pattern) if path.is_file()}


def python(name: str, *words: object) -> tuple[str, ...]:
    """A task of our own: only Python's standard library, nothing of the user's."""
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
    # (Montage says so, with an exit code that not all versions set.)
    if done.returncode or '[struct stat="ERROR"' in printed:
        said = (printed + done.stderr.decode(errors="replace")).strip()
        raise RuntimeError(f"{' '.join(task.words)}\nended with {done.returncode} and said:\n{said[-2000:]}")
    return task.told(printed) if task.told else {}


def transferred() -> tuple[int, int]:
    """Bytes read and written by system calls, of this process and of all that it has waited for."""
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
            told = list(pool.map(lambda task: perform(place, task), tasks))
        seconds, after = time.monotonic() - began, transferred()
        line: dict = {"stage": stage.name, "tasks": len(tasks), "seconds": round(seconds, 4)}
        line |= {"read_bytes": after[0] - before[0], "written_bytes": after[1] - before[1]}
        for one in told:
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
        # (What programs read of their own, and of pipes, is noise that would differ each time.)
        amounts["bytes_read"] = round(line["read_bytes"], -5)
        amounts["bytes_mapped"] = line["tasks"] * sum(path.stat().st_size for path in matching(place, stage.mapped))
        found.append(amounts)
    recorded.setdefault(workload.name, {})[word] = found
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def amounts_of(workload: Workload, word: str, size: object, processes: int) -> list[dict]:
    return workload.amounts(size, processes) if workload.amounts else json.loads(RECORDED.read_text())[workload.name][word]


def compare(workload: Workload, place: Path, word: str, size: object, processes: int) -> Iterator[str]:
    """The directory with what `describe` says. Intermediate files may have been left out of the store, but then all of a pattern."""
    stages = workload.stages(size)
    known = matching(place, workload.given + tuple(pattern for stage in stages for pattern in stage.writes))
    yield from (f"{path} belongs to no stage" for path in place.rglob("*") if not path.is_dir() and path not in known)
    yield from (f"no {pattern}" for pattern in workload.final if not matching(place, (pattern,)))
    for stage, told in zip(stages, amounts_of(workload, word, size, processes), strict=True):
        files = matching(place, stage.writes)
        amount = sum(path.stat().st_size for path in files)
        # (Where it reckons with floating point numbers a program's text may be some characters longer on another processor.)
        if files and (len(files) != told["files_out"] or abs(amount - told["bytes_out"]) > told["bytes_out"] / 100):
            yield f"{stage.name} wrote {len(files)} files of {amount} bytes, not {told['files_out']} of {told['bytes_out']}"


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
