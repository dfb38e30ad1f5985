"""What a sparse replica has sent without knowing its fate: rounds' tickets, decided by what comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.tickets import Ticket
from ragtag.core.types import Bools, Gathered, PeerId


@dataclass(slots=True)
class _Sent:
    """A round's ticket: which of its fragments are undecided, and of which blocks anything came."""

    ticket: Ticket
    open: Bools
    block: NDArray[np.int64]
    none: Bools


class Undecided:
    """Commits and rolls back the tickets of ``feedback``. Each answer is (committed, restored) fragments."""

    def __init__(self, feedback: ErrorFeedback) -> None:
        self._feedback = feedback
        self._sent: dict[int, _Sent] = {}

    def add(self, round_: int, ticket: Ticket, me: PeerId, n: int) -> None:
        """A ticket's fragments were offered in a round of so many blocks."""
        block = (me + np.arange(ticket.fragments)) % n
        self._sent[round_] = _Sent(ticket, np.ones(ticket.fragments, np.bool_), block, np.ones(n, np.bool_))

    def clear(self) -> None:
        """Nobody will tell of any of them."""
        self._sent.clear()

    def decide(self, round_: int, mine: NDArray[np.int64], part: Gathered) -> tuple[int, int]:
        """Of a round came ``part``, with these fragments of this peer."""
        sent = self._sent.get(round_)
        if sent is None:
            return 0, 0
        sent.none &= part.none
        there = np.zeros(len(sent.open), np.bool_)
        there[mine[mine < len(there)]] = True
        there &= sent.open
        return self._settle(round_, sent, there, sent.open & ~there & part.whole[sent.block])

    def give_up(self, round_: int, block: int) -> tuple[int, int]:
        """Nothing more will come of a block of a round."""
        sent = self._sent.get(round_)
        if sent is None:
            return 0, 0
        these = sent.open & (sent.block == block)
        none = np.zeros_like(these)
        return self._settle(round_, sent, *((none, these) if sent.none[block] else (these, none)))

    def _settle(self, round_: int, sent: _Sent, there: Bools, not_there: Bools) -> tuple[int, int]:
        if there.any():
            self._feedback.commit(sent.ticket, there)
        if not_there.any():
            self._feedback.rollback(sent.ticket, not_there)
        sent.open &= ~(there | not_there)
        if not sent.open.any():
            del self._sent[round_]
        return int(there.sum()), int(not_there.sum())
