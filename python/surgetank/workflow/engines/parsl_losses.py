"""Parsl in a pool: when a node is lost, apps whose files are lost with it run again, and no others.

An app that fails then waits until the pool knows which node is lost. Of its inputs, those that are missing or lost are
made again by the apps that made them, whose own inputs are looked at first. Then it runs again. Only files are known
that the program passes as `File` and lists in `outputs`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import parsl  # type: ignore[import-untyped, unused-ignore]
from parsl.app.futures import DataFuture  # type: ignore[import-untyped, unused-ignore]
from parsl.config import Config  # type: ignore[import-untyped, unused-ignore]
from parsl.data_provider.files import File  # type: ignore[import-untyped, unused-ignore]
from parsl.dataflow.errors import PropagatedException  # type: ignore[import-untyped, unused-ignore]

from ..agent import Agent, lost, mounted
from ..execute.losses import Losses
from ..problem import Problem

logger = logging.getLogger(__name__)
Record = dict[str, Any]


class LostNodes:
    """Parsl's `retry_handler`, which makes again what was lost with a node: `lost = LostNodes(config)` before
    `parsl.load(config)`, and `lost.finish()` at the end of the program.

    `again` has the numbers of the apps (their `tid`) that ran again. An app that a lost node makes fail does not use
    up a retry of `Config(retries=…)`. Parsl keeps the records of all apps for this (`garbage_collect=False`).
    """

    def __init__(self, config: Config) -> None:
        if config.retry_handler is not None:
            raise Problem("the Config has a retry_handler already", remedy="use one of the two")
        handler: Any = self._failed
        config.retry_handler, config.garbage_collect = handler, False
        self.again: list[int] = []
        self._directory = Path.cwd()
        self._losses = Losses(Agent() if mounted(".") else None, ".")
        if not self._losses.in_pool:
            logger.warning(
                "this directory is not in a pool, so no app runs again; start the program with "
                "`surgetank run --pool NAME -- …`, in a directory of the mount"
            )
        self._at_start, _ = self._losses.now()
        # The nodes that were lost when an app ran again for free, and the apps that waited for a silent one.
        self._seen: dict[int, frozenset[int]] = {}
        self._waited: set[int] = set()
        self._lock = threading.Lock()
        # The app that makes a file again: only one does at a time. Its number, and that of its first run.
        self._makers: dict[str, Any] = {}
        self._first: dict[Any, int] = {}

    def finish(self) -> None:
        """Waits for all apps, and makes again the outputs of the program that are lost. Call it before the cleanup."""
        dfk = parsl.dfk()
        dfk.wait_for_current_tasks()
        tried: set[str] = set()
        while self._losses.in_pool and (missing := self._results_missing(dfk)):
            if missing <= tried:
                raise Problem(
                    "outputs are lost with a node, and their apps did not make them again",
                    why=", ".join(sorted(missing)),
                    remedy="start the program again",
                    code=3,
                )
            tried |= missing
            with self._lock:
                makers = [self._make(dfk, path) for path in sorted(missing)]
            for maker in filter(None, makers):
                maker.exception()
            dfk.wait_for_current_tasks()

    # What Parsl calls.

    def _failed(self, error: Exception, task: Record) -> float:
        """The price of another try: nothing if a lost node may be the cause."""
        if not self._losses.in_pool or isinstance(error, PropagatedException):
            return 1.0
        lost_nodes, silent = self._losses.now()
        number = task["id"]
        is_new = lost_nodes - self._seen.get(number, self._at_start)
        if not is_new and (not silent or number in self._waited):
            return 1.0
        if is_new:
            self._seen[number] = lost_nodes
        else:
            self._waited.add(number)
        # Parsl starts a task when nothing that it depends on is pending.
        ready: Future[None] = Future()
        task["depends"] = [*(task["depends"] or []), ready]
        ready.add_done_callback(lambda _: task["dfk"].launch_if_ready(task))
        threading.Thread(target=self._prepare, args=(task, ready), name="surgetank-lost", daemon=True).start()
        return 0.0

    # Our own methods.

    def _prepare(self, task: Record, ready: Future[None]) -> None:
        """(The callback of a failure must not wait.)"""
        try:
            self._seen[task["id"]] = self._losses.settled()
            with self._lock:
                wanted = filter(self._is_missing, map(self._path, _inputs(task)))
                makers = {id(maker): maker for maker in (self._make(task["dfk"], path) for path in wanted) if maker}
            for maker in makers.values():
                maker.exception()
        except BaseException:
            logger.exception("inputs of app %s could not be made again", task["id"])
        finally:
            ready.set_result(None)

    def _make(self, dfk: Any, path: str) -> Any:
        """Starts the app that made this file again, and before it those of its own missing inputs. None: no app did.
        With the lock."""
        if (maker := self._makers.get(path)) is not None and not maker.done():
            return maker
        task = self._made(dfk).get(path)
        if task is None:
            return None
        outputs = _outputs(task)
        arguments = {name: value for name, value in task["kwargs"].items() if name != "outputs"}
        args, kwargs = _replaced(tuple(task["args"]), self._source(dfk)), _replaced(arguments, self._source(dfk))
        if "outputs" in task["kwargs"]:
            kwargs["outputs"] = [file.cleancopy() for file in task["kwargs"]["outputs"]]
        # (A lost file cannot be opened, not even to write it again.)
        for gone in filter(lost, map(self._path, outputs)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(gone)
        number = self._first.setdefault(task["id"], task["id"])
        logger.warning("a node of the pool was lost; app %s (%s) runs again", number, task["func_name"])
        self.again.append(number)
        maker = dfk.submit(
            task["func"],
            app_args=args,
            executors=[task["executor"]],
            cache=False,
            ignore_for_cache=[],
            app_kwargs=kwargs,
            join=task["join"],
        )
        self._first[maker.tid] = number
        for file in outputs:
            self._makers[self._path(file)] = maker
        return maker

    def _source(self, dfk: Any) -> Callable[[File], Any]:
        """An input as it is, or the future of the app that makes it again."""

        def source(file: File) -> Any:
            path = self._path(file)
            maker = self._make(dfk, path) if self._is_missing(path) else None
            futures = [] if maker is None else [one for one in maker.outputs if self._path(one.file_obj) == path]
            return futures[0] if futures else file

        return source

    def _made(self, dfk: Any) -> dict[str, Record]:
        """Each file, and the app that made it last."""
        ended = [task for task in list(dfk.tasks.values()) if task["app_fu"].done()]
        well = [task for task in ended if task["app_fu"].exception() is None]
        return {self._path(file): task for task in well for file in _outputs(task)}

    def _results_missing(self, dfk: Any) -> set[str]:
        """Outputs that are lost, or that are missing and that no app reads (such an app may have removed them)."""
        if self._losses.settled() <= self._at_start:
            return set()
        read = {self._path(file) for task in list(dfk.tasks.values()) for file in _inputs(task)}
        missing = {path for path in self._made(dfk) if self._is_missing(path)}
        return {path for path in missing if lost(path) or path not in read}

    def _path(self, file: File) -> str:
        return str(self._directory / file.filepath)

    def _is_missing(self, path: str) -> bool:
        return not os.path.lexists(path) or lost(path)


def _inputs(task: Record) -> list[File]:
    """(`inputs`, and each file that is an argument.)"""
    named = {name: value for name, value in task["kwargs"].items() if name not in ("outputs", "stdout", "stderr")}
    return list(_files([*task["args"], *named.values()]))


def _outputs(task: Record) -> list[File]:
    return list(_files(task["kwargs"].get("outputs", [])))


def _files(value: Any) -> Iterator[File]:
    if isinstance(value, DataFuture):
        value = value.file_obj
    if isinstance(value, File):
        if value.scheme == "file":
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _files(one)


def _replaced(value: Any, source: Callable[[File], Any]) -> Any:
    """A copy with another source for each file."""
    if isinstance(value, File):
        return source(value) if value.scheme == "file" else value
    if isinstance(value, dict):
        return {name: _replaced(one, source) for name, one in value.items()}
    return type(value)(_replaced(one, source) for one in value) if type(value) in (list, tuple) else value
