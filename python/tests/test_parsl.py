"""Parsl with Surgetank's staging provider: a real program with its own threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_replay import BINARY, NEEDS_MOUNT, ROOT, places, tier
from test_snakemake import LOOK

from surgetank.workflow.agent import Agent

__all__ = ["tier"]

# Two lines are for Surgetank.
PROGRAM = """
import os, sys
import parsl
from parsl import File, bash_app
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor
from surgetank.workflow.engines.parsl import SurgetankStaging

@bash_app
def order(inputs=(), outputs=()):
    look = f"python3 {os.environ['SEEN']}/look.py"
    return (f"{look} {inputs[0]} user.surgetank.tier ram > $SEEN/tier; sort {inputs[0]} > {outputs[0]};"
            f"{look} {outputs[0]} user.surgetank.state kept > $SEEN/temporary")

@bash_app
def count(inputs=(), outputs=()):
    return f"wc -l < {inputs[0]} > {outputs[0]}; test {outputs[0].filename} != '{os.environ['FAIL']}'"

config = Config(
    executors=[ThreadPoolExecutor(max_threads=2, storage_access=[SurgetankStaging(["work/*"], ["out/*"])])],
    usage_tracking=0, run_dir=os.environ["SEEN"] + "/runinfo", initialize_logging=False,
)
with parsl.load(config):
    sums = []
    for name in "abc":
        ordered = order(inputs=[File(f"data/{name}.txt")], outputs=[File(f"work/{name}.txt")])
        sums.append(count(inputs=[ordered.outputs[0]], outputs=[File(f"out/{name}.txt")]).outputs[0])
    for done in sums:
        done.result()
        if "error" in os.environ["FAIL"]:
            raise OSError("an error of the program's own")
        # Its future is done when the store has it.
        print(os.getxattr(done.filepath, "user.surgetank.state").decode())
"""


# A forked child that ends when all apps are done, then an uncaught error of the program.
FORKS = """
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
raise RuntimeError(sorted(os.listdir("work")))
"""


def program(
    tmp_path: Path, tier: Path, fail: str, more: str = ""
) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    work, state = places(tmp_path)
    seen = tmp_path / "seen"
    seen.mkdir()
    (seen / "look.py").write_text(LOOK)
    for name in ("data", "work", "out"):
        (work / name).mkdir(parents=True)
    for name in "abc":
        (work / f"data/{name}.txt").write_text("b\na\n" * 100)
    (work / "flow.py").write_text(PROGRAM + more)
    words = [
        "unshare",
        "-m",
        BINARY,
        "run",
        "--state",
        str(state),
        "--tier",
        f"ram={tier}:64M",
        "--",
        sys.executable,
        "flow.py",
    ]
    there = {**os.environ, "PYTHONPATH": str(ROOT), "SURGETANK_BINARY": BINARY, "SEEN": str(seen), "FAIL": fail}
    return (
        subprocess.run(words, cwd=work, env=there, capture_output=True, text=True, check=False, timeout=60),
        work,
        seen,
    )


@NEEDS_MOUNT
@pytest.mark.parametrize("fail", ["", "b.txt", "error"])
def test_program_with_surgetank_staging_runs(
    tmp_path: Path, tier: Path, fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, work, seen = program(tmp_path, tier, fail)
    assert (seen / "tier").read_text() == "ram\n" and (seen / "temporary").read_text() == "kept\n", done.stderr
    if fail:
        # The store has every file that the next attempt may need.
        message = "an error of the program's own" if fail == "error" else "BashExitFailure"
        assert done.returncode == 1 and message in done.stderr
        assert sorted(path.name for path in (work / "work").iterdir()) == ["a.txt", "b.txt", "c.txt"]
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["durable"] * 3
    assert list((work / "work").iterdir()) == []
    # The temporary files are removed, and not left on the tier.
    monkeypatch.setenv("SURGETANK_BINARY", BINARY)
    assert Agent(state=str(tmp_path / "state")).records()[-1]["verdict"]["kept"]["total"] == 0
    assert {path.read_text() for path in (work / "out").iterdir()} == {"200\n"}


@NEEDS_MOUNT
def test_forked_child_keeps_the_files_of_its_parent(tmp_path: Path, tier: Path) -> None:
    done, work, _seen = program(tmp_path, tier, "", FORKS)
    assert done.returncode == 1 and "['a.txt', 'b.txt', 'c.txt']" in done.stderr, done.stderr
    assert sorted(path.name for path in (work / "work").iterdir()) == ["a.txt", "b.txt", "c.txt"]


def test_executor_on_other_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parsl.data_provider.files import File
    from parsl.providers import LocalProvider, SlurmProvider

    from surgetank.workflow.engines import parsl as inside
    from surgetank.workflow.problem import Problem

    monkeypatch.chdir(tmp_path)
    # (As under the mount; this test sends no request to an agent.)
    monkeypatch.setattr(inside, "mounted", lambda _: True)
    monkeypatch.setattr(inside, "Agent", lambda: Agent("true"))
    monkeypatch.setattr(inside.atexit, "register", lambda _: None)
    staging = inside.SurgetankStaging()
    executors = {"far": SimpleNamespace(provider=SlurmProvider()), "near": SimpleNamespace(provider=LocalProvider())}
    dm = SimpleNamespace(dfk=SimpleNamespace(executors=executors))
    for stage in (staging.stage_in, staging.stage_out):
        stage(dm, "near", File("x"), None)
        with pytest.raises(Problem, match="runs apps on other machines"):
            stage(dm, "far", File("x"), None)
