"""When an epoch is over, and what it came to."""

from __future__ import annotations

from collections.abc import Collection

from ragtag.training.samples.claims import Section
from ragtag.training.samples.ledger import EpochReport, Ledger, Process

KEPT = 2
"""Epochs that are kept in posts for those who are away."""


class Closing:
    """The epochs of process ``who`` that are reported, and that wait for it.

    started_with: the epoch it entered the crew with. closed: epochs below this are reported. ready: of epochs
    below this it knows no block that anybody could still use.
    """

    def __init__(self, who: Process, ledger: Ledger, open_max: int) -> None:
        self.open_max = open_max
        self.started_with = self.closed = self.ready = 0
        self.reports: list[EpochReport] = []
        self._who, self._ledger = who, ledger
        self._begun: set[int] = set()

    def start(self, epoch: int) -> None:
        """The crew is in this epoch."""
        self.started_with = self.closed = self.ready = epoch

    def begin(self, epoch: int) -> None:
        """This process draws in this epoch, if there is anything to draw."""
        self._begun.add(epoch)

    def advance(self, over: int, here: Collection[Section], all_know: bool, force: bool) -> None:
        """Report what is over of the epochs below ``over``, in order.

        An epoch is, once all who are there know of nothing left in it; or more than ``open_max`` wait. here:
        the others' sections. all_know: they know all that was posted, so that what they have reported may be
        reported here. force: report all, as they are known.
        """
        self.ready = max(self.ready, self.closed)
        while self.ready < over and self._resolved(self.ready, here):
            self.ready += 1
        agreed = min([self.ready, *(max(s.ready, s.closed) for s in here)])
        passed = max((s.reported for s in here), default=0) if all_know else 0
        until = min(over, over if force else max(agreed, passed, over - self.open_max))
        while self.closed < until:
            self._report(self.closed, passed)
            self.closed += 1
            self.ready = max(self.ready, self.closed)
            self._ledger.forget(self.closed)

    def _report(self, epoch: int, passed: int) -> None:
        """What was told long before ``passed`` is forgotten; of what nobody began, nothing is missed."""
        begun = epoch in self._begun or self._ledger.claimed(epoch).any()
        self._begun.discard(epoch)
        if epoch >= passed - KEPT and begun:
            self.reports.append(self._ledger.report(epoch, self._who))

    def _resolved(self, epoch: int, here: Collection[Section]) -> bool:
        """Whether each block is used, or claimed by nobody who could still use it."""
        living = [self._who, *((s.peer, s.process) for s in here)]
        may_be = self._ledger.claimed_by(epoch, living) | ~self._ledger.claimed(epoch)
        return not (may_be & (self._ledger.used(epoch) == 0)).any()
