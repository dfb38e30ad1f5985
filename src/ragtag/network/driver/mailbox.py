"""Calls from other threads to the driver's thread, and the futures that answer them."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ragtag.core.errors import Error
from ragtag.core.types import Met, Outcome
from ragtag.protocols.node import Node


class DriverFailed(Error, RuntimeError):
    """The driver's thread has ended on an error; nothing is averaged any more."""


class Mailbox:
    """Functions that wait for the driver's thread to call them; each one wakes it.

    closed: whether the thread takes no calls, so that what is put fails at once.
    failure: the error that ended the thread, if one did.
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
        """Have the thread call ``function(now_s)``.

        Where the thread has ended, ``future`` fails with DriverFailed; without a future it is raised.
        """
        if self.closed:
            error = self.error("the driver")
            if future is not None:
                future.set_exception(error)
                return
            raise error
        self._calls.append((function, future))
        if self.closed:  # the thread ended after the first look
            self._drop()
            return
        with contextlib.suppress(OSError):  # full: the thread is about to wake anyway; closed: it has ended
            self._wake_out.send(b"x")

    def run(self, now_s: float) -> None:
        """Call the functions that wait (in the driver's thread)."""
        while self._calls:
            self._calls.popleft()[0](now_s)

    def woken(self) -> None:
        """Take the bytes that woke the thread, so that it can sleep again."""
        self._wake_in.recv(4096)

    def end(self) -> None:
        """The thread has ended: calls that wait fail, lest they wait for ever."""
        self.closed = True
        self._drop()

    def error(self, who: str) -> DriverFailed:
        """The error that says why nothing is called any more."""
        return DriverFailed(f"{who} has ended: {self.failure or 'it was closed, as the crew was left'}")

    def release(self) -> None:
        """Give the sockets back."""
        self._wake_in.close()
        self._wake_out.close()

    def _drop(self) -> None:
        with contextlib.suppress(IndexError):  # both threads may empty the queue at once
            while True:
                _, future = self._calls.popleft()
                if future is not None and not future.done():
                    future.set_exception(self.error("the driver"))


class Promises:
    """Futures of rounds (by channel), of meetings (by number) and of newer rounds (by channel).

    Only the driver's thread uses it.
    """

    def __init__(self) -> None:
        self._outcomes: dict[int, Future[Outcome]] = {}
        self._meetings: dict[int, Future[Met]] = {}
        self._newer: dict[int, list[Future[bool]]] = {}

    def outcome(self, channel: int, future: Future[Outcome]) -> bool:
        """Promise a round's outcome. ``False``: the future fails, as the channel's last round is not done."""
        if channel in self._outcomes:
            future.set_exception(RuntimeError(f"a round of channel {channel} is not done yet"))
            return False
        self._outcomes[channel] = future
        return True

    def under_way(self, channel: int) -> Future[Outcome] | None:
        """What a channel's round that is not done yet was promised (``None``: there is none)."""
        return self._outcomes.get(channel)

    def meeting(self, number: int, future: Future[Met]) -> bool:
        """Promise what a meeting brings. ``False``: the future fails, as that meeting is not over."""
        if number in self._meetings:
            future.set_exception(RuntimeError(f"meeting {number} is not over yet"))
            return False
        self._meetings[number] = future
        return True

    def newer(self, channel: int, future: Future[bool]) -> None:
        """Promise to tell once a round of a channel is known that this peer has not begun."""
        waiting = self._newer.setdefault(channel, [])
        waiting[:] = [other for other in waiting if not other.cancelled()] + [future]

    def done(self, outcome: Outcome) -> None:
        """A round has ended: its future has the outcome."""
        future = self._outcomes.pop(outcome.channel, None)
        if future is not None:
            future.set_result(outcome)

    def met(self, met: Met) -> None:
        """A meeting is over: its future has what it brought."""
        future = self._meetings.pop(met.number, None)
        if future is not None:
            future.set_result(met)

    def misused(self, future: Future[Any], error: Exception) -> None:
        """What was asked could not be begun: its future fails and is forgotten."""
        for table in (self._outcomes, self._meetings):
            for number in [number for number, other in table.items() if other is future]:
                del table[number]
        future.set_exception(error)

    def look(self, node: Node) -> None:
        """Answer those that wait for a newer round, where the node knows of one."""
        for channel in [channel for channel in self._newer if node.newer(channel)]:
            self._tell(channel, True)

    def lose_seat(self) -> None:
        """This peer takes part in nothing any more: all that wait for a newer round get ``False``."""
        for channel in list(self._newer):
            self._tell(channel, False)

    def fail(self, error: Exception) -> None:
        """The thread has ended: every future that is not done fails."""
        futures: list[Future[Any]] = [
            *self._outcomes.values(),
            *self._meetings.values(),
            *(future for waiting in self._newer.values() for future in waiting),
        ]
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _tell(self, channel: int, newer: bool) -> None:
        for future in self._newer.pop(channel):
            if future.set_running_or_notify_cancel():
                future.set_result(newer)
