"""The importers' results for graphs that are known by hand, for public ones, and compared with the tasks of real runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surgetank.workflow import cli, importers
from surgetank.workflow.graph import File, Task, Workflow
from surgetank.workflow.importers import wfformat

SNAKEFILE = """
rule all:
    input: "final.txt", "agg.txt"
rule a:
    input: "in.txt"
    output: temp("a.txt")
    threads: 1
    resources: mem_mb=100
    retries: 2
    log: "logs/a.log"
    benchmark: "bench/a.tsv"
    container: "docker://debian"
    shell: "cp {input} {output}"
checkpoint split:
    input: "a.txt"
    output: directory("parts")
    shell: "mkdir parts; cp {input} parts/x; cp {input} parts/y"
rule part:
    input: "parts/{i}"
    output: "done/{i}"
    shell: "cp {input} {output}"
def parts(w):
    import os
    d = checkpoints.split.get().output[0]
    return ["done/" + x for x in sorted(os.listdir(d)) if x[0] != "."]
rule agg:
    input: parts
    output: "agg.txt"
    shell: "cat {input} > {output}"
rule final:
    input: "a.txt"
    output: protected("final.txt")
    shell: "cp {input} {output}"
"""


def need(library: str) -> None:
    if importlib.util.find_spec(library.split(".")[0]) is None:
        pytest.skip(f"{library} is not installed")


def shape(workflow: Workflow) -> dict[str, tuple[list[str], list[str]]]:
    return {task.id: (task.inputs, task.outputs) for task in workflow.tasks.values()}


def run_in_order(workflow: Workflow, directory: Path) -> None:
    """The commands themselves, in the graph's order."""
    for id_ in workflow.order:
        command = workflow.tasks[id_].command
        assert command
        for name in workflow.tasks[id_].outputs:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=directory, shell=isinstance(command, str), check=True, capture_output=True)


def assert_all_there(workflow: Workflow, directory: Path) -> None:
    for task in workflow.tasks.values():
        for name in task.outputs:
            assert (directory / name).exists(), f"{task.id} did not make {name}"


def snakemake(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--nolock", *arguments]
    ended = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def test_snakemake_with_a_checkpoint_before_and_after_it(tmp_path: Path) -> None:
    need("snakemake")
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "in.txt").write_text("hi\n")
    before = importers.load(tmp_path / "Snakefile")
    assert shape(before) == {
        "a:a.txt": (["in.txt"], ["a.txt", "logs/a.log", "bench/a.tsv"]),
        "agg:agg.txt": (["parts"], ["agg.txt"]),
        "final:final.txt": (["a.txt"], ["final.txt"]),
        "split:parts": (["a.txt"], ["parts"]),
    }
    a = before.tasks["a:a.txt"]
    assert (a.cores, a.memory_bytes, a.retries, a.image) == (1, 100_000_000, 2, "docker://debian")
    assert (a.command, before.at(a)) == ("cp in.txt a.txt", f"{tmp_path}/Snakefile:4")
    assert before.files["a.txt"].temporary and before.files["final.txt"].final and before.files["agg.txt"].final
    assert before.files["in.txt"].size_bytes == 3
    assert before.tasks["agg:agg.txt"].command is None, "what it reads is not known"
    assert all(file.readers_unknown for file in before.files.values()) and "split" in before.incomplete[0]
    assert sorted(os.listdir(tmp_path)) == [".snakemake", "Snakefile", "in.txt"], "an import runs nothing"

    snakemake(tmp_path, "parts", "--notemp")
    after = importers.load(tmp_path / "Snakefile", everything=False)
    assert after.incomplete == [] and not any(file.readers_unknown for file in after.files.values())
    assert after.tasks["agg:agg.txt"].inputs == ["done/x", "done/y"]
    assert after.tasks["part:done/x"].inputs == ["parts/x"]
    snakemake(tmp_path, "--notemp")
    for task in after.tasks.values():
        for name in task.outputs:
            assert (tmp_path / name).exists() or name.startswith("logs/"), name
    assert importers.load(tmp_path / "Snakefile", everything=False).tasks == {}, "there is nothing left to do"


