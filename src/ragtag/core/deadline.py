"""Deadlines from measurement: a quantile of recent completion times, with head-room.

No typed-in second: a deadline without history starts from a measured probe. What was cut off by a
deadline is a censored sample, so a miss lengthens the next deadline (as a TCP sender backs its timer
off, RFC 6298 section 5.5), and a completion that is seen later corrects it.

A quantile of few samples says little: half of the times the next one is above the only one so far. So it
is stretched until the next wait exceeds it as rarely as it exceeds the quantile of a full window. That
depends on how waits scatter, which few samples do not tell either. Waits for others whose steps vary are
differences, often near 0, and deviate by .5 to 1 of their mean; exponential ones deviate by 1, and have a
closed form. (RFC 6298 section 2.2 presumes a deviation of half the first measurement, and comes to 3, 2.5 and
2.1 times it after one to three alike.)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import cache


@dataclass(slots=True)
class Deadline:
    """How long to wait for something that happens again and again.

    probe_s: a measured first guess. quantile, headroom: a deadline is ``headroom`` times the quantile
    of the last ``window`` samples. floor_s: resolution of the line and of the scheduler, as it is
    measured now (a deadline below it would cut off what has already come). backoff: growth on each
    miss in a row, at most ``backoff_max`` in all: one step by default, for what came late teaches more
    than a miss, and peers that back off far wait for each other in turn. varied: what is waited for is others
    whose steps vary, rather than an answer at once, so that the quantile of few samples is stretched.
    """

    probe_s: float
    quantile: float = 0.9
    headroom: float = 1.5
    window: int = 32
    floor_s: float = 0.0
    backoff: float = 1.5
    backoff_max: float = 1.5
    varied: bool = False
    _samples: deque[float] = field(default_factory=deque)
    _factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.probe_s > 0:
            raise ValueError(f"deadline: the probe measured {self.probe_s} s; it must be above 0")

    def typical_s(self) -> float:
        """The quantile itself, or the probe where there is no history."""
        if not self._samples:
            return self.probe_s
        ranked = sorted(self._samples)
        return ranked[_rank(len(ranked), self.quantile) - 1]

    def budget_s(self) -> float:
        """How long to wait this time."""
        headroom = self.headroom
        if self.varied:
            headroom *= stretch(len(self._samples), self.window, self.quantile)
        return max(self.floor_s, self.typical_s() * headroom) * self._factor

    def completed(self, took_s: float) -> None:
        """Everything that was waited for came, ``took_s`` after the wait began."""
        self._push(took_s)
        self._factor = 1.0

    def late(self, took_s: float) -> None:
        """Something came after its deadline: at most twice what is typical is learned from one straggler."""
        self._push(min(took_s, 2.0 * self.typical_s()))

    def missed(self) -> None:
        """The deadline passed and something had not come."""
        self._factor = min(self.backoff_max, self._factor * self.backoff)

    def _push(self, took_s: float) -> None:
        self._samples.append(max(0.0, took_s))
        if len(self._samples) > self.window:
            self._samples.popleft()


def stretch(n: int, window: int, quantile: float) -> float:
    """By how much the quantile of ``n`` samples is multiplied to be exceeded as rarely as that of ``window``.

    At least 1; 1 for a probe, which is a guess rather than a sample. By default 7.3, 2.6, 1.8 and 1.4 after
    one to four samples, and 1 to 1.2 from five on.
    """
    return _stretch(n, window, quantile) if 0 < n < window else 1.0


@cache
def _stretch(n: int, window: int, quantile: float) -> float:
    goal = _exceeded(window, _rank(window, quantile), 1.0)
    low, high = 1.0, 1.0
    while _exceeded(n, _rank(n, quantile), high) > goal:
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeded(n, _rank(n, quantile), middle) > goal else (low, middle)
    return high


def _rank(n: int, quantile: float) -> int:
    """Which of ``n`` samples, by size, from 1 on, is their quantile."""
    return min(n, 1 + int(quantile * n))


def _exceeded(n: int, rank: int, times: float) -> float:
    """How probably one more wait exceeds ``times`` the ``rank``-th of ``n``, by size; all are exponential.

    Gaps between ordered waits are independent: while j of n have ended, the next one ends at a rate of n - j,
    and the wait outlives each gap, stretched, with probability (n - j) / (n - j + times).
    """
    return math.prod((n - j) / (n - j + times) for j in range(rank))
