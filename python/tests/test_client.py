"""`surgetank.locate` and `surgetank.hint`: questions to an agent without a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_replay import BINARY, NEEDS_MOUNT, tier

import surgetank
from surgetank import AgentError, client

__all__ = ["tier"]

ROOT = Path(__file__).parent.parent
RUN = r"""
import concurrent.futures, json, os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import surgetank

def answer(*words):
    done = subprocess.run([sys.argv[2], *words], stdout=subprocess.PIPE, check=False)
    return json.loads(done.stdout)

os.makedirs("a/b")
surgetank.hint(["a/b/kept", "a/later"], mode="keep", size=4096, pin=True)
open("a/b/kept", "w").write("content")
open("plain", "w").write("")
open(b"a/\xff", "w").write("no text")
names = ["a/b/kept", "plain", os.fsdecode(b"a/\xff"), os.path.abspath("a/../plain"), "a/none", "in", "a"]
found = surgetank.locate(names)
assert [one["path"] for one in found] == names
kept, empty, odd, same, none, stored, directory = found
assert kept["size_bytes"] == 7 and kept["home"] is None and not kept["durable"], kept
(copy,) = kept["copies"]
assert (copy["member"], copy["node"], copy["tier"]) == (None, os.uname().nodename, "ram"), copy
assert open(copy["path"]).read() == "content"
assert open(odd["copies"][0]["path"]).read() == "no text"
assert same["copies"] == empty["copies"] and same["version"] == empty["version"]
assert set(none) == {"path", "error"}, none
assert (stored["durable"], stored["version"], stored["copies"], stored["size_bytes"]) == (True, 0, [], 5), stored
assert directory["copies"] == []
# The verb says the same.
text = [name for name in names if name.isascii()]
assert answer("locate", "--json", *text) == [one for one in found if one["path"].isascii()]
assert bytes(answer("locate", "--json", names[2])[0]["path"]) == b"a/\xff"
assert os.getxattr("a/b/kept", "user.surgetank.hint.size") == b"4096"
assert os.getxattr("a/b/kept", "user.surgetank.state") == b"kept"
try:
    surgetank.hint("plain", mode="kept")
except surgetank.AgentError as why:
    assert "keep, copy, move, remove" in str(why), why
else:
    raise SystemExit("a wrong value was accepted")
try:
    surgetank.locate(["/etc/passwd"])
except surgetank.AgentError as why:
    assert "no agent of yours serves /etc" in str(why), why
else:
    raise SystemExit("a file elsewhere was located")
# Another agent takes over: the connection ends, and the next one is asked.
agent = answer("status", "--json")[0]["pid"]
os.kill(agent, signal.SIGKILL)
assert surgetank.locate(["a/b/kept"])[0]["copies"] == kept["copies"]
# A child has a connection of its own.
if os.fork() == 0:
    os._exit(0 if surgetank.locate(["plain"])[0]["path"] == "plain" else 1)
assert os.wait()[1] == 0
assert surgetank.locate([]) == []
# A relative path, or a link, may lead to another file than before.
for name in ("x", "y"):
    os.mkdir(name)
    open(f"{name}/f", "w").write(name * (1 + (name == "y")))
    os.chdir(name)
    assert surgetank.locate(["f"])[0]["size_bytes"] == 1 + (name == "y")
    os.chdir("..")
for name in ("x", "y"):
    os.symlink(name, "latest")
    assert surgetank.locate(["latest/f"])[0]["size_bytes"] == 1 + (name == "y")
    os.unlink("latest")
assert surgetank.locate([os.getcwd()])[0]["copies"] == []
assert len(surgetank.locate(["x/f", "y/f"] * 2000)) == 4000
# Threads share a connection.
with concurrent.futures.ThreadPoolExecutor(8) as threads:
    names = ["x/f", "y/f", "a/b/kept"]
    sizes = threads.map(lambda n: surgetank.locate([names[n % 3]] * (1 + n % 7))[0]["size_bytes"], range(200))
    assert list(sizes) == [(1, 2, 7)[n % 3] for n in range(200)]
