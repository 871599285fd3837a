"""Signals to the executor."""

from __future__ import annotations

import contextlib
import signal
import socket


class Signals:
    """Makes SIGINT, SIGTERM and SIGHUP readable from a descriptor."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> Signals:
        self._ours, its = socket.socketpair()
        self._its = its
        for end in (self._ours, its):
            end.setblocking(False)
        self.descriptor = self._ours.fileno()
        self._arrived: list[int] = []
        self._before = {number: signal.signal(number, lambda *_: None) for number in self.NUMBERS}
        self._wakeup = signal.set_wakeup_fd(its.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._ours.close()
        self._its.close()

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._arrived += [number for number in self._ours.recv(64) if number in self.NUMBERS]

    def drain(self) -> list[int]:
        some, self._arrived = self._arrived, []
        return some
