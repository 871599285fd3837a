"""Nodes on this machine: namespaces of their own, links of 1 Gbit/s (or another rate; 0: no limit), host names and memory for a tier; and a slow store for all.

Needs root. What a killed run left is found by its names, and cleaned up by the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

TOP = Path(__file__).resolve().parents[2]
SLOWSTORE = TOP / "bench/testbed/slowstore"
SURGETANK = TOP / "target/release/surgetank"
LINK_MBIT = 1000
# Of the network namespaces: by their names the next run finds what a killed run left.
PREFIX = "sgtk-demo-"
SWITCH = PREFIX + "switch"
Result = TypeVar("Result")


class Failed(Exception):
    pass


@dataclass
class Node:
    number: int  # from 0
    keeper: subprocess.Popen[str]  # the parent of its first process
    init: int  # its first process, which reaps the others

    @property
    def host(self) -> str:
        return f"node{self.number + 1}"

    def command(self, directory: Path, words: list[str]) -> list[str]:
        """Words that run a command on this node, in a directory as the node sees it."""
        enter = ["nsenter", f"--target={self.init}", "--net", "--mount", "--uts", "--pid"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(directory), *words]

    def run(self, directory: Path, words: list[str]) -> str:
        return output(self.command(directory, words))

    def surgetank(self, directory: Path, verb: str, *words: str) -> str:
        return self.run(directory, [str(SURGETANK), *verb.split(), "--state", "/dev/shm/state", *words])

    def cpu_us(self) -> float:
        """Processor time of its agent, supervisor and member of the pool since they began."""
        ticks = sum(int(word) for text in self.texts("stat") for word in text.rpartition(")")[2].split()[11:13])
        return 1e6 * ticks / os.sysconf("SC_CLK_TCK")

    def private_bytes(self) -> int:
        """Memory of these processes that no file backs."""
        lines = [line for text in self.texts("status") for line in text.splitlines() if line.startswith("RssAnon")]
        return sum(int(line.split()[1]) for line in lines) << 10

    def texts(self, file: str) -> Iterator[str]:
        for pid in output(["ip", "netns", "pids", f"{PREFIX}{self.number + 1}"]).split():
            at = Path("/proc") / pid
            with contextlib.suppress(OSError):
                if b"surgetank" in (at / "cmdline").read_bytes().split(b"\0")[0]:
                    yield (at / file).read_text()


@contextlib.contextmanager
def nodes_up(count: int, tier_mib: int, link_mbit: int = LINK_MBIT) -> Iterator[list[Node]]:
    nodes: list[Node] = []
    try:
        names = "".join(f"10.77.0.{number + 1} node{number + 1}\n" for number in range(count))
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number in range(count):
            nodes.append(node_up(number, "127.0.0.1 localhost\n" + names, tier_mib, link_mbit))
        yield nodes
    finally:
        # A second Ctrl-C would leave the nodes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nodes_down()
        for node in nodes:
            node.keeper.wait()


def node_up(number: int, hosts: str, tier_mib: int, link_mbit: int) -> Node:
    name, port = f"{PREFIX}{number + 1}", f"port{number + 1}"
    ip("netns", "add", name)
    ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", SWITCH)
    ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
    ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
    for link in ("eth0", "lo"):
        ip("-n", name, "link", "set", link, "up")
    if link_mbit:
        limit = ["root", "tbf", "rate", f"{link_mbit}mbit", "burst", "1mb", "latency", "50ms"]
        call(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit])
        call(["tc", "-n", SWITCH, "qdisc", "add", "dev", port, *limit])
    script = (
        f"echo node{number + 1} >/proc/sys/kernel/hostname && mount -t tmpfs -o size={tier_mib + 64}m,mode=1777 tmpfs /dev/shm"
        ' && printf %s "$0" >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts'
        " && mkdir -m 700 /dev/shm/tier /dev/shm/state && echo up && while :; do sleep 60; done"
    )
    words = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", script, hosts]
    keeper = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if not keeper.stdout or keeper.stdout.readline() != "up\n":
        raise Failed(f"node{number + 1} did not start")
    init = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text()
    return Node(number, keeper, int(init))


def nodes_down() -> None:
    """Ends every process of the nodes, also of a killed run. The links and mounts end with them."""
    names = [line.split()[0] for line in output(["ip", "netns", "list"]).splitlines() if line.startswith(PREFIX)]
    deadline = time.monotonic() + 10
    while pids := [int(pid) for name in names for pid in output(["ip", "netns", "pids", name]).split()]:
        if time.monotonic() > deadline:
            raise Failed(f"processes of the nodes do not end: {pids}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for name in names:
        ip("netns", "delete", name)


def ip(*words: str) -> None:
    call(["ip", *words], quiet=True)


def on_each(nodes: list[Node], act: Callable[[Node], Result]) -> list[Result]:
    """What it returns for each node; the nodes do it at the same time."""
    with ThreadPoolExecutor(len(nodes)) as workers:
        return list(workers.map(act, nodes))


@contextlib.contextmanager
def only_run(work: Path, store: Path) -> Iterator[None]:
    """The nodes have the same names in each run. The lock ends with this process."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind("\0surgetank-demo-nodes")
        except OSError:
            raise Failed("another run on such nodes is under way") from None
        nodes_down()
        call([SLOWSTORE, "down", store])
        shutil.rmtree(work, ignore_errors=True)
        store.mkdir(parents=True)
        yield


@contextlib.contextmanager
def slow_store(store: Path, preset: str, size_mib: int) -> Iterator[str]:
    try:
        call([SLOWSTORE, "up", store, "--preset", preset, "--size-mib", size_mib], quiet=True)
        # The comparison of the runs is valid on a store that misses its preset, but the store must not have the preset's name.
        off = subprocess.run([SLOWSTORE, "calibrate", store], capture_output=True, text=True, check=False)
        state = json.loads(output([SLOWSTORE, "status", store]))
        if state["throttle"].startswith("/"):
            # The cap applies to this group only, and so to this process and all that it starts.
            (Path(state["throttle"]) / "cgroup.procs").write_text(str(os.getpid()))
        yield state["label"] + ("" if off.returncode == 0 else ", OFF ITS PRESET")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if subprocess.run([SLOWSTORE, "down", store], check=False).returncode != 0:
            print(f"the slow store is still up: {SLOWSTORE} down {store}", file=sys.stderr)


def call(command: Sequence[object], quiet: bool = False) -> None:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE if quiet else None, stderr=subprocess.PIPE if quiet else None, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{command[0]} ended with {done.returncode}" + (f"\n{done.stdout}{done.stderr}" if quiet else ""))


def output(command: Sequence[object]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
