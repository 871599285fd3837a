"""Every importer, with typical mistakes of users: the error names the file, and the line if there is one."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surgetank.workflow import importers
from surgetank.workflow.problem import Problem

CWL = """cwlVersion: v1.2
class: Workflow
inputs: {x: File}
outputs: {o: {type: File, outputSource: b/o}}
steps:
  a: {run: tool.cwl, in: {i: %s}, out: [o]}
  b: {run: tool.cwl, in: {i: a/o}, out: [o]}
"""
TOOL = """cwlVersion: v1.2
class: CommandLineTool
baseCommand: cat
inputs: {i: {type: File, inputBinding: {}}}
outputs: {o: stdout}
"""
JOB = """  - type: job
    id: %s
    name: cat
    uses: [{lfn: %s, type: input}, {lfn: %s, type: output, stageOut: true}]
"""
PEGASUS = "pegasus: '5.0'\nname: n\njobs:\n"
TASK = '{"name": "%s", "id": "%s", "parents": [], "children": [], "inputFiles": ["%s"], "outputFiles": ["%s"]}'
WFFORMAT = '{"name": "n", "schemaVersion": "1.5",\n "workflow": {"specification": {"tasks": [%s], "files": []}}}'
RULE = "rule %s:\n    input: '%s'\n    output: '%s'\n    shell: 'cat {input} > {output}'\n"
OWN = "surgetank: 1\ntasks:\n"
OWN_TASK = "  %s: {command: [cat], inputs: [%s], outputs: [%s]}\n"

# Engine, file's name, text, the required part of the message, and the line that it names (None: no line).
BROKEN = [
    ("snakemake", "Snakefile", "rule a:\n    output 'x'\n", "cannot make its graph", 2),
    ("snakemake", "Snakefile", RULE % ("a", "gone", "x"), "Missing", 1),
    ("snakemake", "Snakefile", RULE % ("a", "y", "x") + RULE % ("b", "x", "y"), "yclic", None),
    ("cwl", "w.cwl", "cwlVersion: v1.2\nclass: Workflow\nsteps: [\n", "refuses", 4),
    ("cwl", "w.cwl", CWL % "nobody", "refuses", 6),
    ("cwl", "w.cwl", CWL % "b/o", "circular", None),
    ("pegasus", "workflow.yml", PEGASUS + "  - type: job\n   id: a\n", "not YAML", 5),
    ("pegasus", "workflow.yml", PEGASUS + "  - {type: job, name: cat}\n", "id is missing", 4),
    ("pegasus", "workflow.yml", PEGASUS + JOB % ("a", "y", "x") + JOB % ("b", "x", "y"), "wait for each other", 4),
    ("pegasus", "workflow.yml", PEGASUS + JOB % ("a", "y", "x") + "jobDependencies:\n- {id: z}\n", "'z'", 9),
    ("nextflow", "trace.txt", "task_id\thash\tname\tstatus\n1\tab/cd\n", "2 values instead of 4", 2),
    ("nextflow", "trace.txt", "task_id\tname\n1\ta\n", "hash, status", 1),
    ("make", "Makefile", "a:\n    touch a\n", "missing separator", 2),
    ("make", "Makefile", "a: gone\n\ttouch a\n", "'gone'", 1),
    ("make", "Makefile", "\na: b\n\ttouch a\nb: a\n\ttouch b\n", "need each other", 2),
    ("makeflow", "w.mf", "a: \ntouch a\n", "has no command", 1),
    ("makeflow", "w.mf", "X=1\na: gone\n\ttouch a\n", "'gone'", 2),
    ("makeflow", "w.mf", "a: b\n\ttouch a\nb: a\n\ttouch b\n", "wait for each other", None),
    ("makeflow", "w.mf", '{"rules": []}', "JX or JSON", None),
    ("makeflow", "w.mf", "a:\n\tMAKEFLOW sub.mf\n", "inside a workflow", 2),
    ("pegasus", "workflow.yml", "pegasus: '4.9'\nname: n\n", "not a workflow of Pegasus 5", 1),
    ("wfformat", "w.json", '{"schemaVersion": "1.5",\n', "not JSON", 2),
    ("wfformat", "w.json", WFFORMAT % "1", "not an object", None),
    (
        "wfformat",
        "w.json",
        WFFORMAT % (TASK % ("a", "a", "y", "x") + "," + TASK % ("b", "b", "x", "y")),
        "wait for",
        None,
    ),
    ("observed", "r.json", '{"format": 1,\n "processes"', "not JSON", 2),
    ("observed", "r.json", '{"format": 1, "processes": []}', "which process", None),
    ("own", "w.yaml", "surgetank: 1\ntasks:\n  a: {command: [cat]\n", "not YAML", 4),
    ("own", "w.yaml", OWN + "  a: {command: [cat], inptus: [x]}\n", "did you mean 'inputs'", 3),
    ("own", "w.yaml", OWN + OWN_TASK % ("a", "y", "x") + OWN_TASK % ("b", "x", "y"), "wait for each other", 3),
    ("own", "w.yaml", OWN + OWN_TASK % ("a", "y", "x") + OWN_TASK % ("a", "x", "y"), "is there twice", 4),
    ("own", "w.yaml", OWN + OWN_TASK % ("a", "y", "x") + OWN_TASK % ("b", "y", "x"), "both", 4),
    ("own", "w.yaml", OWN + "  a: {command: [cat], memory: lots}\n", "not a size", 3),
    ("own", "w.yaml", OWN + "  a: {command: [cat], outputs: [1.5, null]}\n", "not text", 3),
    ("own", "w.yaml", OWN + "  a: {command: [cat], after: [b]}\n", "does not exist", 3),
    ("own", "w.yaml", OWN + OWN_TASK % ("a", "", "x") + "files: {y: {size: 1G}}\n", "no task reads", 4),
]
NAMES = {
    "snakemake": "Snakefile", "cwl": "w.cwl", "pegasus": "workflow.yml", "nextflow": "trace.txt", "make": "Makefile",
    "makeflow": "w.mf", "wfformat": "w.json", "observed": "r.json", "own": "w.yaml",
}  # fmt: skip
LIBRARIES = {"snakemake": "snakemake", "cwl": "cwltool"}


def need(engine: str) -> None:
    library = LIBRARIES.get(engine)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if engine == "make" and shutil.which("make") is None:
        pytest.skip("make is not installed")


@pytest.mark.parametrize(
    ("engine", "name", "text", "says", "line"), BROKEN, ids=[f"{row[0]}-{i}" for i, row in enumerate(BROKEN)]
)
def test_broken_description_is_refused_with_its_place(
    tmp_path: Path, engine: str, name: str, text: str, says: str, line: int | None
) -> None:
    need(engine)
    (tmp_path / "tool.cwl").write_text(TOOL)
    path = tmp_path / name
    path.write_text(text)
    if (engine, says) == ("observed", "which process"):
        # No error: the processes are unknown, and the graph states that.
        assert any(says in why for why in importers.load(path, engine).incomplete)
        return
    with pytest.raises(Problem) as caught:
        importers.load(path, engine)
    message = str(caught.value)
    assert says in message, message
    assert name in message.split("\n")[0], message
    if line is not None:
        assert f"{name}:{line}" in message.split("\n")[0].replace('"', ""), message


@pytest.mark.parametrize("engine", NAMES)
def test_empty_file_is_reported_as_empty(tmp_path: Path, engine: str) -> None:
    need(engine)
    path = tmp_path / NAMES[engine]
    path.write_text(" \n")
    with pytest.raises(Problem, match=r"empty|not JSON"):
        importers.load(path, engine)


@pytest.mark.parametrize("engine", NAMES)
def test_bytes_that_are_not_text_are_refused(tmp_path: Path, engine: str) -> None:
    need(engine)
    path = tmp_path / NAMES[engine]
    path.write_bytes(b"a: b\n\xff\xfe: 1\n")
    with pytest.raises(Problem, match=r"UTF-8|cannot be read") as caught:
        importers.load(path, engine)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("engine", NAMES)
def test_missing_file_is_named(tmp_path: Path, engine: str) -> None:
    need(engine)
    with pytest.raises(Problem, match="cannot be read"):
        importers.load(tmp_path / NAMES[engine], engine)


@pytest.mark.parametrize("engine", LIBRARIES)
def test_missing_library_is_named_with_its_extra(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / NAMES[engine]
    path.write_text("x\n")
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == LIBRARIES[engine] else find(name, *rest)
    )
    with pytest.raises(Problem, match=rf"pip install 'surgetank\[{engine}\]'"):
        importers.load(path)


@pytest.mark.parametrize(
    ("name", "text", "engine"),
    [
        ("Snakefile", "x", "snakemake"), ("rules.smk", "x", "snakemake"), ("a.cwl", "x", "cwl"),
        ("Makefile", "x", "make"),
        ("a.mf", "x", "makeflow"), ("a.yml", "# c\npegasus: 5.0.4\n", "pegasus"), ("a.yaml", "surgetank: 1\n", "own"),
        ("a.json", '{"name": "n", "schemaVersion": "1.5"}', "wfformat"), ("a.json", '{"format": 1}', "observed"),
        ("a.json", '{"cwlVersion": "v1.2"}', "cwl"), ("a.yml", "class: Workflow\ncwlVersion: v1.2\n", "cwl"),
        ("t.txt", "task_id\thash\tname\n", "nextflow"),
    ],
)  # fmt: skip
def test_kind_of_a_workflow_is_recognised(tmp_path: Path, name: str, text: str, engine: str) -> None:
    (tmp_path / name).write_text(text)
    assert importers.recognise(tmp_path / name) == engine


def test_unrecognised_workflow_is_refused_with_the_engines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello\n")
    with pytest.raises(Problem, match=r"snakemake .* own"):
        importers.load(tmp_path / "x.txt")
    (tmp_path / "main.nf").write_text("process a {}\n")
    with pytest.raises(Problem, match="-with-trace"):
        importers.load(tmp_path / "main.nf")
    with pytest.raises(Problem, match="the importer 'slurm' does not exist"):
        importers.load(tmp_path / "x.txt", "slurm")
