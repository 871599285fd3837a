"""Hints for the agent: mode, size, tier and next read of each file (docs/hints.md has the names).

Hints go to a running agent (`surgetank hint --from -`, JSON lines) or, before it starts, as rules with exact paths
(`surgetank.toml`). The user's own rule takes precedence over a hint. A file with unknown readers gets only its size.
An executor that drops files itself uses `held_back` for outputs; a tool that only describes the workflow uses
`hints`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from . import jsontext
from .agent import escaped
from .derive import Facts, Pattern, Persist, derive
from .graph import Workflow


def hints(workflow: Workflow, facts: Mapping[str, Facts], persist: Persist) -> Iterator[dict[str, Any]]:
    """One hint per file with known facts: `path` and keys of a rule."""
    for path, fact in facts.items():
        if fact.maker is not None:
            yield from _of_output(workflow, path, persist, "remove" if fact.disposable else None, fact.size_bytes)
        elif fact.pattern is Pattern.BROADCAST and not path.startswith("/"):
            yield {"path": path, "prefetch": True}


def held_back(workflow: Workflow, persist: Persist, drop: Collection[str]) -> Iterator[dict[str, Any]]:
    """Hints about outputs, for an executor that drops these itself. Hints, not rules: the executor can release a kept
    file later (`mode=copy`)."""
    for path in workflow.producer:
        # Not `remove`: the agent would drop the files at the end of a failed or killed run. The next run would have to
        # make again what its tasks still need.
        yield from _of_output(
            workflow, path, persist, "keep" if path in drop else None, workflow.files[path].size_bytes
        )


def gathered(workflow: Workflow, run: Collection[str]) -> Iterator[dict[str, Any]]:
    """In a pool: files that one task of `run` reads and several make come to one node while their makers end (WOSS's collocation).
    Only for an executor that then starts the reader there. The other patterns need no hint: what a task writes is on its node, and
    what many nodes read goes from one to the next."""
    for path, fact in derive(workflow).items():
        reader = fact.group
        if fact.pattern is Pattern.REDUCE and reader in run and fact.maker in run and not path.startswith("/"):
            digest = hashlib.blake2b(str(reader).encode(errors="surrogatepass"), digest_size=8).hexdigest()
            yield {"path": path, "collocate": f"task-{digest}"}


def _of_output(
    workflow: Workflow, path: str, persist: Persist, gone: str | None, size_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """`gone`: the mode of a file that is removed after its last reader."""
    if path.startswith("/"):
        return  # outside: it is drained like any other file
    hint: dict[str, Any] = {}
    read = bool(workflow.readers[path]) and not workflow.files[path].readers_unknown
    if gone is not None:
        hint["mode"] = gone
    elif persist is Persist.WHEN_CONSUMED and read:
        hint["mode"] = "keep"  # until it is consumed: then the executor sends `copy`
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
    """For `surgetank.toml`: a rule with an exact path for each. A rule has only a file's name, so prefetch is included."""
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
    """A basic string of TOML. Its escapes are JSON's, except that JSON leaves DEL unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
