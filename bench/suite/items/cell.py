"""A comparison: the same work by several variants, under the same conditions."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from suite.testbed import CHECKOUT
from suite.variants import Tier, Workload

MIB, GIB = 1 << 20, 1 << 30
# Python with numpy; the suite runs in it too.
PYTHON = sys.executable
HEADLINE_ROUNDS, FULL_ROUNDS = 10, 5


@dataclass(frozen=True)
class Cell:
    item: str
    name: str
    workload: Workload
    variants: tuple[str, ...]
    preset: str
    series: str = "idle"
    warm: bool = False
    memory_bytes: int = 4 * GIB
    tier: Tier = Tier(2 * GIB)
    rounds: int = FULL_ROUNDS
    parameters: dict = field(default_factory=dict)

    def on(self, preset: str) -> "Cell":
        return replace(self, preset=preset)

    def described(self) -> dict:
        work = self.workload
        return {
            "name": self.name,
            "cache": "warm" if self.warm else "cold",
            "memory_limit_bytes": self.memory_bytes,
            "tier_bytes": self.tier.bytes,
            "parameters": self.parameters,
            "read_mib": work.read_mib,
            "written_mib": work.written_mib,
            "final_mib": work.final_mib,
            "moved_mib": work.moved_mib,
            "compute_s": work.compute_s,
        }


@dataclass(frozen=True)
class Item:
    name: str
    cells: Callable[[str], list[Cell]]
    """The cells for a mode."""
    note: str = ""


# Benches with their own harnesses, the program that each needs beyond scripts/setup, and the time of each.
COLLECTED = [
    ("figures", ["--rounds", "3"], "fio", "10 minutes: doors, metadata, start, drain, recovery"),
    ("objects", ["--rounds", "3"], "rclone", "5 minutes: S3 beside rclone"),
    ("terrain", ["--rounds", "3"], "tc", "3 minutes: the workflow with a store of objects behind the link of the preset s3, simulated"),
]


def collected(mode: str, results: Path) -> list[str]:
    """Runs those, and returns the failed ones. They write records of other forms beside those of the suite."""
    failed = []
    if mode != "full":
        return failed
    (results / "collected").mkdir(parents=True, exist_ok=True)
    for name, options, program, what in COLLECTED:
        if not shutil.which(program):
            print(f"bench/{name}: NOT MEASURED: {program} is not on the path", flush=True)
            continue
        print(f"bench/{name}: {what}", flush=True)
        done = subprocess.run([CHECKOUT / "bench" / name, *options, "--json", results / "collected" / f"{name}.json"], check=False)
        if done.returncode:
            failed.append(f"bench/{name} ended with {done.returncode}")
    return failed
