"""Replicas that average gradients, kept alike: an exchange after whose steps they are compared."""

from __future__ import annotations

from typing import Any

from ragtag.core.types import Outcome, PeerId
from ragtag.training.align.aligner import Aligner
from ragtag.training.exchange.base import Exchange, Layer


class Aligning(Layer):
    """Around an exchange of gradients: what spoilt rounds left different is made the same (see ``align``)."""

    def __init__(self, inner: Exchange, aligner: Aligner) -> None:
        super().__init__(inner)
        self.aligner = aligner

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """See ``Exchange``. What a comparison came to is taken over before the step by this average."""
        outcome = self.inner.average(weight, deadline_s, aside)
        self.aligner.finish()
        return outcome

    def end(self, begun: Any) -> Outcome:
        """See ``average``."""
        outcome = self.inner.end(begun)
        self.aligner.finish()
        return outcome

    def stepped(self, outcome: Outcome) -> None:
        """Begin to compare, where it is time."""
        self.inner.stepped(outcome)
        self.aligner.begin(outcome)

    def forget(self) -> None:
        """What was found before is of another model."""
        self.aligner.forget()
        self.inner.forget()
