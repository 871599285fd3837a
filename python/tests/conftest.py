"""Under CI nothing is skipped, but for what needs the sample data that is not in the repository; and what fails is repeated up to
two times. Tests that hold then are flaky: `SURGETANK_FLAKY` names the file in which they are recorded (scripts/checks/flaky.py)."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

_SAMPLES = ("sample data", "instances")
_RUNS_MORE = 2
# By test: what its failed runs said.
_SAID: dict[str, list[str]] = defaultdict(list)
_FAILED: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.option.reruns = _RUNS_MORE


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines leave temporary files, above all those that are killed: they go with the directories of the tests."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI"):
        reason = str(report.longrepr)
        if not any(word in reason for word in _SAMPLES):
            report.outcome = "failed"
            report.longrepr = f"skipped under CI, where nothing is: {reason}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":
        streams = (report.longreprtext, report.capstdout, report.capstderr, report.caplog)
        _SAID[report.nodeid].append("\n".join(text for text in streams if text))
    elif report.failed:
        _FAILED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    record = os.environ.get("SURGETANK_FLAKY")
    # Of several processes the first one gets all reports.
    if hasattr(session.config, "workerinput"):
        return
    lines = [json.dumps({"name": name, "said": said}) for name, said in _SAID.items() if name not in _FAILED]
    if record and lines:
        with Path(record).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
