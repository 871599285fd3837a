"""What goes to the store, and when: the user's choice, carried out by rules at the start, hints, and dropping."""

from __future__ import annotations

import os
from collections.abc import Collection

from ..agent import WORDS_BYTES_MAX, escaped
from ..derive import Persist
from ..graph import Workflow
from .journal import HOME


def droppable(workflow: Workflow, persist: Persist, named: bool) -> set[str]:
    """Outputs that go when their last reader has succeeded: declared temporary or, where the user said `--persist final` himself
    (`named`), read by tasks that are all known."""
    if persist is not Persist.FINAL:
        return set()
    # Of a graph that is not complete, only what is declared may go: there may be readers that nobody has named yet.
    all_known = named and not workflow.incomplete
    found = set()
    for path, file in workflow.files.items():
        if path not in workflow.producer or file.final or file.readers_unknown:
            continue
        if path in workflow.tasks[workflow.producer[path]].inputs:
            continue  # changed in place: there is no other copy
        if file.temporary or (all_known and workflow.readers[path]):
            found.add(path)
    return found


def rules(workflow: Workflow, directory: str, persist: Persist, drop: Collection[str]) -> tuple[list[str], int]:
    """`--rule` words for `surgetank run`, and how many files found no place among them; `directory` is the workflow's, relative to
    what is served. A file without a rule is drained and then removed: that costs writing it, no more."""
    asked: dict[str, str] = {}
    for path in sorted(drop):
        # Not `remove`: the agent would drop them at the end of a run that failed or was killed, and the next one would have to make
        # again what its tasks still need. We drop them ourselves.
        asked[path] = "keep"
    if persist is Persist.WHEN_CONSUMED:
        for path in workflow.files:
            if path in workflow.producer and workflow.readers[path] and not workflow.files[path].readers_unknown:
                asked[path] = "keep"
    words: list[str] = []
    size = left_out = 0
    for path, mode in asked.items():
        if path.startswith("/"):
            continue
        word = "/" + escaped(os.path.normpath(os.path.join(directory, path))) + "=" + mode
        size += len(os.fsencode(word)) + 24
        if size > WORDS_BYTES_MAX or "\n" in word:
            left_out += 1
        else:
            words += ["--rule", word]
    return words, left_out


def is_ours(path: str) -> bool:
    """Whether a file is of the executor's own, not the workflow's."""
    return path.split("/", 1)[0] == HOME
