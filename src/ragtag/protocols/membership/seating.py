"""A newcomer's way to a seat."""

from __future__ import annotations

import math

from msgspec.structs import replace

from ragtag.protocols.membership.probe import ANNOUNCED_MAX
from ragtag.protocols.membership.roster import Card, Roster

_OBJECT_PERIODS = 2.0
"""All members are told of a claim at once, and answer with what they know; what got lost comes by gossip."""


class Seating:
    """Hear who is there, claim a seat that is free, wait whether anybody objects, or claim another one.

    ``look`` whenever something has changed, and at ``until_s``. card: what the newcomer tells of itself.
    """

    def __init__(self, roster: Roster, card: Card, now_s: float, period_s: float) -> None:
        self._roster, self.card = roster, card
        self.until_s = now_s + 2 * period_s  # the rest of a long list of members, at the latest
        self.settled = False

    @property
    def claimed(self) -> bool:
        """Whether a seat was claimed (it may be contested)."""
        return self.card.seat >= 0

    def look(self, now_s: float, period_s: float, n: int, whole: bool = False) -> Card | None:
        """See how things stand; a card is to be told to the crew, of ``n`` members, at once.

        whole: the list of members has come to its end.

        Raises:
            RuntimeError: no seat is free.
        """
        if self.settled:
            return None
        if self.claimed and not self._roster.contested():
            self.settled = now_s >= self.until_s
            return None
        if not self.claimed and not whole and now_s < self.until_s:
            return None
        self.card = self._next()
        spread = math.log2(n / ANNOUNCED_MAX) if n > ANNOUNCED_MAX else 0.0  # from those told to the others
        self.until_s = now_s + (_OBJECT_PERIODS + spread) * period_s
        return self.card

    def _next(self) -> Card:
        """The next claim. Where nobody has a seat yet the first one to have one begins the crew."""
        holders = [holder for holder in self._roster.seats.values() if holder.live]
        founded, seed = self.card.founded, self.card.seed
        if holders:
            first = min(holders, key=lambda holder: holder.epoch).card
            founded, seed = first.founded, first.seed
        lost = self._roster.rivals(self.card) if self.claimed else 0
        seat, term = self._roster.free(max(0, lost - 1))
        return replace(self.card, seat=seat, term=term, averaging=not holders, founded=founded, seed=seed)
