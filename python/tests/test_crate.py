"""The crate of a run passes the profiles' own validator, and everything that it refers to exists.

The validator fetches the JSON-LD context of RO-Crate 1.1 from the network. The tests give it the context of 1.3 instead, which the
library `rocrate` ships, with 1.1's names for terms that have moved since.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_execute import diamond, do

from surgetank.workflow import crate
from surgetank.workflow.execute import launch
from surgetank.workflow.graph import Task, Workflow
from surgetank.workflow.problem import Problem

pytest.importorskip("rocrate")
pytest.importorskip("rocrate_validator")


def graph(text: str) -> dict[str, dict[str, Any]]:
    return {entity["@id"]: entity for entity in json.loads(text)["@graph"]}


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for one in value for found in references(one)]
    if isinstance(value, dict):
        return (
            [value["@id"]] if set(value) == {"@id"} else [found for one in value.values() for found in references(one)]
        )
    return []


def test_crate_has_tasks_files_and_times(tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    (work / "in").write_text("x\n")
    do(diamond(), work, persist_named=True)
    run = crate.read("last", work)
    begun_us = min(record.began_ns for record in run.records.values()) // 1000
    file = {"path": "c", "place": "ram", "placement": "room", "versions": 1, "sealed_us": 5, "durable_us": 1_000_000}
    record = {"directory": str(work), "store": "file:///store", "begun_unix_us": begun_us, "files": [file]}
    record |= {"exit": 0, "command_ended_us": 1_000_000, "ended_us": 3_000_000}
    crate.write(run, record, tmp_path / "out", "results", "CC0-1.0")
    found = graph((tmp_path / "out/ro-crate-metadata.json").read_text())

    root = found["./"]
    assert {one["@id"] for one in root["conformsTo"]} == {id_ for id_, _ in crate.PROFILES}
    assert all(root[key] for key in ("name", "description", "datePublished", "license"))
    types = {"File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"}
    assert set(found[root["mainEntity"]["@id"]]["@type"]) == types
    for id_, entity in found.items():
        for other in references({key: value for key, value in entity.items() if key != "@id"}):
            assert other in found or other.startswith("https://w3id.org/ro/crate/"), (id_, other)

    actions = [entity for entity in found.values() if entity["@type"] == "CreateAction"]
    assert all(action["instrument"]["@id"] in found and action["endTime"] >= action["startTime"] for action in actions)
    assert {action["@id"] for action in actions} | {"#organize"} == {one["@id"] for one in root["mentions"]}
    assert all(action["actionStatus"].endswith("CompletedActionStatus") for action in actions)
    assert "auxiliary task stage-out" in {action["name"] for action in actions}
    assert {"#task-a", "#task-c", "#run", "#step-0"} <= {action["@id"] for action in actions}
    assert (
        [one["@id"] for one in found["#task-c"]["result"]] == ["files/c"]
        if isinstance(found["#task-c"]["result"], list)
        else (found["#task-c"]["result"] == {"@id": "files/c"})
    )

    result = found["files/c"]
    assert result["sha256"] == hashlib.sha256((tmp_path / "out/files/c").read_bytes()).hexdigest()
    assert result["contentSize"] == str((work / "c").stat().st_size)
    notes = {found[id_]["name"]: found[id_]["value"] for id_ in references(result["additionalProperty"])}
    assert notes["place"] == "ram" and notes["store"] == "file:///store" and notes["durable"].startswith("20")
    gone = found[(work / "a").as_uri()]
    assert "sha256" not in gone
    assert any("dropped" in found[id_]["value"] for id_ in references(gone["additionalProperty"]))

    crate.write(run, None, tmp_path / "out.zip", "none", "CC0-1.0")
    with zipfile.ZipFile(tmp_path / "out.zip") as packed:
        assert "files/c" not in packed.namelist()
        assert (work / "c").as_uri() in graph(packed.read("ro-crate-metadata.json").decode())


CONTEXT = "https://w3id.org/ro/crate/1.1/context"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from rocrate_validator.utils import document_loader, http

    given = json.loads(importlib.resources.files("rocrate").joinpath("data/ro-crate.jsonld").read_text())["@context"]
    for name, term in given.items():
        if isinstance(term, str):
            given[name] = term.replace("bioschemas.org/terms/", "bioschemas.org/")
    for name in ("input", "output"):
        given[name] = f"https://bioschemas.org/ComputationalWorkflow#{name}"
    context = {"@context": given}

    class Response:
        status_code, ok, url, links = 200, True, CONTEXT, dict[str, str]()
        headers: ClassVar = {"Content-Type": "application/ld+json"}
        text = json.dumps(context)
        content = text.encode()

        def json(self) -> Any:
            return context

    def get(_: object, url: str, *args: object, **kwargs: object) -> Response:
        assert url == CONTEXT
        return Response()

    def fetch(url: str) -> Any:
        assert url == CONTEXT
        return context

    monkeypatch.setattr(http.HttpRequester, "get", get, raising=False)
    monkeypatch.setattr(http.HttpRequester, "head", get, raising=False)
    monkeypatch.setattr(document_loader, "_fetch_json_ld", fetch)


def broken(crate_directory: Path, profile: str) -> list[str]:
    """The MUSTs that the crate breaks, of the profile and of those on which it is based."""
    from rocrate_validator import models, services

    settings = services.ValidationSettings(
        rocrate_uri=str(crate_directory), profile_identifier=profile, requirement_severity=models.Severity.REQUIRED
    )
    result = services.validate(settings)
    assert len(result.executed_checks) > 40
    return [f"{issue.check.identifier}: {issue.message}" for issue in result.get_issues()]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("profile", ["workflow-ro-crate-1.0", "workflow-run-crate-0.5", "provenance-run-crate-0.5"])
def test_crate_passes_the_validator_of_its_profile(tmp_path: Path, profile: str) -> None:
    work = tmp_path / "w"
    work.mkdir()
    (work / "in").write_text("x\n")
    do(diamond(), work, persist_named=True)
    out = tmp_path / "out"
    crate.write(crate.read("last", work), None, out, "results", "https://spdx.org/licenses/CC0-1.0")
    assert broken(out, profile) == []
    # The validator does check: it refuses a run without an instrument.
    described = out / "ro-crate-metadata.json"
    document = json.loads(described.read_text())
    for entity in document["@graph"]:
        if entity["@type"] == "CreateAction":
            del entity["instrument"]
    if profile != "workflow-ro-crate-1.0":
        described.write_text(json.dumps(document))
        assert any("instrument" in line for line in broken(out, profile))


def test_names_are_quoted_once(tmp_path: Path) -> None:
    work = tmp_path / "w"
    work.mkdir()
    task = Task("t", "t", command="echo x > 'a b.txt'", outputs=["a b.txt"])
    do(Workflow.of("w", "w.yaml", [task]), work)
    crate.write(crate.read("last", work), None, tmp_path / "out", "all", "CC0-1.0")
    assert (tmp_path / "out/files/a b.txt").read_text() == "x\n"
    assert "files/a%20b.txt" in graph((tmp_path / "out/ro-crate-metadata.json").read_text())


def test_changed_file_has_no_checksum_and_unknown_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x\n")
    do(diamond(), tmp_path)
    (tmp_path / "c").write_text("meddled")
    crate.write(crate.read("last", tmp_path), None, tmp_path / "out", "all", "CC0-1.0")
    found = graph((tmp_path / "out/ro-crate-metadata.json").read_text())
    assert "sha256" not in found[(tmp_path / "c").as_uri()] and "sha256" in found["files/in"]
    with pytest.raises(Problem, match="does not exist, or has not ended"):
        crate.read("0009-nothing", tmp_path)


STEPS = [{"step": name, "began_ns": 1, "ended_ns": 2, "ok": True} for name in ("reserve", "release")]
COPIED = [STEPS[0], {**STEPS[0], "step": "stage-out"}, STEPS[1]]
DRAINED: dict[str, int | None] = {"begun_unix_us": 10, "command_ended_us": 5, "ended_us": 8, "exit": 0}


@pytest.mark.parametrize(
    ("steps", "record", "code", "expected"),
    [
        (STEPS, DRAINED, 0, (15_000, 18_000, True)),
        (STEPS, DRAINED | {"exit": 3}, None, (15_000, 18_000, False)),
        (COPIED, DRAINED, 0, (1, 18_000, True)),
        (COPIED, DRAINED | {"exit": 3}, 3, (1, 18_000, False)),
        # The run was killed during the drain, before the drain, and before its record.
        (STEPS, DRAINED | {"exit": None}, None, (15_000, 18_000, False)),
        (STEPS, DRAINED | {"exit": None, "command_ended_us": None}, 137, (None, None, False)),
        (STEPS, None, 137, (None, None, False)),
        (STEPS, None, 0, (None, None, True)),
    ],
)
def test_step_of_an_interrupted_drain_is_recorded(
    steps: list[dict[str, Any]], record: dict[str, Any] | None, code: int | None, expected: tuple[Any, ...]
) -> None:
    recorded = launch.drained(steps, record, code)
    assert [step["step"] for step in recorded] == ["reserve", "stage-out", "release"]
    assert (recorded[1]["began_ns"], recorded[1]["ended_ns"], recorded[1]["ok"]) == expected
    assert launch.drained(steps, None) == steps
