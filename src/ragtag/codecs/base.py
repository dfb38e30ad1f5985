"""What a codec is: a value, not a class hierarchy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ragtag.core.types import Bools, Bytes, Floats


def finite_rows(values: Floats) -> Bools | None:
    """Which rows of float32 ``[k, n]`` are finite throughout, bool ``[k]``; ``None``: all are.

    One sum in most cases: it is not finite where any value is not. Where finite values overflow it, each is
    looked at.
    """
    if math.isfinite(np.einsum("ij->", values)):
        return None
    finite: Bools = np.asarray(np.isfinite(values).all(axis=1), np.bool_)
    return None if finite.all() else finite


def unseen(chunks: Bytes) -> Bools | None:
    """Of chunks that nobody adds up on their way nothing is asked: all may pass."""
    return None


class Codec(NamedTuple):
    """How values become chunks. Every chunk decodes alone: scales and indices travel inside it.

    elements: values per chunk.
    encode: float32 ``[k, elements]`` to uint8 ``[k, chunk_bytes]`` (may share memory with its input).
    decode: chunks to float32 ``[k, elements]``, into the array given.
    accumulate: ``sum += weight * decode(chunks)``, with ``weight`` float32 ``[k]``, a weight per chunk.
    exact: whether decode(encode(x)) is x, bit for bit.
    finite: which chunks hold finite values only, bool ``[k]``; ``None``: all do.
    """

    name: str
    elements: int
    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes, Floats], None]
    accumulate: Callable[[Bytes, Floats, Floats], None]
    exact: bool
    finite: Callable[[Bytes], Bools | None] = unseen