def test_snakemake_import_ignores_targets_of_a_profile(tmp_path: Path) -> None:
    need("snakemake")
    (tmp_path / "Snakefile").write_text(
        "onstart: shell('touch started')\nrule a:\n    output: 'x'\n    conda: 'env.yaml'\n    shell: 'touch x'\n"
    )
    (tmp_path / "env.yaml").write_text("dependencies: [no-such-package]\n")
    (tmp_path / "profiles/default").mkdir(parents=True)
    (tmp_path / "profiles/default/config.yaml").write_text("software-deployment-method: conda\n")
    workflow = importers.load(tmp_path / "Snakefile")
    assert shape(workflow) == {"a:x": ([], ["x"])}
    assert sorted(os.listdir(tmp_path)) == [".snakemake", "Snakefile", "env.yaml", "profiles"]


@pytest.mark.parametrize("case", ["simple", "groups"])
def test_snakemakes_own_test_cases_have_as_many_jobs_as_it_counts(tmp_path: Path, case: str) -> None:
    need("snakemake")
    package = importlib.util.find_spec("snakemake")
    assert package and package.origin
    source = Path(package.origin).parent / "common/tests/testcases" / case
    if not source.is_dir():
        pytest.skip("this Snakemake does not ship its cases")
    shutil.copytree(source, tmp_path / "w")
    workflow = importers.load(tmp_path / "w/Snakefile")
    output = snakemake(tmp_path / "w", "-n", "-F")
    total = next(line.split()[1] for line in output.splitlines() if line.startswith("total"))
    # `all` is a job for Snakemake, but not a task for Surgetank.
    assert len(workflow.tasks) == int(total) - 1
    snakemake(tmp_path / "w", "--notemp")
    missing = [n for t in workflow.tasks.values() for n in t.outputs if not (tmp_path / "w" / n).exists()]
    assert not [name for name in missing if not name.startswith("logs/")]


CWL = """cwlVersion: v1.2
class: Workflow
requirements: {ScatterFeatureRequirement: {}, SubworkflowFeatureRequirement: {}}
inputs: {x: File, many: "File[]"}
outputs: {o: {type: File, outputSource: c/o}, n: {type: "File[]", outputSource: s/o}}
steps:
  c: {run: inner.cwl, in: {i: a/o}, out: [o]}
  a: {run: tool.cwl, in: {i: x}, out: [o]}
  s: {run: tool.cwl, scatter: i, in: {i: many}, out: [o]}
"""
INNER = """cwlVersion: v1.2
class: Workflow
inputs: {i: File}
outputs: {o: {type: File, outputSource: z/o}}
steps: {z: {run: tool.cwl, in: {i: i}, out: [o]}}
"""
TOOL = """cwlVersion: v1.2
class: CommandLineTool
baseCommand: cat
requirements: {ResourceRequirement: {coresMin: 2, ramMin: 64}}
hints: {DockerRequirement: {dockerPull: debian}}
inputs: {i: {type: File, inputBinding: {}}}
outputs: {o: stdout}
"""


