"""`surgetank workflow run --on slurm` in a real Slurm of four nodes (scripts/slurm/serve): tasks run where their files are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_replay import BINARY, NEEDS_MOUNT
from test_slurm import NEEDS_SLURM, Slurm, serving

NODES, CHAINS, LENGTH, FILE_BYTES = 4, 8, 4, 4_000_000
# What moves if no content does: names, times, what the executor writes.
NAMES_BYTES_MAX = 2_000_000


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with serving(tmp_path / "slurm", NODES) as served:
        served.environment["PATH"] = f"{Path(sys.executable).parent}:{served.environment['PATH']}"
        yield served


def job(slurm: Slurm, tmp_path: Path, words: str, within_s: float = 120) -> tuple[str, dict[str, Any], str]:
    """Its state, the report, and standard error."""
    given = tmp_path / "job.sh"
    given.write_text(f"#!/bin/bash\nexec {BINARY} workflow run {words} --on slurm --json\n")
    number = slurm.submit(given, f"--nodes={NODES}", "--exclusive", "--time=5")
    state = slurm.ended(number, within_s)
    output, errors = (Path(f"{given}.{end}").read_text() for end in ("out", "err"))
    return state, json.loads(output or "{}"), errors


def chains() -> dict[str, Any]:
    """Pipelines of as many bytes, then a task that asks for the bytes that moved, then one that reads all."""
    tasks = {}
    for chain in range(CHAINS):
        for step in range(LENGTH):
            made = f"c{chain}/f{step}"
            source = f"cat c{chain}/f{step - 1}" if step else f"yes {chain} | head -c {FILE_BYTES}"
            tasks[f"c{chain}-{step}"] = {
                "command": f"{source} > {made}; uname -n > c{chain}/n{step}; sleep 0.2",
                "inputs": [f"c{chain}/f{step - 1}"] if step else [],
                "outputs": [made, f"c{chain}/n{step}"],
            }
    last = [f"c{chain}/f{LENGTH - 1}" for chain in range(CHAINS)]
    tasks["traffic"] = {
        "command": f"{BINARY} pool status --json . > traffic",
        "inputs": [f"c{chain}/n{LENGTH - 1}" for chain in range(CHAINS)],
        "outputs": ["traffic"],
    }
    tasks["sum"] = {
        "command": f"cat {' '.join(last)} | cksum > sum; uname -n > at",
        "inputs": [*last, "traffic"],
        "outputs": ["sum", "at"],
    }
    return {"surgetank": 1, "tasks": tasks}


@NEEDS_MOUNT
@NEEDS_SLURM
def test_pipelines_move_no_content_and_all_is_in_the_store(tmp_path: Path, slurm: Slurm) -> None:
    work, plain, described = tmp_path / "work", tmp_path / "plain", tmp_path / "w.yaml"
    for directory in (work, plain):
        directory.mkdir()
    described.write_text(json.dumps(chains()))
    state, report, errors = job(slurm, tmp_path, f"{described} --dir {work}")
    assert state == "COMPLETED", errors
    assert (report["exit"], report["tasks"]["done"], report["tasks"]["failed"]) == (0, len(chains()["tasks"]), {}), (
        report
    )
    assert "joins the pool slurm-" in errors
    # Each pipeline stayed on a node, and all nodes had some.
    at = {
        chain: {(work / f"c{chain}/n{step}").read_text().strip() for step in range(LENGTH)} for chain in range(CHAINS)
    }
    assert all(len(nodes) == 1 for nodes in at.values()), at
    assert len(set.union(*at.values())) == NODES, at
    # Elsewhere than on its node the content of three of four steps would move.
    moved = sum(one["bytes"] for one in json.loads((work / "traffic").read_text())["traffic"])
    assert 0 < moved < NAMES_BYTES_MAX < CHAINS * (LENGTH - 1) * FILE_BYTES // 10, moved
    for chain in range(CHAINS):
        expected = (f"{chain}\n" * (FILE_BYTES // 2)).encode()
        assert all((work / f"c{chain}/f{step}").read_bytes() == expected for step in range(LENGTH))
    assert (work / "sum").read_text().split()[1] == str(CHAINS * FILE_BYTES)

    # The next job has one task to do, and finds the others done.
    (work / "sum").unlink()
    state, report, errors = job(slurm, tmp_path, f"{described} --dir {work}")
    assert state == "COMPLETED", errors
    assert (report["tasks"]["done"], report["tasks"]["done_before"]) == (1, len(chains()["tasks"]) - 1), report
    assert (work / "sum").read_text().split()[1] == str(CHAINS * FILE_BYTES)


@NEEDS_MOUNT
@NEEDS_SLURM
def test_a_failed_task_is_named_and_others_go_on(tmp_path: Path, slurm: Slurm) -> None:
    work, described = tmp_path / "work", tmp_path / "w.yaml"
    work.mkdir()
    tasks = {
        f"t{n}": {"command": f"echo {n} > t{n}; sleep 0.3; echo more >> t{n}", "inputs": [], "outputs": [f"t{n}"]}
        for n in range(24)
    }
    tasks["bad"] = {"command": "echo because >&2; exit 7", "inputs": ["t3"], "outputs": ["bad"]}
    described.write_text(json.dumps({"surgetank": 1, "tasks": tasks}))
    state, report, errors = job(slurm, tmp_path, f"{described} --dir {work} --keep-going")
    assert state == "FAILED" and report["exit"] == 5, errors
    assert report["tasks"]["failed"] == {"bad": "exit code 7"} and "| because" in errors
    assert all((work / f"t{n}").read_text() == f"{n}\nmore\n" for n in range(24))
