"""The table of server suites, `scripts/servers.toml`: what each runs, and which of them changed paths can affect."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "servers.toml"


@dataclass(frozen=True)
class Table:
    # Filter expressions of nextest, and files of pytest.
    nextest: dict[str, str]
    pytest: dict[str, str]
    affects: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        return sorted([*self.nextest, *self.pytest])

    def affected(self, paths: Iterable[str]) -> list[str]:
        found: set[str] = set()
        for path in paths:
            prefixes = [prefix for prefix in self.affects if path.startswith(prefix)]
            found.update(self.affects[max(prefixes, key=len)] if prefixes else self.names)
        return sorted(found)

    def nextest_of(self, names: Iterable[str]) -> str:
        """The tests of these suites as one expression; an empty one if nextest runs none of the suites."""
        return " | ".join(f"({self.nextest[name]})" for name in names if name in self.nextest)


def read(path: Path = TABLE) -> Table:
    table = tomllib.loads(path.read_text())
    suites = table["suites"]
    of = {kind: {name: suite[kind] for name, suite in suites.items() if kind in suite} for kind in ("nextest", "pytest")}
    unknown = {name for names in table["affects"].values() for name in names} - set(suites)
    if unknown or len(of["nextest"]) + len(of["pytest"]) != len(suites):
        raise ValueError(f"{path}: no such suite, or one that runs nothing: {sorted(unknown)}")
    return Table(of["nextest"], of["pytest"], table["affects"])
