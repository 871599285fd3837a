"""CWL by cwltool, unmodified: files between steps stay on the tiers, and the store gets the same files as from a plain run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_replay import BINARY, NEEDS_MOUNT, kill_all, places, tier
from test_snakemake import tree

from surgetank.workflow.agent import Agent

__all__ = ["tier"]

SORT = """
cwlVersion: v1.2
class: CommandLineTool
baseCommand: [sh, -c, 'echo start $1 >> SEEN; sort $0 > sorted; sleep SECONDS; echo end $1 >> SEEN']
inputs:
  file: {type: File, inputBinding: {position: 1}}
arguments: [{position: 2, valueFrom: $(inputs.file.basename)}]
outputs:
  sorted: {type: File, outputBinding: {glob: sorted}}
"""
FLOW = """
cwlVersion: v1.2
class: Workflow
requirements: {ScatterFeatureRequirement: {}}
inputs: {files: "File[]"}
steps:
  sort: {run: sort.cwl, scatter: file, in: {file: files}, out: [sorted]}
  join:
    run:
      class: CommandLineTool
      baseCommand: [sort, -m]
      inputs: {files: {type: "File[]", inputBinding: {}}}
      outputs: {joined: stdout}
      stdout: joined.txt
    in: {files: sort/sorted}
    out: [joined]
outputs:
  joined: {type: File, outputSource: join/joined}
"""
BETWEEN = ["--tmpdir-prefix", "cwl-work/tmp", "--tmp-outdir-prefix", "cwl-work/out", "--outdir", "results"]


def project(place: Path, seen: Path, seconds: float) -> Path:
    (place / "data").mkdir(parents=True)
    for name in "abcd":
        (place / f"data/{name}.txt").write_text("".join(f"{name}{n * 7919 % 10007}\n" for n in range(5000)))
    (place / "sort.cwl").write_text(SORT.replace("SEEN", str(seen)).replace("SECONDS", str(seconds)))
    (place / "flow.cwl").write_text(FLOW)
    files = [{"class": "File", "location": f"data/{name}.txt"} for name in "abcd"]
    (place / "job.yaml").write_text(json.dumps({"files": files}))
    return place


def cwltool(*more: str) -> list[str]:
    return [sys.executable, "-m", "cwltool", "--parallel", *more, "flow.cwl", "job.yaml"]


def under(state: Path, tier: Path, rule: str, words: list[str]) -> list[str]:
    # (In the environment, which identifies every process of the run.)
    there = ["env", f"SURGETANK_STATE={state}", f"SURGETANK_TIERS=ram={tier}:64M"]
    return [*there, "unshare", "-m", BINARY, "run", "--rule", rule, "--", *words]


def run(words: list[str], work: Path) -> None:
    done = subprocess.run(words, cwd=work, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@NEEDS_MOUNT
def test_only_results_reach_the_store(tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, state = places(tmp_path)
    plain = project(tmp_path / "plain", tmp_path / "seen", 0)
    run(cwltool("--outdir", "results"), plain)
    # (A wrong drain of a step's output has enough time to reach the store.)
    project(work, tmp_path / "seen", 1)
    before = tree(work)
    run(under(state, tier, "cwl-work/=remove", cwltool(*BETWEEN)), work)
    (work / "sort.cwl").write_bytes((plain / "sort.cwl").read_bytes())
    assert tree(work) == tree(plain) and tree(work).keys() - before.keys() == {"results/joined.txt"}
    # The drain sent exactly the bytes of the result.
    monkeypatch.setenv("SURGETANK_BINARY", BINARY)
    record = Agent(state=str(state)).records()[-1]
    assert record["store_traffic"]["out_bytes"] == (work / "results/joined.txt").stat().st_size
    assert record["tiers"][0]["in_bytes"] > 2 * record["store_traffic"]["out_bytes"] - 1


@NEEDS_MOUNT
def test_kill_of_cwltool_and_agent_and_resume_by_its_cache(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    seen = tmp_path / "seen"
    project(work, seen, 0.5)
    command = under(state, tier, "cwl-cache/=keep", cwltool("--cachedir", "cwl-cache", "--outdir", "results"))
    process = subprocess.Popen(
        command, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 60
    while not seen.exists() or seen.read_text().count("end") < 2 or seen.read_text().count("start") < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    kill_all(str(state))
    process.kill()
    process.wait()
    assert not (work / "results").exists() or not any((work / "results").iterdir())
    run(command, work)
    lines = (work / "results/joined.txt").read_text().splitlines()
    assert len(lines) == 20_000 and lines == sorted(lines)
    # Finished steps did not run again.
    begun = seen.read_text().split("start")
    assert len(begun) - 1 <= 4 + 2
    # The cache was on the tier only; the user of the result removes it.
    assert not [path for path in (work / "cwl-cache").rglob("*") if path.is_file()]
    run(under(state, tier, "cwl-cache/=keep", ["rm", "-r", "cwl-cache"]), work)
    assert not (work / "cwl-cache").exists()
