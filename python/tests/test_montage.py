"""Montage by Snakemake with `persist = final`, in a tier of a quarter of its footprint: bench/montage/measure judges the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from test_replay import BINARY, NEEDS_MOUNT, ROOT

NEEDS_MONTAGE = pytest.mark.skipif(
    shutil.which("mProjectPP") is None or not (ROOT.parent / ".cache/venv").exists(),
    reason="no Montage, or no Python with numpy: scripts/setup bench",
)


@NEEDS_MOUNT
@NEEDS_MONTAGE
def test_only_results_reach_the_store_and_nothing_spills() -> None:
    words = [sys.executable, str(ROOT.parent / "bench/montage/measure")]
    there = {**os.environ, "SURGETANK_BINARY": BINARY}
    done = subprocess.run(words, env=there, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == [] and result["jobs"] == 165
    # The case is meaningful: the tier is far smaller than the footprint, and the live bytes fit it.
    assert result["live_bytes_max"] < result["tier_bytes"] <= result["footprint_bytes"] / 4
