"""Follows the tutorials as a reader does: writes their files, runs their commands, and compares the output with the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_nextflow import NEEDS_NEXTFLOW
from test_replay import BINARY, NEEDS_MOUNT, ROOT, tier

from surgetank.workflow.agent import Agent

__all__ = ["tier"]

TUTORIALS = ROOT.parent / "docs/tutorials"
EXPORT = re.compile(r"export (\w+)=(\S+)")
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command with its lines of output in the page; `…` stands for any text, or alone on a line for any lines."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield command, lines


def shown(lines: list[str]) -> re.Pattern[str]:
    text = "".join(r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in lines)
    return re.compile(text)


def follow(page: Path, work: Path, there: dict[str, str]) -> int:
    done = 0
    for language, name, text in BLOCK.findall(page.read_text()):
        if name:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)
        elif language == "console":
            for command, lines in commands(text):
                if found := EXPORT.fullmatch(command):
                    there = {**there, found[1]: found[2]}
                # A terminal shows both streams as one.
                words = ["unshare", "-m", "bash", "-c", f"exec 2>&1\n{command}"]
                ended = subprocess.run(
                    words, cwd=work, env=there, capture_output=True, text=True, check=False, timeout=120
                )
                assert ended.returncode == 0, f"{page.name}: {command}\n{ended.stdout}"
                # (A page shows the summary of `surgetank run` only where it matters.)
                output = ended.stdout if any("surgetank:" in line for line in lines) else without_summary(ended.stdout)
                wanted = [*lines, "…"] if any("surgetank:" in line for line in lines) else lines
                assert shown(wanted).fullmatch(output), f"{page.name}: {command}\n{ended.stdout}"
                done += 1
    return done


def without_summary(output: str) -> str:
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("surgetank:"))


@NEEDS_MOUNT
@pytest.mark.parametrize(
    ("page", "count"),
    [("snakemake", 12), pytest.param("nextflow", 10, marks=NEEDS_NEXTFLOW), ("cwl", 8), ("parsl", 4)],
)
def test_tutorial_output_matches(
    tmp_path: Path, tier: Path, page: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, state, programs = (tmp_path / name for name in ("w", "state", "programs"))
    work.mkdir()
    state.mkdir(mode=0o700)
    programs.mkdir()
    (programs / "surgetank").symlink_to(BINARY)
    (programs / "nextflow").symlink_to(ROOT.parent / "scripts/nextflow/nextflow")
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"SURGETANK_STATE": str(state), "SURGETANK_TIERS": f"ram={tier}:64M", "SURGETANK_BINARY": BINARY}
    there = {**os.environ, **own, "PATH": path, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    there |= {"NXF_HOME": str(tmp_path / "home"), "NXF_OFFLINE": "true", "NXF_ANSI_LOG": "false"}
    assert follow(TUTORIALS / f"{page}.md", work, there) == count
    # Files that a page removes are removed from the tiers too, and not only kept from the store.
    monkeypatch.setenv("SURGETANK_BINARY", BINARY)
    assert Agent(state=str(state)).records()[-1]["verdict"]["kept"]["total"] == 0
