"""Replicas that average gradients, kept alike: an exchange after whose steps they are compared."""

from __future__ import annotations

from ragtag.core.types import Outcome
from ragtag.training.align.aligner import Aligner
from ragtag.training.exchange.base import Exchange, Layer


class Aligning(Layer):
    """Around an exchange of gradients: what spoilt rounds left different is made the same (see ``align``)."""

    def __init__(self, inner: Exchange, aligner: Aligner) -> None:
        super().__init__(inner)
        self.aligner = aligner

    def stepped(self, outcome: Outcome) -> None:
        """Compare, where it is time, and take what others give."""
        self.inner.stepped(outcome)
        self.aligner.after(outcome)

    def forget(self) -> None:
        """What was found before is of another model."""
        self.aligner.forget()
        self.inner.forget()
