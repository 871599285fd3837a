"""A node of a pool is lost in the middle of a workflow: the tasks whose outputs are lost run again, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_execute import flow
from test_pool import NEXT_TURN
from test_replay import BINARY, NEEDS_MOUNT, ROOT, tier

from surgetank.workflow.execute import graphfile
from surgetank.workflow.graph import Task, Workflow

__all__ = ["tier"]

NODES = 4
# This node is lost, when so many jobs have begun.
LOST, AFTER = 2, 10

# Takes the place of bash: the job's commands, in the same directory on the next node that is there.
ON_A_NODE = (
    NEXT_TURN
    + r"""touch "$SEEN/$turn"
if [ $turn = $AFTER ]; then
    touch "$NODES/lose"
    until [ -e "$NODES/is-lost" ]; do sleep 0.02; done
fi
exec 9<&-
node=$((turn % COUNT))
if [ $node = $LOST ] && [ -e "$NODES/is-lost" ]; then node=0; fi
cd "$NODES/node$node"
bash "$@"
job=$(sed -n 's/.*export JOB=\([a-z0-9]*\);.*/\1/p' <<< "$*")
echo "$node ${SURGETANK_WORKFLOW_TASK:-$job}" >> "$NODES/done"
"""
)

# (In a mount namespace of its own.) Nothing is drained before the end. All members leave, the first one last.
ON_ALL_NODES = r"""
set -eu
for node in $(seq 0 $((COUNT - 1))); do
    mkdir -p $NODES/node$node $STATE/$node $TIER/$node
    chmod 700 $STATE/$node
    "$BINARY" mount --pool test --pool-host 127.0.0.1 --pool-secret $NODES/secret --pool-lease 3s --quiet-period 1h \
        --store $STORE --state $STATE/$node --tier ram=$TIER/$node:64M $NODES/node$node
