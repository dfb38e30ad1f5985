"""What must hold before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ragtag.core.errors import NotFinite
from ragtag.core.types import PEERS_MAX, WEIGHT_MAX, Floats, Outcome, PeerId, PeerSet
from ragtag.protocols.rounds.base import peers_in
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.layout import BUFFER

_OF_BUFFER = (
    "Keep infinities out of a buffer that is averaged, or have them in it from the beginning (a mask is not "
    "averaged), or give crew.optimizer(..., buffers=False)"
)
LEAP = 100.0
"""An average of like values is no larger than the largest of them: one that is so many times as large as what
this peer sent holds values of others that are nothing like its own."""
_OWN = "Lower the learning rate or clip gradients; torch.autograd.set_detect_anomaly finds the cause"


def require_finite(bucket: Bucket, blame: Callable[[], str] = str) -> float:
    """Look through a flattened bucket: its largest magnitude.

    One pass over the table for the smallest and the largest value; NaN is both, where there is one.
    blame: says, where it is not this peer's own doing, what has moved the values.

    Raises NotFinite where a value is NaN or infinite.
    """
    low, high = torch.aminmax(bucket.flat)
    largest = max(-low.item(), high.item())
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return largest
    found = [at for at in range(len(bucket.parts)) if not torch.isfinite(bucket.on_host(at)).all()]
    if found:
        is_mask = bucket.parts[found[0]].kind == BUFFER and not bucket.on_host(found[0]).isnan().any()
        own = _OF_BUFFER if is_mask else _OWN
        raise NotFinite(_message(bucket, found, blame() or own))
    return largest


class Leaps:
    """Whether values went astray by what an average brought, rather than by what this peer learned."""

    def __init__(self) -> None:
        self._sent = self._usual = math.inf
        self._took: tuple[int, Floats, PeerSet, tuple[PeerId, ...]] | None = None
        self._why = ""

    def require_finite(self, bucket: Bucket) -> None:
        """Before a round. Raises NotFinite; the message blames the last averages where they were to blame."""
        largest = require_finite(bucket, self._blame)
        if largest > LEAP * self._sent:
            self._look()
        elif self._why and largest <= LEAP * self._usual:
            self._why = ""
        self._sent, self._took = largest, None

    def took(self, outcome: Outcome, values: Floats) -> None:
        """After a round: what it brought."""
        self._took = outcome.round, values, outcome.heard, outcome.members

    def _blame(self) -> str:
        self._look()
        return self._why

    def _look(self) -> None:
        """Values are much larger than those that were sent last: was it the average that made them so?"""
        if self._took is None or self._sent == 0:
            return
        round_, values, heard, members = self._took
        largest = float(np.abs(values).max(initial=0.0))
        if not largest > LEAP * self._sent:
            return
        bits = int(np.bitwise_or.reduce(heard, initial=np.uint64(0)))
        peers = [members[bit] if members else bit for bit in peers_in(bits)]
        self._usual = min(self._usual, self._sent)
        self._why = (
            f"It was not this peer's learning rate: the average of round {round_}, with values of peers "
            f"{', '.join(map(str, peers))} in it, came to {largest:.3g} where this peer had sent "
            f"{self._sent:.3g} at most. Look for the cause on the others"
        )


def _message(bucket: Bucket, found: list[int], advice: str) -> str:
    part, values = bucket.parts[found[0]], bucket.on_host(found[0])
    nans = int(values.isnan().sum())
    infinite = int(values.isinf().sum())
    first = tuple((~values.isfinite()).nonzero()[0].tolist())
    others = f", and so have {len(found) - 1} more tensors" if len(found) > 1 else ""
    return (
        f"{part} has {nans + infinite} of {values.numel()} values that are not finite "
        f"({nans} NaN, {infinite} infinite, the first at {first}){others}. Nothing was sent. {advice}"
    )


def require_weight(weight: float) -> float:
    """A peer's weight in a mean: 0 or more, and no more than others believe. Raises ValueError."""
    value, most = float(weight), WEIGHT_MAX / PEERS_MAX
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"the weight of this peer is {weight}; it must be finite and 0 or more")
    if value > most:
        raise ValueError(
            f"the weight of this peer is {weight}; it may be {most:g} at most: use a larger unit"
        )
    return value
