"""Fragments under way: what each holds, until it is known whether it is in the round's aggregate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ragtag.codecs.sparse.indices import Indices
from ragtag.core.types import Bools, Bytes, Floats

OPEN, COMMITTED, RESTORED = 0, 1, 2
_WORDS = ("open", "committed", "rolled back")


class TicketError(ValueError):
    """A fragment was decided twice, or its ticket is of no round under way; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What ``ErrorFeedback.prepare`` hands out for a round's message of so many fragments."""

    number: int
    round: int
    fragments: int


@dataclass(slots=True, eq=False)
class Pending:
    """A ticket's fragments: entries as receivers decode them, and what became of each fragment."""

    ticket: Ticket
    indices: Indices
    values: Floats
    starts: Indices
    state: Bytes

    def decide(self, fragments: Iterable[int] | Bools | None, to: int) -> tuple[Indices, Floats]:
        """Decide fragments (``None``: those that are open) and return their entries. Raises TicketError."""
        chosen = self._chosen(fragments)
        decided = np.flatnonzero(chosen & (self.state != OPEN))
        if len(decided):
            first = int(decided[0])
            raise TicketError(
                f"fragment {first} of round {self.ticket.round} was {_WORDS[self.state[first]]} before, and "
                f"cannot be {_WORDS[to]}: a late arrival must be dropped, or it counts twice"
            )
        self.state[chosen] = to
        keep = np.repeat(chosen, np.diff(self.starts))
        return self.indices[keep], self.values[keep]

    @property
    def over(self) -> bool:
        """Whether every fragment is decided."""
        return bool((self.state != OPEN).all())

    def open_entries(self) -> tuple[Indices, Floats]:
        """Indices and values of the fragments whose fate is not known yet."""
        keep = np.repeat(self.state == OPEN, np.diff(self.starts))
        return self.indices[keep], self.values[keep]

    def _chosen(self, fragments: Iterable[int] | Bools | None) -> Bools:
        n = self.ticket.fragments
        if fragments is None:
            return np.asarray(self.state == OPEN, np.bool_)
        chosen = np.zeros(n, np.bool_)
        if isinstance(fragments, np.ndarray) and fragments.dtype == np.bool_:
            if len(fragments) != n:
                raise TicketError(f"a bitmap of {len(fragments)} for a message of {n} fragments")
            chosen[:] = fragments
            return chosen
        for fragment in fragments:
            if not 0 <= fragment < n:
                raise TicketError(f"fragment {fragment} of a message of {n}")
            chosen[fragment] = True
        return chosen