def test_cwl_with_a_sub_workflow_and_a_scatter(tmp_path: Path) -> None:
    need("cwltool")
    for name, text in (("w.cwl", CWL), ("inner.cwl", INNER), ("tool.cwl", TOOL), ("x", "hello"), ("y", "you")):
        (tmp_path / name).write_text(text)
    (tmp_path / "job.yml").write_text("x: {class: File, location: x}\nmany: [{class: File, path: y}]\n")
    workflow = importers.load(tmp_path / "w.cwl", job=tmp_path / "job.yml")
    assert shape(workflow) == {
        "a": (["x"], ["a/o"]),
        "c/z": (["a/o"], ["c/z/o"]),
        "s": (["y"], ["s/o"]),
    }
    a = workflow.tasks["a"]
    assert (a.kind, a.cores, a.memory_bytes, a.image) == ("cat", 2, 64 * 2**20, "debian")
    unknown = {name for name, file in workflow.files.items() if file.readers_unknown}
    assert unknown == {"y", "s/o"}, "of what is scattered, and of nothing else"
    assert {name for name, file in workflow.files.items() if file.final} == {"c/z/o", "s/o"}
    assert workflow.files["x"].size_bytes == 5
    assert any("step s has a `scatter`" in why for why in workflow.incomplete)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [("count-lines7-wf_v1_2.cwl", 1), ("scatter-wf1_v1_2.cwl", 1), ("step_valuefrom5_wf_v1_2.cwl", 2)],
)
def test_public_cwl_documents_are_imported(name: str, tasks: int) -> None:
    """Workflows of cwl-utils, which cwltool installs."""
    need("cwltool")
    package = importlib.util.find_spec("cwl_utils")
    assert package and package.origin
    path = Path(package.origin).parent / "testdata" / name
    if not path.exists():
        pytest.skip("this cwl-utils does not ship it")
    assert len(importers.load(path).tasks) == tasks


def test_pegasus_workflow_of_its_api_is_imported(tmp_path: Path) -> None:
    need("Pegasus.api")
    from Pegasus import api  # type: ignore[import-untyped, unused-ignore]

    (tmp_path / "f.a").write_text("12345")
    one, two, three = api.File("f.a"), api.File("f.b"), api.File("f.c", size=77)
    box = api.Container("box", api.Container.DOCKER, "docker:///debian")
    cat = api.Transformation("cat", namespace="n", site="local", pfn="/bin/cat", is_stageable=False, container=box)
    cat.add_pegasus_profile(cores=3, memory=100)
    catalogue = api.TransformationCatalog().add_containers(box).add_transformations(cat)
    replicas = api.ReplicaCatalog().add_replica("local", one, str(tmp_path / "f.a"))
    first = (
        api.Job(cat, _id="first")
        .add_args(one)
        .add_inputs(one)
        .add_outputs(two, stage_out=False, register_replica=False)
    )
    second = api.Job(cat, _id="second").add_inputs(two).add_outputs(three).add_dagman_profile(retry="2")
    third = api.Job(cat, _id="third").add_args("x")
    flow = (
        api.Workflow("w", infer_dependencies=True)
        .add_jobs(first, second, third)
        .add_dependency(second, children=[third])
    )
    flow.add_transformation_catalog(catalogue)
    replicas.write(str(tmp_path / "replicas.yml"))
    flow.write(str(tmp_path / "workflow.yml"))
    workflow = importers.load(tmp_path / "workflow.yml")
    assert shape(workflow) == {"first": (["f.a"], ["f.b"]), "second": (["f.b"], ["f.c"]), "third": ([], [])}
    got = workflow.tasks["second"]
    assert (got.cores, got.memory_bytes, got.retries, got.image) == (3, 100 * 2**20, 2, "docker:///debian")
    assert workflow.tasks["third"].after == ["second"] and got.after == []
    assert workflow.files == {
        "f.a": File("f.a", 5),
        "f.b": File("f.b", temporary=True),
        "f.c": File("f.c", 77, final=True),
    }


MAKEFILE = """all: out.txt both1
.PHONY: all
out.txt: a.mid b.mid | dir
	cat a.mid b.mid > $@
%.mid: %.src
	cp $< $@
both1 both2 &: a.src
	touch both1 \\
	  both2
dir:
	mkdir dir
.INTERMEDIATE: b.mid
sub:
	$(MAKE) -C nowhere
"""


