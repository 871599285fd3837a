"""The user's command line under the mount: which files persist, and when."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_replay import BINARY, NEEDS_MOUNT, environment, places, tier

from surgetank.workflow import importers
from surgetank.workflow.graph import Workflow

__all__ = ["tier"]

# Writes the agent's state of a.out into the named file, when the state is `durable` or that many seconds have passed.
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
def test_outputs_persist_during_the_run_after_their_children(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    # b waits long enough for a wrong drain of a's output.
    given = described(tmp_path / "w.yaml", 1)
    done = run(command(tier, work, state, str(given), "--persist", "when-consumed"))
    assert done.returncode == 0, done.stderr
    assert (work / "b.out").read_text() != "durable"
    assert (work / "c.out").read_text() == "durable"
    assert (work / "a.out").read_text() == "from a\n"


@NEEDS_MOUNT
def test_rule_of_the_user_overrides_the_graph(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    (work / "surgetank.toml").write_text('rules = ["a.out=copy"]\n')
    given = described(tmp_path / "w.yaml", 10)
    done = run(command(tier, work, state, str(given), "--persist", "when-consumed"))
    assert done.returncode == 0, done.stderr
    assert (work / "b.out").read_text() == "durable"


@NEEDS_MOUNT
def test_failed_task_gives_its_exit_code_through_the_binary(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    given = tmp_path / "w.yaml"
    given.write_text(json.dumps({"surgetank": 1, "tasks": {"t": {"command": ["false"], "outputs": ["x"]}}}))
    done = run(command(tier, work, state, str(given)))
    assert done.returncode == 5, done.stderr
    assert "t" in done.stderr


@NEEDS_MOUNT
def test_removed_journal_ends_the_run_with_a_message(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    given = tmp_path / "w.yaml"
    tasks = {"t": {"command": "rm -r .surgetank-workflow; echo x >x", "outputs": ["x"]}}
    given.write_text(json.dumps({"surgetank": 1, "tasks": tasks}))
    done = run(command(tier, work, state, str(given)))
    assert done.returncode == 1 and "the run cannot continue" in done.stderr and "Traceback" not in done.stderr
    assert (work / "x").read_text() == "x\n"


MAKEFILE = """
all: report
a.txt: raw
	tr a-m n-z <raw | sort -u >a.txt
b.txt: raw
	cp raw b.tmp && mv b.tmp b.txt
joined: a.txt b.txt
	cat a.txt b.txt >$@
report: joined
	$(PYTHON) -c 'import mmap; f = open("joined", "rb"); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); \
	  open("report", "w").write(str(sum(m[::512])))'
"""


@NEEDS_MOUNT
def test_traced_make_run_gives_the_graph_of_the_makefile(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    (work / "Makefile").write_text(MAKEFILE)
    (work / "raw").write_text("".join(f"{number * 7919 % 10007}\n" for number in range(20_000)))
    describes = importers.load(work / "Makefile")
    served = ["--over", str(work), "--state", str(state), "--tier", f"ram={tier}:64M", "-q"]
    make = ["make", "-C", str(work), "-j2", "-s", f"PYTHON={sys.executable}"]
    done = run(["unshare", "-m", BINARY, "run", "--trace", *served, "--", *make])
    assert done.returncode == 0, done.stderr
    shown = run([BINARY, "report", "--state", str(state), "--json"])
    recorded = tmp_path / "record.json"
    recorded.write_text(shown.stdout)
    observed = importers.load(recorded)
    assert observed.incomplete == []

    def edges(workflow: Workflow) -> set[tuple[str, str]]:
        ours = {"raw", "a.txt", "b.txt", "joined", "report"}
        tasks = workflow.tasks.values()
        return {(one, made) for task in tasks for one in task.inputs for made in task.outputs if {one, made} <= ours}

    assert edges(observed) == edges(describes) and len(edges(observed)) == 5
    assert observed.files["joined"].size_bytes == (work / "joined").stat().st_size
    # A file and its name before the rename are one file in the graph.
    assert not any("tmp" in path for path in observed.files)


def _misses(state: Path) -> int:
    """Bytes that tasks of the last run read from the store because they were not in the tier."""
    shown = run([BINARY, "report", "--state", str(state), "--json"])
    return sum(event["bytes"] for event in json.loads(shown.stdout)["events"] if event["kind"] == "miss")


@NEEDS_MOUNT
def test_latest_read_files_are_evicted_first(tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run makes twelve files, and reads the first five three times, then the others. An eviction by age would drop the first ones."""
    count, size = 12, 4 << 20
    tasks: dict[str, dict[str, object]] = {}
    for number in range(count):
        command = f"head -c {size} /dev/zero >m{number} && '{BINARY}' wait -q m{number}"
        tasks[f"make{number}"] = {"command": command, "outputs": [f"m{number}"]}
    for place, number in enumerate([*range(5), *range(5), *range(5), *range(5, count)]):
        tasks[f"read{place}"] = {
            "command": f"cksum <m{number} >r{place}",
            "inputs": [f"m{number}"],
            "outputs": [f"r{place}"],
        }
    for before, after in itertools.pairwise(tasks):
        tasks[after]["after"] = [before]
    described = tmp_path / "w.yaml"
    described.write_text(json.dumps({"surgetank": 1, "tasks": tasks}))
    misses = {}
    for knows in (True, False):
        work, state = tmp_path / f"work-{knows}", tmp_path / f"state-{knows}"
        work.mkdir()
        served = ["--state", str(state), "--tier", f"ram={tier}:{6 * size}", "-q"]
        if knows:
            words = [BINARY, "workflow", "run", str(described), "-j1", "--over", str(work), "--dir", str(work), *served]
        else:
            script = "set -e\n" + "\n".join(str(task["command"]) for task in tasks.values())
            words = [BINARY, "run", "--over", str(work), *served, "--", "sh", "-c", f"cd '{work}'\n{script}"]
        monkeypatch.setenv("SURGETANK_STATE", str(state))
        done = run(["unshare", "-m", *words])
        assert done.returncode == 0, done.stderr
        assert len({(work / f"r{number}").read_text() for number in range(15 + count - 5)}) == 1
        misses[knows] = _misses(state)
    assert misses[True] <= misses[False] - 3 * size, misses


