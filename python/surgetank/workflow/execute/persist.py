"""What is dropped when it has been read: the user's choice. (What the agent is told of the rest: `..hints`.)"""

from __future__ import annotations

from ..derive import Lifetime, Persist, lifetime_of
from ..graph import Workflow


def droppable(workflow: Workflow, persist: Persist, named: bool) -> set[str]:
    """Outputs that go when their last reader has succeeded: declared temporary or, where the user said `--persist final` himself
    (`named`), read by tasks that are all known."""
    if persist is Persist.FINAL and not named:
        persist = Persist.ALL
    return {path for path in workflow.files if lifetime_of(workflow, path, persist) is not Lifetime.FOREVER}
