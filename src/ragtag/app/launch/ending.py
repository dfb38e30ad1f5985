"""How peers are ended."""

from __future__ import annotations

import signal

from ragtag.app.launch.process import KILL_S


class Ending:
    """Which signal is due when: SIGINT at once, SIGTERM and SIGKILL to those that are still there later.

    Pure. grace_s: how long peers may take to end after SIGINT, and again after SIGTERM.
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
