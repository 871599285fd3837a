"""What goes to the store, and when: the user's choice, carried out by hints and by dropping."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache
from typing import Any

from ..derive import Lifetime, Persist, lifetime_of
from ..graph import Workflow


def droppable(workflow: Workflow, persist: Persist, named: bool, directory: str = ".", over: str = ".") -> set[str]:
    """Outputs that go when their last reader has succeeded: declared temporary or, where the user said `--persist final` himself
    (`named`), read by tasks that are all known. What links lead out of `over`, which is served, stays."""
    if persist is Persist.FINAL and not named:
        persist = Persist.ALL
    top = os.path.join(os.path.realpath(over), "")

    @cache
    def served(above: str) -> bool:
        return os.path.join(os.path.realpath(os.path.join(directory, above)), "").startswith(top)

    return {
        path
        for path in workflow.files
        if lifetime_of(workflow, path, persist) is not Lifetime.FOREVER and served(os.path.dirname(path))
    }


def hints(workflow: Workflow, persist: Persist, drop: Collection[str]) -> list[dict[str, Any]]:
    """What the agent is told before the first task: JSON lines of `surgetank hint`. Hints, not rules: a rule of the user's is
    stronger, and what is kept can be handed over later (`mode=copy`)."""
    told = []
    for path, maker in workflow.producer.items():
        if path.startswith("/"):
            continue  # outside: it is drained like any other file
        hint: dict[str, Any] = {}
        file = workflow.files[path]
        consumed = persist is Persist.WHEN_CONSUMED and workflow.readers[path] and not file.readers_unknown
        if path in drop or consumed:
            # Not `remove`: the agent would drop them at the end of a run that failed or was killed, and the next one would have
            # to make again what its tasks still need. We drop them ourselves.
            hint["mode"] = "keep"
        if file.size_bytes:
            hint["size"] = file.size_bytes
        if (tier := workflow.tasks[maker].tier) is not None:
            hint["tier"] = tier
        if hint:
            told.append({"path": path, **hint})
    return told
