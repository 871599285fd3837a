"""The stores for the measured runs. Each can be made, calibrated, made cold, synced, read at full speed and removed, also after a crash.

simulated   bench/testbed/slowstore, by its presets: refused if a measured figure is more than 10 % off
moosefs     a real shared file system, of one node (scripts/moosefs/serve): its figures are recorded, and have no preset

The danger that it avoids: a store that is not as slow as its name says, which would change every ratio.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from presets import PRESETS, Shared

CHECKOUT = Path(__file__).resolve().parents[2]
SLOWSTORE = CHECKOUT / "bench/testbed/slowstore"
SLOWFS = CHECKOUT / "target/release/examples/slowfs"
# A fixed place, so that `up` removes what an earlier suite left there.
PLACE = Path("/var/tmp/surgetank-suite")
CALIBRATION_TRIES = 3


class Refused(Exception):
    """The store must not be measured now."""


def words(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, check=False, **options)
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


class Simulated:
    simulated = True

    def __init__(self, preset: str, size_mib: int) -> None:
        self.name, self.preset, self.size_mib = preset, PRESETS[preset], size_mib
        self.directory = PLACE / f"store-{preset}"
        self.state: dict = {}

    def up(self) -> None:
        self.down()
        self.directory.mkdir(parents=True, exist_ok=True)
        words(SLOWSTORE, "up", self.directory, "--preset", self.name, "--slowfs", SLOWFS, "--size-mib", self.size_mib)
        self.look()
        if self.state["missing"]:
            raise Refused(f"the store lacks its {', '.join(self.state['missing'])}: measurements on it are void (`slowstore up` gives the reason)")

    def look(self) -> None:
        self.state = json.loads(words(SLOWSTORE, "status", self.directory))

    @property
    def bare(self) -> Path:
        return Path(self.state["bare"])

    @property
    def device(self) -> str:
        """MAJ:MIN, for the cgroup of a run if the cap does not apply to all processes (cgroup v2)."""
        return self.state["device"] if self.state["throttle"].startswith("/") else ""

    @property
    def counter(self) -> Path | None:
        """The seventh number of this file counts written sectors."""
        return Path("/sys/block", Path(self.state["loop"]).name, "stat")

    def figures(self) -> dict:
        return {name: getattr(self.preset, name) for name in self.preset.sources}

    def bandwidth_mib_s(self) -> float:
        return self.preset.bandwidth_mib_s

    def calibrate(self) -> dict:
        """Returns the measured figures; refuses a store that stays off its preset."""
        for left in reversed(range(CALIBRATION_TRIES)):
            done = subprocess.run([SLOWSTORE, "calibrate", self.directory], text=True, capture_output=True, check=False)
            if done.returncode == 0:
                return json.loads(done.stdout.splitlines()[-1])
            if left:
                print(f"  off its preset; again in 5 s\n{done.stderr.rstrip()}", file=sys.stderr, flush=True)
                time.sleep(5)
        raise Refused(f"{self.name} is off its preset: {done.stderr.strip()}")

    def cold(self) -> None:
        words(SLOWSTORE, "remount", self.directory)
        self.look()

    def sync_command(self) -> str:
        return f"sync --file-system {self.bare}"

    @contextmanager
    def at_full_speed(self) -> Iterator[Path]:
        """The bare directory without the cap, for preparation and comparison."""
        words(SLOWSTORE, "uncap", self.directory)
        try:
            yield self.bare
            words("sync", "--file-system", self.bare)
        finally:
            words(SLOWSTORE, "cap", self.directory)

    def server_cpu_s(self) -> float:
        return cpu_of(self.state["slowfs_pid"])

    def down(self) -> None:
        if self.directory.exists():
            words(SLOWSTORE, "down", self.directory)


class MooseFs:
    """Real: three servers and a client on this machine, on its disk."""

    simulated, device, counter = False, "", None

    def __init__(self) -> None:
        self.name, self.at = "moosefs", PLACE / "moosefs"
        self.directory = self.bare = self.at / "mnt"
        self.server: subprocess.Popen | None = None
        self.measured: dict = {}

    def up(self) -> None:
        self.down()
        self.at.mkdir(parents=True)
        self.server = subprocess.Popen(
            ["unshare", "--net", CHECKOUT / "scripts/moosefs/serve", self.at], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until = time.monotonic() + 60
        while not os.path.ismount(self.directory):
            if time.monotonic() > until or self.server.poll() is not None:
                raise Refused(f"MooseFS did not come up; its logs are in {self.at}")
            time.sleep(0.1)

    def figures(self) -> dict:
        return {}

    def bandwidth_mib_s(self) -> float:
        return self.measured.get("write_mib_s", 200)

    def calibrate(self) -> dict:
        probe = self.directory / ".suite-probe"
        found = {}
        for way in ("write", "read"):
            drop_caches()
            output = words("fio", "--name=probe", f"--filename={probe}", f"--rw={way}", "--bs=1M", "--size=512M", "--ioengine=psync", "--end_fsync=1", "--fallocate=none", "--output-format=json")
            job = json.loads(output[output.index("{") :])["jobs"][0]
            found[f"{way}_mib_s"] = round(job[way]["io_bytes"] / (1 << 20) / (job["job_runtime"] / 1000), 1)
        probe.unlink()
        began = time.perf_counter()
        for number in range(100):
            os.path.lexists(self.directory / f".suite-absent-{number}")
        found["stat_us"] = round((time.perf_counter() - began) * 1e4)
        self.measured = found
        return found

    def cold(self) -> None:
        words("sync", "--file-system", self.directory)
        drop_caches()

    def sync_command(self) -> str:
        return f"find {self.directory} -type f -exec sync --data {{}} +"

    @contextmanager
    def at_full_speed(self) -> Iterator[Path]:
        yield self.directory

    def server_cpu_s(self) -> float:
        return sum(cpu_of(int(pid)) for pid in session(self.server.pid)) if self.server else 0.0

    def down(self) -> None:
        if self.server:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            self.server = None
        # (For a mount whose server has ended, `ismount` is false, and the directory cannot be removed.)
        subprocess.run(["umount", "--lazy", self.directory], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.at, ignore_errors=True)


def session(leader: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if stat.read_text().rpartition(")")[2].split()[3] == str(leader):
                found.append(stat.parent.name)
        except OSError:
            continue  # the process ended
    return found


def cpu_of(pid: int) -> float:
    """Processor time until now, its threads' included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def store(name: str, size_mib: int) -> Simulated | MooseFs:
    if name == "moosefs":
        return MooseFs()
    if isinstance(PRESETS.get(name), Shared):
        return Simulated(name, size_mib)
    raise Refused(f"{name} is not a store that programs can read and write directly: {', '.join([*STORES])}")


STORES = [name for name, preset in PRESETS.items() if isinstance(preset, Shared)] + ["moosefs"]
