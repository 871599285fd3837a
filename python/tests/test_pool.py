"""A workflow engine on one node of a pool, and its jobs on all nodes: the store gets what a plain directory gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test_replay import BINARY, NEEDS_MOUNT, tier
from test_snakemake import nothing_to_do, project, tree

__all__ = ["tier"]

NODES = 4

# Temporary files, logs, a checkpoint, a directory as an output, and a reader of all results. The next job is on the next node.
SNAKEFILE = r"""
import os
shell.executable(os.environ["ON_A_NODE"])
shell.prefix("set -euo pipefail; ")
NAMES = [f"{letter}{number}" for letter in "abcd" for number in range(3)]

rule all:
    input: "out/sum.txt"

rule scatter:
    input: expand("data/{s}.txt", s=list("abcd"))
    output: expand("parts/{n}.txt", n=NAMES)
    shell: "for f in {input}; do n=$(basename $f .txt); for k in 0 1 2; do awk \"NR % 3 == $k\" $f > parts/$n$k.txt; done; done"

rule sort:
    input: "parts/{n}.txt"
    output: temp("work/{n}.sorted")
    log: "logs/{n}.log"
    shell: "sort {input} > {output}.new; mv {output}.new {output}; echo {wildcards.n} >> {log}; wc -l < {output} >> {log}"

rule count:
    input: "work/{n}.sorted"
    output: "counts/{n}.txt"
    shell: "uniq {input} | wc -l > {output}; head -n 1 {input} >> {output}"

checkpoint split:
    input: expand("counts/{n}.txt", n=NAMES)
    output: directory("split")
    shell: "mkdir {output}; for f in {input}; do cp $f {output}; done; rm {output}/a0.txt"

rule part:
    input: "split/{n}.txt"
    output: "done/{n}.txt"
    shell: "cp {input} {output}; echo done >> {output}"

def parts(wildcards):
    there = glob_wildcards(os.path.join(checkpoints.split.get().output[0], "{n}.txt")).n
    return expand("done/{n}.txt", n=sorted(there))

rule sum:
    input: parts
    output: "out/sum.txt"
    shell: "cat {input} > {output}; ls logs | wc -l >> {output}"
"""

# Counts the jobs. Without a pool it is bash.
NEXT_TURN = r"""#!/bin/bash
set -eu
[ -n "${NODES:-}" ] || exec bash "$@"
exec 9< "$SEEN"
flock 9
turn=$(ls "$SEEN" | wc -l)
"""
# Takes the place of bash: the job's commands, in the same directory on the next node.
ON_A_NODE = (
    NEXT_TURN
    + r"""echo $((turn % COUNT)) > "$SEEN/$turn"
exec 9<&-
cd "$NODES/node$((turn % COUNT))"
exec bash "$@"
"""
)

# (In a mount namespace of its own.) All members leave, the first one last.
ON_ALL_NODES = r"""
set -eu
for node in $(seq 0 $((COUNT - 1))); do
    mkdir -p $NODES/node$node $STATE/$node $TIER/$node
    chmod 700 $STATE/$node
    "$BINARY" mount --pool test --pool-host 127.0.0.1 --pool-secret $NODES/secret --store $STORE --state $STATE/$node \
        --tier ram=$TIER/$node:64M $NODES/node$node
done
trap 'for node in $(seq $((COUNT - 1)) -1 0); do
    "$BINARY" umount --timeout 5s --state $STATE/$node $NODES/node$node || true
done' EXIT
code=0
cd $NODES/node0
"$@" || code=$?
cd /
for node in $(seq $((COUNT - 1)) -1 0); do
    "$BINARY" umount --timeout 60s --state $STATE/$node $NODES/node$node
done
trap - EXIT
exit $code
"""


def snakemake(words: list[str], place: Path, there: dict[str, str]) -> None:
    # (A result is there when its job has ended, on whichever node: no time for a late file system.)
    words = [*words, sys.executable, "-m", "snakemake", "--cores", str(NODES), "--latency-wait", "0"]
    done = subprocess.run(words, cwd=place, env=there, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_MOUNT
def test_snakemake_with_jobs_on_four_nodes_equals_a_plain_directory(tmp_path: Path, tier: Path) -> None:
    shell, seen, nodes = tmp_path / "on-a-node", tmp_path / "seen", tmp_path / "nodes"
    shell.write_text(ON_A_NODE)
    shell.chmod(0o755)
    seen.mkdir()
    nodes.mkdir()
    plain, store = (project(tmp_path / name, SNAKEFILE) for name in ("plain", "store"))
    there = {**os.environ, "ON_A_NODE": str(shell)}
    snakemake([], plain, there)
    pool = {"BINARY": BINARY, "TIER": str(tier), "STORE": str(store), "COUNT": str(NODES)}
    # (The kernel takes no path of a socket as long as these.)
    pool |= {"NODES": str(nodes), "SEEN": str(seen), "STATE": str(tmp_path / ("state" * 20))}
    snakemake(["unshare", "-m", "bash", "-c", ON_ALL_NODES, "nodes"], tmp_path, {**there, **pool})
    assert tree(store) == tree(plain)
    assert len(tree(store)) > 50
    # All nodes had jobs.
    jobs = [path.read_text().strip() for path in seen.iterdir()]
    assert {jobs.count(str(node)) for node in range(NODES)} <= {len(jobs) // NODES, len(jobs) // NODES + 1}
    assert nothing_to_do(store, there)
