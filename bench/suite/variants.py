"""The ways to run a workload. Each variant names the files that are durable when its clock stops, and is a script that ensures it.

store      straight on the store, then a sync: everything
by-hand    as a careful user works: all in memory, inputs read from the store, finals copied there and synced: the limit
overlay    an overlay of memory over the store, finals copied out of it and synced
in-memory  `surgetank run`, intermediates under rule `remove`: finals
copy-all   `surgetank run` without a rule: everything

The danger that it avoids: a comparison of variants that did different work. The suite counts the durable bytes of each variant in the
store and prints them. They must be equal among variants that keep the same files.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from suite.testbed import CHECKOUT

SURGETANK = CHECKOUT / "target/release/surgetank"
EVERYTHING, FINALS = "everything", "finals"


@dataclass(frozen=True)
class Workload:
    """Runs in a directory that has its inputs, wherever that is. Patterns are globs from that directory."""

    name: str
    prepare: Callable[[Path], None]
    command: tuple[str, ...]
    inputs: tuple[str, ...]  # names in the directory
    finals: tuple[str, ...]
    temporaries: tuple[str, ...]  # patterns of surgetank's rules
    read_mib: float  # from the store, of inputs
    written_mib: float
    final_mib: float
    moved_mib: float  # by its programs, read and written
    compute_s: float = 0.0  # wall, of all processes together
    environment: dict[str, str] = field(default_factory=dict)
    stages: tuple[dict, ...] = ()
    """In the form of `surgetank model` (docs/model.md)."""
    describe: Callable[[Path], tuple[dict, ...]] | None = None
    """The same from a run in that directory, which has the inputs. Without either, the record of a run is the description."""


@dataclass(frozen=True)
class Place:
    """The directories and files of one run."""

    run: Path  # in the store, with the inputs
    bare: Path  # the same, below the layers that make the store slow; must not be used while the clock runs
    memory: Path  # a directory in memory, empty
    state: Path
    account: Path  # surgetank's record of the run
    marks: Path  # the time of the command's end, and the counter of the store's device at that time
    sync: str
    counter: Path | None


@dataclass(frozen=True)
class Variant:
    name: str
    keeps: str
    script: Callable[[Workload, Place, "Tier"], str]
    ours: bool = False


@dataclass(frozen=True)
class Tier:
    bytes: int
    devices: int = 1
    options: tuple[str, ...] = ()


def command(workload: Workload, place: Place) -> str:
    """The workload, followed by a mark."""
    counter = f"$(cat {place.counter})" if place.counter else ""
    return f'{shlex.join(workload.command)}\nprintf "%s\\n" "$EPOCHREALTIME" "{counter}" >{shlex.quote(str(place.marks))}\n'


def finals_to_store(workload: Workload, place: Place, source: Path) -> str:
    return f"cd {source} && cp -r --parents {' '.join(workload.finals)} {place.run}/\n{place.sync}\n"


def straight(workload: Workload, place: Place, _: Tier) -> str:
    return f"cd {place.run}\n{command(workload, place)}{place.sync}\n"


def by_hand(workload: Workload, place: Place, _: Tier) -> str:
    links = "".join(f"ln -s {place.run}/{name} {place.memory}/{name}\n" for name in workload.inputs)
    return f"{links}cd {place.memory}\n{command(workload, place)}{finals_to_store(workload, place, place.memory)}"


def overlay(workload: Workload, place: Place, _: Tier) -> str:
    upper, work, merged = (place.memory / name for name in ("upper", "work", "merged"))
    return (
        f"mkdir {upper} {work} {merged}\n"
        f"mount -t overlay overlay -o lowerdir={place.run},upperdir={upper},workdir={work} {merged}\n"
        f'trap "cd / && umount {merged}" EXIT\n'
        f"cd {merged}\n{command(workload, place)}cd /\numount {merged}\ntrap - EXIT\n{finals_to_store(workload, place, upper)}"
    )


def surgetank(workload: Workload, place: Place, tier: Tier, rules: tuple[str, ...]) -> str:
    devices = [place.memory / f"tier{number}" for number in range(tier.devices)]
    words = ["run", "--quiet", "--over", place.run, "--state", place.state, "--json", place.account]
    words += ["--tier", f"ram={','.join(map(str, devices))}:{tier.bytes}", *tier.options]
    words += [word for pattern in rules for word in ("--rule", f"{pattern}=remove")]
    words += ["--", "bash", "-euc", command(workload, place)]
    made = "".join(f"mkdir -m 700 {device}\n" for device in devices)
    return f"{made}cd {place.run}\nexec {shlex.join([str(SURGETANK), *map(str, words)])}\n"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("store", EVERYTHING, straight),
        Variant("by-hand", FINALS, by_hand),
        Variant("overlay", FINALS, overlay),
        Variant("in-memory", FINALS, lambda *all: surgetank(*all, rules=all[0].temporaries), ours=True),
        Variant("copy-all", EVERYTHING, lambda *all: surgetank(*all, rules=()), ours=True),
    )
}
