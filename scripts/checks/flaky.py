"""Flaky tests, which failed and then passed when repeated: finds them in the records of nextest and pytest, prints and counts them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

# A run with more flaky tests fails.
FLAKY_MAX = 3


@dataclass(frozen=True)
class Flaky:
    name: str
    # The output of each failed run, with its seed.
    outputs: tuple[str, ...]


def of_junit(path: Path) -> list[Flaky]:
    """From the JUnit file of nextest (https://nexte.st/docs/machine-readable/junit/): the last run of a flaky test passed."""
    found = []
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            failed = [one for one in case if one.tag in ("flakyFailure", "flakyError")]
            if failed:
                name = f"{suite.get('name')} {case.get('name')}"
                found.append(Flaky(name, tuple(output(one) for one in failed)))
    return found


def output(failed: ElementTree.Element) -> str:
    streams = (failed.findtext(stream, "").strip() for stream in ("system-out", "system-err"))
    # A test that nextest ended has no streams, only a message.
    return "\n".join(text for text in streams if text) or (failed.get("message") or failed.text or "").strip()


def of_pytest(path: Path) -> list[Flaky]:
    """From the lines that `python/tests/conftest.py` writes."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Flaky(one["name"], tuple(one["outputs"])) for one in lines]


def report(found: list[Flaky], most: int = FLAKY_MAX) -> tuple[str, bool]:
    """What to print last, and whether the run may pass."""
    parts = []
    for one in found:
        runs = len(one.outputs) + 1
        parts.append(f"flaky: {one.name} (passed in run {runs})")
        parts += [f"---- output of run {number}\n{text}" for number, text in enumerate(one.outputs, 1)]
    if len(found) > most:
        parts.append(f"{len(found)} flaky tests, at most {most} are allowed: each is a defect of the product or of the test")
    return "\n".join(parts), len(found) <= most
