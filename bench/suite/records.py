"""The records of measurements: a file for an item on a store in a series, all of one schema (schema.json).

A record is written again after each cell, so that an interrupted suite keeps the cells that it measured.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from suite.testbed import CHECKOUT, Refused
from suite.variants import SURGETANK

SCHEMA = json.loads(Path(__file__).with_name("schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def faults(value: object, schema: dict = SCHEMA, at: str = "record") -> list[str]:
    """The violations of the schema in `value`: supports the part of JSON Schema that schema.json uses."""
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: {value!r} is none of {schema['enum']}"]
    kind = schema["type"]
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return [f"{at}: {value!r} is not of type {kind}"]
    found = []
    if kind == "array":
        for number, entry in enumerate(value):
            found += faults(entry, schema["items"], f"{at}[{number}]") if "items" in schema else []
    if kind == "object":
        found += [f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value]
        others = schema.get("additionalProperties", True)
        for name, entry in value.items():
            if name in schema.get("properties", {}):
                found += faults(entry, schema["properties"][name], f"{at}.{name}")
            elif others is False:
                found.append(f"{at}: {name} is not known")
            elif isinstance(others, dict):
                found += faults(entry, others, f"{at}.{name}")
    return found


def first_line(*command: str | Path) -> str:
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        return "not there"
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def machine() -> dict:
    information = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    return {
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "processor": next((value.strip() for name, value in information.items() if name.strip() == "model name"), platform.machine()),
        "cgroup": "v1" if Path("/sys/fs/cgroup/memory").exists() else "v2",
        "root": os.geteuid() == 0,
    }


def versions() -> dict:
    import numpy

    return {
        "surgetank": first_line(SURGETANK, "--version"),
        "fio": first_line("fio", "--version"),
        "gdal": first_line("gdalinfo", "--version"),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


class Record:
    def __init__(self, directory: Path, item: str, mode: str, series: str, store, argv: list[str]) -> None:
        git = ["git", "-C", str(CHECKOUT)]
        self.file = directory / f"{item}-{store.name}-{series}.json"
        self.content = {
            "schema": 1,
            "item": item,
            "mode": mode,
            "series": series,
            "command": shlex.join(["bench/run", *argv]),
            "began": now(),
            "ended": now(),
            "git": {"commit": first_line(*git, "rev-parse", "HEAD"), "changed": bool(first_line(*git, "status", "--porcelain", "--untracked-files=no"))},
            "machine": machine(),
            "versions": versions(),
            "store": {"name": store.name, "simulated": store.simulated, "preset": store.figures()},
            "calibrations": [],
            "cells": [],
        }

    def calibrated(self, before: str, figures: dict) -> None:
        self.content["calibrations"].append({"at": now(), "before": before} | figures)

    def cell(self, cell: dict) -> None:
        self.content["cells"].append(cell)
        self.save()

    def save(self) -> None:
        self.content["ended"] = now()
        if wrong := faults(self.content):
            raise Refused("a record violates bench/suite/schema.json: " + "; ".join(wrong[:5]))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.rename(self.file)


def load(directory: Path) -> list[dict]:
    """All records, each with the name of its file. A record that violates the schema ends the program."""
    found = []
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text())
        if wrong := faults(record):
            sys.exit(f"{path}: {'; '.join(wrong[:5])}")
        found.append(record | {"file": path.name})
    return found