done
lose() {
    until [ -e $NODES/lose ]; do sleep 0.02; done
    agent=$("$BINARY" status --json --state $STATE/$LOST $NODES/node$LOST | sed -n 's/^ *"pid": \([0-9]*\),$/\1/p' | head -n 1)
    supervisor=$(ps -o ppid= -p $agent)
    kill -STOP $supervisor
    pkill -KILL -P $supervisor
    kill -KILL $supervisor
    umount -l $NODES/node$LOST
    rm -rf $STATE/$LOST $TIER/$LOST
    touch $NODES/is-lost
}
lose &
loses=$!
leave() {
    for node in $(seq $((COUNT - 1)) -1 0); do
        [ $node = $LOST ] || "$BINARY" umount --timeout $1 --state $STATE/$node $NODES/node$node || $2
    done
}
trap 'touch $NODES/lose; wait $loses; leave 5s true' EXIT
code=0
cd $NODES/node0
"$@" || code=$?
cd /
leave 60s false
trap - EXIT
exit $code
"""

DRIVER = """
import json, sys
from surgetank.workflow.execute import graphfile
from surgetank.workflow.execute.launch import launch
from surgetank.workflow.execute.settings import Settings
workflow = graphfile.from_json(json.load(open(sys.argv[1])))
settings = Settings(".", ".", jobs=2.0, persist="all", state=sys.argv[2], progress=False, grace_s=2.0)
report = launch(workflow, settings)
json.dump(report, open(sys.argv[3], "w"))
sys.exit(report["exit"])
"""


@dataclass
class Pool:
    """Four members over one store, and a directory without Surgetank."""

    place: Path
    environment: dict[str, str]

    def run(self, words: list[str], code: int = 0) -> str:
        words = ["unshare", "-m", "bash", "-c", ON_ALL_NODES, "nodes", *words]
        done = subprocess.run(
            words, cwd=self.place, env=self.environment, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def done(self) -> list[tuple[int, str]]:
        """Each job that has ended well: its node and its name, in order."""
        lines = (self.place / "nodes/done").read_text().splitlines()
        return [(int(node), name) for node, name in (line.split(" ", 1) for line in lines)]

    def lost_outputs(self, first: set[str]) -> set[str]:
        """Of these jobs, those that ran on the lost node."""
        return {name for node, name in self.done() if node == LOST and name in first}


@pytest.fixture
def pool(tmp_path: Path, tier: Path) -> Iterator[Pool]:
    before = set(Path("/dev/shm").glob("surgetank-*"))
    shell = tmp_path / "on-a-node"
    shell.write_text(ON_A_NODE)
    shell.chmod(0o755)
    for name in ("seen", "nodes", "store", "plain"):
        (tmp_path / name).mkdir()
    there = {"BINARY": BINARY, "TIER": str(tier), "STORE": str(tmp_path / "store"), "COUNT": str(NODES)}
    there |= {"LOST": str(LOST), "AFTER": str(AFTER), "STATE": str(tmp_path / "state"), "ON_A_NODE": str(shell)}
    there |= {"NODES": str(tmp_path / "nodes"), "SEEN": str(tmp_path / "seen"), "PYTHONPATH": str(ROOT)}
    yield Pool(tmp_path, {**os.environ, **there, "SURGETANK_BINARY": BINARY})
    # (Of the lost node.)
    for index in set(Path("/dev/shm").glob("surgetank-*")) - before:
        index.unlink()


def results(place: Path) -> dict[str, bytes]:
    names = [path for path in place.rglob("*") if path.is_file() and path.parent.name in ("parts", "work", "out")]
    return {str(path.relative_to(place)): path.read_bytes() for path in names}


def described(shell: str) -> Workflow:
    """Twelve parts, each sorted, and the sum of all."""

    def job(id_: str, text: str, inputs: list[str], output: str) -> Task:
        return Task(id_, "kind", inputs, [output], command=[shell, "-c", f"set -e; {text} > {output}"])

    numbers = range(12)
    parts = [job(f"part{n}", f"seq {n} 7 20000", [], f"parts/{n}") for n in numbers]
    works = [job(f"work{n}", f"sort parts/{n}", [f"parts/{n}"], f"work/{n}") for n in numbers]
    names = [f"work/{n}" for n in numbers]
    return flow(*parts, *works, job("sum", f"cat {' '.join(names)}", names, "out/sum"))


@NEEDS_MOUNT
def test_tasks_whose_outputs_are_lost_run_again(pool: Pool) -> None:
    shell = pool.environment["ON_A_NODE"]
    spec, report = pool.place / "workflow.json", pool.place / "report.json"
    spec.write_text(json.dumps(graphfile.to_json(described(shell))))
    said = pool.run([sys.executable, "-c", DRIVER, str(spec), f"{pool.environment['STATE']}/0", str(report)])
    facts: dict[str, Any] = json.loads(report.read_text())
    names = [name for _, name in pool.done()]
    twice = {name for name in names if names.count(name) > 1}
    assert set(facts["tasks"]["again"]) == twice == pool.lost_outputs(set(names)), said
    assert twice and "run again" in said
    plain = described("/bin/bash")
    for task in plain.tasks.values():
        for path in task.outputs:
            (pool.place / "plain" / path).parent.mkdir(exist_ok=True)
    for id_ in plain.order:
        words = plain.tasks[id_].command
        assert isinstance(words, list)
        subprocess.run(words, cwd=pool.place / "plain", check=True)
    assert results(pool.place / "store") == results(pool.place / "plain")
    assert len(results(pool.place / "store")) == 25


# The lines for the shell are those of docs/how-to/several-nodes.md.
SNAKEFILE = r"""
import os
shell.executable(os.environ["ON_A_NODE"])
rule all:
    input: "out/sum"
rule part:
    output: "parts/{n}"
    shell: "export JOB=part{wildcards.n}; set -e; seq {wildcards.n} 7 20000 > {output}"
rule sort:
    input: "parts/{n}"
    output: "work/{n}"
    shell: "export JOB=work{wildcards.n}; set -e; sort {input} > {output}"
rule sum:
    input: expand("work/{n}", n=range(12))
    output: "out/sum"
    shell: "export JOB=sum; set -e; cat {input} > {output}"
