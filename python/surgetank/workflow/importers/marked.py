"""YAML with the line of every value, for messages; duplicate keys are an error, as in YAML's standard and unlike
PyYAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..problem import Problem
from .paths import read

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Place = tuple[str | int, ...]


@dataclass
class Marked:
    """A document and the lines of its values, by their path from the top (`("tasks", 3, "inputs")`)."""

    path: Path
    value: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def at(self, *place: str | int) -> str:
        """`FILE:LINE` of a value, or of the closest enclosing value."""
        for length in range(len(place), -1, -1):
            if place[:length] in self.lines:
                return f"{self.path}:{self.lines[place[:length]]}"
        return str(self.path)

    def wrong(self, what: str, *place: str | int, remedy: str | None = None) -> Problem:
        return Problem(what, where=self.at(*place), remedy=remedy)

    def mapping(self, *place: str | int) -> dict[str, Any]:
        value = self.get(*place)
        if not isinstance(value, dict):
            raise self.wrong(f"{_name(place)} is not a mapping", *place)
        return value

    def sequence(self, *place: str | int) -> list[Any]:
        value = self.get(*place)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(f"{_name(place)} is not a list", *place)
        return value

    def get(self, *place: str | int) -> Any:
        value = self.value
        for step in place:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def text(self, *place: str | int) -> str:
        value = self.get(*place)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{_name(place)} is missing or not text", *place)
        return value

    def only(self, known: Iterable[str], *place: str | int) -> None:
        """Refuses keys other than `known`."""
        names = list(known)
        for key in self.mapping(*place):
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                remedy = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(sorted(names))
                raise self.wrong(f"{key!r} is not known in {_name(place)}", *place, key, remedy=remedy)


def _name(place: Place) -> str:
    return ".".join(str(step) for step in place) or "the document"


def load(path: Path, what: str = "the workflow") -> Marked:
    """The document of a file."""
    marked = Marked(path)
    loader = _LOADER(read(path, what))
    try:
        node = loader.get_single_node()
        marked.value = None if node is None else _value(loader, node, (), marked, frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Problem(
            "the file is not YAML", where=f"{path}:{mark.line + 1}" if mark else path, why=error.problem
        ) from None
    except yaml.YAMLError as error:
        raise Problem("the file is not YAML", where=path, why=error) from None
    finally:
        loader.dispose()
    if marked.value is None:
        raise Problem(f"{what} is empty", where=path)
    return marked


def _value(loader: Any, node: Any, place: Place, marked: Marked, under: frozenset[int]) -> Any:
    marked.lines.setdefault(place, node.start_mark.line + 1)
    if id(node) in under:
        raise marked.wrong("an alias contains itself", *place)
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            marked.lines[(*place, key)] = key_node.start_mark.line + 1
            if key in found:
                raise marked.wrong(f"{key!r} is there twice", *place, key)
            found[key] = _value(loader, value_node, (*place, key), marked, under | {id(node)})
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, one, (*place, i), marked, under | {id(node)}) for i, one in enumerate(node.value)]
    return loader.construct_object(node)
