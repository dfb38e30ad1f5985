"""Taking part in rounds with nothing to offer, and taking their steps again later: see ``replay``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from ragtag.core.types import Bools, Floats, Outcome
from ragtag.training.align.aligner import Aligner, Patch
from ragtag.training.exchange.base import Exchange
from ragtag.training.optimizer.modes import Gradients

KEPT_BYTES = 1 << 29
"""Means may take so much memory, where that is no fewer rounds than ``ROUNDS_MIN``."""
ROUNDS_MIN, ROUNDS_MAX = 8, 1024
"""So many rounds' means are kept at least, whatever their size, and at most."""
ARRIVED_MIN = 0.5
"""Share of a round's mean that must have come: else the round counts as missed."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """What a round came to.

    table: float32 ``[n_chunks, elements]``.
    averaged: bool ``[n_chunks]``.
    patch: what replicas that differed took from others before its step.
    """

    round: int
    table: Floats
    averaged: Bools
    patch: Patch = ()

    @property
    def whole(self) -> bool:
        """Whether all of it came."""
        return bool(self.averaged.all())


class Means:
    """The means of consecutive rounds up to the newest, at most ``rounds_max``: the oldest make room.

    newest: the last round that was added or missed (-1: none).
    """

    def __init__(self, rounds_max: int) -> None:
        self._kept: deque[Mean] = deque(maxlen=rounds_max)
        self.newest = -1

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Mean]:
        return iter(self._kept)

    def add(self, mean: Mean) -> None:
        """Keep one more. Those before a round that was missed are of no use any more."""
        if mean.round != self.newest + 1:
            self._kept.clear()
        self.newest = mean.round
        self._kept.append(mean)

    def missed(self, round_: int) -> None:
        """This round's mean did not come."""
        self._kept.clear()
        self.newest = round_

    def after(self, round_: int) -> list[Mean] | None:
        """The means of all rounds after this one; ``None``: not all of them were kept."""
        if self.newest <= round_:
            return []
        if not self._kept or self._kept[0].round > round_ + 1:
            return None
        return [mean for mean in self._kept if mean.round > round_]


def rounds_max(n_bytes: int) -> int:
    """How many rounds' means of so many bytes are kept at most."""
    return min(ROUNDS_MAX, max(ROUNDS_MIN, KEPT_BYTES // max(1, n_bytes)))


class Follower:
    """Takes part in rounds with nothing to offer, and takes steps again."""

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        deadline_s: float | None,
        aligner: Aligner | None = None,
    ) -> None:
        self._exchange, self._gradients, self._deadline_s = exchange, gradients, deadline_s
        self._aligner = aligner

    @property
    def n_bytes(self) -> int:
        """The memory that one round's mean takes."""
        return self._exchange.bucket.values.nbytes

    def arrived(self, in_step: bool) -> None:
        """From now on this peer is a member; ``in_step``: its model is as theirs."""
        if self._aligner is not None:
            self._aligner.arrived(in_step)

    def follow(self, apply: bool) -> tuple[Outcome, Mean | None]:
        """One round with weight 0, and its mean. apply: take the step, too.

        ``None``: too little came, or replicas were compared before it without this peer.
        """
        aligner = self._aligner
        self._gradients.clear()
        with nullcontext() if aligner is None else aligner.following():
            outcome = self._exchange.average(0.0, self._deadline_s)
        patch = () if aligner is None else aligner.followed(outcome.round)
        if apply:
            self._put(patch or ())
            self._gradients.apply()
        if aligner is not None:
            aligner.follow(outcome)
        if patch is None or outcome.averaged.mean() < ARRIVED_MIN:
            return outcome, None
        table = self._exchange.bucket.values.copy()
        # where rows were gathered, what is late is part of a later mean, and all of this one counts
        averaged = outcome.averaged if outcome.gathered is None else np.ones(len(table), np.bool_)
        return outcome, Mean(outcome.round, table, averaged.copy(), patch)

    def redo(self, mean: Mean) -> None:
        """Take the step of a round that is over."""
        self._put(mean.patch)
        self._gradients.clear()
        self._exchange.bucket.flatten()
        self._exchange.bucket.restore(mean.table, mean.averaged)
        self._gradients.apply()

    def _put(self, patch: Patch) -> None:
        if self._aligner is not None:
            self._aligner.put(patch)
