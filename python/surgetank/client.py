"""Questions to the agent that serves a directory: where files are, and hints about files. No process is started.

The functions find the agent by the path. A connection stays open for the next question, and each thread may use it. Errors are
:class:`AgentError`: its text says what failed, why, and what to try.

The danger that this avoids: the answer to another question. A connection on which an answer is still to come is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROTOCOL = 2
# An answer about a file is longer than its path: in a pool it names each node that has a copy.
LOCATED_MAX, LOCATED_BYTES_MAX = 500, 64 << 10
# (The agent takes 1 MiB.)
REQUEST_BYTES_MAX = 1 << 19
ANSWER_BYTES_MAX = 16 << 20
PATIENCE_S = 120.0
SITE_FILE = Path("/etc/surgetank.toml")

AnyPath = str | os.PathLike[str]


class AgentError(RuntimeError):
    """No agent serves the path, or it refused the request, or it did not answer."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        lines = [what, *([f"  why:  {why}"] if why else []), *([f"  try:  {remedy}"] if remedy else [])]
        super().__init__("\n".join(lines))


def locate(
    paths: Iterable[AnyPath],
    state: AnyPath | None = None,
    patience_s: float = PATIENCE_S,
    resolve: bool = True,
) -> list[dict[str, Any]]:
    """Where these files are, in the order of the paths.

    Each answer has `path` (as given), `size_bytes`, `version`, `state`, `home` (a member of the pool, or None), `durable`, and
    `copies`: a list of `member`, `node` (as `uname -n`), `tier` and `path`. A file that cannot be found has `path` and `error`.
    `state`: the state directory, as `--state`; else the configured one. `patience_s`: so long the answer to all of it is awaited.
    `resolve=False`: directories in the paths are taken as they are written. Otherwise the file system is asked for symbolic links,
    and a node that does not answer delays that.
    """
    given = [os.fspath(path) for path in paths]
    answers: list[dict[str, Any]] = [{} for _ in given]
    until = time.monotonic() + patience_s

    def asked(agent: _Agent, some: list[tuple[int, str | list[int]]]) -> None:
        found = _asked(agent, {"locate": {"paths": [name for _, name in some]}}, "located", until)["files"]
        for (nth, _), one in zip(some, found, strict=True):
            for copy in one["Ok"]["copies"] if "Ok" in one else ():
                copy["path"] = _plain(copy["path"])
            answers[nth] = {"path": given[nth], **(one["Ok"] if "Ok" in one else {"error": one["Err"]})}

    for agent, places in _by_agent(given, state, until, resolve):
        named = ((nth, _text(name)) for nth, name in places)
        for some in _batches(named, LOCATED_MAX, LOCATED_BYTES_MAX):
            asked(agent, some)
    return answers


