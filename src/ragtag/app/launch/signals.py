"""Signals that come, as something to select on; and signals that are sent, to end peers."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ragtag.app.launch.process import KILL_S

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While entered: SIGINT, SIGTERM, SIGHUP and SIGCHLD make ``fd`` readable instead of acting at once.

    A signal that is ignored stays ignored (``nohup``).

    stopping: once set, the next SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, wherever the program may
        hang.

    Raises:
        RuntimeError: not entered in the main thread, which alone is told of signals.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.fd = -1
        self._write = -1
        self._came: list[int] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "peers are launched from the main thread only: no other one is told of signals"
            )
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._stop)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> list[int]:
        """The stopping signals that came since the last call; empties ``fd``."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass
        came, self._came = self._came, []
        return came

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self._came = [*self._came[:8], number]

    def _child(self, number: int, frame: FrameType | None) -> None:
        """A child ended or stopped: the wakeup says so, the loop looks."""


class Shutdown:
    """Which signal is due when: SIGINT at once, SIGTERM and SIGKILL to those that are still there later.

    It does no I/O itself.

    grace_s: how long peers may take to end after SIGINT, and again after SIGTERM.
    """

    def __init__(self, now_s: float, grace_s: float) -> None:
        self._stages = [
            (now_s, signal.SIGINT),
            (now_s + grace_s, signal.SIGTERM),
            (now_s + 2 * grace_s, signal.SIGKILL),
            (now_s + 2 * grace_s + KILL_S, None),
        ]

    @property
    def next_s(self) -> float | None:
        """When there is something to do, or ``None``: never again."""
        return self._stages[0][0] if self._stages else None

    def due(self, now_s: float) -> list[signal.Signals | None]:
        """What is to be sent by now; ``None``: SIGKILL should have ended everyone long ago."""
        due = [number for at_s, number in self._stages if at_s <= now_s]
        del self._stages[: len(due)]
        return due
