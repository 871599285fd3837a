"""Turns a description in an engine's own language into the one graph (`surgetank.workflow.graph`).

`load` recognises the file's engine and calls its importer; only that importer imports the engine's library.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ..graph import Workflow
from ..problem import Problem

# Name of an importer's module → its input, in the words of a message.
ENGINES = {
    "snakemake": "a Snakefile",
    "cwl": "CWL",
    "pegasus": "Pegasus 5 YAML",
    "nextflow": "a trace of Nextflow",
    "make": "a makefile",
    "makeflow": "Makeflow's classic language",
    "wfformat": "WfFormat",
    "observed": "the record of a run (`surgetank report --json`)",
    "own": "Surgetank's own YAML (`surgetank: 1`)",
}
_NAMES = (
    (r"(?:.*\.)?Snakefile(?:\..*)?|.*\.smk|snakefile", "snakemake"),
    (r".*\.cwl", "cwl"),
    (r"GNUmakefile|[Mm]akefile|.*\.mk|.*\.make", "make"),
    (r"Makeflow|.*\.makeflow|.*\.mf", "makeflow"),
)
# Searched in the first lines of YAML or JSON whose name is not specific, strongest first.
_CONTENTS = (
    (r"^surgetank\s*:|\A\s*\{\s*\"surgetank\"\s*:", "own"),
    (r"^[\"']?pegasus[\"']?\s*:|^x-pegasus\s*:", "pegasus"),
    (r"[\"']?cwlVersion[\"']?\s*:", "cwl"),
    (r"\"schemaVersion\"\s*:", "wfformat"),
    (r"\"format\"\s*:\s*1\b", "observed"),
    (r"\A#?task_id\t|\A[^\n]*\ttask_id\t", "nextflow"),
)
_BYTES_LOOKED_AT = 64 * 1024


def load(path: Path, engine: str | None = None, **options: Any) -> Workflow:
    """The graph of a description; `engine` (of `ENGINES`) if the file does not show it, `options` for its importer."""
    name = engine or recognise(path)
    if name not in ENGINES:
        raise Problem(f"the importer {name!r} does not exist", where=path, remedy="one of " + ", ".join(ENGINES))
    module = import_module(f".{name}", __name__)
    try:
        workflow: Workflow = module.load(Path(path), **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise Problem(f"the options do not fit the importer of {ENGINES[name]}", where=path, why=error) from None
    return workflow


def recognise(path: Path) -> str:
    """The importer for a file, from its name or else its first lines."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            begin = file.read(_BYTES_LOOKED_AT)
    except OSError as error:
        raise Problem("the workflow cannot be read", where=path, why=error.strerror or error) from None
    for pattern, name in _NAMES:
        if re.fullmatch(pattern, path.name):
            return name
    if path.suffix == ".nf":
        raise Problem(
            "a Nextflow script cannot be imported before a run", where=path,
            remedy="run it with `-with-trace trace.txt` and give the trace; `surgetank help workflows` has the fields",
        )  # fmt: skip
    text = begin.decode("utf-8", "replace")
    for pattern, name in _CONTENTS:
        if re.search(pattern, text, re.MULTILINE):
            return name
    known = ", ".join(f"{name} ({what})" for name, what in ENGINES.items())
    raise Problem("the kind of workflow cannot be recognised", where=path, remedy=f"name the engine: {known}")