def test_make(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("a.src", "b.src"):
        (tmp_path / name).write_text(name)
    workflow = importers.load(tmp_path / "Makefile")
    assert shape(workflow) == {
        "a.mid": (["a.src"], ["a.mid"]),
        "b.mid": (["b.src"], ["b.mid"]),
        "dir": ([], ["dir"]),
        "out.txt": (["a.mid", "b.mid"], ["out.txt"]),
        "both1": (["a.src"], ["both1", "both2"]),
    }
    assert workflow.tasks["out.txt"].after == ["dir"]
    assert {name for name, file in workflow.files.items() if file.temporary} == {"b.mid"}
    assert {name for name, file in workflow.files.items() if file.final} == {"out.txt", "both1"}
    assert workflow.at(workflow.tasks["out.txt"]).endswith("Makefile:4")
    assert sorted(os.listdir(tmp_path)) == ["Makefile", "a.src", "b.src"], "an import runs nothing"
    run_in_order(workflow, tmp_path)
    assert_all_there(workflow, tmp_path)
    assert (tmp_path / "out.txt").read_text() == "a.srcb.src"
    assert "calls make again" in importers.load(tmp_path / "Makefile", targets=["sub"]).incomplete[0]


MAKEFLOW = """# a comment
N=2
CATEGORY="big"
CORES=4
MEMORY=100
.SIZE out$(N) 3M
mid->remote : src
\tcp src mid

CATEGORY="default"
out$(N) "other out" : mid \\
   src
@BATCH_OPTIONS="-q x"
\tLOCAL cat mid src > out2 && echo $$HOME > "other out"
MAKEFLOW_OUTPUTS="out2"
"""


def test_makeflow(tmp_path: Path) -> None:
    (tmp_path / "w.mf").write_text(MAKEFLOW)
    (tmp_path / "src").write_text("s")
    workflow = importers.load(tmp_path / "w.mf")
    assert shape(workflow) == {"mid": (["src"], ["mid"]), "out2": (["mid", "src"], ["out2", "other out"])}
    assert (workflow.tasks["mid"].cores, workflow.tasks["mid"].memory_bytes) == (4, 100 * 2**20)
    assert workflow.tasks["out2"].cores == 1
    assert workflow.files["out2"] == File("out2", 3 * 2**20, final=True)
    assert workflow.at(workflow.tasks["out2"]) == f"{tmp_path}/w.mf:11"
    run_in_order(workflow, tmp_path)
    assert_all_there(workflow, tmp_path)


def nextflow_run(tmp_path: Path) -> Path:
    """The remains of two processes in the form of Nextflow 24.10, written by hand."""
    first, second = tmp_path / "work/0b/8e45f39109dcbe", tmp_path / "work/f9/89265954c4ad29"
    for place in (first, second):
        place.mkdir(parents=True)
        for name in (".command.sh", ".command.run", ".exitcode"):
            (place / name).write_text("0")
    (tmp_path / "in.fa").write_text("abc")
    (first / "in.fa").symlink_to(tmp_path / "in.fa")
    (first / "dir").mkdir()
    (first / "dir/hits").write_text("12")
    (second / "dir").symlink_to(first / "dir")
    (second / "out").write_text("1")
    trace = tmp_path / "trace.txt"
    rows = [
        "task_id\thash\tprocess\tname\tstatus\trealtime\tcpus\tmemory\tcontainer\tattempt",
        "1\t0b/8e45f3\tA\tA (1)\tCOMPLETED\t1m 2s\t4\t1.5 GB\tdebian\t2",
        "2\tf9/892659\tW:B\tW:B (1)\tCACHED\t30ms\t1\t-\t-\t1",
        "3\taa/aaaaaa\tA\tA (1)\tFAILED\t30ms\t1\t-\t-\t1",
    ]
    trace.write_text("\n".join(rows) + "\n")
    return trace


def test_nextflow_from_its_work_directories(tmp_path: Path) -> None:
    workflow = importers.load(nextflow_run(tmp_path))
    first, second = "work/0b/8e45f39109dcbe", "work/f9/89265954c4ad29"
    assert shape(workflow) == {
        "A (1)": (["in.fa"], [f"{first}/dir/hits"]),
        "W:B (1)": ([f"{first}/dir/hits"], [f"{second}/out"]),
    }
    task = workflow.tasks["A (1)"]
    assert (task.runtime_s, task.cores, task.memory_bytes, task.image) == (62, 4, int(1.5 * 2**30), "debian")
    assert workflow.files[f"{first}/dir/hits"].size_bytes == 2
    assert not any(file.temporary for file in workflow.files.values()), "-resume needs them"
    assert workflow.incomplete == ["1 tasks were not completed and are left out"]


def test_nextflow_without_work_directories_is_read_from_its_dag(tmp_path: Path) -> None:
    trace = nextflow_run(tmp_path)
    shutil.rmtree(tmp_path / "work")
    (tmp_path / "dag.dot").write_text(
        'digraph "dag" {\nv0 [shape=point,label="",xlabel="Channel.of"];\nv1 [label="A"];\nv0 -> v1 [label="x"];\n'
        'v2 [shape=circle,label="",xlabel="view"];\nv1 -> v2;\nv3 [label="W:B"];\nv2 -> v3;\n}\n'
    )
    workflow = importers.load(trace, dag=tmp_path / "dag.dot")
    assert workflow.parents == {"A (1)": [], "W:B (1)": ["A (1)"]} and workflow.files == {}
    assert "work directories" in workflow.incomplete[1]


def record(**more: Any) -> dict[str, Any]:
    def used(path: str, size_bytes: int, *, reads: bool = False, writes: bool = False) -> dict[str, Any]:
        return {"path": path, "size_bytes": size_bytes, "reads": reads, "writes": writes}

    processes = [
        {"program": "sh", "command": "sh run", "begun_us": 0, "ended_us": 9_000_000},
        {
            "program": "gen",
            "begun_us": 0,
            "ended_us": 2_000_000,
            "files": [used("/d/in", 5, reads=True), used("/d/a", 3, writes=True)],
        },
        {"program": "app", "begun_us": 2_000_000, "ended_us": 3_000_000, "files": [used("/d/a", 7, writes=True)]},
        {
            "program": "use",
            "begun_us": 4_000_000,
            "ended_us": 4_100_000,
            "pipeline": 9,
            "files": [used("a", 7, reads=True)],
        },
        {
            "program": "sort",
            "begun_us": 4_050_000,
            "ended_us": 5_000_000,
            "pipeline": 9,
            "files": [used("b", 8, writes=True)],
        },
        {
            "program": "tail",
            "begun_us": 6_000_000,
            "ended_us": 7_000_000,
            "pipeline": 9,
            "files": [used("b", 8, reads=True), used("c", 1, reads=True, writes=True)],
        },
    ]
    made = [{"path": "a", "size_bytes": 7}, {"path": "b", "size_bytes": 8}]
    top = {"format": 1, "id": "20261125-1", "directory": "/d", "command": "sh run", "command_ended_us": 9_000_000}
    top["traced"] = True
    return {**top, "processes": processes, "processes_total": 6, "files": made, "files_total": 500, **more}


def test_record_with_files_of_processes_is_a_graph(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record()))
    workflow = importers.load(path)
    assert shape(workflow) == {"gen:0": (["in"], ["a"]), "use:2": (["a"], ["b"]), "tail:4": (["b"], ["c"])}
    assert workflow.files["a"].size_bytes == 7 and workflow.files["in"].size_bytes == 5
    assert workflow.incomplete == []
    for missing in ({"processes_total": 7}, {"accesses_left_out": 1}, {"agents": 2}):
        path.write_text(json.dumps(record(**missing)))
        partial = importers.load(path)
        assert partial.incomplete and all(file.readers_unknown for file in partial.files.values())


