"""A run's memory: `.surgetank-workflow/RUN/`, with a journal of JSON lines in segments.

A segment is closed after a while and never written again, so that under a mount it is sealed and survives the
agent's death. The first segment carries the previous run's facts. It appears atomically (renamed), so the newest run
that has it knows everything. A kill -9 leaves a torn last line, which is skipped. The journal's facts count only if
the files' stamps agree: a lost segment costs work, and never gives a wrong result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from . import logs
from .stamp import Stamp

HOME = ".surgetank-workflow"
SEGMENT_SECONDS_MAX = 1.0
CARRIED = "journal-0000.jsonl"
NAME_BYTES_MAX = 180


@dataclass(slots=True)
class Record:
    """A task that succeeded. Times are in ns since 1970; stamps are those of the files as the task read and left them."""

    task: str
    derivation: str
    run: str
    attempt: int
    began_ns: int
    ended_ns: int
    inputs: dict[str, Stamp]
    outputs: dict[str, Stamp]
    cpu_s: float = 0.0
    memory_bytes_max: int = 0


@dataclass
class Past:
    """Tasks of earlier runs, by task and derivation, the latest last."""

    records: dict[tuple[str, str], list[Record]] = field(default_factory=dict)
    run: str | None = None
    # Tasks that had begun without a later event: the task or the executor was killed.
    open_tasks: set[str] = field(default_factory=set)
    # Task → its attempt, and the name of its logs at that time.
    unnamed_logs: dict[str, tuple[int, str]] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "start":
            self.open_tasks.add(event["task"])
        elif kind == "log":
            self.unnamed_logs[event["task"]] = (event["attempt"], event["named"])
        elif kind == "done":
            record = _record(event)
            self.records.setdefault((record.task, record.derivation), []).append(record)
            self.open_tasks.discard(record.task)
        elif kind in ("failed", "killed"):
            self.open_tasks.discard(event["task"])


def runs(home: Path) -> list[str]:
    """Names of the runs of a directory, the oldest first."""
    try:
        names = [entry.name for entry in os.scandir(home) if entry.name.split("-")[0].isdigit() and entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(names, key=lambda name: (int(name.split("-")[0]), name))


def load(home: Path) -> Past:
    """The facts of the newest run that wrote its first segment."""
    past = Past()
    for run in reversed(runs(home)):
        if (home / run / CARRIED).exists():
            past.run = run
            for event in events(home / run):
                past.take(event)
            break
    return past


def name_logs(home: Path, past: Past) -> None:
    """Gives the logs of tasks that were killed together with the executor their own names."""
    for task in past.open_tasks & past.unnamed_logs.keys():
        attempt, named = past.unnamed_logs[task]
        if not logs.is_unnamed(named):
            continue
        for end in ("out", "err"):
            log = home / (past.run or "") / f"{named}.{end}"
            own = log.with_name(f"{log_name(task, attempt)}.{end}")
            # (The log got its name in time.)
            with contextlib.suppress(OSError):
                if not own.exists():
                    log.rename(own)


def events(directory: Path) -> Iterator[dict[str, Any]]:
    """All events of a run, in order."""
    for segment in sorted(directory.glob("journal-*.jsonl")):
        with open(segment, "rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    with contextlib.suppress(ValueError):
                        event = json.loads(line)
                        if isinstance(event, dict):
                            yield event


class Journal:
    """The journal that is being written."""

    def __init__(self, home: Path, past: Past, now: time.struct_time | None = None) -> None:
        last = runs(home)
        number = int(last[-1].split("-")[0]) + 1 if last else 1
        self.run = f"{number:04}-{time.strftime('%Y%m%d-%H%M%S', now or time.localtime())}"
        self.directory = home / self.run
        self.directory.mkdir(parents=True)
        self._segment = 0
        self._stream: BinaryIO | None = None
        self._opened_s = 0.0
        self._waiting: list[str] = []
        draft = self.directory / "carried.part"
        with open(draft, "wb") as stream:
            for several in past.records.values():
                for record in several:
                    stream.write(_line({"event": "done", **_fields(record)}).encode())
        draft.rename(self.directory / CARRIED)

    def say(self, event: str, **what: Any) -> None:
        """Written at the next `flush`."""
        self._waiting.append(_line({"event": event, **what}))

    def done(self, record: Record) -> None:
        self.say("done", **_fields(record))

    def flush(self) -> None:
        """From here on a kill -9 of the executor loses no earlier event."""
        now = time.monotonic()
        if self._stream is not None and now - self._opened_s > SEGMENT_SECONDS_MAX:
            self._close()
        if not self._waiting:
            return
        if self._stream is None:
            self._segment += 1
            path = self.directory / f"journal-{self._segment:04}.jsonl"
            self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `_close`)
            self._opened_s = now
        text = "".join(self._waiting).encode()
        self._waiting.clear()
        while text:
            text = text[self._stream.write(text) :]

    def close(self) -> None:
        self.flush()
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def log_name(task: str, attempt: int) -> str:
    """The name of a task's logs, without `.out` or `.err`: any id becomes one short, unique name."""
    safe = quote(task, safe="@+=,", errors="surrogatepass")
    if safe.startswith("."):
        safe = "%2E" + safe[1:]
    if len(safe) > NAME_BYTES_MAX:
        digest = hashlib.sha256(task.encode(errors="surrogatepass")).hexdigest()
        safe = f"{safe[:NAME_BYTES_MAX]}-{digest[:16]}"
    # `~` is quoted in ids, so no id of another task can look like a second attempt.
    safe = safe.replace("~", "%7E")
    return safe if attempt == 1 else f"{safe}~{attempt}"


def _line(event: dict[str, Any]) -> str:
    # ASCII: names that are not UTF-8 survive as escapes.
    return json.dumps(event) + "\n"


def _fields(record: Record) -> dict[str, Any]:
    # (`asdict` copies every field's content, for each of 10,000 tasks.)
    return {key: getattr(record, key) for key in Record.__slots__}


def _record(event: dict[str, Any]) -> Record:
    fields = {key: event[key] for key in Record.__slots__ if key in event}
    for side in ("inputs", "outputs"):
        fields[side] = {path: (size, changed) for path, (size, changed) in fields[side].items()}
    return Record(**fields)
