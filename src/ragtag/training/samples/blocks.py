"""How an epoch is cut into blocks, and where in it a peer goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ragtag.training.samples.claims import Span
from ragtag.training.samples.ledger import Mask

LEASE_S = 1.0
"""A peer claims about so much of its work ahead."""


@dataclass(frozen=True, slots=True)
class Deck:
    """An epoch's blocks, the same on all peers and in all epochs.

    sizes: samples of each block.
    arcs: the blocks ``[start, stop)`` where each peer begins.
    exclusive: the arcs of live peers are theirs alone.
    identity: 32 bits that differ where decks do.
    """

    sizes: tuple[int, ...]
    arcs: tuple[Span, ...]
    exclusive: bool
    identity: int

    def arc(self, peer: int) -> Span:
        """Where a peer begins; nowhere, if it came when the crew had grown."""
        return self.arcs[peer] if peer < len(self.arcs) else (0, 0)

    def start(self, me: int, cursor: int, free: Mask) -> int:
        """The block to claim next: ``cursor``, or the beginning of one's arc, or the largest gap's middle.

        free: bool ``[blocks]``, at least one.
        """
        if 0 <= cursor < len(free) and free[cursor]:
            return cursor
        begin, end = self.arc(me)
        if begin < end and free[begin]:
            return begin
        edges = np.flatnonzero(np.diff(np.concatenate(([0], free, [0]))))
        starts, stops = edges[::2], edges[1::2]
        largest = int(np.argmax(stops - starts))
        a, b = int(starts[largest]), int(stops[largest])
        return a if b - a == 1 else (a + b) // 2


@dataclass(slots=True)
class Pace:
    """How fast this peer draws and is answered, as it is measured: moving means, in seconds.

    batch: how many blocks it draws at once, one right after the other, before it computes.
    """

    between_s: float = 0.0
    reach_s: float = 0.0
    batch: int = 1
    _drawn: int = 0
    _drawn_s: float = 0.0

    def drew(self, took_s: float) -> None:
        """A block was drawn that long after the one before."""
        self._drawn, self._drawn_s = self._drawn + 1, self._drawn_s + took_s
        if self._drawn >= self.batch:
            self.between_s = _mean(self.between_s, max(1e-6, self._drawn_s / self._drawn))
            self._drawn, self._drawn_s = 0, 0.0

    def reached(self, took_s: float) -> None:
        """All had acknowledged a post after that time."""
        self.reach_s = _mean(self.reach_s, max(0.0, took_s))

    def blocks(self, lease_s: float, left: int, sharers: int) -> int:
        """How many blocks to claim at once, of ``left`` that ``sharers`` peers share (0: nobody else may).

        Half a lease (a batch at least), and towards the end the share of guided self-scheduling, but no less
        than is used up while others are asked, which now and then takes twice as long as it does on average.
        """
        rate = 1.0 / self.between_s if self.between_s else 0.0
        half = max(2 * self.batch, int(rate * lease_s)) // 2
        share = left // (2 * sharers) if sharers else half
        return max(1, min(half, max(share, int(2 * rate * self.reach_s) + 1)))


def _mean(before: float, sample: float) -> float:
    return before + (sample - before) / 4 if before else sample
