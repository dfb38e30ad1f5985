"""Deadlines from measurement: a quantile of recent completion times, with head-room.

No typed-in second: a deadline without history starts from a measured probe. What was cut off by a
deadline is a censored sample, so a miss lengthens the next deadline (as a TCP sender backs its timer
off, RFC 6298 section 5.5), and a completion that is seen later corrects it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median


def require_deadline(deadline_s: float | None) -> None:
    """Raise ValueError where a bound that was given leaves no time (``None``: none was)."""
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(
            f"deadline_s is {deadline_s}: every round would be over as it begins; give seconds above 0, or "
            "leave it out, and deadlines come from measurement"
        )


@dataclass(slots=True)
class Deadline:
    """How long to wait for something that happens again and again.

    probe_s: a measured first guess.
    quantile, headroom: a deadline is ``headroom`` times the quantile of the last ``window`` samples.
    floor_s: resolution of the line and of the scheduler, as it is measured now (a deadline below it would cut
        off what has already come).
    backoff: growth on each miss in a row, at most ``backoff_max`` in all: one step by default, for what came
        late teaches more than a miss, and peers that back off far wait for each other in turn.
    """

    probe_s: float
    quantile: float = 0.9
    headroom: float = 1.5
    window: int = 32
    floor_s: float = 0.0
    backoff: float = 1.5
    backoff_max: float = 1.5
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
        return ranked[min(len(ranked) - 1, int(self.quantile * len(ranked)))]

    def longest_s(self) -> float:
        """The longest that it has taken of late, or the probe where there is no history."""
        return max(self._samples, default=self.probe_s)

    def quickest_s(self, last: int) -> float:
        """The least of so many samples that came last, or the probe where there is none."""
        return min(list(self._samples)[-last:], default=self.probe_s)

    def budget_s(self, patience: float = 1.0) -> float:
        """How long to wait this time, with ``patience`` times the head-room."""
        return max(self.floor_s, self.typical_s() * self.headroom * patience) * self._factor

    def middle_s(self) -> float:
        """How long it takes in half of the cases, with head-room."""
        return max(self.floor_s, median(self._samples or [self.probe_s]) * self.headroom)

    def completed(self, took_s: float) -> None:
        """Everything that was waited for came, ``took_s`` after the wait began."""
        self._push(took_s)
        self._factor = 1.0

    def late(self, took_s: float, most_s: float = 0.0) -> None:
        """Something came after its deadline: one straggler teaches at most twice what is typical, or
        ``most_s`` where that is longer.
        """
        self._push(min(took_s, max(most_s, 2.0 * self.typical_s())))

    def missed(self) -> None:
        """The deadline passed and something had not come."""
        self._factor = min(self.backoff_max, self._factor * self.backoff)

    def _push(self, took_s: float) -> None:
        self._samples.append(max(0.0, took_s))
        if len(self._samples) > self.window:
            self._samples.popleft()
