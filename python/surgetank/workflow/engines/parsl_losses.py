"""Parsl in a pool: when a node is lost, the program runs again, and only apps whose files are lost or missing run.

Parsl keeps each app's result in memory, and does not look for files. So a second pass over the program takes the results
of apps that have ended well, as long as their outputs are there. Every app waits for the futures of its inputs, as in
the first pass. So no app reads a file that is being made again.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import parsl  # type: ignore[import-untyped, unused-ignore]
from parsl.data_provider.files import File  # type: ignore[import-untyped, unused-ignore]
from parsl.dataflow.memoization import BasicMemoizer  # type: ignore[import-untyped, unused-ignore]

from ..agent import Agent, lost, mounted
from ..execute.losses import Losses, readable
from ..problem import Problem

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# An app's call: a hash of the app and its arguments, and how many equal calls there were before it in this pass.
Call = tuple[str, int]


class LostNodes(BasicMemoizer):  # type: ignore[misc, unused-ignore]
    """`lost = LostNodes()`, `Config(memoizer=lost)`, and `lost.run(program)` inside of `parsl.load`.

    `made_again` has the files that apps have made again. The keywords are those of Parsl's `BasicMemoizer`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.made_again: set[str] = set()
        self._directory = Path.cwd()
        self._losses = Losses(Agent() if mounted(".") else None, ".")
        if not self._losses.in_pool:
            logger.warning(
                "this directory is not in a pool, so nothing runs again; start the program with "
                "`surgetank run --pool NAME -- …`, in a directory of the mount"
            )
        self._lock = threading.Lock()
        self._results: dict[Call, Any] = {}
        # Of this pass: equal calls, the call of each task, and what apps have made.
        self._calls: Counter[str] = Counter()
        self._of_task: dict[int, Call] = {}
        self._made: set[str] = set()
        # Every file that an app was to write, in any pass.
        self._outputs: set[str] = set()

    def run(self, program: Callable[[], Result]) -> Result:
        """Runs `program`, and again each time when a node was lost meanwhile. It has to make the same calls each time.

        Errors: those of the program without a loss; `Problem`, its outputs are lost and were not made again.
        """
        while True:
            error: Exception | None = None
            try:
                result = program()
            except Exception as failed:
                error = failed
            parsl.dfk().wait_for_current_tasks()
            is_new = self._losses.are_new(failed=error is not None)
            gone = sorted(path for path in self._outputs if lost(path))
            if error is not None and not is_new:
                raise error
            if error is None and (not self._losses.in_pool or (not is_new and not gone)):
                return result
            if not is_new:
                raise Problem(
                    "files are lost with a node, and no app made them again",
                    why=", ".join(gone),
                    remedy="start the program again",
                    code=3,
                )
            # (A lost file cannot be opened, not even to write it again.)
            for path in gone:
                Path(path).unlink(missing_ok=True)
            logger.warning("a node of the pool was lost; apps whose files are missing run again")
            with self._lock:
                self._calls.clear()
                self._of_task.clear()
                self._made.clear()

    # What Parsl calls.

    def check_memo(self, task: Any) -> Future[Any] | None:
        """The result of this call in an earlier pass, or nothing: then the app runs."""
        known: Future[Any] | None = super().check_memo(task)
        outputs, inputs = set(self._paths(_outputs(task))), set(self._paths(_inputs(task)))
        hashed = _hash(task)
        with self._lock:
            # (Of another try of one task, it is the same call.)
            if (call := self._of_task.get(task["id"])) is None:
                call = self._of_task[task["id"]] = (hashed, self._calls[hashed])
                self._calls[hashed] += 1
            self._outputs |= outputs | set(self._paths(_streams(task)))
            has_run = call in self._results
            # (What another app has just made again lacks what this one did.)
            is_whole = not outputs & self._made and all(readable(path) for path in outputs)
            if is_whole:
                return self._results[call] if has_run else known
            if has_run and outputs & inputs and not outputs & inputs <= self._made:
                failed: Future[Any] = Future()
                failed.set_exception(
                    Problem(
                        "an app that changes its input cannot run again, as the input is changed already",
                        why=", ".join(sorted(outputs & inputs)),
                        remedy="remove that file, and start the program again",
                        code=3,
                    )
                )
                return failed
        return None

    def update_memo_result(self, task: Any, r: Any) -> None:
        super().update_memo_result(task, r)
        with self._lock:
            call = self._of_task.get(task["id"])
            if call is None or task["from_memo"]:
                return
            done: Future[Any] = Future()
            done.set_result(r)
            if call in self._results:
                self.made_again |= set(self._paths(_outputs(task)))
            self._results[call] = done
            self._made |= set(self._paths(_outputs(task)))

    def _paths(self, files: Iterator[File]) -> Iterator[str]:
        return (str(self._directory / file.filepath) for file in files if file.scheme == "file")


def _hash(task: Any) -> str:
    kwargs = {name: value for name, value in task["kwargs"].items() if name not in task["ignore_for_cache"]}
    code = getattr(inspect.unwrap(task["func"]), "__code__", None)
    place = None if code is None else (code.co_filename, code.co_firstlineno)
    called = [task["func"].__module__, task["func_name"], place, _plain(task["args"]), _plain(kwargs)]
    try:
        return hashlib.sha256(pickle.dumps(called)).hexdigest()
    except Exception:
        # (An argument that cannot be compared: the app runs again.)
        return f"task {task['id']}"


def _plain(value: Any) -> Any:
    """The same, with the names of files in their place."""
    if isinstance(value, File):
        return ("file", value.url)
    if isinstance(value, dict):
        return sorted((str(name), _plain(one)) for name, one in value.items())
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _inputs(task: Any) -> Iterator[File]:
    """(`inputs`, and each file that is an argument.)"""
    named = [value for name, value in task["kwargs"].items() if name not in ("outputs", "stdout", "stderr")]
    return _files([*task["args"], *named])


def _outputs(task: Any) -> Iterator[File]:
    return _files(task["kwargs"].get("outputs", []))


def _streams(task: Any) -> Iterator[File]:
    for name in ("stdout", "stderr"):
        stream = task["kwargs"].get(name)
        # (With a mode.)
        stream = stream[0] if isinstance(stream, tuple) else stream
        if isinstance(stream, (str, os.PathLike)):
            yield File(stream)
        else:
            yield from _files(stream)


def _files(value: Any) -> Iterator[File]:
    if isinstance(value, File):
        yield value
    elif isinstance(value, dict):
        yield from _files(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _files(one)
