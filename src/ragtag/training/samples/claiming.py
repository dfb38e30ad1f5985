"""Which blocks a peer may claim, and which of them it claims next."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ragtag.training.samples.blocks import Deck, Pace
from ragtag.training.samples.claims import Span, overlap, without
from ragtag.training.samples.ledger import Ledger, Mask, Process


def enterable(deck: Deck, ledger: Ledger, epoch: int, others: Collection[int]) -> Mask:
    """bool ``[n_blocks]``: what of an epoch is claimed by nobody, nor in an exclusive arc of ``others``."""
    free = ~ledger.claimed(epoch)
    if deck.exclusive:
        for peer in others:
            start, stop = deck.arc(peer)
            free[start:stop] = False
    return free


def alone(deck: Deck, ledger: Ledger, who: Process, spans: Sequence[Span]) -> bool:
    """Whether blocks of one epoch are in ``who``'s exclusive arc, where nobody else has claimed anything."""
    first = spans[0][0] // ledger.n_blocks * ledger.n_blocks
    start, stop = deck.arc(who[0])
    arc = [(first + start, first + stop)]
    if not deck.exclusive or without(spans, arc):
        return False
    others = (section for other, section in ledger.sections.items() if other != who)
    return not any(overlap(arc, (*section.firm, *section.pending)) for section in others)


def next_claim(
    deck: Deck, pace: Pace, me: int, free: Mask, cursor: int, present: int, lease_s: float
) -> Span:
    """What peer ``me`` claims of an epoch; blocks count from the epoch's first.

    free: bool ``[n_blocks]``, at least one.
    cursor: where it goes on, if it can.
    present: how many peers share what is left.
    """
    (a, b), left = deck.arc(me), int(free.sum())
    mine_only = deck.exclusive and left == int(free[a:b].sum())
    want = pace.blocks(lease_s, left, 0 if mine_only else present)
    start = deck.start(me, cursor, free)
    stop = start + 1
    while stop < len(free) and free[stop] and stop - start < want:
        stop += 1
    return start, stop
