"""What is dropped when it has been read: the user's choice. (What the agent is told of the rest: `..hints`.)"""

from __future__ import annotations

import os
from functools import cache

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
