"""How long a suspect has to refute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ragtag.protocols.membership.wire import ACCUSERS_MAX

_UNCONFIRMED = 2.5
"""A suspicion that no other member shares lasts so many times as long."""


def confirmations_wanted(n: int) -> int:
    """After how many further accusers a suspicion in a crew of ``n`` lasts its shortest time."""
    return max(0, min(3, n - 3))


def shortest_periods(n: int) -> float:
    """The least time to refute, in protocol periods: a rumour must reach the suspect and come back.

    It grows with the logarithm of the crew, as a rumour's time to reach all members does (SWIM, section 4.2;
    there a constant times log n).
    """
    return 2.0 + math.log(max(n, 2)) / math.log(4.0)


@dataclass(slots=True)
class Suspicion:
    """An accusation of a member.

    The time to refute falls with each independent accuser from its longest to its shortest, as the logarithm
    of their number (Lifeguard, section IV-B, equation for SuspicionTimeout).

    since_s: since when this peer knows.
    accusers: hashes of the accusers' names.
    wanted: further accusers after which the time is shortest.
    periods: the shortest time, in protocol periods.
    certain: another member has declared it dead: the time is shortest.
    """

    since_s: float
    accusers: dict[int, None]
    wanted: int
    periods: float
    certain: bool = False

    def add(self, accusers: Sequence[int]) -> bool:
        """Add accusers. Returns whether any of them is new and counts."""
        before = len(self.accusers)
        for accuser in accusers:
            if len(self.accusers) < min(ACCUSERS_MAX, self.wanted + 1):
                self.accusers[accuser] = None
        return len(self.accusers) > before

    def until_s(self, period_s: float, doubt: float, rto_s: float) -> float:
        """When the suspect is declared dead. Its own round trip is added, as it may be far away.

        doubt: by how many times this peer's own trouble prolongs its accusations (``Health.factor``), 1 or
            more. It prolongs none that another member has declared.
        """
        shortest_s = self.periods * period_s
        if self.certain:
            return self.since_s + 2 * rto_s + shortest_s
        share = 0.0
        if self.wanted:
            further = max(0, min(len(self.accusers) - 1, self.wanted))
            share = 1.0 - math.log(further + 1) / math.log(self.wanted + 1)
        return self.since_s + 2 * rto_s + doubt * shortest_s * (1.0 + (_UNCONFIRMED - 1.0) * share)
