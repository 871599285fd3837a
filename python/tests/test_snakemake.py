"""Snakemake with Surgetank's storage plugin: its results, the files that reach the store, and Snakemake's own view of the bare store."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_replay import BINARY, NEEDS_MOUNT, ROOT, kill_all, tier

from surgetank.workflow.agent import Agent
from surgetank.workflow.derive import Persist
from surgetank.workflow.graph import File, Task, Workflow

__all__ = ["tier"]

# The line that a project adds; the tutorial has only this line, and the default `persist`.
PROFILE = "default-storage-provider: surgetank\n"

# A typical project: temp(), a log, references to rules, a checkpoint, a directory, an environment. Its jobs write their observations to
# SEEN, which is outside; `sum` also tests the locks.
SNAKEFILE = r"""
import os
SEEN = os.environ["SEEN"]

rule all:
    input: "out/sum.txt", "out/env.txt"

rule sort:
    input: "data/{s}.txt"
    output: temp("work/{s}.sorted")
    log: "logs/{s}.log"
    shell: "python3 $SEEN/look.py {input} user.surgetank.tier ram > $SEEN/tier-{wildcards.s};"
           "sort {input} > {output} 2> {log}; python3 $SEEN/look.py {output} user.surgetank.state kept > $SEEN/temp-{wildcards.s}"

rule count:
    input: rules.sort.output
    output: "counts/{s}.txt"
    shell: "wc -l < {input} > {output}"

checkpoint split:
    input: "counts/a.txt", "counts/b.txt"
    output: directory("parts")
    shell: "mkdir parts; cp counts/a.txt parts/1.txt; cp counts/b.txt parts/2.txt;"
           "python3 $SEEN/look.py counts/a.txt user.surgetank.state durable > $SEEN/before"

rule part:
    input: "parts/{n}.txt"
    output: "done/{n}.txt"
    shell: "cp {input} {output}"

def parts(wildcards):
    there = glob_wildcards(os.path.join(checkpoints.split.get().output[0], "{n}.txt")).n
    return expand("done/{n}.txt", n=sorted(there))

rule sum:
    input: parts
    output: "out/sum.txt"
    shell: "cat {input} > {output}; python3 -m snakemake -c1 --workflow-profile none counts/a.txt > $SEEN/lock 2>&1 || true"

rule env:
    output: "out/env.txt"
    conda: "env.yaml"
    shell: "from-env < Snakefile > {output}"
"""
# Waits until an attribute has the value, at most 5 s, and prints it.
LOOK = """
import os, sys, time
def value():
    try: return os.getxattr(sys.argv[1], sys.argv[2]).decode()
    except OSError: return ""
end = time.monotonic() + 5 * ("SURGETANK_AGENT" in os.environ)
while value() != sys.argv[3] and time.monotonic() < end: time.sleep(0.05)
print(value())
"""
# Replaces conda, which no package here contains: makes an environment with one program.
CONDA = r"""#!/bin/sh
here=$(cd "$(dirname "$0")/.." && pwd)
case $1 in
    info) echo "{\"conda_prefix\": \"$here\", \"platform\": \"linux-64\"}" ;;
    --version) echo "conda 24.7.1" ;;
    config) echo '{"get": {"channel_priority": "strict"}}' ;;
    env) while [ "$1" != --prefix ]; do shift; done
         mkdir -p "$2/bin" "$2/conda-meta"; cp "$(command -v wc)" "$2/bin/from-env" ;;
