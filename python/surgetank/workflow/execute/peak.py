"""The peak of live bytes of an executed schedule, from the journal's times and the files' real sizes.

A file lives from the start of its maker, because its room must exist while it is written. Without lifetimes it lives
to the end. With lifetimes an intermediate lives to the end of its last reader, and a result to the end. `executed`
is the real situation: until a file was dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..derive import Life, live_bytes_max
from ..graph import Workflow
from .journal import Record


@dataclass(frozen=True)
class Peak:
    with_lifetimes_bytes: int
    without_lifetimes_bytes: int
    executed_bytes: int


def of_journal(workflow: Workflow, events: Iterable[Mapping[str, Any]], run: str) -> Peak:
    """For the tasks that `run` itself executed; files of earlier runs that still exist count from the beginning."""
    spans: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for event in events:
        if event["event"] == "done":
            own = event["run"] == run
            spans[event["task"]] = (event["began_ns"], event["ended_ns"]) if own else (0, 0)
            for path, (size, _) in event["outputs"].items():
                sizes[path] = size
                if own:
                    dropped.pop(path, None)
        elif event["event"] == "drop":
            dropped[event["path"]] = event["at_ns"]
        elif event["event"] == "gone":
            sizes.pop(event["path"], None)
    return of(workflow, spans, sizes, dropped)


def of_records(workflow: Workflow, records: Iterable[Record]) -> Peak:
    """For tasks that ran once each."""
    spans: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    for record in records:
        spans[record.task] = (record.began_ns, record.ended_ns)
        sizes.update({path: size for path, (size, _) in record.outputs.items()})
    return of(workflow, spans, sizes, {})


def of(
    workflow: Workflow,
    spans: Mapping[str, tuple[int, int]],
    sizes: Mapping[str, int],
    dropped: Mapping[str, int],
) -> Peak:
    """`spans`: task → begin and end; `dropped`: file → time."""
    bounded: list[Life] = []
    endless: list[Life] = []
    executed: list[Life] = []
    for path, size in sizes.items():
        maker = workflow.producer.get(path)
        if maker is None or maker not in spans:
            continue
        begin = spans[maker][0]
        file = workflow.files[path]
        readers = workflow.readers[path]
        known = not file.readers_unknown and not file.final and all(reader in spans for reader in readers)
        end = None
        if known and (readers or file.temporary):
            end = max([spans[maker][1], *(spans[reader][1] for reader in readers)])
        bounded.append((begin, end, size))
        endless.append((begin, None, size))
        executed.append((begin, dropped.get(path), size))
    return Peak(live_bytes_max(bounded), live_bytes_max(endless), live_bytes_max(executed))