"""

SNAKEMAKE = f'{sys.executable} -m snakemake --cores 2 --latency-wait 0 --keep-incomplete "$@"'
# The lost files are known when the pool has taken over from the node.
AGAIN = r"""
set -eu
run() { @SNAKEMAKE@; }
run && exit 9
cp "$NODES/done" "$NODES/done-before"
until "$BINARY" pool members --state $STATE/0 . | grep -q lost:; do sleep 0.1; done
"$BINARY" pool lost --remove --state $STATE/0 . > "$NODES/named"
run --rerun-incomplete
"""


@NEEDS_MOUNT
def test_snakemake_makes_again_what_the_pool_names(pool: Pool) -> None:
    for place in ("store", "plain"):
        (pool.place / place / "Snakefile").write_text(SNAKEFILE)
    again = AGAIN.replace("@SNAKEMAKE@", SNAKEMAKE)
    said = pool.run(["bash", "-c", again])
    first = (pool.place / "nodes/done-before").read_text().splitlines()
    before = {name for _, name in (line.split(" ", 1) for line in first)}
    twice = {name for _, name in pool.done()[len(first) :] if name in before}
    named = {path.lstrip("./") for path in (pool.place / "nodes/named").read_text().splitlines()}
    jobs = {path.replace("parts/", "part").replace("work/", "work") for path in named if path[:5] in ("parts", "work/")}
    # (Of a part that was sorted before, Snakemake needs only the result.)
    assert jobs and jobs == pool.lost_outputs(before), said
    assert twice <= jobs and all(f"work{name[4:]}" in before for name in jobs - twice), said
    plain = {**pool.environment, "NODES": ""}
    words = ["bash", "-c", SNAKEMAKE, "snakemake"]
    done = subprocess.run(words, cwd=pool.place / "plain", env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(pool.place / "store").items() <= results(pool.place / "plain").items()
    assert (pool.place / "store/out/sum").exists()


# Three lines are for the losses.
PARSL = r"""
import json, os, shlex
import parsl
from parsl import File, bash_app
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor
from surgetank.workflow.engines.parsl_losses import LostNodes

SHELL = os.environ["ON_A_NODE"]

def job(name, text):
    return f"{SHELL} -c " + shlex.quote(f"export JOB={name}; set -e; {text}")

@bash_app
def part(n, outputs=()):
    return job(f"part{n}", f"seq {n} 7 20000 > {outputs[0]}")

@bash_app
def ordered(n, inputs=(), outputs=()):
    return job(f"work{n}", f"sort {inputs[0]} > {outputs[0]}")

@bash_app
def joined(inputs=(), outputs=()):
    return job("sum", f"cat {' '.join(map(str, inputs))} > {outputs[0]}")

for name in ("parts", "work", "out"):
    os.mkdir(name)
lost = LostNodes()
config = Config(
    executors=[ThreadPoolExecutor(max_threads=2)], memoizer=lost,
    usage_tracking=0, run_dir=os.environ["NODES"] + "/runinfo", initialize_logging=False,
)

def program():
    parts = [part(n, outputs=[File(f"parts/{n}")]) for n in range(12)]
    works = [ordered(n, inputs=[p.outputs[0]], outputs=[File(f"work/{n}")]) for n, p in enumerate(parts)]
    out = joined(inputs=[w.outputs[0] for w in works], outputs=[File("out/sum")])
    out.result()

with parsl.load(config):
    lost.run(program)
with open(os.environ["NODES"] + "/again", "w") as again:
    json.dump(sorted(os.path.relpath(path) for path in lost.made_again), again)
"""


@NEEDS_MOUNT
def test_parsl_makes_again_what_is_lost(pool: Pool) -> None:
    flow_file = pool.place / "flow.py"
    flow_file.write_text(PARSL)
    pool.environment["SURGETANK_STATE"] = f"{pool.environment['STATE']}/0"
    said = pool.run([sys.executable, str(flow_file)])
    names = [name for _, name in pool.done()]
    twice = {name for name in names if names.count(name) > 1}
    paths = json.loads((pool.place / "nodes/again").read_text())
    again = {path.replace("parts/", "part").replace("work/", "work") for path in paths}
    assert again == twice == pool.lost_outputs(set(names)), said
    assert twice and max(map(names.count, names)) == 2 and "run again" in said
    store = results(pool.place / "store")
    assert len(store) == 25
    for n in range(12):
        lines = [str(number) for number in range(n, 20001, 7)]
        assert store[f"parts/{n}"].decode().split() == lines and store[f"work/{n}"].decode().split() == sorted(lines)
