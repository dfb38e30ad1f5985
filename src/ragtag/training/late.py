"""Rows of a round that come with a later one, where replicas are also made alike in between.

A row that is late is part of a later sum, and after it all replicas have added the same. A comparison of
replicas in between (``align``) breaks that: what one takes from another, after a round, has all rows that the
giver had by then. Of those that come late here, some are in it already, and would count twice.
"""

from __future__ import annotations

import numpy as np

from ragtag.codecs.gather import Added, add_rows
from ragtag.codecs.pack import Values
from ragtag.core.types import Bools, Bytes, Floats, Gathered
from ragtag.protocols.lane import BEHIND


class Late:
    """What of earlier rounds may still come, and which of it this replica has got in another way."""

    def __init__(self) -> None:
        self.settled = True
        """Whether all rows of all rounds so far are in this replica, or will never come."""
        self._known: dict[int, Bools] = {}

    def saw(self, round_: int, gathered: Gathered) -> None:
        """A round is over, with what came late in it."""
        forgotten = round_ - BEHIND  # of these nothing comes any more
        self.settled = bool(gathered.whole.all()) and all(
            part.whole.all() for number, part in gathered.late if number > forgotten
        )
        self._known = {number: where for number, where in self._known.items() if number > forgotten}

    def replaced(self, round_: int, where: Bools) -> None:
        """These values (bool ``[d]``) became, after a round, those of a replica that was settled."""
        known = self._known.get(round_)
        self._known[round_] = where if known is None else known | where

    def add(self, total: Floats, round_: int, rows: Bytes, factor: Floats, values: Values) -> Added:
        """Add a round's rows to ``total`` (see ``add_rows``), except where that would be twice."""
        known = [where for number, where in self._known.items() if round_ <= number]
        if not known:
            return add_rows(total, rows, factor, values)
        of_these = np.zeros_like(total)
        added = add_rows(of_these, rows, factor, values)
        of_these[np.logical_or.reduce(known)] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            total += of_these
        return added
