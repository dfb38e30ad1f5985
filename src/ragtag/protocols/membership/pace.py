"""What membership measures and rations: round trips, allowances, replays, its own health."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_RECENT = 8
INITIAL_RTO_S = 1.0
"""The timeout before anything was measured (RFC 6298, section 2.1)."""
_WINDOW = 4096
"""Numbers that a replay window spans. A sender numbers its datagrams to all members: a hundred periods'
worth."""


@dataclass(slots=True)
class RoundTrip:
    """Smoothed round trip and retransmission timeout of one path (RFC 6298, section 2).

    Each attempt has its own number, and late answers count, too. So no sample is ambiguous (Karn's problem
    does not arise), and a path that has become slower shows it without a back-off.

    rto_s: how long an answer may take: at least half as long again as it typically does, and at most a few
        times the quickest of the last answers. One that its sender slept on is no round trip, and a mean
        would remember it for long.
    """

    srtt_s: float = 0.0
    var_s: float = 0.0
    rto_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def measured(self) -> bool:
        """Whether there has been a sample."""
        return self.srtt_s > 0

    def sample(self, took_s: float) -> None:
        """An answer took ``took_s``."""
        took_s = max(took_s, 1e-6)
        self.recent_s.append(took_s)
        if not self.measured:
            self.srtt_s, self.var_s = took_s, took_s / 2
        else:
            self.var_s += (abs(took_s - self.srtt_s) - self.var_s) / 4
            self.srtt_s += (took_s - self.srtt_s) / 8
        typical_s = max(self.srtt_s + 4 * self.var_s, 1.5 * self.srtt_s)
        self.rto_s = min(typical_s, _RECENT * min(self.recent_s))


@dataclass(slots=True)
class Allowance:
    """A token bucket: ``rate_per_s`` on average, one second's worth (at least ``burst``) at once."""

    rate_per_s: float
    burst: float = 8.0
    level: float = -1.0
    at_s: float = 0.0

    def take(self, now_s: float, count: int = 1) -> bool:
        """Whether one more is allowed now, or so many."""
        full = max(self.burst, self.rate_per_s)
        if self.level < 0:
            self.level = full
        else:
            self.level = min(full, self.level + (now_s - self.at_s) * self.rate_per_s)
        self.at_s = now_s
        if self.level < count:
            return False
        self.level -= count
        return True


@dataclass(slots=True)
class ReplayWindow:
    """Which of a sender's numbers were seen, in a sliding window (RFC 4303, section 3.4.3)."""

    highest: int = 0
    seen: int = 0

    def fresh(self, number: int) -> bool:
        """Whether ``number`` (from 1) is new; it is then marked as seen."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = ((self.seen << ahead) | 1) & ((1 << _WINDOW) - 1) if ahead < _WINDOW else 1
            self.highest = number
            return True
        if ahead <= -_WINDOW or number < 1 or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


@dataclass(slots=True)
class Health:
    """How much this peer doubts itself (Lifeguard, section IV-A: local health multiplier).

    The score grows when no member answers, not even those asked to help, and when this peer is accused. It
    falls with each answer. The peer waits ``1 + score`` times as long before it accuses others.
    """

    score: int = 0
    score_max: int = 4

    @property
    def factor(self) -> float:
        """What this peer's timeouts are multiplied by."""
        return 1.0 + self.score

    def worse(self) -> None:
        """A sign that the trouble is here."""
        self.score = min(self.score_max, self.score + 1)

    def better(self) -> None:
        """A sign that it is not."""
        self.score = max(0, self.score - 1)
