"""Whether a peer is alone: it hears of no other peer of its crew, though some have said no good-bye."""

from __future__ import annotations

from collections.abc import Collection

from ragtag.core.arrival import others_in
from ragtag.core.types import Noted, Outcome, PeerId

ALONE_AFTER = 3
"""Rounds without others in a row after which a peer calls itself alone. One or two are a peer that was early
or late, or a group that did not come together."""


class Company:
    """What one peer has seen of the others.

    rounds: so many rounds had nobody else's values while there were others.
    in_a_row: so many of these were the last ones; since_s: when they began.

    A peer that is cut off cannot tell whether the others have died. So one that was there counts until it
    has said good-bye; who was declared dead has not.
    """

    def __init__(self) -> None:
        self._seen: set[PeerId] = set()
        self._dead: set[PeerId] = set()
        self._gone: set[PeerId] = set()
        self.rounds = self.in_a_row = 0
        self.since_s = 0.0

    @property
    def others(self) -> frozenset[PeerId]:
        """The other peers that were there, and have not said good-bye."""
        return frozenset(self._seen - self._gone)

    @property
    def alone(self) -> bool:
        """Whether the last round had nobody else's values, although there are others."""
        return self.in_a_row > 0

    @property
    def said(self) -> bool:
        """Whether this has been said to be so."""
        return self.in_a_row >= ALONE_AFTER

    def noted(self, note: Noted) -> None:
        """What this peer has noted of another one (in the driver's thread)."""
        if note.what == "declared dead":
            self._dead.add(note.peer)
        elif note.what in ("takes part", "back"):
            self._dead.discard(note.peer)
            self._gone.discard(note.peer)
        elif note.what == "has left" or (note.what == "left" and note.peer not in self._dead):
            self._gone.add(note.peer)

    def round(self, now_s: float, me: PeerId, live: Collection[PeerId], outcome: Outcome) -> Noted | None:
        """A round is over. live: the peers believed to take part. Returns what is to be said, if anything."""
        came = others_in(outcome, me)
        self._seen |= came | (set(live) - {me})
        # at a central state a peer may own all blocks, and hear nothing that its average shows
        met = came or (outcome.stale is not None and len(live) > 1)
        if met or not self.others:
            was_said, rounds, self.in_a_row = self.said, self.in_a_row, 0
            if not was_said:
                return None
            how = f"after {rounds} rounds and {now_s - self.since_s:.1f} s"
            who = f"peers {_list(came)} are heard" if came else "the others have left"
            return Noted("no longer alone", me, f"{how}: {who}")
        if not self.in_a_row:
            self.since_s = now_s - outcome.total_s
        self.rounds += 1
        self.in_a_row += 1
        if self.in_a_row != ALONE_AFTER:
            return None
        lost = f"no peer is heard, of {_list(self.others)} that were there"
        return Noted("alone", me, f"since {self.since_s:.1f} s: {lost}")


def _list(peers: Collection[PeerId]) -> str:
    first = ", ".join(map(str, sorted(peers)[:8]))
    return first + (", ..." if len(peers) > 8 else "")
