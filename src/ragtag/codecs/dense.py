"""Every value as it is: float32, little-endian."""

from __future__ import annotations

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.core.types import Bytes, Floats
from ragtag.core.wire import CHUNK_BYTES


def _encode(values: Floats) -> Bytes:
    return np.asarray(values, "<f4").view(np.uint8)


def _decode(chunks: Bytes, out: Floats) -> None:
    out[:] = chunks.view("<f4")


def _accumulate(chunks: Bytes, weight: Floats, total: Floats) -> None:
    values = chunks.view("<f4")
    first = weight[0]
    if len(weight) == 1 or (weight == first).all():
        if first == 1.0:
            total += values
        else:
            total += values * first
    else:
        total += values * weight[:, None]


fp32 = Codec(
    name="fp32", elements=CHUNK_BYTES // 4, encode=_encode, decode=_decode, accumulate=_accumulate, exact=True
)