open("a/done", "w").write("")
"""


@NEEDS_MOUNT
def test_files_are_located_and_hinted_without_a_process(tmp_path: Path, tier: Path) -> None:
    work, state = tmp_path / "work", tmp_path / ("state" * 20)
    work.mkdir()
    state.mkdir(mode=0o700)
    (work / "in").write_text("input")
    script = tmp_path / "script.py"
    script.write_text(RUN)
    words = [BINARY, "run", "--state", str(state), "--tier", f"ram={tier}:64M", "--quiet-period", "1h", "--"]
    words += [sys.executable, str(script), str(ROOT), BINARY]
    there = {**os.environ, "SURGETANK_STATE": str(state)}
    done = subprocess.run(["unshare", "-m", *words], cwd=work, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "a/done").exists() and not (work / "a/b/kept").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_agent_of_another_user_is_not_asked(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    (place / "agent.json").write_text(json.dumps({"over": str(tmp_path), "pid": 1, "global": True}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "agent.sock"))
        os.chmod(place / "agent.sock", 0o777)
        # (The credentials are those of the moment of listen(2).)
        os.seteuid(1234)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(AgentError, match="is another user's"):
            surgetank.locate([tmp_path / "file"], state=tmp_path)


def test_silent_agent_is_waited_for_once(tmp_path: Path) -> None:
    """An agent that does not answer stands in the way of its own directory only, and one that was killed in that of none."""
    for name, over in (("one", "over-one"), ("other", "over-other"), ("killed", "over-one/inner")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.json").write_text(json.dumps({"over": str(tmp_path / over)}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "one/agent.sock"))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(AgentError, match="does not answer in time"):
            surgetank.locate([tmp_path / "over-one/file"], state=tmp_path, patience_s=0.5)
        with pytest.raises(AgentError, match="does not answer in time"):
            surgetank.locate([tmp_path / "over-one/inner/file"], state=tmp_path, patience_s=0.5)
        with pytest.raises(AgentError, match="no agent of yours serves"):
            surgetank.locate([tmp_path / "over-other/file"], state=tmp_path, patience_s=60)
        assert 0.9 < time.monotonic() - began < 10


def test_configured_state_directories_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SURGETANK_STATE", "SURGETANK_AGENT", "SURGETANK_OVER", "SURGETANK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    usual = Path(f"/var/tmp/surgetank-{os.geteuid()}")
    monkeypatch.setattr(client, "SITE_FILE", tmp_path / "site.toml")
    assert client._state_roots(None) == [usual]
    (tmp_path / "site.toml").write_text('state = "/site/state"\n')
    (tmp_path / "surgetank.toml").write_text('state = "beside"\n')
    assert client._state_roots(None) == [Path("/site/state"), tmp_path / "beside", usual]
    (tmp_path / "surgetank.toml").write_text("nonsense\n")
    assert client._state_roots(None) == [Path("/site/state"), usual]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/surgetank.toml").write_text('state = "../there"\n')
    monkeypatch.setenv("SURGETANK_OVER", str(tmp_path / "other"))
    assert client._state_roots(None)[1].resolve() == tmp_path / "there"
    monkeypatch.setenv("SURGETANK_AGENT", "/place")
    assert client._state_roots(None) == [Path("/site/state"), usual]
    monkeypatch.setenv("SURGETANK_STATE", "/given")
    assert client._state_roots(None) == [Path("/given")]
    assert client._state_roots("/told") == [Path("/told")]


def test_without_an_agent_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="no agent of yours serves"):
        surgetank.locate([tmp_path / "file"], state=tmp_path)
    with pytest.raises(AgentError, match="try:"):
        surgetank.hint(tmp_path / "file", state=tmp_path, mode="keep")
    assert json.dumps(surgetank.locate([], state=tmp_path)) == "[]"
