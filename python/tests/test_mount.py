"""The command line as a user has it, under the mount: who persists what, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from test_replay import BINARY, NEEDS_MOUNT, environment, places, tier

__all__ = ["tier"]

# Writes what the agent says of a.out into the file that is named, when that is `durable` or so many seconds have passed.
LOOKS = """
import os, sys, time
def state(): return os.getxattr("a.out", "user.surgetank.state").decode()
end = time.monotonic() + float(sys.argv[2])
while state() != "durable" and time.monotonic() < end:
    time.sleep(0.02)
open(sys.argv[1], "w").write(state())
"""


def command(tier: Path, work: Path, state: Path, *more: str) -> list[str]:
    served = ["--over", str(work), "--dir", str(work), "--state", str(state), "--tier", f"ram={tier}:64M"]
    return ["unshare", "-m", BINARY, "workflow", "run", *more, *served, "-q", "--json"]


def described(path: Path, seconds_of_b: int) -> Path:
    """a → b → c; `c` runs when a's only child is done."""
    looks = [sys.executable, "-c", LOOKS]
    tasks = {
        "a": {"command": ["sh", "-c", "echo from a >a.out"], "outputs": ["a.out"]},
        "b": {"command": [*looks, "b.out", str(seconds_of_b)], "inputs": ["a.out"], "outputs": ["b.out"]},
        "c": {"command": [*looks, "c.out", "10"], "inputs": ["b.out"], "outputs": ["c.out"]},
    }
    path.write_text(json.dumps({"surgetank": 1, "tasks": tasks}))
    return path


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    # `surgetank workflow` takes the Python beside the binary or the first on the path.
    there = environment()
    there["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{there['PATH']}"
    return subprocess.run(words, env=there, capture_output=True, text=True, check=False, timeout=60)


@NEEDS_MOUNT
def test_outputs_are_persisted_while_it_runs_when_their_children_are_done(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    # b waits long enough for a's output to be drained if anything let it.
    given = described(tmp_path / "w.yaml", 1)
    done = run(command(tier, work, state, str(given), "--persist", "when-consumed"))
    assert done.returncode == 0, done.stderr
    assert (work / "b.out").read_text() != "durable"
    assert (work / "c.out").read_text() == "durable"
    assert (work / "a.out").read_text() == "from a\n"


@NEEDS_MOUNT
def test_a_rule_of_the_users_is_stronger_than_the_graph(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    (work / "surgetank.toml").write_text('rules = ["a.out=copy"]\n')
    given = described(tmp_path / "w.yaml", 10)
    done = run(command(tier, work, state, str(given), "--persist", "when-consumed"))
    assert done.returncode == 0, done.stderr
    assert (work / "b.out").read_text() == "durable"


@NEEDS_MOUNT
def test_a_failed_task_has_its_own_exit_code_through_the_binary(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    given = tmp_path / "w.yaml"
    given.write_text(json.dumps({"surgetank": 1, "tasks": {"t": {"command": ["false"], "outputs": ["x"]}}}))
    done = run(command(tier, work, state, str(given)))
    assert done.returncode == 5, done.stderr
    assert "t" in done.stderr
