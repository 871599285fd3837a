"""The tasks that may run, and the cores and memory that are free for them.

The deepest tasks go first, so that a file is read soon and removed soon. Smaller tasks may overtake a task that does
not fit, but not indefinitely: after a while no other task starts until it does.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from ..graph import Task, Workflow

# Memory is counted in this many parts of the limit, so that there are few kinds of needs to search.
MEMORY_PARTS = 256
PASSES_MAX = 64


@dataclass(frozen=True, slots=True)
class Need:
    cores: float
    memory_bytes: int
    # Set when tasks of one kind are clustered.
    kind: str = ""


@dataclass
class Ready:
    cores: float
    memory_bytes: int
    by_kind: bool = False
    cores_free: float = field(init=False)
    memory_free: int = field(init=False)
    # Sorted, the first one last.
    _waiting: dict[Need, list[tuple[int, int, str]]] = field(default_factory=dict)
    _passes: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.cores_free, self.memory_free = self.cores, self.memory_bytes

    def need(self, task: Task) -> Need:
        """Never more than the limit: such a task runs alone."""
        part = max(1, self.memory_bytes // MEMORY_PARTS)
        memory = min(self.memory_bytes, -(-(task.memory_bytes or 0) // part) * part)
        return Need(min(self.cores, max(task.cores, 0.01)), memory, task.kind if self.by_kind else "")

    def push(self, task: Task, priority: tuple[int, int]) -> None:
        depth, place = priority
        bisect.insort(self._waiting.setdefault(self.need(task), []), (-depth, -place, task.id))
        self.count += 1

    def pop(self, beyond: float = 0.0) -> tuple[str, Need] | None:
        """The first task that fits; it holds its cores and memory until `give_back`. `beyond`: so many times the cores and memory are
        given away."""
        best: Need | None = None
        first: Need | None = None
        for need, waiting in self._waiting.items():
            if first is None or waiting[-1] > self._waiting[first][-1]:
                first = need
            if self.fits(need, beyond) and (best is None or waiting[-1] > self._waiting[best][-1]):
                best = need
        if best is not first and self._passes >= PASSES_MAX:
            return None
        if best is None:
            return None
        self._passes = 0 if best is first else self._passes + 1
        self.cores_free -= best.cores
        self.memory_free -= best.memory_bytes
        return self._take(best), best

    def more_like(self, need: Need, count: int) -> list[str]:
        """Up to `count` more tasks with the same need, to run one after another with the resources of one."""
        found: list[str] = []
        while len(found) < count and need in self._waiting:
            found.append(self._take(need))
        return found

    def like(self, need: Need) -> int:
        return len(self._waiting.get(need, ()))

    def give_back(self, need: Need) -> None:
        self.cores_free += need.cores
        self.memory_free += need.memory_bytes

    def fits(self, need: Need, beyond: float = 0.0) -> bool:
        cores, memory = self.cores_free + beyond * self.cores, self.memory_free + beyond * self.memory_bytes
        return need.cores <= cores + 1e-9 and need.memory_bytes <= memory

    def first(self) -> str | None:
        """The task that would start next, if there were room."""
        return max((waiting[-1] for waiting in self._waiting.values()), default=(0, 0, None))[2]

    def last(self, count: int) -> list[str]:
        """Of each need, up to so many of the tasks that would start last."""
        return [entry[2] for waiting in self._waiting.values() for entry in waiting[:count]]

    def remove(self, task: Task) -> None:
        """The task waits here no more; it is one of the last ones."""
        self._take(self.need(task), next(n for n, e in enumerate(self._waiting[self.need(task)]) if e[2] == task.id))

    def _take(self, need: Need, place: int = -1) -> str:
        waiting = self._waiting[need]
        id_ = waiting.pop(place)[2]
        if not waiting:
            del self._waiting[need]
        self.count -= 1
        return id_


def priorities(workflow: Workflow) -> dict[str, tuple[int, int]]:
    """Smaller numbers run sooner: depth first, then in the order of the description."""
    depth: dict[str, int] = {}
    for id_ in workflow.order:
        depth[id_] = 1 + max((depth[parent] for parent in workflow.parents[id_]), default=0)
    return {id_: (-depth[id_], place) for place, id_ in enumerate(workflow.tasks)}