@NEEDS_MOUNT
@pytest.mark.parametrize(("persist", "warned"), [("all", True), ("final", False)])
def test_store_without_room_is_reported_before_the_run(tmp_path: Path, tier: Path, persist: str, warned: bool) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    size = 12 << 20
    described = tmp_path / "w.yaml"
    tasks = {
        "make": {"command": "head -c 100 /dev/zero >large", "outputs": ["large"]},
        "use": {"command": "wc -c <large >count", "inputs": ["large"], "outputs": ["count"]},
    }
    described.write_text(json.dumps({"surgetank": 1, "tasks": tasks, "files": {"large": {"size": size}}}))
    words = [BINARY, "workflow", "run", str(described), "--persist", persist, "--over", str(work), "--dir", str(work)]
    words += ["--state", str(state), "--tier", f"ram={tier}:64M"]
    mounted = 'mount -t tmpfs -o size=8M none "$0" && exec "$@"'
    done = run(["unshare", "-m", "sh", "-c", mounted, str(work), *words])
    assert done.returncode == 0, done.stderr
    assert ("12.0 MiB are to be written to the store, and 8.0 MiB are free there" in done.stderr) == warned, done.stderr


FULL = """
set -eu
store=$1; shift
mount -t tmpfs -o size=3M tmpfs "$store"
dd if=/dev/zero of="$store/filler" bs=1M count=2 status=none
SURGETANK_RETRY=2s "$@" && exit 1
code=$?
rm "$store/filler"
"$@" >"$store.again"
cmp "$store/made" "$store.wanted"
exit $code
"""


@NEEDS_MOUNT
def test_full_store_is_waited_for_once(tmp_path: Path, tier: Path) -> None:
    work, state = places(tmp_path)
    work.mkdir()
    wanted = os.urandom(1_600_000)
    Path(f"{work}.wanted").write_bytes(wanted)
    given = tmp_path / "w.yaml"
    tasks = {"t": {"command": ["cp", f"{work}.wanted", "made"], "outputs": ["made"]}}
    given.write_text(json.dumps({"surgetank": 1, "tasks": tasks}))
    # The executor's requests use this program, which records them.
    asked, program = tmp_path / "asked", tmp_path / "surgetank"
    program.write_text(f'#!/bin/sh\necho "$1" >>{asked}\nexec {BINARY} "$@"\n')
    program.chmod(0o755)
    words = command(tier, work, state, str(given))
    there = ["unshare", "-m", "env", f"SURGETANK_BINARY={program}", "sh", "-c", FULL, "sh", str(work)]
    done = run([*there, *words[2:]])
    assert done.returncode == 3, done.stderr
    report, again = json.loads(done.stdout), json.loads(Path(f"{work}.again").read_text())
    out = {step["step"]: step["ok"] for step in report["steps"]}
    assert out == {"reserve": True, "stage-out": False, "release": True} and report["exit"] == 3
    assert report["steps"][1]["ended_ns"] - report["steps"][1]["began_ns"] >= 2e9
    verbs = asked.read_text().split()
    assert verbs[0] == "run" and "wait" not in verbs[: verbs.index("run", 1)]
    # The next run drains the file, and has no task to run.
    assert again["exit"] == 0 and again["tasks"]["done"] == 0
    assert all(step["ok"] for step in again["steps"]) and again["steps"][1]["step"] == "stage-out"
