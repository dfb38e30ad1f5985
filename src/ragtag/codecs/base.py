"""What a codec is: a value, not a class hierarchy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ragtag.core.types import Bools, Bytes, Floats


def finite_rows(values: Floats) -> Bools | None:
    """Which rows of float32 ``[k, n]`` have a finite sum of squares in float32, bool ``[k]``; ``None``: all.

    Such a row has neither NaN nor infinity, and a norm below 1.8e19: what is larger would, as a part of a
    mean, break the models of all, and counts as not finite.
    """
    if len(values) == 1:  # most messages of a small model; vdot warns of nothing, so no errstate is needed
        row = values[0]
        return None if math.isfinite(np.vdot(row, row)) else np.zeros(1, np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        finite: Bools = np.isfinite(np.vecdot(values, values))
    return None if finite.all() else finite


def unseen(chunks: Bytes) -> Bools | None:
    """Of chunks that nobody adds up on their way nothing is asked: all may pass."""
    return None


class Codec(NamedTuple):
    """How values become chunks. Every chunk decodes alone: scales and indices travel inside it.

    elements: values per chunk.
    encode: float32 ``[k, elements]`` to uint8 ``[k, chunk_bytes]`` (may share memory with its input).
    decode: chunks to float32 ``[k, elements]``, into the array given.
    accumulate: ``sum += weight * decode(chunks)``, with ``weight`` float32 ``[k]``, a weight per chunk. Numpy
        warns of sums that are not finite. None is, of 64 peers' finite chunks that weigh ``WEIGHT_MAX`` each.
    exact: whether decode(encode(x)) is x, bit for bit.
    finite: which chunks hold finite values only (see ``finite_rows``), bool ``[k]``; ``None``: all do.
    """

    name: str
    elements: int
    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes, Floats], None]
    accumulate: Callable[[Bytes, Floats, Floats], None]
    exact: bool
    finite: Callable[[Bytes], Bools | None] = unseen