esac
"""


def project(place: Path, snakefile: str = SNAKEFILE) -> Path:
    (place / "data").mkdir(parents=True)
    for number, name in enumerate("abcd"):
        (place / f"data/{name}.txt").write_text("".join(f"{n * 7919 % 10007}\n" for n in range(2000 + number)))
    (place / "Snakefile").write_text(snakefile)
    (place / "env.yaml").write_text("channels: [conda-forge]\ndependencies: [coreutils]\n")
    return place


def surroundings(place: Path, tier: Path) -> dict[str, str]:
    """The environment of a user's shell, with the directories of this test's agent."""
    conda, seen, state = place / "conda/bin", place / "seen", place / "state"
    for directory in (conda, seen):
        directory.mkdir(parents=True)
    state.mkdir(mode=0o700)
    (conda / "conda").write_text(CONDA)
    (conda / "conda").chmod(0o755)
    (conda / "activate").write_text('PATH="$1/bin:$PATH"\n')
    (seen / "look.py").write_text(LOOK)
    own = {"SURGETANK_BINARY": BINARY, "SURGETANK_STATE": str(state), "SURGETANK_TIERS": f"ram={tier}:64M"}
    path = os.pathsep.join([str(conda), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **own, "PATH": path, "PYTHONPATH": str(ROOT), "SEEN": str(seen)}


def snakemake(place: Path, there: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    words = ["unshare", "-m", sys.executable, "-m", "snakemake", "--cores", "2", "--sdm", "conda", *more]
    done = subprocess.run(words, cwd=place, env=there, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def tree(place: Path) -> dict[str, bytes]:
    files = (
        path for path in place.rglob("*") if path.is_file() and not path.relative_to(place).parts[0].startswith(".")
    )
    return {str(path.relative_to(place)): path.read_bytes() for path in files if path.parent.name != "default"}


def nothing_to_do(place: Path, there: dict[str, str]) -> bool:
    done = snakemake(place, there, "-n", "--workflow-profile", "none")
    return "Nothing to be done" in done.stdout + done.stderr


def with_profile(place: Path, persist: str) -> None:
    """The profile that Snakemake finds by itself."""
    (place / "profiles/default").mkdir(parents=True)
    (place / "profiles/default/config.yaml").write_text(f"{PROFILE}storage-surgetank-persist: {persist}\n")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that the project makes without Surgetank."""
    place = tmp_path_factory.mktemp("plain")
    there = surroundings(place, place)
    snakemake(project(place / "w"), there)
    return tree(place / "w")


