"""Facts derived from the graph: patterns, lifetimes, sizes, peaks, hints; checked by hand on small graphs and two real ones."""

from __future__ import annotations

import json
import os
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import pytest

from surgetank.workflow import cli, hints, plot
from surgetank.workflow.derive import Lifetime, Pattern, Persist, Span, derive, peak_live_bytes, schedule
from surgetank.workflow.graph import File, Task, Workflow
from surgetank.workflow.importers import wfformat

INSTANCES = Path(os.environ.get("SURGETANK_SHARED", "/work/shared")) / "data/wfinstances"


def spread_and_gathered() -> Workflow:
    """split → 3 × work (each with the table) → merge; `log` has no reader; a checkpoint's file has unknown readers."""
    tasks = [
        Task("split", "split", ["in"], ["p0", "p1", "p2"], runtime_s=1),
        *(Task(f"work{n}", "work", [f"p{n}", "table"], [f"q{n}"], runtime_s=2) for n in range(3)),
        Task("merge", "merge", ["q0", "q1", "q2"], ["out", "log"], runtime_s=1),
        Task("next", "next", ["out"], ["end", "later"], runtime_s=1),
    ]
    sizes = {"in": 30, "table": 7, "p0": 10, "p1": 10, "p2": 10, "q0": 5, "q1": 5, "q2": 5, "out": 15, "end": 1}
    files = [File(path, size) for path, size in sizes.items()]
    files += [File("log", 2, temporary=True), File("later", 3, readers_unknown=True, temporary=True)]
    return Workflow.of("w", "w", tasks, files)


def test_patterns() -> None:
    facts = derive(spread_and_gathered())
    assert {path: fact.pattern for path, fact in facts.items()} == {
        "in": Pattern.PRIVATE,
        "table": Pattern.BROADCAST,
        **dict.fromkeys(("p0", "p1", "p2"), Pattern.DISTRIBUTE),
        **dict.fromkeys(("q0", "q1", "q2"), Pattern.REDUCE),
        "out": Pattern.PIPELINE,
        "end": Pattern.RESULT,
        "log": Pattern.RESULT,
        "later": Pattern.UNKNOWN,
    }
    assert facts["q1"].group == "merge"


def test_only_named_files_are_disposable() -> None:
    workflow = spread_and_gathered()
    kept = derive(workflow, Persist.ALL)
    assert [path for path, fact in kept.items() if fact.disposable] == ["log"]
    assert kept["log"].lifetime is Lifetime.TASK
    workflow.files["q0"].final = True
    final = derive(workflow, Persist.FINAL)
    assert {path for path, fact in final.items() if fact.disposable} == {"p0", "p1", "p2", "q1", "q2", "out", "log"}
    # Its readers are unknown, whatever the description says.
    assert final["later"].lifetime is Lifetime.FOREVER


def test_incomplete_graph_and_files_changed_in_place_are_kept() -> None:
    workflow = spread_and_gathered()
    workflow.incomplete.append("a checkpoint")
    assert [path for path, fact in derive(workflow, Persist.FINAL).items() if fact.disposable] == ["log"]
    in_place = Workflow.of("w", "w", [Task("a", "k", ["x"], ["x", "y"]), Task("b", "k", ["x", "y"], ["z"])])
    assert [path for path, fact in derive(in_place, Persist.FINAL).items() if fact.disposable] == ["y"]


def test_peak_is_the_sum_of_live_files() -> None:
    workflow = spread_and_gathered()
    facts = derive(workflow, Persist.FINAL)
    order = ["split", "work0", "work1", "work2", "merge", "next"]
    spans = [Span(task, at, at + 1) for at, task in enumerate(order)]
    # By hand: split 30; work0 35, then p0 goes; work1 30, work2 25; merge 15 + 15 + 2; next 15 + 1 + 3.
    assert peak_live_bytes(workflow, facts, spans, lifetimes=True) == 35
    assert peak_live_bytes(workflow, facts, spans, lifetimes=False) == 30 + 15 + 15 + 2 + 1 + 3


def test_started_branches_are_finished_first() -> None:
    tasks = [Task(f"a{n}", "a", [], [f"x{n}"], runtime_s=1) for n in range(3)]
    tasks += [Task(f"b{n}", "b", [f"x{n}"], [f"y{n}"], runtime_s=1) for n in range(3)]
    spans = schedule(Workflow.of("w", "w", tasks), 1)
    assert [span.task for span in spans] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_schedule_respects_parents_and_cores() -> None:
    workflow = spread_and_gathered()
    workflow.tasks["work1"].cores = 99
    spans = {span.task: span for span in schedule(workflow, 2)}
    for task, parents in workflow.parents.items():
        assert all(spans[parent].end_s <= spans[task].begin_s for parent in parents)
    wide = spans["work1"]
    others = [span for span in spans.values() if span.task != "work1"]
    assert all(span.end_s <= wide.begin_s or span.begin_s >= wide.end_s for span in others)


def test_sizes_from_history_where_the_description_has_none() -> None:
    earlier = Workflow.of(
        "w", "w", [Task("t", "t", [], ["a.x", "b.x", "c.x"])], [File("a.x", 10), File("b.x", 20), File("c.x", 90)]
    )
    now = Workflow.of("w", "w", [Task("t", "t", [], ["a.x", "new.x", "new.y", "said.x"])], [File("said.x", 1)])
    facts = derive(now, history=[earlier])
    derived = {path: (fact.size_bytes, fact.size_from) for path, fact in facts.items()}
    assert derived == {
        "said.x": (1, "description"),
        "a.x": (10, "history"),
        "new.x": (20, "history of its kind"),
        "new.y": (None, None),
    }


