"""Whom a peer talks to in a crew with more seats than can average directly.

All to all costs n^2 messages, which is little up to 64 seats. In larger crews each peer meets a few others,
and every 64 seats, a *district*, have a notice board. So what a peer sends does not grow with the crew.
"""

from __future__ import annotations

from collections.abc import Collection

from ragtag.core.types import PEERS_MAX, PeerId


def district_of(peer: PeerId) -> int:
    """The district that a seat belongs to."""
    return peer // PEERS_MAX


def districts(n: int) -> int:
    """How many districts a crew of ``n`` seats has."""
    return -(-n // PEERS_MAX)


def partners(me: PeerId, others: Collection[PeerId]) -> frozenset[PeerId]:
    """The peers that a peer of a large crew meets: those at distances 1, 2, 4, ... both ways on the ring of
    all.

    Peers that see the same others are each other's partners. Each has at most ``2 log2(n)``, and news reach
    every peer in ``log2(n)`` meetings (as in Chord: Stoica et al., SIGCOMM 2001, section 4.3).
    """
    ring = sorted({*others, me})
    n, at = len(ring), ring.index(me)
    found: set[PeerId] = set()
    step = 1
    while step < n:
        found |= {ring[(at + step) % n], ring[(at - step) % n]}
        step *= 2
    return frozenset(found - {me})
