"""One run of one variant: its directories, its clock, and the check of the store afterwards.

The clock begins and ends with the variant's script, which ends when the variant's promised files are durable. Three findings end the
suite without a report of the run: a later sync that still has work, a missing file, or a file with other bytes.
The danger that it avoids: memory that no limit counts. The script and all its processes (the agent too) are in one cgroup. Its limit
covers page cache and tmpfs, and is the same for all variants of a cell.
"""

import json
import os
import shutil
import subprocess
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from suite.background import background
from suite.testbed import PLACE, Refused, drop_caches
from suite.variants import Place, Tier, Variant, Workload

CGROUPS = Path("/sys/fs/cgroup")
GROUP = "surgetank-suite-"
MEMORY = Path("/dev/shm/surgetank-suite")
# A journal's last commit and the call itself may take this long after the clock.
UNSYNCED_S_MAX = 0.3
SECTOR_BYTES = 512


class Group:
    """Memory limit and processor time of a run."""

    def __init__(self, limit_bytes: int, device: str, bytes_per_second: int) -> None:
        name = f"{GROUP}{os.getpid()}"
        self.v1 = (CGROUPS / "memory/memory.limit_in_bytes").exists()
        if self.v1:
            self.directories = [CGROUPS / "memory" / name, CGROUPS / "cpuacct" / name]
        else:
            (CGROUPS / "cgroup.subtree_control").write_text("+memory +io +cpu")
            self.directories = [CGROUPS / name]
        remove_group(self.directories)
        for directory in self.directories:
            directory.mkdir()
        limit = "memory.limit_in_bytes" if self.v1 else "memory.max"
        (self.directories[0] / limit).write_text(str(limit_bytes))
        if device:
            (self.directories[0] / "io.max").write_text(f"{device} rbps={bytes_per_second} wbps={bytes_per_second}")

    def around(self, words: list[str]) -> list[str]:
        enter = "".join(f"echo $$ >{directory}/cgroup.procs; " for directory in self.directories)
        return ["sh", "-c", f'{enter}exec "$@"', "sh", *words]

    def cpu_s(self) -> float:
        if self.v1:
            return int((self.directories[1] / "cpuacct.usage").read_text()) / 1e9
        lines = dict(line.split() for line in (self.directories[0] / "cpu.stat").read_text().splitlines())
        return int(lines["usage_usec"]) / 1e6

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        file = self.directories[0] / name
        return int(file.read_text()) if file.exists() else 0

    def remove(self) -> None:
        remove_group(self.directories)


