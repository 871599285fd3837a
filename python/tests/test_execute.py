"""The local executor, straight on a directory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surgetank.workflow.execute import graphfile, journal, orphans, settings
from surgetank.workflow.execute.cli import dry_run
from surgetank.workflow.execute.launch import launch
from surgetank.workflow.execute.settings import Settings
from surgetank.workflow.graph import File, Task, Workflow
from surgetank.workflow.problem import Problem

DRIVER = """
import sys
from pathlib import Path
from surgetank.workflow.execute.launch import inside
sys.exit(inside(Path(sys.argv[1])))
"""
ROOT = str(Path(__file__).parents[1])


def flow(*tasks: Task, files: list[File] | None = None) -> Workflow:
    return Workflow.of("test", "test.yaml", tasks, files or [])


def sh(id_: str, text: str, inputs: list[str] | None = None, outputs: list[str] | None = None, **rest: Any) -> Task:
    return Task(id_, "kind", inputs or [], outputs or [], command=text, **rest)


def do(workflow: Workflow, directory: Path, **asked: Any) -> dict[str, Any]:
    asked = {"jobs": 2.0, "bare": True, "progress": False, "grace_s": 2.0, **asked}
    before = Path.cwd()
    try:
        return launch(workflow, Settings(str(directory), str(directory), **asked))
    finally:
        os.chdir(before)


def started(directory: Path) -> list[str]:
    """Tasks that any run began, from the journals."""
    home = directory / journal.HOME
    events = (event for run in journal.runs(home) for event in journal.events(home / run))
    return [event["task"] for event in events if event["event"] == "start"]


def in_background(workflow: Workflow, directory: Path, draft: Path, **asked: Any) -> subprocess.Popen[bytes]:
    settings = {"jobs": 2.0, "bare": True, "progress": False, "grace_s": 1.0, "persist": "final", **asked}
    settings |= {"directory": str(directory), "over": str(directory)}
    draft.mkdir(exist_ok=True)
    (draft / "spec.json").write_text(json.dumps({"workflow": graphfile.to_json(workflow), "settings": settings}))
    words = [sys.executable, "-c", DRIVER, str(draft)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.DEVNULL)


def appears(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def diamond() -> Workflow:
    """in → a → (b0 … b3) → c."""
    middle = [sh(f"b{n}", f"sleep 0.05; (cat a; echo {n}) > b{n}", ["a"], [f"b{n}"]) for n in range(4)]
    names = [f"b{n}" for n in range(4)]
    first = sh("a", "sleep 0.05; cat in > a", ["in"], ["a"])
    return flow(first, *middle, sh("c", "cat b0 b1 b2 b3 > c", names, ["c"]))


def test_runs_and_runs_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("hello\n")
    assert do(diamond(), tmp_path)["exit"] == 0
    assert (tmp_path / "c").read_text() == "".join(f"hello\n{n}\n" for n in range(4))
    again = do(diamond(), tmp_path)
    assert (again["tasks"]["done"], again["tasks"]["done_before"]) == (0, 6)
    assert len(started(tmp_path)) == 6


def test_changed_task_reruns_its_children_and_missing_file_its_maker(tmp_path: Path) -> None:
    for name in ("in", "other"):
        (tmp_path / name).write_text(name)
    copies = [sh(b, f"cat {a} > {b}", [a], [b]) for a, b in (("in", "a"), ("a", "b"), ("other", "x"))]
    do(flow(*copies), tmp_path)
    (tmp_path / "in").write_text("changed")
    do(flow(*copies), tmp_path)
    assert started(tmp_path)[3:] == ["a", "b"]
    assert (tmp_path / "b").read_text() == "changed"
    (tmp_path / "b").unlink()
    do(flow(*copies), tmp_path)
    assert started(tmp_path)[5:] == ["b"]
    (tmp_path / "a").write_text("meddled")
    do(flow(*copies), tmp_path)
    assert started(tmp_path)[6:] == ["a"]
    assert (tmp_path / "a").read_text() == "changed"
    copies[2].command = "echo more > x"
    do(flow(*copies), tmp_path)
    assert started(tmp_path)[7:] == ["x"]


def test_final_drops_unread_files_and_makes_them_when_needed(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x\n")
    assert do(diamond(), tmp_path, persist_named=True)["dropped"] == ["a", "b0", "b1", "b2", "b3"]
    assert not (tmp_path / "a").exists() and (tmp_path / "c").exists()
    assert do(diamond(), tmp_path, persist_named=True)["tasks"]["done"] == 0
    (tmp_path / "c").unlink()
    assert do(diamond(), tmp_path, persist_named=True)["tasks"]["done"] == 6
    assert not (tmp_path / "b3").exists()
    # Without the user's own `--persist`, every file that is not declared temporary stays.
    assert do(diamond(), tmp_path)["dropped"] == []
    assert (tmp_path / "a").exists()


def test_final_keeps_intermediates_outside_the_directory(tmp_path: Path) -> None:
    work, outside = tmp_path / "w", tmp_path / "outside"
    for place in (work, outside):
        place.mkdir()
    (work / "linked").symlink_to(outside)
    between = [f"{outside}/a", "linked/b", "c"]
    make, use = sh("make", "tee " + " ".join(between), [], between), sh("use", "cat linked/b > end", between, ["end"])
    report = do(flow(make, use), work, persist_named=True)
    assert report["exit"] == 0 and report["dropped"] == ["c"]
    assert sorted(path.name for path in outside.iterdir()) == ["a", "b"]


def test_only_declared_temporaries_go_by_default(tmp_path: Path) -> None:
    tasks = [sh("a", "echo a > t; echo a > k", [], ["t", "k"]), sh("b", "cat t k > r", ["t", "k"], ["r"])]
    assert do(flow(*tasks, files=[File("t", temporary=True)]), tmp_path)["dropped"] == ["t"]
    (tmp_path / "r").unlink()
    unknown = flow(*tasks, files=[File("t", temporary=True, readers_unknown=True)])
    assert do(unknown, tmp_path, persist_named=True)["dropped"] == ["k"]


def test_failure_names_its_log_and_leaves_no_half_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = sh("bad", "echo half > o; echo the reason >&2; exit 7", [], ["o"])
    report = do(flow(bad, sh("next", "true", ["o"])), tmp_path)
    assert report["exit"] == 5 and report["tasks"]["failed"] == {"bad": "exit code 7"}
    assert not (tmp_path / "o").exists()
    errors = capfd.readouterr().err
    assert "the reason" in errors and f"{report['run']}/bad.err" in errors
    assert (tmp_path / journal.HOME / report["run"] / "bad.err").read_text() == "the reason\n"
    assert started(tmp_path) == ["bad"]


def test_missing_output_fails_even_if_an_old_one_exists(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("old")
    report = do(flow(sh("lazy", "true", [], ["o"])), tmp_path)
    assert report["exit"] == 5 and "did not make 'o'" in report["tasks"]["failed"]["lazy"]


def test_retries_until_it_succeeds_with_inputs_kept(tmp_path: Path) -> None:
    text = "cat t > /dev/null && echo x >> count && [ $(wc -l < count) -ge 3 ] && echo ok > o"
    flaky = sh("flaky", text, ["t"], ["o"], retries=2)
    report = do(flow(sh("t", "echo t > t", [], ["t"]), flaky), tmp_path, persist_named=True)
    assert report["exit"] == 0 and report["tasks"]["retried"] == 2
    (tmp_path / "count").unlink()
    assert do(flow(sh("t", "echo t2 > t", [], ["t"]), flaky), tmp_path, retries=1)["exit"] == 5


def test_keep_going_runs_what_does_not_depend_on_the_failure(tmp_path: Path) -> None:
    quick = [sh(f"t{n}", "true") for n in range(4)]
    tasks = [sh("bad", "exit 1", [], ["o"]), sh("below", "true", ["o"]), *quick]
    assert do(flow(*tasks), tmp_path, jobs=1.0)["tasks"]["done"] == 0
    report = do(flow(*tasks), tmp_path, jobs=1.0, keep_going=True)
    assert report["tasks"]["done"] == 4 and report["tasks"]["left"] == 2


def test_certain_failure_is_reported_before_the_run(tmp_path: Path) -> None:
    large = {"memory_bytes": 1 << 30, "memory_named": True}
    for task, asked, message in (
        (sh("b", "true", ["nowhere"]), {}, "nowhere"),
        (Task("b", "b"), {}, "no command"),
        (sh("b", "true", memory_bytes=1 << 40), large, "1.0 TiB"),
    ):
        with pytest.raises(Problem, match=message) as caught:
            do(flow(sh("a", "echo > ran"), task), tmp_path, **asked)
        assert caught.value.code == 2 and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("need", "limit"), [({"cores": 2.0}, 2), ({"memory_bytes": 400}, 2), ({}, 4), ({"cores": 99.0}, 1)]
)
def test_cores_and_memory_are_respected(tmp_path: Path, need: dict[str, Any], limit: int) -> None:
    count = "mkdir -p now; f=$(mktemp now/XXXXXX); ls now | wc -l >> seen; sleep 0.15; ls now | wc -l >> seen; rm $f"
    report = do(flow(*(sh(f"t{n}", count, **need) for n in range(8))), tmp_path, jobs=4.0, memory_bytes=1000)
    assert report["exit"] == 0
    assert max(int(line) for line in (tmp_path / "seen").read_text().split()) == limit


def test_names_are_never_read_by_a_shell(tmp_path: Path) -> None:
    names = ["-rf", "a b", "line\nbreak", "$(touch pwned)", "'; touch pwned; '", "*", "ü\udcff", "d/é/x"]
    make = [Task(f"m{name}", "make", ["in"], [name], command=["cp", "--", "in", f"./{name}"]) for name in names]
    take = [Task(f"../{n}", "take", [n], [f"{n}.2"], command=["cp", "--", f"./{n}", f"./{n}.2"]) for n in names]
    (tmp_path / "in").write_text("x")
    report = do(flow(*make, *take), tmp_path, persist_named=True)
    assert report["exit"] == 0, report
    assert len(report["dropped"]) == len(names) and not (tmp_path / "pwned").exists()
    assert all((tmp_path / f"{name}.2").read_text() == "x" for name in names)
    assert do(flow(*make, *take), tmp_path, persist_named=True)["tasks"]["done"] == 0


def test_each_task_has_its_own_log_name() -> None:
    ids = ["a", "a~2", "a/b", "a%2Fb", "..", ".", "x" * 300, "x" * 299 + "y", "A", "line\nbreak"]
    names = [journal.log_name(id_, attempt) for id_ in ids for attempt in (1, 2)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and not name.startswith(".") and len(name) < 220 for name in names)


def test_cluster_puts_short_tasks_into_few_processes(tmp_path: Path) -> None:
    tasks = [sh(f"t{n}", f"echo {n} > o{n}; echo said {n}", [], [f"o{n}"]) for n in range(40)]
    report = do(flow(*tasks), tmp_path, cluster=10)
    assert report["tasks"]["done"] == 40 and report["tasks"]["processes"] <= 8
    assert (tmp_path / journal.HOME / report["run"] / "t7.out").read_text() == "said 7\n"
    bad = [sh(f"t{n}", "exit 3" if n == 5 else f"echo new > o{n}", [], [f"o{n}"]) for n in range(40)]
    report = do(flow(*bad), tmp_path, cluster=10, keep_going=True)
    assert report["tasks"]["failed"] == {"t5": "exit code 3"} and report["tasks"]["done"] == 39


def test_only_logs_with_content_are_renamed_for_short_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda one, other: (renamed.append(Path(other).name), rename(one, other)))
    tasks = [sh(f"t{n}", "true") for n in range(20)]
    tasks += [sh("says", "echo said"), sh("fails", "exit 3")]
    # A longer task has its log while it runs.
    tasks.append(sh("long", f"while ! ls {journal.HOME}/*/long.out; do sleep 0.02; done >/dev/null 2>&1"))
    report = do(flow(*tasks), tmp_path, keep_going=True)
    assert report["tasks"]["failed"] == {"fails": "exit code 3"}
    there = tmp_path / journal.HOME / report["run"]
    assert {path.name for path in there.iterdir() if path.suffix in (".out", ".err")} == {
        "says.out", "says.err", "fails.out", "fails.err"
    }  # fmt: skip
    assert (there / "says.out").read_text() == "said\n"
    assert not [name for name in renamed if name.startswith("t")]


def test_ten_thousand_tasks(tmp_path: Path) -> None:
    tasks = [Task(f"t{n}", "true", command=["true"]) for n in range(10_000)]
    report = do(flow(*tasks), tmp_path, cluster=50)
    assert report["tasks"]["done"] == 10_000
    assert not list((tmp_path / journal.HOME / report["run"]).glob("*.out"))


def test_children_of_a_task_are_waited_for(tmp_path: Path) -> None:
    report = do(flow(sh("a", "(sleep 0.3; echo late > o) & echo early > o", [], ["o"])), tmp_path)
    assert report["exit"] == 0 and (tmp_path / "o").read_text() == "late\n"


def test_ctrl_c_stops_keeps_state_and_goes_on(tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    slow = sh("slow", "echo half > s; [ -e ../go ] || sleep 60; echo s > s", ["q"], ["s"])
    workflow = flow(sh("quick", "echo q > q", [], ["q"]), slow)
    process = in_background(workflow, work, tmp_path / "draft")
    appears(work / "s")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not (work / "s").exists() and (work / "q").exists()
    assert orphans.end(str(work)) == 0
    (tmp_path / "go").touch()
    assert do(workflow, work)["tasks"]["done"] == 1
    assert started(work) == ["quick", "slow", "slow"]


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_any_moment_and_resume(tmp_path: Path, seed: int) -> None:
    work, calm = tmp_path / "w", tmp_path / "calm"
    for place in (work, calm):
        place.mkdir()
        (place / "in").write_text("in\n")
    draw = random.Random(seed)
    kills = 0
    for _ in range(3):
        process = in_background(diamond(), work, tmp_path / "draft", persist_named=True)
        time.sleep(draw.uniform(0.1, 0.5))
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert do(diamond(), work, persist_named=True)["exit"] == 0
    do(diamond(), calm, persist_named=True)
    assert (work / "c").read_text() == (calm / "c").read_text()
    assert sorted(p.name for p in work.iterdir()) == sorted(p.name for p in calm.iterdir())
    # A kill costs at most the two tasks that ran at that moment.
    assert len(started(work)) <= 6 + 2 * kills


def test_processes_of_a_killed_executor_are_ended_first(tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    text = "[ -e ../go ] || { touch ../began; sleep 1.5; echo orphan > o; exit; }; echo good > o"
    process = in_background(flow(sh("a", text, [], ["o"])), work, tmp_path / "draft")
    appears(tmp_path / "began")
    process.kill()
    process.wait()
    (tmp_path / "go").touch()
    assert do(flow(sh("a", text, [], ["o"])), work)["exit"] == 0
    time.sleep(1.7)
    assert (work / "o").read_text() == "good\n"


def test_logs_of_a_killed_short_task_name_the_task(tmp_path: Path) -> None:
    """The executor was killed before the half second after which logs get their own names."""
    work = tmp_path / "w"
    work.mkdir()
    workflow = flow(sh("quiet", "true"), sh("a b", "echo said; [ -e go ] || sleep 60; touch o", [], ["o"]))
    engine = in_background(workflow, work, tmp_path / "draft")
    home = work / journal.HOME
    until_s = time.monotonic() + 60
    while not any(log.read_text() == "said\n" for log in home.glob("*/*.out")):
        assert engine.poll() is None and time.monotonic() < until_s
        time.sleep(0.005)
    engine.kill()
    engine.wait()
    (work / "go").touch()
    assert do(workflow, work)["exit"] == 0
    first, second = (home / run for run in journal.runs(home))
    assert [log.name for log in first.glob("*.out") if log.stat().st_size] == ["a%20b.out"]
    assert [log.name for log in second.glob("*.out")] == ["a%20b.out"]


def test_two_executors_in_one_directory_are_refused(tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    process = in_background(flow(sh("a", "touch began; sleep 30", [], ["began"])), work, tmp_path / "draft")
    appears(work / "began")
    with pytest.raises(Problem, match="another executor"):
        do(flow(sh("b", "true")), work)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


def test_plan_shows_auxiliary_tasks_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    before = Path.cwd()
    plan = dry_run(diamond(), Settings(str(tmp_path), str(tmp_path), persist_named=True))
    os.chdir(before)
    kinds = [step.kind for step in plan.steps]
    assert kinds == ["reserve", "prefetch"] + ["task"] * 6 + ["stage-out", "release"]
    assert plan.dropped == ["a", "b0", "b1", "b2", "b3"] and plan.results == ["c"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_peak_with_lifetimes_is_less(tmp_path: Path) -> None:
    text = "head -c 1000 /dev/zero > f"
    tasks = [sh(f"s{n}", f"{text}{n}", [f"f{n - 1}"] if n else [], [f"f{n}"]) for n in range(10)]
    peak = do(flow(*tasks), tmp_path, persist_named=True)["peak"]
    assert peak["without_lifetimes_bytes"] == 10_000 and peak["with_lifetimes_bytes"] == 2000
    assert 2000 <= peak["executed_bytes"] <= 3000


def test_memory_limit_of_a_cgroup_v1_job_is_used(tmp_path: Path) -> None:
    groups, top = tmp_path / "cgroup", tmp_path / "mounted"
    job = top / "memory/slurm/job_7"
    (job / "step").mkdir(parents=True)
    whole = settings.memory_here(str(groups), str(top))
    groups.write_text("5:cpuset:/\n4:memory,hugetlb:/slurm/job_7/step\n0::/\n")
    assert settings.memory_here(str(groups), str(top)) == whole > 1 << 20
    (job / "step/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (job / "memory.limit_in_bytes").write_text("1048576\n")
    assert settings.memory_here(str(groups), str(top)) == 1 << 20
    (top / "new/step").mkdir(parents=True)
    (top / "new/memory.max").write_text("524288\n")
    (top / "new/step/memory.max").write_text("max\n")
    groups.write_text("0::/new/step\n")
    assert settings.memory_here(str(groups), str(top)) == 1 << 19
