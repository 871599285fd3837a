"""Figures of records and cells, for tables, plots and claims."""

from suite.statistics import Ratio, paired_ratio

MIB = 1 << 20
GIB = 1 << 30


def of(cell: dict, variant: str) -> list[dict]:
    return sorted((run for run in cell["runs"] if run["variant"] == variant), key=lambda run: run["round"])


def seconds(cell: dict, variant: str) -> list[float]:
    return [run["seconds"] for run in of(cell, variant)]


def faster(cell: dict, variant: str, than: str) -> Ratio | None:
    """The speed-up over the other variant, if both were measured."""
    ours, theirs = seconds(cell, variant), seconds(cell, than)
    return paired_ratio(theirs, ours) if ours and theirs and variant != than else None


def bound(record: dict, cell: dict) -> float | None:
    """The highest possible speed-up of in-memory over the store, if only the store took time. (In-memory reads and writes at the
    same time, each at its rate.)"""
    if not record["store"]["simulated"] or cell["cache"] == "warm":
        return None
    return max(cell["read_mib"], cell["written_mib"]) / max(cell["read_mib"], cell["final_mib"])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def least_tail_s(record: dict, cell: dict, run: dict) -> float | None:
    """The least time of the store for the bytes that remain at the command's end: bytes at the measured bandwidth, and two latencies."""
    if not record["store"]["simulated"] or not run.get("tail_bytes"):
        return None
    measured = [one for one in record["calibrations"] if one["before"] == cell["name"]][0]
    return run["tail_bytes"] / MIB / measured["write_mib_s"] + 2 * record["store"]["preset"]["latency_us"] / 1e6


def same_cell(record: dict, cell: dict) -> tuple[str, ...]:
    """Equal for two measurements of the same work under the same conditions."""
    return record["item"], record["store"]["name"], record["series"], cell["name"], cell["cache"]


def latest(records: list[dict]) -> dict[tuple[str, ...], str]:
    """For each cell, the begin of the newest record that has it."""
    found: dict[tuple[str, ...], str] = {}
    for record in records:
        for cell in record["cells"]:
            key = same_cell(record, cell)
            found[key] = max(found.get(key, ""), record["began"])
    return found


def newest(records: list[dict]) -> list[dict]:
    """The records without the cells that a later record measures again."""
    last = latest(records)
    return [
        record | {"cells": [cell for cell in record["cells"] if last[same_cell(record, cell)] == record["began"]]}
        for record in records
    ]
