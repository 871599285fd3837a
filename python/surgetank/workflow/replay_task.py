"""One task of a replay: reads and verifies its inputs, uses its time, writes its outputs.

A separate program: `python -P replay_task.py busy|sleep SECONDS [r|w NAME SIZE]…`, in the workflow's directory.
"""

import os
import sys
import time
from importlib import import_module

# The module is next to this file; the package itself need not be found.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

content = import_module("content")


def main(words: list[str]) -> int:
    how, seconds, *files = words
    entries = [(files[at], files[at + 1], int(files[at + 2])) for at in range(0, len(files), 3)]
    for kind, name, size in entries:
        if kind == "r" and (wrong := content.verify(name, name, size)):
            print(f"a file that was read differs from what was written: {wrong}", file=sys.stderr)
            return 1
    spend(how, float(seconds))
    for kind, name, size in entries:
        if kind == "w":
            content.write(name, name, size)
    return 0


def spend(how: str, seconds: float) -> None:
    if how == "sleep":
        time.sleep(seconds)
        return
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
