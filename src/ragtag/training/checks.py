"""What must hold before anything is sent."""

from __future__ import annotations

import math

import torch

from ragtag.core.errors import NotFinite
from ragtag.training.bucket import Bucket


def require_finite(bucket: Bucket) -> None:
    """Look through a flattened bucket; raise NotFinite where a value is NaN or infinite.

    One pass over the table (a sum, a quarter of the time of a look at each value). A sum of finite values
    may overflow, so only when it is not finite is each tensor looked at.
    """
    if math.isfinite(bucket.flat.sum().item()):
        return
    found = [at for at in range(len(bucket.parts)) if not torch.isfinite(bucket.on_host(at)).all()]
    if found:
        raise NotFinite(_message(bucket, found))


def _message(bucket: Bucket, found: list[int]) -> str:
    part, values = bucket.parts[found[0]], bucket.on_host(found[0])
    nans = int(values.isnan().sum())
    infinite = int(values.isinf().sum())
    first = tuple((~values.isfinite()).nonzero()[0].tolist())
    others = f", and so have {len(found) - 1} more tensors" if len(found) > 1 else ""
    return (
        f"{part} has {nans + infinite} of {values.numel()} values that are not finite "
        f"({nans} NaN, {infinite} infinite, the first at {first}){others}. Nothing was sent. "
        "Lower the learning rate or clip gradients; torch.autograd.set_detect_anomaly finds the cause"
    )


def require_weight(weight: float) -> float:
    """A peer's weight in a mean: finite, 0 or more. Raises ValueError."""
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"the weight of this peer is {weight}; it must be finite and 0 or more")
    return value
