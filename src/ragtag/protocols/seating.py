"""A newcomer's way to a seat."""

from __future__ import annotations

import math

from msgspec.structs import replace

from ragtag.protocols.roster import Card, Roster


class Seating:
    """Hear who is there, claim a seat that is free, wait whether anybody objects, or claim another one.

    ``look`` whenever something has changed, and at ``until_s``. card: what the newcomer tells of itself.
    """

    def __init__(self, roster: Roster, card: Card, now_s: float, period_s: float) -> None:
        self._roster, self.card = roster, card
        self.until_s = now_s + 2 * period_s  # the rest of a long list of members
        self.settled = False

    @property
    def claimed(self) -> bool:
        """Whether a seat was claimed (it may be contested)."""
        return self.card.seat >= 0

    def look(self, now_s: float, period_s: float, n: int) -> Card | None:
        """See how things stand; a card is to be told to the crew, of ``n`` members, at once.

        Raises:
            RuntimeError: no seat is free.
        """
        if self.settled:
            return None
        if self.claimed and not self._roster.contested():
            self.settled = now_s >= self.until_s
            return None
        if not self.claimed and now_s < self.until_s:
            return None
        self.card = self._next()
        self.until_s = now_s + (2 + math.log2(1 + n)) * period_s  # as long as news takes to reach all
        return self.card

    def _next(self) -> Card:
        """The next claim. Where nobody has a seat yet the first one to have one begins the crew."""
        holders = [holder for holder in self._roster.seats.values() if holder.live]
        founded, seed = self.card.founded, self.card.seed
        if holders:
            first = min(holders, key=lambda holder: holder.epoch).card
            founded, seed = first.founded, first.seed
        seat, term = self._roster.free()
        return replace(self.card, seat=seat, term=term, averaging=not holders, founded=founded, seed=seed)
