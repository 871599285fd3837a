"""Nextflow, as scripts/setup gets it from Maven, after a kill of everything. (Its tutorial shows that its cache is valid on the bare store.)"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from test_replay import BINARY, NEEDS_MOUNT, ROOT, kill_all, tier
from test_snakemake import tree

__all__ = ["tier"]

NEXTFLOW = ROOT.parent / "scripts/nextflow/nextflow"
TOOLS = Path(os.environ.get("SURGETANK_TOOLS", Path.home() / ".cache/surgetank/tools"))
NEEDS_NEXTFLOW = pytest.mark.skipif(not (TOOLS / "nextflow/lib").exists(), reason="no Nextflow: scripts/setup test")

FLOW = """
process SORT {
    input: path file
    output: path "${file.baseName}.sorted"
    script: "echo start ${file} >> $SEEN; sort ${file} > ${file.baseName}.sorted; sleep SECONDS; echo end >> $SEEN"
}

process COUNT {
    publishDir 'results', mode: 'copy'
    input: path file
    output: path "${file.baseName}.count"
    script: "echo start ${file} >> $SEEN; wc -l < ${file} > ${file.baseName}.count; sleep SECONDS; echo counted >> $SEEN"
}

workflow { Channel.fromPath('data/*.txt') | SORT | COUNT }
"""


def project(place: Path, seen: Path, seconds: float, config: str = "") -> Path:
    (place / "data").mkdir(parents=True)
    for name in "abc":
        (place / f"data/{name}.txt").write_text("".join(f"{name}{n * 7919 % 10007}\n" for n in range(20_000)))
    (place / "main.nf").write_text(FLOW.replace("$SEEN", str(seen)).replace("SECONDS", str(seconds)))
    (place / "nextflow.config").write_text(config)
    return place


def surroundings(tmp_path: Path, tier: Path) -> dict[str, str]:
    (tmp_path / "state").mkdir(mode=0o700)
    own = {"SURGETANK_STATE": str(tmp_path / "state"), "SURGETANK_TIERS": f"ram={tier}:64M"}
    # Nextflow fetches nothing and draws nothing. It does not map its cache, because a kill of the agent and its supervisor loses the last
    # seconds of mapped files (its tutorial says so).
    own["NXF_OPTS"] = "-Dleveldb.mmap=false"
    return {**os.environ, **own, "NXF_HOME": str(tmp_path / "home"), "NXF_OFFLINE": "true", "NXF_ANSI_LOG": "false"}


def under(rule: str, *more: str) -> list[str]:
    return ["unshare", "-m", BINARY, "run", "--rule", rule, "--", str(NEXTFLOW), "run", "main.nf", *more]


def nextflow(words: list[str], work: Path, there: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=work, env=there, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def scripts_left(there: dict[str, str]) -> int:
    """The number of task directories that the last run left on the tier."""
    words = [BINARY, "report", "last", "--json", "--state", there["SURGETANK_STATE"]]
    record = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return sum(path.endswith("/.command.run") for path in record["verdict"]["kept"]["first"])


@NEEDS_MOUNT
@NEEDS_NEXTFLOW
def test_nextflow_work_stays_on_the_tier_and_survives_a_kill(tmp_path: Path, tier: Path) -> None:
    seen = tmp_path / "seen"
    work, there = project(tmp_path / "w", seen, 1, "cleanup = true\n"), surroundings(tmp_path, tier)
    command = under("work/=keep")
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=work, env=there, stdout=file, stderr=file, start_new_session=True)
    until = time.monotonic() + 60
    # At this point Nextflow has recorded that the preceding task is done.
    while not seen.exists() or "counted" not in seen.read_text():
        assert process.poll() is None and time.monotonic() < until, f"exit {process.poll()}: {output.read_text()}"
        time.sleep(0.02)
    kill_all(there["SURGETANK_STATE"])
    process.kill()
    process.wait()
    begun = seen.read_text().count("start")
    resumed = nextflow([*command, "-resume"], work, there)
    # The tier still had the results of the recorded tasks, so only the other tasks ran.
    cached = resumed.count("Cached process")
    assert cached >= 1 and seen.read_text().count("start") == begun + 6 - cached, resumed
    made = tree(work)
    # (Nextflow's clean-up leaves the directories of the killed run's tasks, with links to the inputs and the files on the tier.)
    files = {path for path in made if path.startswith(("results/", "work/")) and not (work / path).is_symlink()}
    assert files == {f"results/{name}.count" for name in "abc"}
    assert {made[f"results/{name}.count"] for name in "abc"} == {b"20000\n"}
    # Only the directories of cached tasks are left; the command of the tutorial removes them.
    assert scripts_left(there) == cached
    nextflow([*command[: command.index("--") + 1], "rm", "-r", "work"], work, there)
    assert scripts_left(there) == 0 and not (work / "work").exists()
