"""Rows of a round that come with a later one, where replicas are also made alike in between.

A row that is late is part of a later sum, and after it all replicas have added the same. A comparison of
replicas in between (``align``) breaks that: what one takes from another, after a round, has the rows that the
giver had by then, which may be other ones than had come here. So a giver says which rows of the last rounds
it has. What is among these and comes late here is not added to what was taken; what is not among them and
had come here is added to it once more, as the giver adds it when it comes there. Each counts once in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ragtag.codecs.sparse.gather import Added, add_rows, names, whole_marks
from ragtag.codecs.sparse.pack import Values
from ragtag.core.types import Bools, Bytes, Floats, Gathered
from ragtag.protocols.channel.at_once import BEHIND
from ragtag.training.align.rows import Came


@dataclass(slots=True)
class _Taken:
    """After a round these places (bool ``[d]``) became another's. came: which rows that one had (of rounds
    that are not named: all).
    """

    round: int
    where: Bools
    came: Came


class Late:
    """What of earlier rounds may still come, and which of it this replica has got in another way."""

    def __init__(self) -> None:
        self.keeps = False
        """Whether the last ``BEHIND`` rounds' rows are kept: only where replicas are compared."""
        self._open: frozenset[int] = frozenset()
        self._rows: dict[int, list[tuple[Bytes, Floats]]] = {}
        self._taken: list[_Taken] = []
        self._again: list[tuple[Bools, Bytes, Floats]] = []

    @property
    def settled(self) -> bool:
        """Whether all rows of all rounds so far are in this replica, or will never come."""
        return not self._open

    def saw(self, round_: int, gathered: Gathered) -> None:
        """A round is over, with what came late in it."""
        parts = [
            (number, part)
            for number, part in [(round_, gathered), *gathered.late]
            if number > round_ - BEHIND  # of the others nothing comes any more
        ]
        self._open = frozenset(number for number, part in parts if not part.whole.all())
        self._taken = [taken for taken in self._taken if taken.round > round_ - BEHIND]
        self._rows = {number: rows for number, rows in self._rows.items() if number > round_ - BEHIND}
        for number, part in parts if self.keeps else []:
            fragments = ~whole_marks(part.rows)
            self._rows.setdefault(number, []).append((part.rows[fragments], part.factor[fragments]))

    def came(self) -> Came | None:
        """By round of which more may come: the names of the rows that are in this replica. ``None``: at some
        places other ones are, since values were taken there in the last rounds.
        """
        if self._open and self._taken:
            return None
        none = np.zeros(0, np.uint32)
        return {
            number: np.concatenate([none, *(names(rows) for rows, _ in self._rows.get(number, ()))])
            for number in sorted(self._open)
        }

    def replaced(self, round_: int, where: Bools, came: Came) -> None:
        """These places (bool ``[d]``) became, after the round that is over, those of a replica that had these
        rows of rounds of which it may get more, and all of other rounds.
        """
        for earlier in self._taken:
            earlier.where = earlier.where & ~where
        self._taken.append(_Taken(round_, where, came))
        for number, theirs in came.items():
            for rows, factor in self._rows.get(number, ()):
                lacking = ~np.isin(names(rows), theirs)
                if lacking.any():
                    self._again.append((where, rows[lacking], factor[lacking]))

    def add(self, total: Floats, round_: int, rows: Bytes, factor: Floats, values: Values) -> Added:
        """Add a round's rows to ``total`` (see ``add_rows``), except where that would be twice."""
        taken = [taken for taken in self._taken if round_ <= taken.round]
        if not taken:
            return add_rows(total, rows, factor, values)
        of_these = np.zeros_like(total)
        added = add_rows(of_these, rows, factor, values)
        of_these[np.logical_or.reduce([one.where for one in taken])] = 0.0
        _add(total, of_these)
        for one in taken:
            lacking = ~np.isin(names(rows), one.came.get(round_, names(rows)))
            _add_where(total, one.where, rows[lacking], factor[lacking], values)
        return added

    def add_again(self, total: Floats, values: Values) -> None:
        """Add what had come, where it is no longer in, since another replica's values were taken there."""
        again, self._again = self._again, []
        for where, rows, factor in again:
            _add_where(total, where, rows, factor, values)


def _add_where(total: Floats, where: Bools, rows: Bytes, factor: Floats, values: Values) -> None:
    if len(rows):
        of_these = np.zeros_like(total)
        add_rows(of_these, rows, factor, values)
        of_these[~where] = 0.0
        _add(total, of_these)


def _add(total: Floats, more: Floats) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the sum
        total += more
