"""The user's options, as passed from the command line to the process under the mount."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..derive import Persist
from ..problem import Problem

# docs/exit-codes.md.
TASK_FAILED = 5
NOT_DURABLE = 3
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass
class Settings:
    """The workflow's paths are relative to `directory`; Surgetank serves `over`, which contains `directory`."""

    directory: str
    over: str
    jobs: float = 1.0
    # Whether the user gave the cores: then a node has not more than these.
    jobs_named: bool = False
    memory_bytes: int = 1 << 30
    # Whether the user gave the limit: then a task that needs more is an error, otherwise it runs alone.
    memory_named: bool = False
    persist: Persist = Persist.FINAL
    # The user gave `--persist`: with `final` the user declares files between tasks temporary.
    persist_named: bool = False
    retries: int | None = None
    cluster: int = 1
    keep_going: bool = False
    # Results of earlier runs do not count.
    fresh: bool = False
    grace_s: float = 10.0
    bare: bool = False
    prefetch: bool = True
    images: bool = True
    progress: bool = True
    inputs_from: str | None = None
    results_to: str | None = None
    state: str | None = None
    # Words for `surgetank run`.
    serve: list[str] = field(default_factory=list)
    # Of `serve`, what only the agent at the end needs.
    at_exit: list[str] = field(default_factory=list)
    # Where tasks run: `here`, or on the nodes of the `slurm` job.
    on: str = "here"
    # The user's environment.
    environment: dict[str, str] = field(default_factory=dict)
    # The tasks' PYTHONPATH: the process under the mount has one that also finds this package.
    python_path: str | None = None
    # A word in the command line of `surgetank run` that identifies its record.
    mark: str | None = None

    def of_node(self, cores: float, memory_bytes: int) -> tuple[float, int]:
        """What tasks share on a node that has so much."""
        memory = self.memory_bytes if self.memory_named else memory_bytes
        return min(cores, self.jobs) if self.jobs_named else cores, min(memory, memory_bytes)


def size_of(text: str) -> int:
    """`8G` in bytes; units are binary, as in all of Surgetank."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a size")
    return int(float(found[1]) * UNITS[found[2].lower()])


def memory_here(groups: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> int:
    """The memory limit of this machine, or of the job's cgroup (either version)."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    top = Path(mounted)
    try:
        lines = Path(groups).read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            limit = min(limit, *(_least(root, group, "memory.max", limit) for root in (top, top / "unified")))
        elif "memory" in controllers.split(","):
            limit = min(limit, _least(top / "memory", group, "memory.limit_in_bytes", limit))
    return max(limit, 1)


def _least(root: Path, group: str, name: str, limit: int) -> int:
    """The smallest limit of the group and all groups above it."""
    here = root / group.lstrip("/")
    while here.is_relative_to(root):
        with contextlib.suppress(OSError, ValueError):
            if (text := (here / name).read_text().strip()) != "max":
                limit = min(limit, int(text))
        here = here.parent
    return limit


def below(directory: str, over: str) -> str:
    """`directory` relative to `over`; an error if it is not below."""
    inner, outer = os.path.realpath(directory), os.path.realpath(over)
    if inner != outer and not inner.startswith(outer.rstrip("/") + "/"):
        raise Problem(
            f"the workflow's directory is not below {over}",
            where=directory,
            remedy="set --dir to --over, or to a directory in it",
        )
    return os.path.relpath(inner, outer)
