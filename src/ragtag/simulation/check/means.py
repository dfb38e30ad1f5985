"""Whether a mean is that of the values that it names, as near as sums and a codec let it be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.base import Codec
from ragtag.core.types import Floats

_ROUNDINGS = 4.0
"""How often an error of rounding counts. A share is rounded, and its error may move the mean that is rounded
then: by as much again, and, where a codec's steps follow from the values, those by as much."""


def is_mean(
    mean: Floats, shares: Sequence[Floats], weights: NDArray[np.float64], tolerance: float, codec: Codec
) -> bool:
    """Whether float32 ``[k, elements]`` is the weighted mean of shares of that shape.

    tolerance: relative to the sum of magnitudes.
    codec: rounds each share, and the mean, to the nearest that it can tell. How far that takes these very
        values is measured, by row.
    """
    total = weights.sum()
    parts = np.stack([share.astype(np.float64) * w for share, w in zip(shares, weights, strict=True)])
    whole = parts.sum(axis=0)
    bound = tolerance * np.abs(parts).sum(axis=0)
    if not codec.exact:
        errors = [w * rounding(codec, share) for share, w in zip(shares, weights, strict=True)]
        bound += _ROUNDINGS * (np.sum(errors, axis=0) + total * rounding(codec, whole / total))
    return bool((np.abs(mean * total - whole) <= bound).all())


def rounding(codec: Codec, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """How far a codec takes the values of each row of ``[k, elements]`` at most, ``[k, 1]``."""
    if codec.exact:
        return np.zeros((len(values), 1))
    given = np.ascontiguousarray(values, np.float32)
    told = np.empty_like(given)
    codec.decode(codec.encode(given), told)
    off: NDArray[np.float64] = np.abs(told - given).max(axis=1, keepdims=True).astype(np.float64)
    return off
