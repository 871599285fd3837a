"""From the command line's process to the one that runs the tasks: directly (`--bare`), or inside `surgetank run`.

What is outside waits, passes signals on, and clears up whatever becomes of the inside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..agent import Agent, binary
from ..derive import Persist
from ..graph import Workflow
from . import graphfile
from .inner import run
from .settings import Settings

PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(workflow: Workflow, settings: Settings) -> dict[str, Any]:
    """The report; `exit` in it is the exit code. `surgetank` in it is what `surgetank run --json` says."""
    settings.directory = os.path.realpath(settings.directory)
    settings.over = os.path.realpath(settings.over)
    settings.python_path = os.environ.get("PYTHONPATH")
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
    words = [binary(), "run", "--over", settings.over, "--json", str(draft / "run.json"), *settings.serve]
    if settings.state is not None:
        words += ["--state", settings.state]
    if settings.persist is Persist.WHEN_CONSUMED:
        # What was not handed over before goes to the store in the end.
        words += ["--keep-at-exit", "drain"]
    words += ["--", sys.executable, "-P", "-m", "surgetank.workflow.execute", str(draft)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, settings.python_path]))}
    code = _attend(words, environment)
    report = _read(draft / "report.json")
    report["surgetank"] = _read(draft / "run.json")
    report["exit"] = code
    record = find_record(settings.state, str(draft))
    report["record"] = record.get("id") if record else None
    tiers = record.get("tiers", []) if record else []
    report["tier_bytes_max"] = {tier["name"]: tier["used_bytes_max"] for tier in tiers}
    return report


def find_record(state: str | None, mark: str) -> dict[str, Any] | None:
    """What `surgetank report` has of the run whose command line has `mark` in it."""
    found = [one for one in Agent(state=state).records() if mark in one.get("command", "")]
    return found[-1] if found else None


def _attend(words: list[str], environment: dict[str, str]) -> int:
    """Runs it in a process group of its own; what reaches us reaches it once."""
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
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def inside(draft: Path) -> int:
    """What `surgetank run` starts."""
    spec = json.loads((draft / "spec.json").read_text())
    settings = Settings(**{**spec["settings"], "persist": Persist(spec["settings"]["persist"])})
    report = run(graphfile.from_json(spec["workflow"]), settings)
    (draft / "report.json").write_text(json.dumps(report))
    code: int = report["exit"]
    return code
