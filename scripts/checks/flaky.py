"""Tests that failed and then held when they were repeated: found in what nextest and pytest wrote, printed, counted."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

# A run with more of them fails.
FLAKY_MAX = 3


@dataclass(frozen=True)
class Flaky:
    name: str
    # What each failed run said, its seed with it.
    said: tuple[str, ...]


def of_junit(path: Path) -> list[Flaky]:
    """From the JUnit file of nextest (https://nexte.st/docs/machine-readable/junit/): the last run of a flaky test held."""
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
    # Without streams (it was ended from outside) there is a message only.
    return "\n".join(text for text in streams if text) or (failed.get("message") or failed.text or "").strip()


def of_pytest(path: Path) -> list[Flaky]:
    """From the lines that `python/tests/conftest.py` writes."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Flaky(one["name"], tuple(one["said"])) for one in lines]


def report(found: list[Flaky], most: int = FLAKY_MAX) -> tuple[str, bool]:
    """What to print last, and whether the run may pass."""
    parts = []
    for one in found:
        runs = len(one.said) + 1
        parts.append(f"flaky: {one.name} (held in run {runs})")
        parts += [f"---- run {number} said\n{said}" for number, said in enumerate(one.said, 1)]
    if len(found) > most:
        parts.append(f"{len(found)} flaky tests, at most {most} are allowed: each is a defect of the product or of the test")
    return "\n".join(parts), len(found) <= most