def test_hints_and_rules_say_the_same() -> None:
    workflow = Workflow.of(
        "w",
        "w",
        [Task("t", "t", ["i"], ["a*[1].x", 'q"\\\x7f'], tier="nvme"), Task("u", "u", ["i", "a*[1].x"], ["end"])],
        [File("a*[1].x", 5)],
    )
    facts = derive(workflow, Persist.FINAL)
    derived = list(hints.hints(workflow, facts, Persist.FINAL))
    assert derived == [
        {"path": "a*[1].x", "mode": "remove", "size": 5, "tier": "nvme"},
        {"path": "i", "prefetch": True},
        {"path": 'q"\\\x7f', "tier": "nvme"},
    ]
    assert [json.loads(line) for line in hints.json_lines(iter(derived)).splitlines()] == derived
    rules = tomllib.loads(hints.rules_toml(iter(derived)))["rules"]
    assert rules[0] == {"match": "/a\\*\\[1\\].x", "mode": "remove", "size": 5, "tier": "nvme"}
    assert rules[2]["match"] == '/q"\\\\\x7f'
    consumed = list(hints.hints(workflow, derive(workflow, Persist.WHEN_CONSUMED), Persist.WHEN_CONSUMED))
    assert consumed[0]["mode"] == "keep" and "mode" not in consumed[2]


def test_drawing_is_well_formed_and_names_each_part(tmp_path: Path) -> None:
    tasks = [Task("a<&>", "k", ["in\x1b[2J"], ['o"1"']), Task("b", "k", ['o"1"'], ["end"])]
    workflow = Workflow.of("<w>", "w", tasks)
    drawn = xml.fromstring(plot.svg(workflow, derive(workflow)))
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"<w>", "a<&>", 'o"1"', "end", "in\\x1b[2J"} <= texts
    few = xml.fromstring(plot.svg(workflow, derive(workflow), boxes_max=1))
    assert "2 tasks" not in texts and len(list(few.iter("{http://www.w3.org/2000/svg}g"))) == 5


@pytest.mark.skipif(not INSTANCES.is_dir(), reason="the instances are sample data that is not in the repository")
def test_montage_and_epigenomics_as_checked_by_hand() -> None:
    montage = wfformat.load(INSTANCES / "montage-chameleon-2mass-01d-001.json")
    facts = derive(montage, Persist.FINAL)
    of = {
        kind: {facts[path].pattern for task in montage.tasks.values() if task.kind == kind for path in task.outputs}
        for kind in {task.kind for task in montage.tasks.values()}
    }
    # A projected image goes to its background correction and to every overlap; fits are gathered by mConcatFit.
    assert of["mProject"] == {Pattern.BROADCAST} and of["mDiffFit"] == {Pattern.REDUCE}
    assert of["mConcatFit"] == {Pattern.PIPELINE} and of["mViewer"] == {Pattern.RESULT}
    assert sum(fact.lifetime is Lifetime.FOREVER and fact.maker is not None for fact in facts.values()) == 7
    epigenomics = wfformat.load(INSTANCES / "epigenomics-chameleon-hep-1seq-100k-001.json")
    facts = derive(epigenomics, Persist.FINAL)
    # One split into 9 chains of four steps, merged at the end.
    assert Counter(fact.pattern for fact in facts.values() if fact.maker) == {
        Pattern.DISTRIBUTE: 9,
        Pattern.PIPELINE: 30,
        Pattern.REDUCE: 9,
        Pattern.RESULT: 1,
    }
    for workflow in (montage, epigenomics):
        facts = derive(workflow, Persist.FINAL)
        spans = schedule(workflow, 2)
        without, with_ = (peak_live_bytes(workflow, facts, spans, lifetimes=way) for way in (False, True))
        assert without >= 2 * with_


def test_command_line_explains_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = tmp_path / "w.json"
    wfformat.dump(spread_and_gathered(), described)
    assert cli.main(["explain", str(described), "--json", "-j", "1", "--persist", "final", "--final", "out"]) == 0
    derived = json.loads(capsys.readouterr().out)
    assert (derived["tasks"], derived["peak_live_bytes"] < derived["peak_live_bytes_without_lifetimes"]) == (6, True)
    assert {row["path"] for row in derived["of_files"] if row["lifetime"] == "forever"} >= {"out", "later", "end"}
    assert cli.main(["explain", str(described), "--every"]) == 0
    assert "p1" in capsys.readouterr().out
    assert cli.main(["plot", str(described), "-o", str(tmp_path / "w.svg")]) == 0
    assert xml.parse(tmp_path / "w.svg").getroot().tag.endswith("svg")
    assert cli.main(["import", str(described)]) == 0
    assert (
        wfformat.of(json.loads(capsys.readouterr().out), described).tasks.keys() == spread_and_gathered().tasks.keys()
    )
    assert cli.main(["explain", str(tmp_path / "absent.json"), "--engine", "wfformat"]) == 2
    assert "absent.json" in capsys.readouterr().err
    assert cli.main(["explain", str(described), "--final", "nothing*"]) == 2
