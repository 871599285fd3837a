"""Replays under their own mount: readers verify files, dropped files never reach the store, and a replay resumes after a kill of everything."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_execute import diamond, do

from surgetank.workflow import cli, content, replay
from surgetank.workflow.execute import journal
from surgetank.workflow.graph import File, Task, Workflow

ROOT = Path(__file__).parents[1]
BINARY = os.environ.get("SURGETANK_BINARY", str(ROOT.parent / "target/debug/surgetank"))
NEEDS_MOUNT = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse") or not os.access(BINARY, os.X_OK),
    reason="needs root, /dev/fuse and the binary (SURGETANK_BINARY)",
)
DRIVER = """
import argparse, sys
from surgetank.workflow.crate import add_crate
from surgetank.workflow.problem import Problem
from surgetank.workflow.replay import add_replay
parser = argparse.ArgumentParser()
verbs = parser.add_subparsers()
add_replay(verbs), add_crate(verbs)
args = parser.parse_args()
try:
    sys.exit(args.do(args))
except Problem as problem:
    print(problem, file=sys.stderr)
    sys.exit(problem.code)
"""


@pytest.fixture
def tier() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="replay-test-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place)


def instance(path: Path, chains: int = 3, size: int = 2_000_000, seconds: float = 0.0) -> Path:
    """in → a → b → c, several times, and one task that reads every c."""
    tasks: list[dict[str, Any]] = []
    names = ["in", "end"]
    for n in range(chains):
        for at, (one, other) in enumerate((("in", f"a{n}"), (f"a{n}", f"b{n}"), (f"b{n}", f"c{n}"))):
            tasks.append(
                {"name": "step", "id": f"step{at}_{n}", "inputFiles": [one], "outputFiles": [other], "parents": []}
            )
            names.append(other)
    last = {
        "name": "end",
        "id": "end",
        "inputFiles": [f"c{n}" for n in range(chains)],
        "outputFiles": ["end"],
        "parents": [],
    }
    tasks.append(last)
    files = [{"id": name, "sizeInBytes": size} for name in names]
    executed = [{"id": task["id"], "runtimeInSeconds": seconds} for task in tasks]
    workflow = {"specification": {"tasks": tasks, "files": files}, "execution": {"tasks": executed}}
    path.write_text(json.dumps({"name": "chains", "schemaVersion": "1.5", "workflow": workflow}))
    return path


def words(tier: Path, work: Path, state: Path, *more: str) -> list[str]:
    program = ["unshare", "-m", sys.executable, "-c", DRIVER]
    return [*program, *more, "--dir", str(work), "--state", str(state), "--tier", f"ram={tier}:64M", "-q", "--json"]


def places(tmp_path: Path) -> tuple[Path, Path]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    return tmp_path / "w", state


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "SURGETANK_BINARY": BINARY}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)


@NEEDS_MOUNT
def test_final_under_the_mount_writes_results_only(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    given = instance(tmp_path / "i.json")
    done = run(words(tier, work, state, "replay", str(given), "--persist", "final"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = report["replay"]
    assert (found["verified_files"], found["verified_bytes"]) == (1, 2_000_000) and found["wrong"] == []
    # The tasks wrote ten files; one of them and the executor's own reached the store.
    assert found["written_bytes"] == 20_000_000 and 2_000_000 <= found["store_bytes"] < 2_300_000
    assert [step["step"] for step in report["steps"]] == ["reserve", "stage-out", "release"]
    assert found["tier_bytes_max"]["ram"] < 20_000_000
    assert sorted(path.name for path in work.iterdir()) == [".surgetank-workflow", "end", "in"]
    done = run(words(tier, work, state, "replay", str(given), "--persist", "when-consumed"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["replay"]["verified_files"] == 10


@NEEDS_MOUNT
def test_kill_of_everything_under_the_mount_and_resume(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    given = instance(tmp_path / "i.json", seconds=0.3)
    command = words(
        tier, work, state, "replay", str(given), "--persist", "final", "--time-scale", "1", "--resume", "-j", "2"
    )
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    # (Through the process's own mount, because the results are on the tier only.)
    seen, until = Path(f"/proc/{process.pid}/root{work}") / journal.HOME, time.monotonic() + 60
    while sum(event["event"] == "done" for run_ in journal.runs(seen) for event in journal.events(seen / run_)) < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    kill_all(str(state), str(work))
    process.kill()
    process.wait()
    done = run(command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["replay"]["wrong"] == [] and report["replay"]["verified_files"] == 1
    # Finished tasks did not run again: the tier still had their outputs, which the store never had.
    assert report["tasks"]["done"] + report["tasks"]["done_before"] == 10 and report["tasks"]["done_before"] >= 4


def kill_all(*marks: str) -> None:
    """Kills with SIGKILL, including processes that are just starting."""
    while found := _processes(*marks):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes(*marks: str) -> list[int]:
    """Engine, agent and tasks: all processes with one of the marks in their command line or environment, except this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), os.getppid()):
            try:
                text = Path(f"/proc/{name}/cmdline").read_bytes() + b"\0" + Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if any(os.fsencode(mark) + b"\0" in text or os.fsencode(mark) + b":" in text for mark in marks):
                found.append(int(name))
    return found


