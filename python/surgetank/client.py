"""Questions to the agent that serves a directory: where files are, and hints about files. No process is started.

The functions find the agent by the path. A connection stays open for the next question, and each thread may use it. Errors are
:class:`AgentError`: its text says what failed, why, and what to try.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PROTOCOL = 2
# A request has at most 1 MiB. Answers about files are longer than the question.
PATHS_MAX, BYTES_MAX = 2000, 200 << 10
ANSWER_BYTES_MAX = 16 << 20
PATIENCE_S = 120.0

AnyPath = str | os.PathLike[str]


class AgentError(RuntimeError):
    """No agent serves the path, or it refused the request, or it did not answer."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(
            "\n".join([what, *([f"  why:  {why}"] if why else []), *([f"  try:  {remedy}"] if remedy else [])])
        )


def locate(
    paths: Iterable[AnyPath], state: AnyPath | None = None, patience_s: float = PATIENCE_S
) -> list[dict[str, Any]]:
    """Where these files are, in the order of the paths.

    Each answer has `path` (as given), `size_bytes`, `version`, `state`, `home` (a member of the pool, or None), `durable`, and
    `copies`: a list of `member`, `node` (as `uname -n`), `tier` and `path`. A file that cannot be found has `path` and `error`.
    `state`: the state directory, as `--state`. `patience_s`: so long each answer of the agent is awaited.
    """
    given = [os.fspath(path) for path in paths]
    answers: list[dict[str, Any]] = [{} for _ in given]
    for agent, places in _by_agent(given, state, patience_s):
        for some in _batches(given, places):
            names = [agent.relative(given[place]) for place in some]
            found = _asked(agent, {"locate": {"paths": [_text(name) for name in names]}}, "located", patience_s)[
                "files"
            ]
            for place, one in zip(some, found, strict=True):
                for copy in one["Ok"]["copies"] if "Ok" in one else ():
                    copy["path"] = _plain(copy["path"])
                answers[place] = {"path": given[place], **(one["Ok"] if "Ok" in one else {"error": one["Err"]})}
    return answers


def hint(paths: AnyPath | Iterable[AnyPath], state: AnyPath | None = None, **hints: object) -> None:
    """Gives hints about files, which need not exist yet: `hint("work/b.fits", mode="remove", size="3G")` (see docs/hints.md).

    Raises AgentError if the agent refuses one; the others are set.
    """
    given = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
    values = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in hints.items()}
    hint_each(({"path": path, **values} for path in given), state)


def hint_each(hints: Iterable[dict[str, Any]], state: AnyPath | None = None) -> None:
    """The same, with other hints for each path: dictionaries of `path`, and hints beside it."""
    each = list(hints)
    refused: list[str] = []
    given = [os.fspath(one["path"]) for one in each]
    for agent, places in _by_agent(given, state):
        for some in _batches(given, places):
            lines = []
            for place in some:
                values = {
                    name: str(value).lower() if isinstance(value, bool) else str(value)
                    for name, value in each[place].items()
                    if name != "path"
                }
                lines.append({"path": _text(agent.relative(given[place])), "hints": values})
            answer = _asked(agent, {"hint": {"hints": lines}}, "hinted")["refused"]
            refused += [f"{_shown(one['path'])}: {one['why']}" for one in answer["first"]]
    if refused:
        raise AgentError(
            "the agent refused hints",
            "; ".join(refused[:5]) + (f"; and {len(refused) - 5} more" if len(refused) > 5 else ""),
            "docs/hints.md lists names and values; the other hints are set",
        )


