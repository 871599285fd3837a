"""Which place is best for a task: the one where it waits and moves bytes for the shortest time.

The danger that this avoids: all tasks queue at the node that has the data, while others are idle. And its opposite: tasks leave the
node that has their data because it is a little ahead of others. So only the load above a fair share of all work counts as waiting.
"""

from __future__ import annotations


def cost_s(load_s: float, own_s: float, fair_s: float, moved_bytes: float, bytes_per_s: float) -> float:
    """`load_s`: the work of the place, per core. `own_s`: that of the task there. `fair_s`: all work, per core of all places."""
    return max(0.0, load_s + own_s - fair_s) + moved_bytes / bytes_per_s
