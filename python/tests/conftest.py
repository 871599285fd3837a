"""Under CI a skipped test fails, unless it needs the sample data that is not in the repository. A failed test is repeated up to two
times. If it passes then it is flaky, and goes into the file that `SURGETANK_FLAKY` names (scripts/checks/flaky.py)."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

_SAMPLES = ("sample data", "instances")
_RUNS_MORE = 2
# The output of each failed run, by test.
_OUTPUTS: dict[str, list[str]] = defaultdict(list)
_FAILED: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.option.reruns = _RUNS_MORE


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines leave temporary files, above all killed ones, so these are put into the tests' directories and removed with them."""
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
            report.longrepr = f"skipped under CI, where every test must run: {reason}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":
        streams = (report.longreprtext, report.capstdout, report.capstderr, report.caplog)
        _OUTPUTS[report.nodeid].append("\n".join(text for text in streams if text))
    elif report.failed:
        _FAILED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    record = os.environ.get("SURGETANK_FLAKY")
    # With several processes, the first one gets all reports.
    if hasattr(session.config, "workerinput"):
        return
    lines = [
        json.dumps({"name": name, "outputs": outputs}) for name, outputs in _OUTPUTS.items() if name not in _FAILED
    ]
    if record and lines:
        with Path(record).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
