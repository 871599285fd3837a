"""Snakemake on four nodes of a pool: jobs run where their files are, by a resource of their rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_pool import NODES, ON_ALL_NODES
from test_replay import BINARY, NEEDS_MOUNT, tier

import surgetank

__all__ = ["tier"]

ROOT = Path(__file__).parent.parent
PARTS = 12
# The three lines: the import, the resource, and its use.
SNAKEFILE = r"""
import surgetank
STATE = os.environ["STATE"] + "/0"
PARTS = range(int(os.environ["PARTS"]))

def near(wildcards, input):
    return surgetank.nodelist(input, state=STATE)

rule all:
    input: expand("read/{n}", n=PARTS), "sum"

rule make:
    output: "made/{n}"
    params: node=lambda wildcards: (int(wildcards.n) * 7 + int(wildcards.n) // 4) % 4
    shell: "srun --nodelist=node{params.node} --nodes=1 --ntasks=1 bash -c 'head -c 1000000 /dev/zero > {output}; uname -n > {output}.node'"

rule read:
    input: "made/{n}"
    output: "read/{n}"
    resources: near=near
    shell: "srun {resources.near} --nodes=1 --ntasks=1 bash -c 'cat {input} | wc -c > {output}; uname -n >> {output}'"

# (The node that has most of them.)
rule add:
    input: expand("made/{n}", n=[n for n in PARTS if n % 4 == 0] + [0])
    output: "sum"
    resources: near=near
    shell: "srun {resources.near} --nodes=1 --ntasks=1 bash -c 'uname -n > {output}'"
"""
# Takes the place of Slurm's: the command, in the directory of the node that it names. Without one, any.
SRUN = r"""#!/bin/bash
set -eu
node=node3
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; --nodes=1|--ntasks=1) ;; *) exit 9 ;; esac
    shift
done
cd "$NODES/$node"
exec unshare --uts sh -c 'hostname "$0"; exec "$@"' "$node" "$@"
"""


@NEEDS_MOUNT
def test_jobs_run_where_their_files_are(tmp_path: Path, tier: Path) -> None:
    nodes, store, commands = (tmp_path / name for name in ("nodes", "store", "bin"))
    for directory in (nodes, store, commands):
        directory.mkdir()
    (commands / "srun").write_text(SRUN)
    (commands / "srun").chmod(0o755)
    (store / "Snakefile").write_text(SNAKEFILE)
    there = {**os.environ, "BINARY": BINARY, "TIER": str(tier), "STORE": str(store), "COUNT": str(NODES)}
    there |= {"NODES": str(nodes), "STATE": str(tmp_path / "state"), "PARTS": str(PARTS)}
    there |= {"PYTHONPATH": str(ROOT), "PATH": f"{commands}:{os.environ['PATH']}"}
    mounts = ON_ALL_NODES.replace(
        '"$BINARY" mount', 'unshare --uts sh -c \'hostname "$0"; exec "$@"\' node$node "$BINARY" mount'
    )
    assert mounts != ON_ALL_NODES
    words = ["unshare", "-m", "bash", "-c", mounts, "nodes", sys.executable, "-m", "snakemake"]
    words += ["--cores", str(NODES), "--latency-wait", "0", "--quiet"]
    done = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {n: (store / f"made/{n}.node").read_text().strip() for n in range(PARTS)}
    assert len(set(made.values())) == NODES, made
    read = {n: (store / f"read/{n}").read_text().split() for n in range(PARTS)}
    assert {n: found[0] for n, found in read.items()} == dict.fromkeys(range(PARTS), "1000000")
    assert {n: found[1] for n, found in read.items()} == made, (read, done.stderr)
    summed = [made[n] for n in range(0, PARTS, 4)]
    best = max(sorted(set(summed)), key=summed.count)
    assert (store / "sum").read_text().strip() == best, (summed, json.dumps(made))


def test_without_an_agent_jobs_run_anywhere(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="jobs are not placed where their files are: no agent of yours serves"):
        assert surgetank.nodelist(tmp_path / "file", state=tmp_path / "state") == ""
    with pytest.raises(surgetank.AgentError, match="no agent of yours serves"):
        surgetank.node([tmp_path / "file"], state=tmp_path / "state")
