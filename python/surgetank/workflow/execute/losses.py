"""In a pool: files that were lost with a node, and whether one has been lost since the tasks began.

A file whose content was only on a lost node keeps its name and its attributes, and cannot be read. So a stamp does not
show that it is gone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ..agent import Agent, lost
from .stamp import Stamp, stamp

# So long a node that does not answer is awaited: it answers again, or its lease ends.
PATIENCE_S = 90.0
LOOK_AGAIN_S = 0.5
SETTLED_S = 3.0


def readable(path: str) -> Stamp | None:
    """The stamp of a file or directory; None: it does not exist, or its content is lost."""
    found = stamp(path)
    if found is None or not os.path.isdir(path):
        return None if found is None or lost(path) else found
    inside = (os.path.join(above, name) for above, _, names in os.walk(path) for name in names)
    return None if any(map(lost, inside)) else found


class Losses:
    """The nodes that the pool has lost; without a pool there are none."""

    def __init__(self, agent: Agent | None, over: str) -> None:
        self.agent, self.over = agent, over
        pool = self._pool()
        self.in_pool = pool is not None
        self._known = _lost(pool)

    def are_new(self, *, failed: bool) -> bool:
        """Whether a node was lost since the last call. If tasks have failed, a node that does not answer is awaited."""
        if not self.in_pool:
            return False
        until_s = time.monotonic() + PATIENCE_S
        while True:
            pool = self._pool()
            now = _lost(pool)
            if now - self._known:
                self._known |= now
                # (Other members learn it a moment later, and put back what they have.)
                time.sleep(SETTLED_S)
                return True
            silent = any(member["undrained_bytes"] is None for member in (pool or {}).get("members", []))
            if not (failed and silent) or time.monotonic() > until_s:
                return False
            time.sleep(LOOK_AGAIN_S)

    def _pool(self) -> dict[str, Any] | None:
        status = None if self.agent is None else self.agent.status(self.over)
        return (status or {}).get("pool")


def _lost(pool: dict[str, Any] | None) -> set[int]:
    return {member["member"] for member in (pool or {}).get("lost", [])}