@NEEDS_MOUNT
def test_project_with_a_profile_runs(
    tmp_path: Path, tier: Path, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = project(tmp_path / "w")
    there = surroundings(tmp_path, tier)
    with_profile(work, "final")
    snakemake(work, there)
    made = tree(work)
    # Before a checkpoint the readers of earlier files are unknown: those files are kept.
    assert made == {path: content for path, content in plain.items() if not path.startswith("done/")}
    assert nothing_to_do(work, there)
    seen = {path.name: path.read_text().strip() for path in (tmp_path / "seen").iterdir()}
    # The plugin prefetched inputs and kept temporaries back; all other files go to the store while jobs run.
    assert (seen["tier-a"], seen["temp-a"], seen["before"]) == ("ram", "kept", "durable")
    assert "cannot be locked" in seen["lock"]
    # The outer Snakemake left no empty log.
    assert all(log.stat().st_size for log in (work / ".snakemake/log").iterdir())
    monkeypatch.setenv("SURGETANK_BINARY", BINARY)
    record = Agent(state=there["SURGETANK_STATE"]).records()[-1]
    assert record["verdict"]["kept"]["total"] == 0 and record["exit"] == 0


PIPE = """
rule all:
    input: "count.txt"

rule numbers:
    output: pipe("numbers.txt")
    shell: "seq 2000 > {output}"

rule count:
    input: "numbers.txt"
    output: "count.txt"
    shell: "wc -l < {input} > {output}"
"""


@NEEDS_MOUNT
@pytest.mark.parametrize("door", ["fuse", "seccomp"])
def test_rules_that_share_a_pipe(tmp_path: Path, tier: Path, door: str) -> None:
    """Snakemake makes a fifo, changes its times and removes it. Regression: under seccomp this counted as another client's change."""
    work = project(tmp_path / "w", PIPE)
    there = surroundings(tmp_path, tier)
    run = [BINARY, "run", "--over", str(work), "--door", door]
    words = [*run, "--", sys.executable, "-m", "snakemake", "--cores", "2"]
    done = subprocess.run(words, cwd=work, env=there, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conflict" not in done.stderr
    assert (work / "count.txt").read_text() == "2000\n"
    assert not (work / "numbers.txt").exists()


CHAIN = r"""
rule all:
    input: "out/sum.txt"

rule sort:
    input: "data/{s}.txt"
    output: "work/{s}.sorted"
    shell: "echo start sort {wildcards.s} >> $SEEN/ran; sort {input} > {output}; sleep 0.4; echo end sort {wildcards.s} >> $SEEN/ran"

rule count:
    input: "work/{s}.sorted"
    output: "counts/{s}.txt"
    shell: "echo start count {wildcards.s} >> $SEEN/ran; wc -l < {input} > {output}; sleep 0.4; "
           "python3 $SEEN/look.py {input} user.surgetank.state kept > $SEEN/state-{wildcards.s}; echo end count {wildcards.s} >> $SEEN/ran"

rule sum:
    input: expand("counts/{s}.txt", s=list("abcd"))
    output: "out/sum.txt"
    shell: "echo start sum >> $SEEN/ran; cat {input} > {output}; python3 $SEEN/look.py work/a.sorted user.surgetank.state \"$AFTER\" > $SEEN/after; echo end sum >> $SEEN/ran"
"""


def ran(there: dict[str, str], what: str) -> list[str]:
    try:
        lines = Path(there["SEEN"], "ran").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.removeprefix(f"{what} ") for line in lines if line.startswith(what)]


@NEEDS_MOUNT
def test_kill_of_snakemake_and_agent_and_resume(tmp_path: Path, tier: Path) -> None:
    work = project(tmp_path / "w", CHAIN)
    there = {**surroundings(tmp_path, tier), "AFTER": ""}
    with_profile(work, "final")
    before = set(tree(work))
    words = ["unshare", "-m", sys.executable, "-m", "snakemake", "--cores", "2"]
    process = subprocess.Popen(
        words, cwd=work, env=there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 60
    while not any(job.startswith("count") for job in ran(there, "end")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    # (The run is under the mount: the results of finished jobs are on the tier only.)
    assert set(tree(work)) == before
    kill_all(there["SURGETANK_STATE"])
    process.kill()
    process.wait()
    ended = ran(there, "end")
    # Snakemake requires this after a kill.
    snakemake(work, there, "--unlock")
    snakemake(work, there, "--rerun-incomplete")
    assert nothing_to_do(work, there)
    made = tree(work)
    assert set(made) - before == {"out/sum.txt"}
    assert made["out/sum.txt"] == b"2000\n2001\n2002\n2003\n"
    # The killed run's results stayed on the tier for later jobs, and never reached the store.
    assert {Path(there["SEEN"], f"state-{name}").read_text() for name in "abcd"} == {"kept\n"}
    # Only the jobs of the moment of the kill began again: at most two, one of which may have ended unseen by Snakemake.
    begun = ran(there, "start")
    again = {job for job in begun if begun.count(job) > 1}
    assert len(begun) <= 9 + 2 and len(again & set(ended)) <= 1


@NEEDS_MOUNT
def test_outputs_persist_after_their_last_reader(tmp_path: Path, tier: Path) -> None:
    work = project(tmp_path / "w", CHAIN)
    there = {**surroundings(tmp_path, tier), "AFTER": "durable"}
    with_profile(work, "when-consumed")
    snakemake(work, there)
    assert nothing_to_do(work, there)
    seen = {path.name: path.read_text().strip() for path in (tmp_path / "seen").iterdir() if path.name != "ran"}
    assert {seen[f"state-{name}"] for name in "abcd"} == {"kept"} and seen["after"] == "durable"
    assert {"work/a.sorted", "counts/d.txt", "out/sum.txt"} <= set(tree(work))


OUTSIDE = r"""
rule all:
    input: "out/sum.txt"

rule aside:
    input: "data/a.txt"
    output: aside=config["outside"] + "/aside.txt", linked="linked/b.txt", between="work/c.txt"
    shell: "sort {input} | tee {output.aside} {output.linked} > {output.between}"

rule sum:
    input: rules.aside.output
    output: "out/sum.txt"
    shell: "cat {input} | wc -l > {output}"
"""


@NEEDS_MOUNT
def test_final_keeps_intermediates_outside_the_mount(tmp_path: Path, tier: Path) -> None:
    work, outside = project(tmp_path / "w", OUTSIDE), tmp_path / "outside"
    there = surroundings(tmp_path, tier)
    outside.mkdir()
    (work / "linked").symlink_to(outside)
    with_profile(work, "final")
    snakemake(work, there, "--config", f"outside={outside}")
    assert (work / "out/sum.txt").read_text() == "6000\n"
    assert sorted(path.name for path in outside.iterdir()) == ["aside.txt", "b.txt"]
    # Files below it are dropped as before.
    assert not (work / "work/c.txt").exists()


def test_final_keeps_files_of_other_storage() -> None:
    from surgetank.workflow.execute.persist import droppable
    from surgetank.workflow.importers.plugins.snakemake_scheduler_plugin_surgetank_import import _file
    from surgetank.workflow.importers.snakemake import workflow_of

    class Named(str):
        flags: dict[str, object]

    def job(number: int, inputs: list[Named], outputs: list[Named]) -> dict[str, object]:
        facts = dict.fromkeys(
            ("benchmark", "checkpoint", "does_nothing", "retries", "image", "command", "file", "line")
        )
        files = {"inputs": [_file(name) for name in inputs], "outputs": [_file(name) for name in outputs]}
        rest = {"number": number, "rule": f"r{number}", "logs": [], "resources": {}, "threads": 1, "dependencies": []}
        return {**facts, **rest, **files}

    stored, local, end = Named(".snakemake/storage/s3/bucket/x"), Named("y"), Named("end")
    stored.flags, local.flags, end.flags = {"storage_object": object()}, {}, {}
    workflow = workflow_of([job(0, [], [stored, local]), job(1, [stored, local], [end])], Path("Snakefile"), Path.cwd())
    assert droppable(workflow, Persist.FINAL, named=True) == {"y"}


@NEEDS_MOUNT
def test_it_is_refused_where_it_could_not_work(tmp_path: Path, tier: Path) -> None:
    work = project(tmp_path / "w", CHAIN)
    there = surroundings(tmp_path, tier)
    program = "from snakemake.cli import main; main(['-c1', '--default-storage-provider', 'surgetank'])"
    library = [sys.executable, "-c", program]
    one_file = [sys.executable, "-m", "snakemake", "-c1"]
    for words, message in ((library, "surgetank run -- "), (one_file, "`default-storage-provider: surgetank`")):
        asked = subprocess.run(words, cwd=work, env=there, capture_output=True, text=True, check=False, timeout=60)
        assert asked.returncode and message in asked.stdout + asked.stderr
        (work / "Snakefile").write_text('rule all:\n    input: storage.surgetank("data/a.txt")\n')


def test_temporaries_of_snakemake_are_not_consumed_twice() -> None:
    from surgetank.workflow.engines.snakemake import Observer

    sent: list[str] = []
    agent = SimpleNamespace(hint=lambda hints: sent.extend(f"{hint['path']} {hint['mode']}" for hint in hints))
    observer = Observer(Persist.WHEN_CONSUMED, agent)  # type: ignore[arg-type]
    tasks = [Task("make", "make", [], ["scratch", "kept"]), Task("read", "read", ["scratch", "kept"], ["end"])]
    observer.workflow = Workflow.of("w", "Snakefile", tasks, [File("scratch", temporary=True)])
    observer._unfinished, observer._children_left = {"make", "read"}, {"make": 1, "read": 0}
    observer._hand_over(["make"])
    assert sent == []
    observer._hand_over(["read"])
    assert sent == ["kept copy", "end copy"]


def test_jobs_on_other_machines_are_refused() -> None:
    from snakemake_interface_common.exceptions import WorkflowError

    from surgetank.workflow.engines.snakemake import Observer

    dag = SimpleNamespace(workflow=SimpleNamespace(local_exec=False))
    with pytest.raises(WorkflowError, match="runs jobs on other machines"):
        Observer(Persist.ALL, Agent("true")).begin(dag, None)


@pytest.mark.parametrize(
    ("unfinished", "held", "stays"), [(set(), True, False), ({"read"}, True, True), (set(), False, True)]
)
def test_unneeded_files_of_a_killed_run_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfinished: set[str], held: bool, stays: bool
) -> None:
    from surgetank.workflow.engines import snakemake as inside

    monkeypatch.chdir(tmp_path)
    Path("between").touch()
    # A file in the store is the result of an earlier run, and stays.
    monkeypatch.setattr(inside, "_held_back", lambda _: held)
    observer = inside.Observer(Persist.FINAL, Agent("true"))
    observer.logger = logging.getLogger()
    tasks = [Task("make", "make", [], ["between"]), Task("read", "read", ["between"], ["end"])]
    observer.workflow, observer._unfinished = Workflow.of("w", "Snakefile", tasks), unfinished
    observer._declare_temporary({"between"})
    assert Path("between").exists() is stays
