"""From the command line's process to the one that runs the tasks: directly (`--bare`), or inside `surgetank run`.

The outer process waits, passes signals on, and cleans up however the inner one ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..agent import Agent, binary
from ..derive import Persist
from ..graph import Workflow
from . import graphfile
from .inner import run
from .settings import NOT_DURABLE, Settings

PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(workflow: Workflow, settings: Settings) -> dict[str, Any]:
    """The report; `exit` in it is the exit code. `surgetank` in it is the output of `surgetank run --json`."""
    settings.directory = os.path.realpath(settings.directory)
    settings.over = os.path.realpath(settings.over)
    settings.python_path = os.environ.get("PYTHONPATH")
    settings.environment = dict(os.environ)
    if settings.persist is Persist.WHEN_CONSUMED:
        # Files that were not drained before go to the store at the end.
        settings.at_exit = ["--keep-at-exit", "drain"]
    if settings.bare:
        return run(workflow, settings)
    draft = Path(tempfile.mkdtemp(prefix="surgetank-workflow-"))
    try:
        return _under_mount(workflow, settings, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _under_mount(workflow: Workflow, settings: Settings, draft: Path) -> dict[str, Any]:
    settings.mark = str(draft)
    (draft / "spec.json").write_text(
        json.dumps({"workflow": graphfile.to_json(workflow), "settings": asdict(settings)})
    )
    words = [binary(), "run", "--over", settings.over, "--json", str(draft / "run.json")]
    words += [*settings.serve, *settings.at_exit]
    if settings.state is not None:
        words += ["--state", settings.state]
    words += ["--", sys.executable, "-P", "-m", "surgetank.workflow.execute", str(draft)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, settings.python_path]))}
    code = _attend(words, environment)
    report = _read(draft / "report.json")
    report["surgetank"] = _read(draft / "run.json")
    record = find_record(settings.state, str(draft))
    if report.get("exit") in (0, NOT_DURABLE):
        report["steps"] = drained(report["steps"], record, code)
        # The user waited for the drain, too.
        report["seconds"] = round(report["seconds"] + _drain_s(record), 3)
    report["exit"] = code
    report["record"] = record.get("id") if record else None
    tiers = record.get("tiers", []) if record else []
    report["tier_bytes_max"] = {tier["name"]: tier["used_bytes_max"] for tier in tiers}
    return report


def find_record(state: str | None, mark: str) -> dict[str, Any] | None:
    """The record of `surgetank report` for the run whose command line contains `mark`."""
    found = [one for one in Agent(state=state).records() if mark in one.get("command", "")]
    return found[-1] if found else None


def drained(
    steps: list[dict[str, Any]], record: Mapping[str, Any] | None, code: int | None = None
) -> list[dict[str, Any]]:
    """Completes the steps with the last drain of `surgetank run`, from its record: stage-out, or the end of it.

    The executor does not wait for the results itself: a full store would make the user wait twice. `code`: the exit
    code of `surgetank run`, if known.
    """
    facts = {} if record is None else record
    ended = facts.get("exit") if code is None else code
    if ended is None and not facts:
        return steps  # the outcome is unknown
    found = next((step for step in steps if step["step"] == "stage-out"), None)
    out = dict(found or {"step": "stage-out", "began_ns": None, "ended_ns": None, "ok": True})
    if facts.get("command_ended_us") is not None:
        begun_us = facts["begun_unix_us"]
        out["began_ns"] = out["began_ns"] or (begun_us + facts["command_ended_us"]) * 1000
        out["ended_ns"] = (begun_us + facts["ended_us"]) * 1000
    # (All tasks had succeeded.)
    out["ok"] = out["ok"] and ended == 0
    if found is not None:
        return [out if step is found else step for step in steps]
    return [*steps[:-1], out, *steps[-1:]]


def _drain_s(record: Mapping[str, Any] | None) -> float:
    if record is None or record.get("command_ended_us") is None:
        return 0.0
    return float(max(record["ended_us"] - record["command_ended_us"], 0)) / 1e6


def _attend(words: list[str], environment: dict[str, str]) -> int:
    """Runs it in its own process group; a signal to this process reaches it once."""
    child = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    before = {number: signal.signal(number, lambda which, _: child.send_signal(which)) for number in PASSED_ON}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def inside(draft: Path) -> int:
    """The program that `surgetank run` starts."""
    spec = json.loads((draft / "spec.json").read_text())
    settings = Settings(**{**spec["settings"], "persist": Persist(spec["settings"]["persist"])})
    report = run(graphfile.from_json(spec["workflow"]), settings)
    (draft / "report.json").write_text(json.dumps(report))
    code: int = report["exit"]
    return code
