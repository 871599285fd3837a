"""The tests that took longest, from the JUnit file that nextest wrote (https://nexte.st/docs/machine-readable/junit/)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

SHOWN = 30


def report(path: Path) -> str:
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    cases = [(float(case.get("time", 0)), f"{suite.get('name')} {case.get('name')}") for suite in suites for case in suite.iter("testcase")]
    total_s = sum(time_s for time_s, _ in cases)
    lines = [f"{time_s:8.1f} s  {name}" for time_s, name in sorted(cases, reverse=True)[:SHOWN]]
    return "\n".join([f"the slowest of {len(cases)} tests, which took {total_s:.0f} s one after the other:", *lines])
