"""Other people on the store: a writer of a fixed rate and somebody who looks at names, the same in every loaded run."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITE_MIB_S = 10
STATS_PER_SECOND = 200
AHEAD_S = 0.5

LOOKER = """
import os, sys, time
place, every, number = sys.argv[1], 1 / float(sys.argv[2]), 0
while os.getppid() != 1:
    os.path.lexists(f"{place}/.background-{number % 997}")
    number += 1
    time.sleep(every)
"""


@contextmanager
def background(store, loaded: bool) -> Iterator[None]:
    """The writer goes past this machine's page cache, as another client's bytes do. Both are there before the clock begins, and end after it."""
    if not loaded:
        yield
        return
    file = Path(store.bare, ".background")
    writer = subprocess.Popen(
        ["fio", "--name=background", f"--filename={file}", "--rw=write", "--bs=1M", "--size=64M", "--direct=1", "--ioengine=psync",
         "--time_based", "--runtime=86400", f"--rate={WRITE_MIB_S}M"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    looker = subprocess.Popen(["python3", "-c", LOOKER, store.directory, str(STATS_PER_SECOND)], stdin=subprocess.DEVNULL, cwd="/")
    try:
        time.sleep(AHEAD_S)
        yield
    finally:
        for child in (writer, looker):
            child.terminate()
            child.wait()
        file.unlink(missing_ok=True)
        os.sync()
