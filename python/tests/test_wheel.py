"""The wheel of `pip install .`, in an environment without any other part of Surgetank: program, package, Snakemake's plugin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_replay import NEEDS_MOUNT, ROOT, tier
from test_snakemake import PROFILE

__all__ = ["tier"]

SNAKEFILE = """
rule count:
    output: "out.txt"
    shell: "python3 -c 'import surgetank; print(surgetank.__file__)' > {output}"
"""


def run(words: list[str], **more: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' directory. The environment of the tests provides the wheel's dependencies, but not the package itself."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    place = tmp_path_factory.mktemp("wheel")
    # As pip builds it, but in the profile that the other tests have built already, and without compression.
    building = [sys.executable, "-m", "maturin", "build", "--profile", "dev", "--offline", "--locked"]
    run([*building, "--compatibility", "linux", "--compression-method", "stored", "-o", str(place)], cwd=ROOT.parent)
    (wheel,) = place.glob("surgetank-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")])
    programs = place / "venv/bin"
    own = Path(run([str(programs / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (own / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # pip checks that the wheel's dependencies are installed.
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-index"]
    run([*pip, "--disable-pip-version-check", str(wheel)])
    return programs


def surroundings(programs: Path, **more: str) -> dict[str, str]:
    """No path in the wheel leads to the sources."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SURGETANK", "PYTHON"))}
    return {**clean, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **more}


def test_wheel_has_the_program_and_the_package(installed: Path, tmp_path: Path) -> None:
    there = surroundings(installed)
    pyproject = (ROOT.parent / "pyproject.toml").read_text()
    version = run([str(installed / "surgetank"), "--version"], env=there, cwd=tmp_path).split()[1]
    assert f'version = "{version}"' in pyproject
    (tmp_path / "w.yaml").write_text(
        json.dumps({"surgetank": 1, "tasks": {"t": {"command": "true", "outputs": ["x"]}}})
    )
    for start in ([str(installed / "surgetank"), "workflow"], [str(installed / "python"), "-m", "surgetank.workflow"]):
        explained = json.loads(run([*start, "explain", "--json", "w.yaml"], env=there, cwd=tmp_path))
        assert [one["path"] for one in explained["of_files"]] == ["x"]


@NEEDS_MOUNT
def test_snakemake_finds_the_plugin_of_the_wheel_and_that_the_program(
    installed: Path, tmp_path: Path, tier: Path
) -> None:
    work, state = tmp_path / "w", tmp_path / "state"
    state.mkdir(mode=0o700)
    (work / "profiles/default").mkdir(parents=True)
    (work / "profiles/default/config.yaml").write_text(PROFILE)
    (work / "Snakefile").write_text(SNAKEFILE)
    there = surroundings(installed, SURGETANK_STATE=str(state), SURGETANK_TIERS=f"ram={tier}:64M")
    output = run(["unshare", "-m", str(installed / "python"), "-m", "snakemake", "--cores", "1"], cwd=work, env=there)
    assert "surgetank: drain: " in output
    assert Path((work / "out.txt").read_text().strip()).is_relative_to(installed.parent)
