"""The crate of a run. The profiles' validator needs JSON-LD contexts from the network, so what is checked is the structure: the
profiles' MUSTs that are named here, and that everything that is referred to is there."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_execute import diamond, do

from surgetank.workflow import crate
from surgetank.workflow.problem import Problem

pytest.importorskip("rocrate")


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
    crate.write(run, record, tmp_path / "out", "results", "CC0-1.0")
    found = graph((tmp_path / "out/ro-crate-metadata.json").read_text())

    root = found["./"]
    assert {one["@id"] for one in root["conformsTo"]} == {id_ for id_, _ in crate.PROFILES}
    assert all(root[key] for key in ("name", "description", "datePublished", "license"))
    assert set(found[root["mainEntity"]["@id"]]["@type"]) == {"File", "SoftwareSourceCode", "ComputationalWorkflow"}
    for id_, entity in found.items():
        for other in references({key: value for key, value in entity.items() if key != "@id"}):
            assert other in found or other.startswith("https://w3id.org/ro/crate/"), (id_, other)

    actions = [entity for entity in found.values() if entity["@type"] == "CreateAction"]
    assert all(action["instrument"]["@id"] in found and action["endTime"] >= action["startTime"] for action in actions)
    assert {action["@id"] for action in actions} == {one["@id"] for one in root["mentions"]}
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


def test_changed_file_has_no_checksum_and_unknown_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x\n")
    do(diamond(), tmp_path)
    (tmp_path / "c").write_text("meddled")
    crate.write(crate.read("last", tmp_path), None, tmp_path / "out", "all", "CC0-1.0")
    found = graph((tmp_path / "out/ro-crate-metadata.json").read_text())
    assert "sha256" not in found[(tmp_path / "c").as_uri()] and "sha256" in found["files/in"]
    with pytest.raises(Problem, match="there is no run"):
        crate.read("0009-nothing", tmp_path)
