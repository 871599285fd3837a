"""The simulated stores: their figures, and the source of each. The figures were fixed before any measurement on the stores.

All are *simulated* on one machine. Two kinds: `Shared` is a file system (`slowstore` makes it), `Far` an object server behind a
link (`farstore`). Every bandwidth is well below that of a machine with two cores, so that ratios are meaningful.
"""

from dataclasses import dataclass

# The tolerance of a measured bandwidth relative to its preset; beyond it the store is not measured.
BANDWIDTH_OFF_MAX = 0.10
# The same for a metadata operation: a sleep is never shorter than requested, and the switch to the FUSE server and back adds to it.
LATENCY_OFF_US = (-20, 250)


@dataclass(frozen=True)
class Shared:
    bandwidth_mib_s: int  # each way, all clients of this machine together
    latency_us: int  # of a metadata operation
    dirty_mib: int  # the most bytes that may wait in the client's write-back cache
    read_ahead_kib: int
    flush_on_close: bool  # close() returns when the file's data is on the server
    sources: dict[str, str]


@dataclass(frozen=True)
class Far:
    link_mbit_s: int
    round_trip_ms: int
    sources: dict[str, str]


READ_AHEAD = "Lustre reads ahead up to 64 MiB a file, Linux' NFS client 15 × rsize before 5.4; enough here to keep the device busy"

PRESETS: dict[str, Shared | Far] = {
    "lustre-busy": Shared(
        50, 500, 32, 4096, False,
        {
            "bandwidth_mib_s": "one node's share while others write; the lowest rate that this rig kept within 4–10 % (chosen, not measured on Lustre)",
            "latency_us": "mdtest on a Dell/Intel Lustre: 2,000 file stats a second from one thread",
            "dirty_mib": "Lustre client, osc.*.max_dirty_mb: 32 for an object server, before 2.12",
            "read_ahead_kib": READ_AHEAD,
            "flush_on_close": "Lustre keeps dirty pages after close",
        },
    ),
    "lustre-idle": Shared(
        200, 150, 64, 4096, False,
        {
            "bandwidth_mib_s": "between the 121 MiB/s written and 1,381 MiB/s read that Sea's authors got with dd on an idle Lustre (Table 2); the highest rate that this rig kept",
            "latency_us": "chosen: a round trip on a fabric and a server that has the inode in memory and no other client",
            "dirty_mib": "chosen: two object servers of 32 each (Sea's authors allowed 1 GB each: more than a whole run here)",
            "read_ahead_kib": READ_AHEAD,
            "flush_on_close": "Lustre keeps dirty pages after close",
        },
    ),
    "nfs": Shared(
        110, 250, 64, 4096, True,
        {
            "bandwidth_mib_s": "1 Gbit/s less Ethernet, IP and TCP headers: 941 Mbit/s, 112 MiB/s",
            "latency_us": "chosen: a round trip on switched gigabit Ethernet plus a server that has the inode in memory",
            "dirty_mib": "chosen; a Linux client is bound by the machine's dirty limits only",
            "read_ahead_kib": READ_AHEAD,
            "flush_on_close": "close-to-open: a client sends what is dirty, and commits it, before close returns (nfs(5))",
        },
    ),
    "s3": Far(
        400, 100,
        {
            "link_mbit_s": "chosen: one node's share of a site's link of 10 Gbit/s that 25 nodes use",
            "round_trip_ms": "Amazon's performance guidelines: 100 to 200 ms to the first byte; here on every message, both ways together",
        },
    ),
}  # fmt: skip
