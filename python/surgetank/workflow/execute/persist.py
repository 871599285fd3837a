"""Files that are dropped after their last reader: the user's choice. (Hints about the rest: `..hints`.)"""

from __future__ import annotations

import os
from functools import cache

from ..derive import Lifetime, Persist, lifetime_of
from ..graph import Workflow


def droppable(workflow: Workflow, persist: Persist, named: bool, directory: str = ".", over: str = ".") -> set[str]:
    """Outputs that are removed when their last reader has succeeded. They are declared temporary, or the user gave
    `--persist final` (`named`) and all their readers are known. A file that links lead out of `over`, the served
    directory, stays."""
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