def remove_group(directories: list[Path]) -> None:
    """Removes the group with all its processes."""
    for directory in directories:
        for _ in range(100):
            if not directory.exists():
                break
            for pid in (directory / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            try:
                directory.rmdir()
            except OSError:
                time.sleep(0.05)


def sweep() -> None:
    """Removes what a killed suite left: its processes, by their cgroups, and its mounts and files in memory."""
    for directory in [*CGROUPS.glob(f"{GROUP}*"), *CGROUPS.glob(f"*/{GROUP}*")]:
        if not Path("/proc", directory.name.removeprefix(GROUP)).exists():
            remove_group([directory])
    clear(MEMORY)


def clear(memory: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in mounts:
        if Path(mount).is_relative_to(memory):
            subprocess.run(["umount", mount], check=False)
    shutil.rmtree(memory, ignore_errors=True)


@dataclass(frozen=True)
class Conditions:
    memory_bytes: int
    tier: Tier
    warm: bool
    loaded: bool


class Bench:
    """A ready store, and the runs on it."""

    def __init__(self, store) -> None:
        self.store, self.number = store, 0
        clear(MEMORY)
        MEMORY.mkdir(mode=0o700)
        self.prepared: dict[str, Path] = {}

    def close(self) -> None:
        clear(MEMORY)
        shutil.rmtree(PLACE / "prepared", ignore_errors=True)

    def inputs(self, workload: Workload) -> Path:
        """Makes the inputs once, on the machine's own disk."""
        if workload.name not in self.prepared:
            directory = PLACE / "prepared" / workload.name
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            workload.prepare(directory)
            self.prepared[workload.name] = directory
        return self.prepared[workload.name]

    def run(self, workload: Workload, variant: Variant, conditions: Conditions) -> dict:
        self.number += 1
        name = f"run{self.number}"
        source, scratch = self.inputs(workload), PLACE / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "state").mkdir(parents=True, mode=0o700)
        memory = MEMORY / name
        memory.mkdir(mode=0o700)
        with self.store.at_full_speed() as bare:
            subprocess.run(["cp", "-r", source, bare / name], check=True)
        place = Place(
            self.store.directory / name, self.store.bare / name, memory, scratch / "state", scratch / "account", scratch / "marks",
            self.store.sync_command(), self.store.counter,
        )  # fmt: skip
        given = files(place.bare)
        self.store.cold()
        group = Group(conditions.memory_bytes, self.store.device, round(self.store.bandwidth_mib_s() * (1 << 20)))
        try:
            if conditions.warm:
                read = f"cd {place.run} && cat {' '.join(given)} >/dev/null"
                subprocess.run(group.around(["sh", "-c", read]), check=True)
            with background(self.store, conditions.loaded):
                found = self.timed(workload, variant, place, conditions, group)
            # (The group is charged for files in memory until they are removed.)
            clear(memory)
            found |= self.compare(workload, place, set(given))
        finally:
            group.remove()
            clear(memory)
        with self.store.at_full_speed():
            shutil.rmtree(place.bare)
        return found

    def timed(self, workload: Workload, variant: Variant, place: Place, conditions: Conditions, group: Group) -> dict:
        script = "shopt -s globstar\n" + variant.script(workload, place, conditions.tier)
        log, load = place.marks.with_name("log"), os.getloadavg()[0]
        server_before, group_before = self.store.server_cpu_s(), group.cpu_s()
        with log.open("wb") as output:
            began_unix, began = time.time(), time.perf_counter()
            child = subprocess.Popen(
                group.around(["bash", "-euc", script]), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | workload.environment
            )
            _, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        written_at_end = sectors(place.counter) if place.counter else 0
        began_sync = time.perf_counter()
        subprocess.run(["sh", "-c", place.sync], check=True)
        unsynced_s = time.perf_counter() - began_sync
        if child.returncode:
            raise Refused(f"{workload.name}, {variant.name}: ended with {child.returncode}:\n{log.read_text(errors='replace')[-1500:]}")
        if unsynced_s > UNSYNCED_S_MAX:
            raise Refused(f"{workload.name}, {variant.name}: its clock stopped {unsynced_s:.2f} s before all files were durable")
        ended, *counted = place.marks.read_text().splitlines()
        tasks_s = used.ru_utime + used.ru_stime
        found = {
            "variant": variant.name,
            "seconds": round(seconds, 4),
            # From the end of the command to the end of the promise.
            "tail_s": round(began_unix + seconds - float(ended), 4),
            "load_before": round(load, 2),
            "memory_peak_bytes": group.peak_bytes(),
            "cpu_s": {
                "tasks": round(tasks_s, 3),
                # The agent and its supervisor, for which the script does not wait.
                "agent": round(max(0.0, group.cpu_s() - group_before - tasks_s), 3) if variant.ours else 0.0,
                "server": round(self.store.server_cpu_s() - server_before, 3),
            },
        }
        if counted and counted[0].split():
            found["tail_bytes"] = (written_at_end - int(counted[0].split()[6])) * SECTOR_BYTES
        if lines := [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]:
            found["told"] = {"lines": lines}
        if variant.ours:
            found["agent"] = account(place.account)
        return found

    def compare(self, workload: Workload, place: Place, given: set[str]) -> dict:
        """The store's content, read from its device: the durable bytes, and a checksum of each final file."""
        drop_caches()
        with self.store.at_full_speed():
            there = {name: (place.bare / name).stat().st_size for name in files(place.bare) if name not in given}
            finals = sorted({str(path.relative_to(place.bare)) for pattern in workload.finals for path in below(place.bare, pattern)})
            if not finals:
                raise Refused(f"{workload.name}: nothing of {', '.join(workload.finals)} is in the store")
            sums = {name: checksum(place.bare / name) for name in finals}
        whole = zlib.crc32(json.dumps(sums, sort_keys=True).encode())
        return {"durable_files": len(there), "durable_bytes": sum(there.values()), "finals": len(finals), "finals_crc32": f"{whole:08x}"}


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def below(directory: Path, pattern: str) -> list[Path]:
    found = list(directory.glob(pattern))
    return [file for path in found for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc


def sectors(counter: Path) -> int:
    return int(counter.read_text().split()[6])


def account(path: Path) -> dict:
    record = json.loads(path.read_text())
    mount = record["summary"]["mount"]
    return {
        "command_s": record["command_ms"] / 1000,
        "drain_s": record["drain_ms"] / 1000,
        "drained_bytes": record["summary"]["drain"]["bytes"],
        "drain_bytes_per_second": record["summary"]["drain"]["bytes_per_second"],
        "tier_in_bytes": sum(tier["in_bytes"] for tier in record["summary"]["tiers"]),
        "spills": sum(tier["spills"] for tier in record["summary"]["tiers"]),
        "mediated_bytes": mount["mediated_read_bytes"] + mount["mediated_write_bytes"],
        "requests": mount["requests"],
        "service_s": mount["service_ms"] / 1000,
    }
