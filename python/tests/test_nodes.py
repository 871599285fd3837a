"""The executor with tasks on several nodes. Here another program stands for `srun`, and the nodes are this machine;
test_slurm_nodes.py has the real one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_execute import appears, diamond, do, flow, in_background, sh

from surgetank.workflow.execute import host, journal, nodes, orphans
from surgetank.workflow.execute.host import Host, Hosts
from surgetank.workflow.execute.ready import Ready, priorities
from surgetank.workflow.graph import File, Task, Workflow
from surgetank.workflow.problem import Problem

NODES = ("n1", "n2", "n3")
# The command, with the name of its node. `FAILS` names nodes whose step fails, and `ENDS` a code with which all end.
SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) export NODE=${1#*=} ;; esac
    shift
done
if [[ " ${FAILS:-} " == *" $NODE "* ]]; then echo "step of $NODE refused" >&2; exit 1; fi
"$@"
code=$?
exit $((code ? code : ${ENDS:-0}))
"""

# (A task whose runner is gone has another parent.)
KILL_RUNNER = "grep -q execute.runner /proc/$PPID/cmdline && kill -KILL $PPID"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a workflow, in a job of three nodes. No process of it is left at the end."""
    commands, work = tmp_path / "bin", tmp_path / "work"
    commands.mkdir()
    work.mkdir()
    (commands / "srun").write_text(SRUN)
    (commands / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(NODES)}\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    yield work
    assert orphans.end(os.path.realpath(work)) == 0


def on_nodes(workflow: Workflow, directory: Path, **asked: Any) -> dict[str, Any]:
    return do(workflow, directory, on="slurm", **asked)


def test_tasks_run_on_all_nodes_and_make_the_same(job: Path) -> None:
    (job / "in").write_text("hello\n")
    assert on_nodes(diamond(), job)["exit"] == 0
    assert (job / "c").read_text() == "".join(f"hello\n{n}\n" for n in range(4))
    again = on_nodes(diamond(), job)
    assert (again["tasks"]["done"], again["tasks"]["done_before"]) == (0, 6)
    # One core of each node: a task never meets another one on its node.
    alone = "mkdir on.$NODE || exit 1; sleep 0.1; rmdir on.$NODE; echo $NODE >"
    report = on_nodes(
        flow(*(sh(f"t{n}", f"{alone} deep/down/{n}", [], [f"deep/down/{n}"]) for n in range(12))),
        job,
        jobs_named=True,
        jobs=1.0,
    )
    assert report["exit"] == 0, report
    counts = [(job / f"deep/down/{n}").read_text().strip() for n in range(12)]
    assert set(counts) == set(NODES) and max(map(counts.count, NODES)) <= 6


def test_short_tasks_share_processes(job: Path) -> None:
    report = on_nodes(
        flow(*(sh(f"t{n}", f"echo $NODE $SURGETANK_WORKFLOW_TASK > {n}", [], [f"{n}"]) for n in range(60))),
        job,
        cluster=10,
    )
    assert report["exit"] == 0 and 6 <= report["tasks"]["processes"] <= 30
    found = [(job / f"{n}").read_text().split() for n in range(60)]
    assert [task for _, task in found] == [f"t{n}" for n in range(60)] and len({node for node, _ in found}) == len(
        NODES
    )


def test_tasks_of_unknown_time_are_not_sent_ahead(job: Path) -> None:
    count = f'sleep 0.4; cat {journal.HOME}/*/journal-*.jsonl | grep -c \'"event": "start"\' > n'
    each = flow(*(sh(f"t{n}", f"{count}{n}", [], [f"n{n}"]) for n in range(9)))
    assert on_nodes(each, job, jobs_named=True, jobs=1.0)["exit"] == 0
    seen = sorted(int((job / f"n{n}").read_text()) for n in range(9))
    # (Once the time is known, tasks are.)
    assert seen[0] == 3 and seen[-1] == 9, seen


def test_failures_are_tried_again_and_have_logs(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    second = "test -e was || { touch was; echo first try >&2; exit 9; }; echo good > a"
    report = on_nodes(
        flow(sh("a", second, [], ["a"], retries=1), sh("b", "echo why >&2; exit 4", ["a"], ["b"])), job, progress=True
    )
    assert (report["exit"], report["tasks"]["failed"], report["tasks"]["retried"]) == (5, {"b": "exit code 4"}, 1)
    output = capfd.readouterr().err
    log = re.search(r"log:  (\S+)", output)
    assert log is not None and Path(job, log[1]).read_text() == "why\n" and "| why" in output
    assert [path.read_text() for path in job.glob(f"{journal.HOME}/*/n*/a.err")] == ["first try\n"]
    absent = on_nodes(flow(Task("x", "kind", [], ["x"], command=["./no-such-program"])), job)
    assert absent["tasks"]["failed"] == {"x": "the program was not found (exit code 127)"}


def test_a_node_that_ends_gives_its_tasks_to_others(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # The first task to run on n2 kills the runner there, its parent.
    once = f"if [ $NODE = n2 ] && mkdir killed; then {KILL_RUNNER}; sleep 30; fi; sleep 0.05; echo $NODE >"
    report = on_nodes(flow(*(sh(f"t{n}", f"{once} {n}", [], [f"{n}"]) for n in range(20))), job, progress=True)
    assert (report["exit"], report["tasks"]["done"], report["tasks"]["retried"]) == (0, 20, 0), report
    assert (job / "killed").is_dir() and "n2: killed by SIGKILL" in capfd.readouterr().err
    after = [path.read_text().strip() for path in sorted(job.glob("[0-9]*"), key=lambda path: path.stat().st_mtime)]
    assert set(after[-10:]) == {"n1", "n3"}
    # (Of the runner that was killed: Slurm ends them.)
    orphans.end(os.path.realpath(job))


def children(pid: int, words: str = "") -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", words], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in found.split()]


def test_a_silent_node_counts_as_lost(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "SILENT_S_MAX", 4.0)
    stop = KILL_RUNNER.replace("-KILL", "-STOP")
    once = f"if [ $NODE = n2 ] && mkdir stopped; then {stop}; sleep 60; fi; sleep 0.05; echo $NODE >"
    report = on_nodes(flow(*(sh(f"t{n}", f"{once} {n}", [], [f"{n}"]) for n in range(20))), job, progress=True)
    assert (report["exit"], report["tasks"]["done"]) == (0, 20), report
    assert "n2: it was silent for 4 s" in capfd.readouterr().err
    # (Slurm ends the step.)
    for runner in children(os.getpid(), "execute.runner"):
        os.kill(runner, signal.SIGKILL)
    orphans.end(os.path.realpath(job))


def test_when_all_nodes_end_the_run_says_so(job: Path) -> None:
    report = on_nodes(
        flow(*(sh(f"t{n}", f"{KILL_RUNNER}; sleep 30", [], [f"{n}"]) for n in range(6))), job, keep_going=True
    )
    assert report["exit"] == 5
    assert set(report["tasks"]["failed"].values()) == {"it ran on the last node of the job, which ended"}
    orphans.end(os.path.realpath(job))


def test_nodes_that_do_not_start(job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAILS", "n1 n3")
    where = flow(*(sh(f"t{n}", f"echo $NODE > {n}", [], [f"{n}"]) for n in range(6)))
    assert on_nodes(where, job, progress=True)["exit"] == 0
    assert {(job / f"{n}").read_text() for n in range(6)} == {"n2\n"}
    assert "no task runs on this node: n3: exit code 1\n    | step of n3 refused" in capfd.readouterr().err
    monkeypatch.setenv("FAILS", "n1 n2 n3")
    with pytest.raises(Problem, match="on no node of the job could tasks be started") as raised:
        on_nodes(flow(sh("other", "echo > other", [], ["other"])), job)
    # Nothing to do: no node is needed.
    assert on_nodes(where, job)["exit"] == 0
    assert raised.value.code == 1
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(Problem, match="--on slurm works in a Slurm job"):
        on_nodes(flow(sh("other", "echo > other", [], ["other"])), job)


def test_a_node_that_could_not_drain_gives_code_3(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDS", "3")
    assert on_nodes(flow(sh("t", "echo > a", [], ["a"])), job)["exit"] == 3


@pytest.mark.parametrize("how", ["executor", "runner", "killed"])
def test_a_signal_ends_the_tasks(job: Path, tmp_path: Path, how: str) -> None:
    wait = "trap 'echo ended > ended.$NODE; exit 1' TERM; touch began.$NODE; while :; do sleep 0.02; done"
    # (Two cores each.)
    six = flow(*(sh(f"t{n}", wait, [], [f"{n}"]) for n in range(6)))
    running = in_background(six, job, tmp_path / "draft", on="slurm", environment=dict(os.environ))
    for node in NODES:
        appears(job / f"began.{node}")
    began = time.monotonic()
    if how == "killed":
        running.kill()
    elif how == "executor":
        running.send_signal(signal.SIGTERM)
    else:
        asked = ["pgrep", "-f", f"execute[.]runner {tmp_path}"] if False else ["pgrep", "-P", str(running.pid)]
        steps = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        runner = subprocess.run(["pgrep", "-P", steps[1]], capture_output=True, text=True, check=True).stdout.split()[0]
        os.kill(int(runner), signal.SIGTERM)
    code = running.wait(20)
    assert code == (-signal.SIGKILL if how == "killed" else 128 + signal.SIGTERM)
    while orphans._find(os.path.realpath(job)):
        assert time.monotonic() - began < 10
        time.sleep(0.05)
    if how != "killed":
        assert all((job / f"ended.{node}").exists() for node in NODES)


class Place:
    logs_in = ""

    def __init__(self, node: str) -> None:
        self.node = node

    def start(self, *_: object) -> None: ...

    def signal_all(self, *_: object) -> None: ...


def hosts_of(workflow: Workflow, where: dict[str, str], monkeypatch: pytest.MonkeyPatch, cores: float = 2.0) -> Hosts:
    """`where`: file → node. Each task takes a second."""

    def locate(paths: list[str], *_: object, **__: object) -> list[dict[str, Any]]:
        names = [os.path.relpath(path, "/work") for path in paths]
        sizes = {name: workflow.files[name].size_bytes for name in names}
        return [
            {"size_bytes": sizes[name], "copies": [{"node": where[name]}]} if name in where else {"error": "?"}
            for name in names
        ]

    monkeypatch.setattr(host, "locate", locate)
    each = [Host(Place(node), Ready(cores, 1 << 30)) for node in NODES]
    return Hosts(
        each, workflow, lambda _: 1.0, lambda path: workflow.files[path].size_bytes or 0, lambda _: None, "/work"
    )


def at(hosts: Hosts) -> dict[str, str]:
    return {task: one.place.node for task, one in hosts.of.items()}


def test_tasks_go_to_the_bytes_and_not_all_to_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    second = int(host.LINK_BYTES_PER_S)
    files = [File(f"f{n}", size_bytes=second) for n in range(12)]
    each = flow(*(sh(f"t{n}", "", [f"f{n}"], [f"o{n}"]) for n in range(12)), files=files)
    order = priorities(each)
    spread = hosts_of(each, {f"f{n}": NODES[n // 4] for n in range(12)}, monkeypatch)
    spread.place([f"t{n}" for n in range(12)], order)
    assert at(spread) == {f"t{n}": NODES[n // 4] for n in range(12)}
    # All on one node: a fair share stays, and others go where they wait less long than their bytes take.
    one = hosts_of(each, {f"f{n}": "n2" for n in range(12)}, monkeypatch)
    one.place([f"t{n}" for n in range(12)], order)
    counts = [list(at(one).values()).count(node) for node in NODES]
    assert counts[1] == max(counts) and min(counts) >= 2, counts
    # Without bytes all get the same.
    none = hosts_of(each, {}, monkeypatch)
    none.place([f"t{n}" for n in range(12)], order)
    assert [list(at(none).values()).count(node) for node in NODES] == [4, 4, 4]


def test_an_idle_node_takes_tasks_if_their_bytes_come_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, moves in ((1, True), (100 * int(host.LINK_BYTES_PER_S), False)):
        files = [File(f"f{n}", size_bytes=size) for n in range(6)]
        each = flow(*(sh(f"t{n}", "", [f"f{n}"], [f"o{n}"]) for n in range(6)), files=files)
        order = priorities(each)
        hosts = hosts_of(each, {f"f{n}": "n1" for n in range(6)}, monkeypatch)
        hosts.place([f"t{n}" for n in range(6)], order)
        hosts.lost(hosts.all[2])
        placed = dict.fromkeys((f"t{n}" for n in range(6)), "n1")
        if not moves:
            assert at(hosts) == placed
        while hosts.steal(order):
            pass
        assert (list(at(hosts).values()).count("n2") >= 2) == moves, at(hosts)


def test_outputs_are_made_where_their_reader_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    second = int(host.LINK_BYTES_PER_S)
    files = [File("a", size_bytes=second), File("b", size_bytes=second)]
    both = flow(sh("ta", "", [], ["a"]), sh("tb", "", [], ["b"]), sh("sum", "", ["a", "b"], ["s"]), files=files)
    order = priorities(both)
    hosts = hosts_of(both, {"a": "n3", "b": "n3"}, monkeypatch)
    hosts.all[0].load_s = hosts.all[1].load_s = 0.5
    hosts.place(["ta"], order)
    assert at(hosts) == {"ta": "n3"}
    hosts.over("ta", [("a", second)])
    hosts.all[2].load_s = 0.9
    hosts.place(["tb"], order)
    assert at(hosts) == {"tb": "n3"}


def test_large_tasks_go_to_large_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    each = flow(
        Task("big", "kind", [], ["b"], cores=4, command="x"), Task("huge", "kind", [], ["h"], cores=9, command="x")
    )
    hosts = hosts_of(each, {}, monkeypatch)
    hosts.all[1].ready = Ready(4, 1 << 30)
    hosts.place(["big"], priorities(each))
    assert at(hosts) == {"big": "n2"}
    hosts.place(["huge"], priorities(each))
    assert len(at(hosts)) == 2
