"""Jobs of a real Slurm (scripts/slurm/serve, one node). The agent finds a job's memory and time limits without configuration. A job
continues the work of a killed one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_replay import BINARY, NEEDS_MOUNT, ROOT, environment, places, tier

from surgetank.workflow.execute import journal

__all__ = ["tier"]

# (Under CI a missing Slurm is an error.)
NEEDS_SLURM = pytest.mark.skipif(
    "CI" not in os.environ and shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="needs Slurm (scripts/setup test)",
)
MIB = 1 << 20
TASKS = 12


@dataclass
class Slurm:
    environment: dict[str, str]

    def submit(self, script: Path, *options: str) -> str:
        words = ["sbatch", "--parsable", f"--output={script}.out", f"--error={script}.err", *options, str(script)]
        return subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True).stdout.strip()

    def state(self, job: str) -> str:
        words = ["scontrol", "show", "job", job]
        output = subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True).stdout
        found = re.search(r"JobState=(\w+)", output)
        assert found is not None, output
        return found[1]

    def ended(self, job: str, within_s: float) -> str:
        until = time.monotonic() + within_s
        while (state := self.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < until, state
            time.sleep(0.1)
        return state

    def kill(self, job: str) -> None:
        subprocess.run(["scancel", "--full", "--signal=KILL", job], env=self.environment, check=True)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with serving(tmp_path / "slurm", 1) as served:
        yield served


@contextlib.contextmanager
def serving(place: Path, nodes: int) -> Iterator[Slurm]:
    sockets = [socket.socket() for _ in range(1 + nodes)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    # Job scripts have the environment of the submitting user.
    served = subprocess.Popen([ROOT.parent / "scripts/slurm/serve", place, *ports], start_new_session=True)
    try:
        until = time.monotonic() + 90
        while not (place / "ready").exists():
            assert served.poll() is None and time.monotonic() < until, "Slurm did not start"
            time.sleep(0.05)
        yield Slurm({**environment(), "SLURM_CONF": str(place / "slurm.conf")})
    finally:
        served.send_signal(signal.SIGTERM)
        try:
            served.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(served.pid, signal.SIGKILL)
            served.wait()


def script(path: Path, command: str) -> Path:
    path.write_text(f"#!/bin/bash\nexec unshare -m {BINARY} {command}\n")
    return path


@NEEDS_MOUNT
@NEEDS_SLURM
def test_jobs_end_with_all_in_the_store_and_the_next_goes_on(tmp_path: Path, tier: Path, slurm: Slurm) -> None:
    # A job that works until its time limit of a minute, and whose quiet period would delay the drain for an hour.
    long, state = places(tmp_path)
    long.mkdir()
    status = tmp_path / "status.json"
    work = f"{BINARY} status --state {state} --json . >{status}; head -c 40000000 /dev/urandom >big; echo last >last; exec sleep 600"
    given = script(
        tmp_path / "long.sh",
        f"run --over {long} --state {state} --tier ram={tier} --quiet-period 1h -- sh -c 'cd {long}; {work}'",
    )
    began = time.monotonic()
    job = slurm.submit(given, "--time=1", "--mem=300M", "--cpus-per-task=1")

    # Meanwhile, a job is killed in the middle of a workflow, with its results only on a tier of the node.
    flow, flow_state = tmp_path / "flow", tmp_path / "flow-state"
    flow.mkdir()
    flow_state.mkdir(mode=0o700)
    (tmp_path / "disk").mkdir()
    steps = {
        f"t{n}": {
            "command": f"sleep 0.5; cat {f'f{n - 1}' if n else '/dev/null'} >f{n}; echo {n} >>f{n}",
            "inputs": [f"f{n - 1}"] if n else [],
            "outputs": [f"f{n}"],
        }
        for n in range(TASKS)
    }
    described = tmp_path / "w.yaml"
    described.write_text(json.dumps({"surgetank": 1, "tasks": steps}))
    served = f"--dir {flow} --state {flow_state} --tier disk={tmp_path / 'disk'}:64M"
    again = script(tmp_path / "flow.sh", f"workflow run {described} {served} --persist final -q --json")
    # `surgetank workflow` takes the Python beside the binary or the first on the path.
    slurm.environment["PATH"] = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    killed = slurm.submit(again, "--time=5", "--mem=300M", "--cpus-per-task=1")
    until = time.monotonic() + 40
    while sum(event["event"] == "done" for event in _events(tmp_path / "disk")) < 3:
        assert time.monotonic() < until and slurm.state(killed) in ("PENDING", "CONFIGURING", "RUNNING")
        time.sleep(0.05)
    slurm.kill(killed)
    assert slurm.ended(killed, 20) in ("CANCELLED", "FAILED")
    assert not (flow / f"f{TASKS - 1}").exists()
    resumed = slurm.submit(again, "--time=5", "--mem=300M", "--cpus-per-task=1")
    assert slurm.ended(resumed, 60) == "COMPLETED", Path(f"{again}.err").read_text()
    report = json.loads(Path(f"{again}.out").read_text())
    assert report["tasks"]["done_before"] >= 3 and report["tasks"]["done"] + report["tasks"]["done_before"] == TASKS
    assert (flow / f"f{TASKS - 1}").read_text() == "".join(f"{n}\n" for n in range(TASKS))

    assert slurm.ended(job, 120) == "TIMEOUT" and time.monotonic() - began >= 50
    output = Path(f"{given}.err").read_text()
    # (From Slurm 23.02 on a variable has the end of the job; with older versions the agent runs `squeue`.)
    assert re.search("the job ends at .* says (SLURM_JOB_END_TIME|squeue)", output), output
    assert (long / "last").read_text() == "last\n" and (long / "big").stat().st_size == 40_000_000, output
    found = json.loads(status.read_text())[0]
    assert found["deadline"]["from"] in ("SLURM_JOB_END_TIME", "squeue")
    caps = [one["cap_bytes"] for one in found["tiers"] if one["name"] == "ram"]
    assert 0 < sum(caps) <= 300 * MIB, found["tiers"]


def _events(disk: Path) -> Iterator[dict[str, str]]:
    """Returns the run in progress: its journal is on the tier."""
    for home in disk.glob(f"*/{journal.HOME}"):
        for run in journal.runs(home):
            yield from journal.events(home / run)
