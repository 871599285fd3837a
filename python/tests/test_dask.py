"""Dask's scheduler and workers on four nodes of a pool: tasks run where their files are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed.scheduler import TaskState
from test_pool import NODES, ON_ALL_NODES
from test_replay import BINARY, NEEDS_MOUNT, tier

from surgetank.workflow.engines import dask as engine

__all__ = ["tier"]

ROOT = Path(__file__).parent.parent
FILES, FILE_BYTES = 32, 1 << 20
# Starts the scheduler and the workers, each on its node: in its directory, and with the name of the node.
CLUSTER = r"""
set -eu
on() { (cd "$NODES/node$1"; shift; exec unshare --uts sh -c 'hostname "$0"; exec "$@"' "$@"); }
on 0 node0 "$PYTHON" -m distributed.cli.dask_scheduler --host 127.0.0.1 --port 0 --no-dashboard --no-jupyter --scheduler-file "$SCRATCH/address" >"$SCRATCH/scheduler" 2>&1 &
for node in $(seq 0 $((COUNT - 1))); do
    on $node node$node "$PYTHON" -m distributed.cli.dask_worker --scheduler-file "$SCRATCH/address" --no-nanny --nthreads 1 --no-dashboard \
        --name $node --local-directory "$SCRATCH" --death-timeout 60 >"$SCRATCH/worker$node" 2>&1 &
done
code=0
"$PYTHON" "$CLIENT" || code=$?
wait
exit $code
"""
CLIENT = r"""
import json, os, time
from pathlib import Path
import surgetank
from distributed import Client
from surgetank.workflow.engines.dask import SurgetankLocations

FILES, FILE_BYTES = map(int, os.environ["SIZES"].split())

def make(number, path):
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(bytes([number]) * FILE_BYTES)
    return os.uname().nodename

def read(path):
    data = Path(path).read_bytes()
    assert len(data) == FILE_BYTES and len(set(data)) == 1
    return os.uname().nodename, data[0]

def join(paths, other=None):
    return os.uname().nodename, sum(len(Path(path).read_bytes()) for path in paths)

client = Client(scheduler_file=os.path.join(os.environ["SCRATCH"], "address"), timeout=60)
client.wait_for_workers(int(os.environ["COUNT"]), timeout=60)
if os.environ["PLUGIN"] == "yes":
    client.register_plugin(SurgetankLocations(state=os.environ["STATE"] + "/0"))
workers = {info["name"]: address for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}
# A node makes each file. Their order gives no hint.
made = [client.submit(make, n, f"work/{n}", workers=workers[(n * 7 + n // 4) % len(workers)], pure=False) for n in range(FILES)]
made = client.gather(made)
assert len(set(made)) == len(workers), made
names = [Path(f"work/{n}") if n % 2 else f"work/{n}" for n in range(FILES)]
began = time.monotonic()
ran = client.gather(client.map(read, names, pure=False))
seconds = time.monotonic() - began
assert [number for _, number in ran] == list(range(FILES))
local = sum(node == at for (node, _), at in zip(ran, made))
# Ready once another task has ended, with its files in a list, and in an annotation.
mine = [n for n in range(FILES) if made[n] == "node2"]
slow = client.submit(time.sleep, 0.2, pure=False)
joined = client.submit(join, [f"work/{n}" for n in mine], slow, pure=False).result()
import dask
with dask.annotate(files=[f"work/{n}" for n in mine]):
    annotated = client.submit(lambda count: (os.uname().nodename, count), len(mine), pure=False).result()
chosen = client.submit(read, names[mine[0]], workers=workers[1], allow_other_workers=True, pure=False).result()
# A reduce: its inputs are brought to one node, and the task runs there.
STATE = os.environ["STATE"] + "/0"

def prepare():
    Path("reduced").mkdir()
    surgetank.hint("reduced", STATE, DP="collocation|sum")

def where():
    found = surgetank.locate([f"reduced/{n}" for n in range(8)], STATE)
    return {copy["node"] for one in found for copy in one["copies"]}

client.submit(prepare, workers=workers[0], pure=False).result()
client.gather([client.submit(make, n, f"reduced/{n}", workers=workers[n % len(workers)], pure=False) for n in range(8)])
until = time.monotonic() + 60
while len(at := client.submit(where, workers=workers[0], pure=False).result()) != 1:
    assert time.monotonic() < until, at
    time.sleep(0.1)
reduced = client.submit(join, [f"reduced/{n}" for n in range(8)], pure=False).result()
print(json.dumps({"reduced": reduced, "at": list(at), "local": local, "seconds": seconds, "joined": joined, "annotated": annotated, "chosen": chosen[0], "mine": len(mine)}))
client.shutdown()
"""


def cluster(tmp_path: Path, tier: Path, plugin: str) -> dict[str, Any]:
    nodes, store, client, scratch = (tmp_path / name for name in ("nodes", "store", "client.py", "scratch"))
    for directory in (nodes, store, scratch):
        directory.mkdir()
    client.write_text(CLIENT)
    there = {**os.environ, "BINARY": BINARY, "TIER": str(tier), "STORE": str(store), "COUNT": str(NODES)}
    there |= {"NODES": str(nodes), "STATE": str(tmp_path / "state"), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    there |= {"CLIENT": str(client), "SCRATCH": str(scratch), "PLUGIN": plugin, "SIZES": f"{FILES} {FILE_BYTES}"}
    mounts = ON_ALL_NODES.replace(
        '"$BINARY" mount', 'unshare --uts sh -c \'hostname "$0"; exec "$@"\' node$node "$BINARY" mount'
    )
    assert mounts != ON_ALL_NODES
    words = ["unshare", "-m", "bash", "-c", mounts, "nodes", "bash", "-c", CLUSTER]
    done = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True, check=False, timeout=240)
    logs = "".join(log.read_text()[-3000:] for log in scratch.iterdir() if log.is_file())
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert len(list((store / "work").iterdir())) == FILES
    return dict(json.loads(done.stdout.splitlines()[-1]))


@NEEDS_MOUNT
def test_tasks_run_where_their_files_are(tmp_path: Path, tier: Path) -> None:
    found = cluster(tmp_path, tier, "yes")
    # (An idle worker may take a task from a busy one.)
    assert found["local"] >= FILES * 3 // 4, found
    assert found["joined"] == ["node2", found["mine"] * FILE_BYTES], found
    assert found["annotated"] == ["node2", found["mine"]], found
    assert found["chosen"] == "node1", found
    assert found["reduced"] == [*found["at"], 8 * FILE_BYTES], found


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("work/a", ["work/a"]),
        ("a word", []),
        (Path("a"), ["a"]),
        ([Path("a"), {"b": "c/d"}, 1, None], ["a", "c/d"]),
        ("a/b\nmore", []),
        ("/" * 5000, []),
        ("s3://bucket/a", []),
        ([[0] * 200, "a/b"], []),
    ],
)
def test_paths_of_arguments(value: Any, paths: list[str]) -> None:
    assert list(engine._paths(value, [100])) == paths


def test_tasks_of_the_scheduler_show_their_arguments() -> None:
    from dask._task_spec import Task, TaskRef

    spec = Task("key", print, [Path("a"), TaskRef("other")], file="b/c")
    ts = cast(TaskState, SimpleNamespace(run_spec=spec, annotations=None))
    plugin = engine.SurgetankLocations("/served")
    assert sorted(plugin._files(ts)) == ["/served/a", "/served/b/c"]
    ts.annotations = {"files": ["/served/x", "/elsewhere/y", "../z"]}
    assert list(plugin._files(ts)) == ["/served/x"]
