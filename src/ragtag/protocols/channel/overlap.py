"""For how long a peer goes on after it has begun a round, before it asks what that came to.

An average that local steps overlap with is taken over some steps later. Until then nobody waits for it, so
the round may wait for others at no cost. When that is cannot be typed in: it is so many steps, of which each
takes as long as it takes here. So it is measured, as the time from a round's beginning until its trainer
first asks for it.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 8
"""The shortest of so many recent times counts: the trainer may be as quick again."""


class Overlap:
    """What a peer measures of one channel, whose rounds follow one another."""

    def __init__(self) -> None:
        self._begun_s = math.nan
        self._went_on_s: deque[float] = deque(maxlen=WINDOW)

    def begins(self, now_s: float) -> float:
        """A round begins: for how long its trainer will go on, at least (seconds; 0: not known)."""
        self._begun_s = now_s
        return min(self._went_on_s, default=0.0)

    def asked(self, now_s: float) -> None:
        """The trainer asks whether the round is over, or waits for it. The first time counts."""
        if not math.isnan(self._begun_s):
            self._went_on_s.append(now_s - self._begun_s)
            self._begun_s = math.nan