@NEEDS_MOUNT
def test_inputs_are_staged_in_and_results_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURGETANK_BINARY", BINARY)
    work, state = places(tmp_path)
    source = tmp_path / "source"
    for place in (work, source):
        place.mkdir()
    (source / "in").write_text("x\n")
    asked = {"inputs_from": str(source), "results_to": str(tmp_path / "results"), "state": str(state)}
    report = do(diamond(), work, persist_named=True, **asked)
    assert [step["step"] for step in report["steps"] if step["ok"]] == ["reserve", "stage-in", "stage-out", "release"]
    assert (work / "in").read_text() == "x\n" and (tmp_path / "results/c").read_text().startswith("x\n0\n")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["c"]
    assert do(diamond(), work, persist_named=True, **asked)["tasks"]["done"] == 0


def test_bare_replay_verifies_what_it_reads(tmp_path: Path) -> None:
    given = instance(tmp_path / "i.json", chains=1, size=1 << 21)
    program = [
        sys.executable,
        "-c",
        DRIVER,
        "replay",
        str(given),
        "--dir",
        str(tmp_path / "w"),
        "--bare",
        "-q",
        "--json",
    ]
    done = run(program)
    assert done.returncode == 0 and json.loads(done.stdout)["replay"]["verified_files"] == 4, done.stderr
    with open(tmp_path / "w/b0", "r+b") as stream:
        stream.seek(1_500_000)
        stream.write(b"?")
    message = content.verify(str(tmp_path / "w/b0"), "b0", 1 << 21)
    assert message is not None and "block 1: its bytes are wrong" in message


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, content.BLOCK_BYTES, content.BLOCK_BYTES * 2 + 5])
def test_content_check_names_the_difference(tmp_path: Path, size: int) -> None:
    path = str(tmp_path / "f")
    content.write(path, "f", size)
    assert content.verify(path, "f", size) is None
    assert content.verify(path, "f", size + 1) is not None
    if size:
        assert content.verify(path, "f", size - 1) is not None
        assert content.verify(path, "g", size) is not None


@pytest.mark.parametrize(
    "at", [0, content.MASK_BYTES - 1, content.MASK_BYTES, content.BLOCK_BYTES - 1, content.BLOCK_BYTES + 5]
)
def test_wrong_byte_and_wrong_block_are_found(tmp_path: Path, at: int) -> None:
    path = tmp_path / "f"
    content.write(str(path), "f", 3 * content.BLOCK_BYTES)
    right = path.read_bytes()
    path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
    message = content.verify(str(path), "f", len(right))
    assert message is not None and f"block {at // content.BLOCK_BYTES}: its bytes are wrong" in message
    first, second, third = (right[n * content.BLOCK_BYTES : (n + 1) * content.BLOCK_BYTES] for n in range(3))
    path.write_bytes(second + first + third)
    assert content.verify(str(path), "f", len(right)) is not None
    assert content.Content("f").block(1) == second and second.startswith(content.Content("f").block(1, 5000))


def test_scaling_keeps_the_graph() -> None:
    tasks = [Task("t", "t", ["i"], ["o"], runtime_s=2.0)]
    workflow = Workflow.of("w", "w", tasks, [File("i", 1000), File("o", 1)])
    half = replay.scaled(workflow, 0.5, 0.1, "sleep")
    assert (half.files["i"].size_bytes, half.files["o"].size_bytes) == (500, 1)
    assert half.tasks["t"].command is not None and half.tasks["t"].command[4:] == [
        "0.2",
        "r",
        "i",
        "500",
        "w",
        "o",
        "1",
    ]
    assert replay.scale_for(workflow, 2002) == 2.0


@pytest.mark.skipif(not os.access(BINARY, os.X_OK), reason="needs the binary (SURGETANK_BINARY)")
def test_binary_help_names_the_verbs_of_the_package_without_it() -> None:
    # Regression: without the package, `surgetank workflow --help` showed only that the package was missing.
    shown = subprocess.run(
        [BINARY, "workflow", "--help"], env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=True
    ).stdout
    rows = shown.partition("Verbs:\n")[2].partition("\n\n")[0].splitlines()
    shown = dict(row.split(maxsplit=1) for row in rows)
    verbs = next(action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert shown == {choice.dest: choice.help for choice in verbs._choices_actions}