def test_record_without_files_of_processes_is_one_task(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(processes=[{"program": "sh"}], processes_total=1, traced=False)))
    workflow = importers.load(path)
    assert shape(workflow) == {"20261125-1": ([], ["a", "b"])}
    assert all(file.readers_unknown for file in workflow.files.values()) and workflow.incomplete


OWN = """surgetank: 1
name: demo
defaults: {memory: 500M, retries: 1}
tasks:
  make:
    command: [sh, -c, "cat in > mid"]
    inputs: [in]
    outputs: [mid]
    cores: 2
    runtime: 5min
  use it:
    command: cp mid out
    inputs: [mid]
    outputs: [sub/../out]
    after: [make]
    memory: 1.5G
    retries: 0
    image: debian
    tier: ram
    kind: copy
files:
  mid: {size: 1K, temporary: true}
  out: {final: true}
"""


def test_own_yaml_is_imported(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(OWN)
    (tmp_path / "in").write_text("x")
    workflow = importers.load(tmp_path / "w.yaml")
    make, use = workflow.tasks.values()
    assert make == Task("make", "sh", ["in"], ["mid"], command=["sh", "-c", "cat in > mid"], runtime_s=300, cores=2,
                        memory_bytes=500 * 2**20, retries=1)  # fmt: skip
    assert use == Task(
        "use it", "copy", ["mid"], ["out"], ["make"], "cp mid out", memory_bytes=3 * 2**29, image="debian", tier="ram"
    )
    assert workflow.files == {
        "mid": File("mid", 1024, temporary=True), "out": File("out", final=True), "in": File("in", 1),
    }  # fmt: skip
    assert workflow.at(use) == f"{tmp_path}/w.yaml:11"
    run_in_order(workflow, tmp_path)
    assert_all_there(workflow, tmp_path)


def test_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/workflows.md").read_text(encoding="utf-8")
    (tmp_path / "w.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    workflow = importers.load(tmp_path / "w.yaml")
    assert shape(workflow) == {"align": (["ref.fa", "reads.fq"], ["out.sam"]), "sort": (["out.sam"], ["sorted.sam"])}
    align, sort = workflow.tasks.values()
    assert (align.memory_bytes, sort.memory_bytes) == (3 * 2**29, 500 * 2**20)


INSTANCES = Path(os.environ.get("SURGETANK_SHARED", Path(__file__).parents[3] / "shared")) / "data/wfinstances"
# The parts of WfFormat 1.5's JSON schema that the exporter could break.
NAME = r"^[0-9a-zA-Z_./:#-]*$"
SCHEMA = {
    "required": ["name", "schemaVersion", "workflow"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "schemaVersion": {"enum": ["1.5"]},
        "workflow": {"properties": {
            "specification": {"required": ["tasks"], "properties": {
                "tasks": {"minItems": 1, "items": {
                    "required": ["name", "id", "parents", "children"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "id": {"type": "string", "minLength": 1},
                        "parents": {"items": {"pattern": r"^[0-9a-zA-Z_.#-]*$"}},
                        "children": {"items": {"pattern": r"^[0-9a-zA-Z_.#-]*$"}},
                        "inputFiles": {"items": {"pattern": NAME, "minLength": 1}},
                        "outputFiles": {"items": {"pattern": NAME, "minLength": 1}},
                    }}},
                "files": {"items": {"required": ["id", "sizeInBytes"], "properties": {
                    "id": {"pattern": NAME, "minLength": 1}, "sizeInBytes": {"type": "integer", "minimum": 0}}}},
            }},
            "execution": {"required": ["makespanInSeconds", "executedAt", "tasks"], "properties": {
                "tasks": {"minItems": 1, "items": {
                    "required": ["id", "runtimeInSeconds"],
                    "properties": {"coreCount": {"minimum": 1}, "memoryInBytes": {"type": "number"}, "command": {
                        "properties": {"program": {"minLength": 1}, "arguments": {"items": {"minLength": 1}}}}}}}}},
        }},
    },
}  # fmt: skip


def again(workflow: Workflow, path: Path) -> Workflow:
    jsonschema = pytest.importorskip("jsonschema")
    wfformat.dump(workflow, path)
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    return wfformat.load(path)


def test_wfformat_instances_survive_being_written(tmp_path: Path) -> None:
    found = sorted(INSTANCES.glob("*.json"))
    if not found:
        pytest.skip("the instances of ../shared are not there")
    assert len(found) == 5
    for path in found:
        workflow = wfformat.load(path)
        same = again(workflow, tmp_path / "w.json")
        assert (same.tasks, same.files, same.parents) == (workflow.tasks, workflow.files, workflow.parents)
        assert "surgetank" not in json.loads((tmp_path / "w.json").read_text()), "WfFormat can express every fact here"


def test_wfformat_keeps_fields_that_it_does_not_define(tmp_path: Path) -> None:
    tasks = [
        Task("a b:1", "k", ["in put"], ["x,y", "z"], command="a | b", runtime_s=1.5, cores=0.5, retries=2, image="i"),
        Task("ü", "k", ["x,y"], [], ["a b:1"], command=["p", ""], tier="ram", memory_bytes=5),
        Task("c", "k", [], [], ["ü"]),
    ]
    files = [File("in put", 3), File("x,y", temporary=True), File("z", 4, final=True, readers_unknown=True)]
    workflow = Workflow.of("n", "s", tasks, files, incomplete=["why"])
    # A parent that follows from a file is not in `after`, as for every importer.
    workflow.tasks["ü"].after = []
    same = again(workflow, tmp_path / "w.json")
    assert (same.tasks, same.files, same.incomplete) == (workflow.tasks, workflow.files, ["why"])


def test_redirecting_shell_makes_none_of_its_childrens_files(tmp_path: Path) -> None:
    """dash itself opens the files to which it redirects. Regression: three programs were one task, because the shell had written the same
    files."""

    def wrote(path: str, size: int, **more: Any) -> dict[str, Any]:
        return {
            "path": path,
            "size_bytes": 2,
            "reads": False,
            "writes": True,
            "write": {"opens": 1, "bytes": size},
            **more,
        }

    def read(path: str) -> dict[str, Any]:
        return {"path": path, "size_bytes": 2, "reads": True, "writes": False, "read": {"opens": 1, "bytes": 2}}

    mapped = wrote("m", 0, read={"opens": 1, "bytes": 0})
    processes = [
        {"program": "sh", "begun_us": 0, "ended_us": 9, "files": [wrote("a", 0), wrote("b", 0), wrote("only", 0)]},
        {"program": "sort", "begun_us": 1, "ended_us": 2, "files": [read("in"), wrote("a", 2)]},
        {"program": "tr", "begun_us": 3, "ended_us": 4, "files": [read("a"), wrote("b", 2), wrote("m", 2)]},
        {"program": "map", "begun_us": 5, "ended_us": 6, "files": [mapped, read("b")]},
    ]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record(processes=processes, processes_total=4)))
    assert shape(importers.load(path)) == {
        "sh:0": ([], ["only"]), "sort:1": (["in"], ["a"]), "tr:2": (["a"], ["b", "m"]),
    }  # fmt: skip


def test_names_that_are_not_text_survive_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the WfFormat file had the raw byte in it, so that no program could read it, and the earlier file was lost."""
    name = list(b"x\xff")
    used = [{"path": name, "size_bytes": 1, "reads": False, "writes": True, "write": {"bytes": 1}}]
    path, out = tmp_path / "r.json", tmp_path / "w.json"
    path.write_text(json.dumps(record(processes=[{"program": "p", "files": used}], processes_total=1)))
    out.write_text("before")
    assert cli.main(["import", str(path), "-o", str(out)]) == 0
    out.read_bytes().decode()
    again = importers.load(out)
    assert list(again.files) == [b"x\xff".decode("utf-8", "surrogateescape")]
    assert cli.main(["hints", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": name, "size": 1}
    assert cli.main(["hints", str(out), "--rules"]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["r.json", "w.json"]