def node(paths: AnyPath | Iterable[AnyPath], state: AnyPath | None = None, patience_s: float = PATIENCE_S) -> str:
    """The node (as `uname -n`) that has most bytes of these files, as `surgetank locate --node`. Empty if none has some.

    Files that are not there, and have no copy, do not count. Raises AgentError if no agent serves the files.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    bytes_on: dict[str, int] = {}
    for one in locate(given, state, patience_s):
        for name in {copy["node"] for copy in one.get("copies", ()) if copy["node"]}:
            bytes_on[name] = bytes_on.get(name, 0) + one["size_bytes"]
    # (Of several, the first by name.)
    best = min(bytes_on, key=lambda name: (-bytes_on[name], name), default="")
    return best if bytes_on.get(best) else ""


def nodelist(paths: AnyPath | Iterable[AnyPath], state: AnyPath | None = None, patience_s: float = 10.0) -> str:
    """For `srun` and `sbatch`: `--nodelist=NODE`, with the node of `node()`. Empty if there is none.

    It is for resources of a workflow's jobs: without an agent it warns, and is empty.
    """
    try:
        best = node(paths, state, patience_s)
    except AgentError as why:
        warnings.warn(f"jobs are not placed where their files are: {why}", stacklevel=2)
        return ""
    return f"--nodelist={best}" if best else ""


def hint(paths: AnyPath | Iterable[AnyPath], state: AnyPath | None = None, **hints: object) -> None:
    """Gives hints about files, which need not exist yet: `hint("work/b.fits", mode="remove", size="3G")` (see docs/hints.md).

    Raises AgentError if the agent refuses one; the others are set.
    """
    given = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
    hint_each(({"path": path, **hints} for path in given), state)


def hint_each(hints: Iterable[dict[str, Any]], state: AnyPath | None = None) -> None:
    """The same, with other hints for each path: dictionaries of `path`, and hints beside it."""
    each = list(hints)
    refused: list[str] = []
    until = time.monotonic() + PATIENCE_S

    def value(of: object) -> str:
        return str(of).lower() if isinstance(of, bool) else str(of)

    def line(nth: int, name: str) -> dict[str, Any]:
        values = {key: value(of) for key, of in each[nth].items() if key != "path"}
        return {"path": _text(name), "hints": values}

    def asked(agent: _Agent, some: list[dict[str, Any]]) -> None:
        answer = _asked(agent, {"hint": {"hints": some}}, "hinted", until)["refused"]
        refused.extend(f"{_shown(one['path'])}: {one['why']}" for one in answer["first"])

    for agent, places in _by_agent([os.fspath(one["path"]) for one in each], state, until):
        for some in _batches((line(nth, name) for nth, name in places), len(each), REQUEST_BYTES_MAX):
            asked(agent, some)
    if refused:
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        remedy = "`surgetank help hints` lists names and values; the other hints are set"
        raise AgentError("the agent refused hints", "; ".join(refused[:5]) + more, remedy)


class _Agent:
    """A connection."""

    def __init__(self, place: Path, over: str, until: float) -> None:
        self.place, self.over, self.lock = place, over, threading.Lock()
        self.received = bytearray()
        left = _left(until)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(left)
        # (By a descriptor: the path of a socket has at most 107 bytes.)
        directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while True:
                try:
                    self.socket.connect(f"/proc/self/fd/{directory}/agent.sock")
                    break
                except BlockingIOError:
                    # (Many wait there.)
                    time.sleep(min(0.01, _left(until)))
            peer = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] not in (0, os.geteuid()):
                raise AgentError(f"the agent at {place} is another user's")
        except BaseException:
            self.socket.close()
            raise
        finally:
            os.close(directory)
        self.ask({"hello": {"protocol": PROTOCOL}}, "hello", until)

    def ask(self, request: dict[str, Any], answer: str, until: float) -> Any:
        """The answer of this name. OSError: the connection has ended."""
        if not self.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise self._silent()
        try:
            self.socket.settimeout(_left(until))
            self.socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._line(until)
        except TimeoutError:
            self.socket.close()
            raise self._silent() from None
        except BaseException:
            self.socket.close()
            raise
        finally:
            self.lock.release()
        words = json.loads(line)
        if isinstance(words, dict) and answer in words:
            return words[answer]
        error = words.get("error", {}) if isinstance(words, dict) else {}
        what = error.get("what", f"the agent at {self.place} gave another answer")
        raise AgentError(what, error.get("why", ""), error.get("remedy", ""))

    def _line(self, until: float) -> bytes:
        begin = 0
        while (end := self.received.find(b"\n", begin)) < 0:
            begin = len(self.received)
            if begin > ANSWER_BYTES_MAX:
                raise ConnectionError("the answer is too long")
            self.socket.settimeout(_left(until))
            more = self.socket.recv(1 << 20)
            if not more:
                raise ConnectionError("the agent closed the connection")
            self.received += more
        line = bytes(self.received[:end])
        del self.received[: end + 1]
        return line

    def _silent(self) -> AgentError:
        remedy = "`surgetank status` shows whether it runs; files are safe meanwhile"
        return AgentError(f"the agent of {self.over} does not answer in time", remedy=remedy)


_known: dict[Path, _Agent] = {}
_knowing = threading.Lock()


def _forget() -> None:
    """A child has connections of its own."""
    global _knowing
    _known.clear()
    _knowing = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _left(until: float) -> float:
    """Seconds, for the time-out of a socket. (0 means another thing there.)"""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _asked(agent: _Agent, request: dict[str, Any], answer: str, until: float) -> Any:
    """Asks; if the agent was replaced since the last question, then the next one. (What is asked may be asked twice.)"""
    try:
        return agent.ask(request, answer, until)
    except OSError:
        pass
    try:
        return _connected(agent.place, agent.over, until, agent).ask(request, answer, until)
    except OSError as why:
        raise AgentError(f"the agent of {agent.over} does not answer", str(why)) from None


def _connected(place: Path, over: str, until: float, ended: _Agent | None = None) -> _Agent:
    """The connection of this process."""
    with _knowing:
        known = _known.get(place)
    if known and known is not ended and known.over == over:
        return known
    # (Not under the lock: it may take its time. Two threads may each make one.)
    made = _Agent(place, over, until)
    with _knowing:
        _known[place] = made
    return made


def _by_agent(
    paths: Sequence[str], state: AnyPath | None, until: float, resolve: bool = True
) -> Iterator[tuple[_Agent, list[tuple[int, str]]]]:
    """Each agent, and for each of its files the place among the paths, and the path below the served directory."""
    if not paths:
        return
    serving = _serving(state)
    directories: dict[str, list[str]] = {}
    living: dict[tuple[Path, str], _Agent | None] = {}
    by_agent: dict[tuple[Path, str], list[tuple[int, str]]] = {}
    for nth, path in enumerate(paths):
        directory, name = os.path.split(path)
        if name in ("", ".", ".."):
            directory, name = path, ""
        # (Of this call: a directory may be another one at the next.)
        if directory not in directories:
            whole = os.path.abspath(directory or ".")
            directories[directory] = [os.path.realpath(directory or "."), whole] if resolve else [whole]
        for whole in (os.path.join(whole, name) if name else whole for whole in directories[directory]):
            # (The innermost first. The sort keeps the order of those that serve the same directory.)
            inside = sorted((one for one in serving if _is_in(whole, one[1])), key=lambda one: -len(one[1]))
            for one in inside:
                if one not in living:
                    living[one] = _living(*one, until)
            if found := next((one for one in inside if living[one]), None):
                by_agent.setdefault(found, []).append((nth, whole[len(found[1].rstrip("/")) + 1 :]))
                break
        else:
            remedy = "start one with `surgetank run` or `surgetank mount`, or give its state directory as `state`"
            raise AgentError(f"no agent of yours serves {path}", remedy=remedy)
    for one, places in by_agent.items():
        if agent := living[one]:
            yield agent, places


def _living(place: Path, over: str, until: float) -> _Agent | None:
    """The agent there. `None`: it has ended, or was killed."""
    try:
        return _connected(place, over, until)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except TimeoutError:
        raise AgentError(f"the agent of {over} does not answer in time") from None
    except OSError as why:
        raise AgentError(f"the agent of {over} cannot be asked", str(why)) from None


def _serving(state: AnyPath | None) -> list[tuple[Path, str]]:
    """Places of agents, and the directory that each serves: the innermost of those around this process first."""
    around = [Path(place) for place in reversed(os.environ.get("SURGETANK_AGENT", "").split(":")) if place]
    for root in _state_roots(state):
        with contextlib.suppress(OSError):
            around += sorted(place for place in root.iterdir() if place not in around)
    found = []
    for place in around:
        # (A directory whose agent has ended has no card; that of a killed one has.)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append((place, _plain(json.loads((place / "agent.json").read_bytes())["over"])))
    return found


def _state_roots(state: AnyPath | None) -> list[Path]:
    """State directories in which agents may have places. Without a given one, those of the site, of the project, and the usual one:
    a file that serves another directory does not matter, because an agent is chosen by what it serves."""
    if given := state or os.environ.get("SURGETANK_STATE"):
        return [Path(given)]
    project = Path(os.environ.get("SURGETANK_OVER", ""), "surgetank.toml")
    files = [SITE_FILE]
    # (Inside a run the agent is known, and must not be asked for a file to find it.)
    if not os.environ.get("SURGETANK_AGENT"):
        files.append(Path(os.environ.get("SURGETANK_CONFIG") or project))
    roots = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            roots.append(file.absolute().parent / tomllib.loads(file.read_text())["state"])
    return [*roots, Path(f"/var/tmp/surgetank-{os.geteuid()}")]


def _is_in(path: str, over: str) -> bool:
    return path == over or path.startswith(over.rstrip("/") + "/")


def _batches(each: Iterable[Any], count_max: int, bytes_max: int) -> Iterator[list[Any]]:
    some: list[Any] = []
    length = 0
    for one in each:
        size = len(json.dumps(one))
        if some and (len(some) >= count_max or length + size > bytes_max):
            yield some
            some, length = [], 0
        some.append(one)
        length += size
    if some:
        yield some


def _text(path: str) -> str | list[int]:
    """A path as the protocol has it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return list(os.fsencode(path))
    return path


def _plain(path: str | list[int]) -> str:
    return path if isinstance(path, str) else os.fsdecode(bytes(path))


def _shown(path: str | list[int]) -> str:
    return path if isinstance(path, str) else repr(bytes(path))
