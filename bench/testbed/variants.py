"""What runs on the nodes of this machine, one after the other: pools, and the file systems beside them."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from nodes import LINK_MBIT, SURGETANK, TOP, Node, nodes_up, on_each

WORK = TOP / ".cache/bench-nodes"
STORE = WORK / "store"
SHIM = [str(SURGETANK), "run", "--state", "/dev/shm/state", "--"]
TIER_MIB = 1024


# Makes the nodes ready. Gives the directory of the work, and words that go before its programs.
Up = Callable[[list[Node]], contextlib.AbstractContextManager[tuple[Path, list[str]]]]
# All nodes together, by shape.
Measure = Callable[[list[Node], Path, list[str]], dict[str, float]]


# Of all rounds, by what and variant.
Figures = dict[tuple[str, str], list[float]]


def compared(count: int, rounds: int, variants: dict[str, Up], measure: Measure, link_mbit: int = LINK_MBIT) -> Figures:
    figures: Figures = {}
    for turn in range(rounds):
        for variant, up in variants.items():
            with nodes_up(count, TIER_MIB, link_mbit) as nodes, up(nodes) as (place, before):
                for what, figure in measure(nodes, place, before).items():
                    figures.setdefault((what, variant), []).append(figure)
                    print(f"  round {turn + 1}, {variant}, {what}: {rounded(figure)}", flush=True)
    summary(figures)
    return figures


def summary(figures: Figures) -> None:
    for (what, variant), values in figures.items():
        print(f"{what:48}{variant:14}{rounded(statistics.median(values)):>10} ({rounded(min(values))} – {rounded(max(values))})")


def rounded(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 or figure.is_integer() else f"{figure:.3g}"


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def sent_bytes(node: Node) -> int:
    (link,) = json.loads(node.run(Path("/"), ["ip", "-json", "-statistics", "link", "show", "eth0"]))
    return int(link["stats64"]["tx"]["bytes"])


@contextlib.contextmanager
def pool_of_mounts(nodes: list[Node], tier_mib: int = TIER_MIB, *more: str) -> Iterator[tuple[Path, list[str]]]:
    place = STORE / "data"
    shutil.rmtree(place, ignore_errors=True)
    for directory in ("all", *(f"own{node.number}" for node in nodes)):
        (place / directory).mkdir(parents=True)
    options = ["--pool", "bench", "--pool-secret", str(WORK / "secret"), "--tier", f"ram=/dev/shm/tier:{tier_mib}M", *more]
    on_each(nodes, lambda node: node.surgetank(WORK, "mount", *options, str(place)))
    yield place, []
    on_each(nodes, lambda node: node.surgetank(WORK, "umount", str(place)))


@contextlib.contextmanager
def pool_of_shims(nodes: list[Node], *more: str) -> Iterator[tuple[Path, list[str]]]:
    with pool_of_mounts(nodes, TIER_MIB, *more) as (place, _):
        yield place, SHIM


@contextlib.contextmanager
def moosefs(nodes: list[Node]) -> Iterator[tuple[Path, list[str]]]:
    """Debian's packages as they are: a master on the first node, a chunkserver and a mount on each."""
    place, own = Path("/dev/shm/mnt"), Path("/dev/shm/mfs")
    common = "WORKING_USER = root\nWORKING_GROUP = root\nLOCK_MEMORY = 0\nNICE_LEVEL = 0\n"
    master = "10.77.0.1"
    files = {
        "exports.cfg": "* / rw,alldirs,maproot=0:0\n",
        "disks.cfg": f"{own}/disk\n",
        "master.cfg": common + f"DATA_PATH = {own}/master\nEXPORTS_FILENAME = {own}/exports.cfg\n" + "".join(f"{name}_LISTEN_HOST = {master}\n" for name in ("MATOML", "MATOCS", "MATOCL")),
        "chunkserver.cfg": common + f"DATA_PATH = {own}/chunks\nHDD_CONF_FILENAME = {own}/disks.cfg\nHDD_LEAVE_SPACE_DEFAULT = 16MiB\nMASTER_HOST = {master}\nMASTER_RECONNECTION_DELAY = 1\n",
    }
    for node in nodes:
        write = "".join(f"printf '%b' '{text.replace(chr(10), chr(92) + 'n')}' >{own}/{name}; " for name, text in files.items())
        node.run(Path("/"), ["sh", "-ec", f"mkdir -p {own}/master {own}/chunks {own}/disk {place}; {write} cp /var/lib/mfs/metadata.mfs.empty {own}/master/metadata.mfs"])
    in_background = ["setsid", "--fork", "sh", "-c", 'exec "$@" >/dev/shm/mfs/log-$(basename $1) 2>&1', "sh"]
    nodes[0].run(Path("/"), [*in_background, "mfsmaster", "-f", "-a", "-c", f"{own}/master.cfg"])
    on_each(nodes, lambda node: node.run(Path("/"), [*in_background, "mfschunkserver", "-f", "-c", f"{own}/chunkserver.cfg"]))
    nodes[0].run(Path("/"), ["sh", "-c", f"until [ $(grep -c 'chunkserver register end' {own}/log-mfsmaster) = {len(nodes)} ]; do sleep 0.1; done"])
    mounts = f"for try in 1 2 3 4 5 6 7 8 9 10; do mfsmount {place} -H {master} -o nosuid >/dev/null 2>&1 && exit; sleep 0.5; done; exit 1"
    on_each(nodes, lambda node: node.run(Path("/"), ["sh", "-c", mounts]))
    nodes[0].run(place, ["mkdir", "all", *(f"own{node.number}" for node in nodes)])
    nodes[0].run(place, ["mfssetgoal", "-r", "1", "."])
    yield place, []
    on_each(nodes, lambda node: node.run(Path("/"), ["umount", "-l", str(place)]))


@contextlib.contextmanager
def glusterfs(nodes: list[Node]) -> Iterator[tuple[Path, list[str]]]:
    """Debian's packages as they are: a daemon, a brick and a mount on each node."""
    place, brick = Path("/dev/shm/mnt"), "/dev/shm/brick"
    # (The daemons' directories are built in. On each node, others are mounted there.)
    start = f"for at in /run /var/lib/glusterd /var/log/glusterfs; do mount -t tmpfs tmpfs $at; done; mkdir {brick} {place}; exec glusterd"
    on_each(nodes, lambda node: node.run(Path("/"), ["sh", "-ec", start]))

    def gluster(*words: str) -> str:
        return nodes[0].run(Path("/"), ["gluster", "--mode=script", *words])

    for node in nodes[1:]:
        gluster("peer", "probe", node.host)
    # (Each daemon has to know all others.)
    known = f"until [ $(gluster pool list | grep -c Connected) = {len(nodes)} ]; do sleep 0.1; done"
    on_each(nodes, lambda node: node.run(Path("/"), ["sh", "-c", known]))
    gluster("volume", "create", "bench", *(f"{node.host}:{brick}" for node in nodes), "force")
    gluster("volume", "start", "bench")
    on_each(nodes, lambda node: node.run(Path("/"), ["mount", "-t", "glusterfs", f"{node.host}:/bench", str(place)]))
    nodes[0].run(place, ["mkdir", "all", *(f"own{node.number}" for node in nodes)])
    yield place, []
    on_each(nodes, lambda node: node.run(Path("/"), ["umount", "-l", str(place)]))
