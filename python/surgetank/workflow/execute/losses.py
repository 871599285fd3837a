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
        self.in_pool = self._pool() is not None
        self._known = self.now()[0]

    def are_new(self, *, failed: bool) -> bool:
        """Whether a node was lost since the last call. If tasks have failed, a node that does not answer is awaited."""
        if not self.in_pool:
            return False
        now = self.settled() if failed else self.now()[0]
        if not now - self._known:
            return False
        self._known |= now
        return True

    def now(self) -> tuple[frozenset[int], bool]:
        """The lost nodes, and whether one does not answer."""
        pool = self._pool() or {}
        lost_nodes = frozenset(member["member"] for member in pool.get("lost", []))
        return lost_nodes, any(member["undrained_bytes"] is None for member in pool.get("members", []))

    def settled(self) -> frozenset[int]:
        """The lost nodes, when each node answers or is lost, and the others have put back what they have."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            nodes, silent = self.now()
            if nodes - self._known:
                # (Other members learn it a moment later.)
                time.sleep(SETTLED_S)
                return nodes
            if not silent or time.monotonic() > until_s:
                return nodes
            time.sleep(LOOK_AGAIN_S)

    def _pool(self) -> dict[str, Any] | None:
        status = None if self.agent is None else self.agent.status(self.over)
        return (status or {}).get("pool")
