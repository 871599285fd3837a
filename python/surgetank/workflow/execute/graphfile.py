"""The graph as JSON: passes it from the command line's process to the one under the mount, and into a run's directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..graph import File, Task, Workflow


def to_json(workflow: Workflow) -> dict[str, Any]:
    return {
        "name": workflow.name,
        "source": workflow.source,
        "tasks": [asdict(task) for task in workflow.tasks.values()],
        "files": [asdict(file) for file in workflow.files.values()],
        "incomplete": workflow.incomplete,
        "places": workflow.places,
    }


def from_json(document: dict[str, Any]) -> Workflow:
    return Workflow.of(
        document["name"],
        document["source"],
        [Task(**task) for task in document["tasks"]],
        [File(**file) for file in document["files"]],
        incomplete=document["incomplete"],
        places=document["places"],
    )


def read(path: Path) -> Workflow:
    return from_json(json.loads(path.read_text(encoding="utf-8", errors="surrogatepass")))
