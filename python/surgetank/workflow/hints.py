"""What the agent is told: per file the mode, size, tier, and when it is read (docs/hints.md has the names).

Hints go to a running agent (`surgetank hint --from -`, JSON lines) or, before it starts, as rules with exact paths
(`surgetank.toml`). The user's own rule is stronger than a hint. A file whose readers are not known gets none but its size.
Who executes the workflow and drops files himself tells of outputs with `held_back`; who only describes it, with `hints`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from . import jsontext
from .agent import escaped
from .derive import Facts, Pattern, Persist
from .graph import Workflow


def hints(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist) -> Iterator[dict[str, Any]]:
    """One hint a file that there is something to say of: `path` and keys of a rule."""
    for path, fact in facts.items():
        if fact.maker is not None:
            yield from _of_output(workflow, path, persist, "remove" if fact.disposable else None, fact.size_bytes)
        elif fact.pattern is Pattern.BROADCAST and not path.startswith("/"):
            yield {"path": path, "prefetch": True}


def held_back(workflow: Workflow, persist: Persist, drop: Collection[str]) -> Iterator[dict[str, Any]]:
    """Of outputs, for an executor that drops these itself. Hints, not rules: what is kept can be handed over later (`mode=copy`)."""
    for path in workflow.producer:
        # Not `remove`: the agent would drop them at the end of a run that failed or was killed, and the next one would have
        # to make again what its tasks still need.
        yield from _of_output(
            workflow, path, persist, "keep" if path in drop else None, workflow.files[path].size_bytes
        )


def _of_output(
    workflow: Workflow, path: str, persist: Persist, gone: str | None, size_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """`gone`: the mode of what goes when its last reader is done."""
    if path.startswith("/"):
        return  # outside: it is drained like any other file
    hint: dict[str, Any] = {}
    read = bool(workflow.readers[path]) and not workflow.files[path].readers_unknown
    if gone is not None:
        hint["mode"] = gone
    elif persist is Persist.WHEN_CONSUMED and read:
        hint["mode"] = "keep"  # until it is consumed: then the executor says `copy`
    if size_bytes:
        hint["size"] = size_bytes
    if (tier := workflow.tasks[workflow.producer[path]].tier) is not None:
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