class _Agent:
    """A connection."""

    def __init__(self, place: Path, patience_s: float) -> None:
        self.place, self.pid, self.lock = place, os.getpid(), threading.Lock()
        self.parents: dict[str, str] = {}
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(patience_s)
        # (By a descriptor: the path of a socket has at most 107 bytes.)
        directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.socket.connect(f"/proc/self/fd/{directory}/agent.sock")
            peer = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] not in (0, os.geteuid()):
                raise PermissionError(f"the agent at {place} is another user's")
        except OSError:
            self.socket.close()
            raise
        finally:
            os.close(directory)
        self.received = bytearray()
        hello = self.ask({"hello": {"protocol": PROTOCOL}}, "hello", patience_s)
        self.over = _plain(hello["over"])

    def ask(self, request: dict[str, Any] | str, answer: str, patience_s: float = PATIENCE_S) -> Any:
        """The answer of this name. OSError: the connection has ended."""
        with self.lock:
            self.socket.settimeout(patience_s)
            self.socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._line()
        words = json.loads(line)
        if isinstance(words, dict) and answer in words:
            return words[answer]
        error = words.get("error", {}) if isinstance(words, dict) else {}
        raise AgentError(
            error.get("what", f"the agent at {self.place} gave another answer"),
            error.get("why", ""),
            error.get("remedy", ""),
        )

    def _line(self) -> bytes:
        begin = 0
        while (end := self.received.find(b"\n", begin)) < 0:
            begin = len(self.received)
            if begin > ANSWER_BYTES_MAX:
                raise ConnectionError("the answer is too long")
            try:
                more = self.socket.recv(1 << 20)
            except TimeoutError:
                waited = f"no answer for {self.socket.gettimeout()} s"
                self.socket.close()
                raise AgentError(f"the agent at {self.place} does not answer", waited) from None
            if not more:
                raise ConnectionError("the agent closed the connection")
            self.received += more
        line = bytes(self.received[:end])
        del self.received[: end + 1]
        return line

    def serves(self, path: str) -> bool:
        return path == self.over or path.startswith(self.over.rstrip("/") + "/")

    def relative(self, path: str) -> str:
        directory, name = os.path.split(path)
        if name in ("", ".", ".."):
            directory, name = path, ""
        if directory not in self.parents:
            whole = os.path.realpath(directory or ".")
            self.parents[directory] = whole if self.serves(whole) else os.path.abspath(directory or ".")
        whole = os.path.join(self.parents[directory], name)
        if not self.serves(whole):
            raise AgentError(f"{path} is not below {self.over}", "the agent serves that directory only")
        return os.path.relpath(whole, self.over) if not name else whole[len(self.over.rstrip("/")) + 1 :]


_known: dict[Path, _Agent] = {}
_knowing = threading.Lock()


def _asked(agent: _Agent, request: dict[str, Any], answer: str, patience_s: float = PATIENCE_S) -> Any:
    """Asks; if the agent was replaced meanwhile, then the next one."""
    try:
        return agent.ask(request, answer, patience_s)
    except OSError as why:
        with _knowing:
            following = _living(agent.place, patience_s)
        if following is None:
            raise AgentError(f"the agent of {agent.over} does not answer", str(why)) from None
    try:
        return following.ask(request, answer, patience_s)
    except OSError as why:
        raise AgentError(f"the agent of {agent.over} does not answer", str(why)) from None


def _by_agent(
    paths: Sequence[str], state: AnyPath | None, patience_s: float = PATIENCE_S
) -> list[tuple[_Agent, list[int]]]:
    """Each agent, with the places of its paths."""
    living, silent = [], None
    with _knowing:
        for place in _places(state):
            try:
                living += [agent] if (agent := _living(place, patience_s)) else []
            except AgentError as why:
                silent = why
    serving: dict[str, _Agent] = {}
    places: dict[Path, list[int]] = {}
    for nth, path in enumerate(paths):
        directory = os.path.dirname(path) or "."
        if directory not in serving:
            serving[directory] = _serving(living, silent, directory)
        places.setdefault(serving[directory].place, []).append(nth)
    by_place = {agent.place: agent for agent in serving.values()}
    return [(by_place[place], some) for place, some in places.items()]


def _serving(living: list[_Agent], silent: AgentError | None, directory: str) -> _Agent:
    """The innermost agent."""
    whole = (os.path.abspath(directory), os.path.realpath(directory))
    found = [agent for agent in living if any(agent.serves(path) for path in whole)]
    if not found:
        if silent:
            raise silent
        raise AgentError(
            f"no agent of yours serves {directory}",
            remedy="start one with `surgetank run` or `surgetank mount`, or give its state directory as `state`",
        )
    return max(found, key=lambda agent: len(agent.over))


def _places(state: AnyPath | None) -> list[Path]:
    """Where agents may be: the innermost of those around this process first."""
    around = [Path(place) for place in reversed(os.environ.get("SURGETANK_AGENT", "").split(":")) if place]
    root = Path(state or os.environ.get("SURGETANK_STATE") or f"/var/tmp/surgetank-{os.geteuid()}")
    with contextlib.suppress(OSError):
        around += sorted(place for place in root.iterdir() if place not in around and place.is_dir())
    return around


def _living(place: Path, patience_s: float) -> _Agent | None:
    """The agent there, by a connection of this process that works: the last one may have been replaced since."""
    known = _known.pop(place, None)
    if known and known.pid == os.getpid():
        try:
            known.ask("waiting", "waiting", patience_s)
        except OSError:
            known.socket.close()
        else:
            _known[place] = known
            return known
    with contextlib.suppress(OSError):
        _known[place] = _Agent(place, patience_s)
    return _known.get(place)


def _batches(paths: Sequence[str], places: list[int]) -> Iterable[list[int]]:
    some: list[int] = []
    length = 0
    for place in places:
        size = len(os.fsencode(paths[place]))
        if some and (len(some) == PATHS_MAX or length + size > BYTES_MAX):
            yield some
            some, length = [], 0
        some.append(place)
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
