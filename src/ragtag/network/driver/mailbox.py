"""Calls from other threads to the driver's thread."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ragtag.core.errors import Error


class DriverFailed(Error, RuntimeError):
    """The driver's thread has ended on an error; nothing is averaged any more."""


class Mailbox:
    """Functions that wait for the driver's thread to call them; each one wakes it.

    closed: what is put fails at once. failure: what ended the thread, if an error did.
    """

    def __init__(self) -> None:
        self.closed = True
        self.failure: BaseException | None = None
        self._calls: deque[tuple[Callable[[float], None], Future[Any] | None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def __len__(self) -> int:
        return len(self._calls)

    def fileno(self) -> int:
        """Becomes readable when something was put."""
        return self._wake_in.fileno()

    def put(self, function: Callable[[float], None], future: Future[Any] | None) -> None:
        """Have ``function(now_s)`` called. Too late, ``future`` fails, or DriverFailed is raised."""
        if self.closed:
            error = self.error("the driver")
            if future is not None:
                future.set_exception(error)
                return
            raise error
        self._calls.append((function, future))
        if self.closed:  # meanwhile
            self._drop()
            return
        with contextlib.suppress(OSError):  # full: the thread is about to wake anyway; closed: it has ended
            self._wake_out.send(b"x")

    def run(self, now_s: float) -> None:
        """Call what waits (in the driver's thread)."""
        while self._calls:
            self._calls.popleft()[0](now_s)

    def woken(self) -> None:
        """Forget what woke the thread."""
        self._wake_in.recv(4096)

    def end(self) -> None:
        """The thread has ended: what waits fails rather than wait for ever."""
        self.closed = True
        self._drop()

    def error(self, who: str) -> DriverFailed:
        """Why nothing is called any more."""
        return DriverFailed(f"{who} has ended: {self.failure or 'it was closed, as the crew was left'}")

    def release(self) -> None:
        """Give the sockets back."""
        self._wake_in.close()
        self._wake_out.close()

    def _drop(self) -> None:
        with contextlib.suppress(IndexError):  # both threads may be here
            while True:
                _, future = self._calls.popleft()
                if future is not None and not future.done():
                    future.set_exception(self.error("the driver"))
