"""How much of what the other peers sent is in a peer's average."""

from __future__ import annotations

import numpy as np

from ragtag.core.types import Outcome, PeerId


def others_in(outcome: Outcome, me: PeerId) -> frozenset[PeerId]:
    """The other peers whose values are in any chunk of an average, or in any block of gathered rows."""
    bits = int(np.bitwise_or.reduce(outcome.heard)) if len(outcome.heard) else 0
    at = (i for i in range(bits.bit_length()) if bits >> i & 1)
    return frozenset(outcome.members[i] if outcome.members else i for i in at) - {me}


def arrived(outcome: Outcome, me: PeerId, alone: bool = False) -> float:
    """The share of what the others sent that a round has averaged, 0 to 1. It counts the crew, not oneself.

    For each chunk: how many of the others are in it, where an average came (else own values were kept), of
    those that were expected, which are the peers that the round waited for and any that came unexpected. The
    same holds for a group, of its members, and for gathered rows, of blocks instead of chunks. From a central
    state it is the share of blocks that came. Where nobody else was expected there is nothing to count: 1 in
    a crew of one, 0 for a peer that is ``alone`` in a larger one.
    """
    if alone:
        return 0.0
    expected = (others_in(outcome, me) | set(outcome.waited_for)) - {me}
    if outcome.stale is not None or not expected:
        return float(outcome.averaged.mean())
    own = outcome.members.index(me) if outcome.members else me
    others = outcome.heard[outcome.averaged] & ~np.uint64(1 << own)
    return float(np.unpackbits(others.view(np.uint8)).sum()) / (len(outcome.heard) * len(expected))
