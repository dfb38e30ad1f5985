"""What stays among few, where a crew has more seats than can average directly.

All to all costs n^2 messages. Up to 64 seats that is little; beyond, peers meet a few others each, and the
notice board is one for every 64 seats: a *district*. What a peer sends then does not grow with the crew.
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
    """Whom a peer meets in a large crew: on the ring of all, those at distances 1, 2, 4, ... both ways.

    Where peers see the same others, they are each other's partners, at most ``2 log2(n)``, and what one of
    them says first is never further than ``log2(n)`` meetings from anybody (as in Chord: Stoica et al.,
    SIGCOMM 2001, section 4.3).
    """
    ring = sorted({*others, me})
    n, at = len(ring), ring.index(me)
    found: set[PeerId] = set()
    step = 1
    while step < n:
        found |= {ring[(at + step) % n], ring[(at - step) % n]}
        step *= 2
    return frozenset(found - {me})
