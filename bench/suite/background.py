"""Other clients of the store: a process that writes at a fixed rate and one that looks up names, the same in every loaded run."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITE_MIB_S = 10
STATS_PER_SECOND = 200
LEAD_S = 0.5

LOOKUPS = """
import os, sys, time
place, every, number = sys.argv[1], 1 / float(sys.argv[2]), 0
while os.getppid() != 1:
    os.path.lexists(f"{place}/.background-{number % 997}")
    number += 1
    time.sleep(every)
"""


@contextmanager
def background(store, loaded: bool) -> Iterator[None]:
    """The writer bypasses this machine's page cache, as another client's bytes do. Both processes start before the clock and end after it."""
    if not loaded:
        yield
        return
    file = Path(store.bare, ".background")
    writer = subprocess.Popen(
        ["fio", "--name=background", f"--filename={file}", "--rw=write", "--bs=1M", "--size=64M", "--direct=1", "--ioengine=psync",
         "--time_based", "--runtime=86400", f"--rate={WRITE_MIB_S}M"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    lookups = subprocess.Popen(["python3", "-c", LOOKUPS, store.directory, str(STATS_PER_SECOND)], stdin=subprocess.DEVNULL, cwd="/")
    try:
        time.sleep(LEAD_S)
        yield
    finally:
        for child in (writer, lookups):
            child.terminate()
            child.wait()
        file.unlink(missing_ok=True)
        os.sync()
