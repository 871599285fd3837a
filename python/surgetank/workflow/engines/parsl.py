"""Parsl's staging provider: `storage_access=[SurgetankStaging()]` of an executor on this machine, in a program that
`surgetank run` starts.

Parsl's graph grows while the program runs: the readers of a file are known only when the program ends. So nothing is
derived from it. Files that the program itself calls temporary are kept from the store. They are removed at the
program's end if every app succeeded; otherwise they go to the store, as the next attempt may need them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parsl.data_provider.files import File  # type: ignore[import-untyped, unused-ignore]
from parsl.data_provider.staging import Staging  # type: ignore[import-untyped, unused-ignore]
from parsl.providers import LocalProvider  # type: ignore[import-untyped, unused-ignore]
from parsl.utils import RepresentationMixin  # type: ignore[import-untyped, unused-ignore]

from ..agent import Agent, mounted
from ..graph import matcher
from ..importers.paths import inside
from ..problem import Problem

logger = logging.getLogger(__name__)
# One command prefetches all inputs that are requested within this time.
GATHER_S = 0.05


class SurgetankStaging(Staging, RepresentationMixin):  # type: ignore[misc, unused-ignore]
    """Files below the current directory, by their paths (Parsl's scheme `file`).

    `temporary`: globs of files that are not results. `durable`: globs of outputs whose DataFuture completes only
    when the store has them, verified; apps that read them wait for that, too.
    """

    def __init__(self, temporary: Sequence[str] = (), durable: Sequence[str] = ()) -> None:
        self.temporary, self.durable = temporary, durable
        self._directory = Path.cwd()
        self._temporary = [matcher(glob) for glob in temporary]
        self._durable = [matcher(glob) for glob in durable]
        self._held: set[str] = set()
        self._asked: set[str] = set()
        self._apps: list[Any] = []
        self._agent = Agent() if mounted(".") else None
        if self._agent is None:
            logger.warning(
                "Surgetank does not serve this directory, so files stay in place; start the program with `surgetank run --`"
            )
            return
        self._inputs: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._prefetch, name="surgetank-prefetch", daemon=True).start()
        self._waiting = ThreadPoolExecutor(4, "surgetank-wait")
        # (A forked child also runs this handler, and knows of no error that ended the program.)
        self._process = os.getpid()
        atexit.register(self._finish)

    # Methods that Parsl calls.

    def can_stage_in(self, file: File) -> bool:
        return bool(file.scheme == "file")

    def can_stage_out(self, file: File) -> bool:
        return bool(file.scheme == "file")

    def stage_in(self, dm: Any, executor: str, file: File, parent_fut: Future[Any] | None) -> None:
        """Prefetches an input that no app makes; the app does not wait for it."""
        self._check(dm, executor)
        path = inside(file.filepath, self._directory)
        if self._agent is not None and parent_fut is None and path not in self._asked and not os.path.isabs(path):
            self._asked.add(path)
            self._inputs.put(path)

    def stage_out(self, dm: Any, executor: str, file: File, app_fu: Any) -> Future[File] | None:
        """Parsl calls this before the app runs."""
        self._check(dm, executor)
        path = inside(file.filepath, self._directory)
        if self._agent is None or os.path.isabs(path):
            return None
        self._apps.append(app_fu)
        if any(matches(path) for matches in self._temporary):
            # The hint precedes the app, because a closed file goes to the store at once.
            refused = self._agent.hint([{"path": str(self._directory / path), "mode": "keep"}])
            if refused is None:
                self._held.add(path)
            else:
                logger.warning("the agent refused the hints of %s, so it is written to the store: %s", path, refused)
            return None
        if not any(matches(path) for matches in self._durable):
            return None
        stored: Future[File] = Future()
        app_fu.add_done_callback(lambda done: self._waiting.submit(self._wait, done, file, path, stored))
        return stored

    # Our own methods.

    def _check(self, dm: Any, executor: str) -> None:
        provider = getattr(dm.dfk.executors[executor], "provider", None)
        if self._agent is not None and provider is not None and not isinstance(provider, LocalProvider):
            raise Problem(
                f"the executor {executor!r} runs apps on other machines ({type(provider).__name__}), which do not have the mount",
                remedy="SurgetankStaging is for executors with a LocalProvider, and for threads",
            )

    def _wait(self, done: Any, file: File, path: str, stored: Future[File]) -> None:
        try:
            if (error := done.exception()) is not None:
                raise error
            assert self._agent is not None
            if left := self._agent.wait([str(self._directory / path)]):
                raise Problem(
                    f"{path!r} is not in the store",
                    why=left,
                    remedy=f"`surgetank why {shlex.quote(str(self._directory / path))}` shows where it is",
                    code=3,
                )
            stored.set_result(file)
        except BaseException as error:
            stored.set_exception(error)

    def _prefetch(self) -> None:
        assert self._agent is not None
        while True:
            some = [self._inputs.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    some.append(self._inputs.get(timeout=GATHER_S))
            there = [str(self._directory / path) for path in some if (self._directory / path).exists()]
            for words in self._agent.prefetch_words(there):
                with contextlib.suppress(OSError):
                    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)

    def _finish(self) -> None:
        """The program ends; Parsl has been cleaned up before, or its apps have not ended."""
        assert self._agent is not None
        if os.getpid() != self._process:
            return
        self._waiting.shutdown(wait=True)
        succeeded = all(app.done() and app.exception() is None for app in self._apps)
        # An uncaught error also ends the program: Python sets this when it reports the error.
        succeeded &= getattr(sys, "last_type", None) is None
        left = [path for path in sorted(self._held) if (self._directory / path).exists()]
        if not succeeded:
            refused = self._agent.hint([{"path": str(self._directory / path), "mode": "copy"} for path in left])
            if refused is not None:
                logger.error("not all that is left goes to the store: %s", refused)
            return
        for path in left:
            with contextlib.suppress(OSError):
                (self._directory / path).unlink()
