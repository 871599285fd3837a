"""What the agent is told: per file the mode, size, tier, and when it is read (docs/hints.md has the names).

Hints go to a running agent (`surgetank hint --from -`, JSON lines) or, before it starts, as rules with exact paths
(`surgetank.toml`). The user's own rule is stronger than a hint. A file whose readers are not known gets none but its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import jsontext
from .agent import escaped
from .derive import Facts, Pattern, Persist
from .graph import Workflow


def hints(
    workflow: Workflow, facts: Mapping[str, Facts], persist: Persist, *, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """One hint a file that there is something to say of: `path` and keys of a rule. `only` limits them to a task's outputs."""
    for path, fact in facts.items():
        if path.startswith("/") or (only is not None and fact.maker != only):
            continue
        hint: dict[str, Any] = {}
        if fact.maker is None:
            if fact.pattern is Pattern.BROADCAST:
                hint["prefetch"] = True
        else:
            if fact.disposable:
                hint["mode"] = "remove"
            elif persist is Persist.WHEN_CONSUMED and fact.readers and fact.pattern is not Pattern.UNKNOWN:
                hint["mode"] = "keep"  # until it is consumed: then the executor says `copy`
            if fact.size_bytes:
                hint["size"] = fact.size_bytes
            tier = workflow.tasks[fact.maker].tier
            if tier is not None:
                hint["tier"] = tier
        if hint:
            yield {"path": path, **hint}


def json_lines(some: Iterator[dict[str, Any]]) -> str:
    """For `surgetank hint --from`."""
    return "".join(jsontext.hint_line(hint) for hint in some)


def rules_toml(some: Iterator[dict[str, Any]]) -> str:
    """For `surgetank.toml`: a rule with an exact path for each; rules know a file's name only, so prefetch is said too."""
    lines = []
    for hint in some:
        if not jsontext.is_text(hint["path"]):
            continue  # no pattern of TOML matches it
        lines += ["[[rules]]", f"match = {_quoted('/' + escaped(hint['path']))}"]
        lines += [f"{key} = {_value(value)}" for key, value in hint.items() if key != "path"]
        lines.append("")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quoted(str(value))


def _quoted(text: str) -> str:
    """A basic string of TOML, whose escapes are JSON's but for the one it has not: DEL stands for itself there."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
