"""The command line of the suite: chooses cells, estimates their time, measures them and shows the progress."""

import argparse
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from suite import items
from suite.measure import Bench, Conditions, sweep
from suite.records import Record
from suite.testbed import CHECKOUT, PLACE, SLOWFS, STORES, Refused, store
from suite.variants import FINALS, SURGETANK, VARIANTS

RESULTS = CHECKOUT / "bench/results"
PART_RESULTS = CHECKOUT / ".cache/bench-results"
CALIBRATION_S = 9
AROUND_RUN_S = 1.6


def expected_s(cell: items.Cell, preset: str) -> float:
    """The estimated time of one round, from the store's bandwidth. A real store counts as the fastest preset."""
    bandwidth = {"lustre-busy": 50, "nfs": 110}.get(preset, 200)
    total = 0.0
    for name in cell.variants:
        workload = cell.workload
        read = 0 if cell.warm else workload.read_mib
        written = workload.final_mib if VARIANTS[name].keeps == "finals" else workload.written_mib
        transfer = (read + written) / bandwidth
        total += AROUND_RUN_S + (max(transfer, workload.compute_s) if name == "copy-all" else transfer + workload.compute_s)
    return total


def main(argv: list[str], usage: str) -> int:
    if argv[:1] == ["report"]:
        from suite import report

        return report.main(argv[1:])
    planning = argv[:1] == ["plan"]
    parser = argparse.ArgumentParser(usage=usage)
    parser.add_argument("what", nargs="+", choices=["all", "headline", *items.ITEMS])
    parser.add_argument("--mode", choices=["smoke", "full"], default="full")
    parser.add_argument("--preset", choices=STORES)
    parser.add_argument("--series", choices=["idle", "loaded"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cell", help="only cells with this in their name")
    parser.add_argument("--results", type=Path)
    words = parser.parse_args(argv[1:] if planning else argv)
    mode = "headline" if "headline" in words.what else words.mode
    names = list(items.ITEMS) if {"all", "headline"} & set(words.what) else words.what
    refused, cells = [], []
    for name in names:
        try:
            cells += items.ITEMS[name].cells(mode)
        except Refused as why:
            refused.append(f"{name}: {why}")
            print(f"REFUSED: {refused[-1]}", flush=True)
    wanted = [cell for cell in cells if words.series in (None, cell.series) and (not words.cell or words.cell in cell.name)]
    chosen = [cell for cell in wanted if words.preset in (None, cell.preset)]
    if words.preset and not chosen:
        # The item has no cells for this store: measures the cells of its first store on it.
        chosen = [cell.on(words.preset) for cell in wanted if cell.preset == wanted[0].preset]
    blocks: dict[tuple[str, str], dict[str, list[items.Cell]]] = {}
    for cell in chosen:
        blocks.setdefault((cell.preset, cell.series), {}).setdefault(cell.item, []).append(cell)
    rounds = {id(cell): words.rounds or (1 if mode == "smoke" else cell.rounds) for cell in chosen}
    seconds = sum(expected_s(cell, cell.preset) * rounds[id(cell)] + CALIBRATION_S for cell in chosen) + CALIBRATION_S * len(blocks)
    print(f"{len(chosen)} cells on {len(blocks)} stores, about {seconds / 60:.0f} minutes", flush=True)
    for cell in chosen:
        took = expected_s(cell, cell.preset) * rounds[id(cell)]
        print(f"  {cell.item:16} {cell.preset:12} {cell.series:6} {cell.name:48} {rounds[id(cell)]:3} × {', '.join(cell.variants)}  ({took:.0f} s)")
    for name in names:
        if note := items.ITEMS[name].note:
            print(f"  {name}: {note}")
    if planning:
        return 0
    if os.geteuid() != 0:
        sys.exit("bench/run: only root can make a slow store, cgroups and cold caches")
    if missing := [str(path) for path in (SURGETANK, SLOWFS) if not path.exists()]:
        sys.exit(f"bench/run: {', '.join(missing)} missing: cargo build --release --locked -p surgetank --bin surgetank --example doorbench --example slowfs")
    # SIGTERM must also run the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # The committed results have whole items only: partial measurements go elsewhere.
    part = mode == "smoke" or words.cell or words.rounds
    results = words.results or (PART_RESULTS if part else RESULTS)
    PLACE.mkdir(parents=True, exist_ok=True)
    lock = (PLACE / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"bench/run: another suite runs on this machine ({PLACE}/lock): its figures and ours would be wrong")
    sweep()
    began = time.monotonic()
    for (preset, series), by_item in blocks.items():
        for name, cells in by_item.items():
            try:
                measure(name, mode, series, preset, cells, rounds, results, argv, began)
            except Refused as why:
                refused.append(f"{name} on {preset}, {series}: {why}")
                print(f"REFUSED: {refused[-1]}", flush=True)
    if "all" in words.what:
        refused += items.collected(mode, results)
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes; records in {results}")
    return 1 if refused else 0


def measure(name: str, mode: str, series: str, preset: str, cells: list, rounds: dict, results: Path, argv: list[str], began: float) -> None:
    where = store(preset, size_mib=16384)
    bench = None
    try:
        where.up()
        bench = Bench(where)
        record = Record(results, name, mode, series, where, argv)
        for cell in cells:
            figures = where.calibrate()
            record.calibrated(cell.name, figures)
            print(f"{name}: {cell.name} on {preset}, {series} {figures}", flush=True)
            runs = repeated(bench, cell, rounds[id(cell)], began)
            record.cell(cell.described() | {"runs": runs})
        record.calibrated("the end", where.calibrate())
        record.save()
    finally:
        if bench:
            bench.close()
        where.down()


def repeated(bench: Bench, cell: "items.Cell", rounds: int, began: float) -> list[dict]:
    """A B A B …"""
    runs: list[dict] = []
    conditions = Conditions(cell.memory_bytes, cell.tier, cell.warm, cell.series == "loaded")
    for number in range(rounds):
        for name in cell.variants:
            variant = VARIANTS[name]
            runs.append(bench.run(cell.workload, variant, conditions) | {"round": number})
            same_work(cell, runs)
            last = runs[-1]
            share = f", {last['agent']['mediated_bytes'] / (1 << 20):.0f} MiB mediated" if variant.ours else ""
            print(
                f"  {time.monotonic() - began:6.0f} s  {number + 1}/{rounds} {name:9} {last['seconds']:7.2f} s, tail {last['tail_s']:.2f} s, "
                f"{last['durable_bytes'] / (1 << 20):.0f} MiB durable in {last['durable_files']} files, CPU {last['cpu_s']}{share}",
                flush=True,
            )
    return runs


def found_no_room(one: dict, other: dict) -> bool:
    """Whether files found no room in the tier: while they were written, or when they were created. Then the tier got that much less."""
    spilled = one["agent"]["spills"] or other["agent"]["spills"]
    ones, others = (run["agent"]["tier_in_bytes"] + run["durable_bytes"] for run in (one, other))
    return bool(spilled) or ones == others


def same_work(cell: "items.Cell", runs: list[dict]) -> None:
    last = runs[-1]
    for other in runs[:-1]:
        if other["finals_crc32"] != last["finals_crc32"]:
            raise Refused(f"{cell.name}: {last['variant']} has other results than {other['variant']}")
        keeps = VARIANTS[last["variant"]].keeps
        # (Temporaries without room in a tier are in the store, and their number differs between runs.)
        more = keeps == FINALS and "agent" in last and "agent" in other and found_no_room(last, other)
        same_promise = VARIANTS[other["variant"]].keeps == keeps and not more
        if same_promise and other["durable_bytes"] != last["durable_bytes"]:
            raise Refused(f"{cell.name}: {last['variant']} left {last['durable_bytes']} bytes in the store, {other['variant']} {other['durable_bytes']}")
