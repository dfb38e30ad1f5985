"""Every value, in order: float32 as it is, bfloat16, or int8 with a scale for each 256.

The two short ones round, but what they have decoded they encode to the same bytes again: an average that is
passed on around a ring is the same for all. Sums are float32 on every machine.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ragtag.codecs.base import Codec, finite_rows
from ragtag.codecs.values import GROUP, from_bf16, groups, to_bf16
from ragtag.core.types import Bools, Bytes, Floats
from ragtag.core.wire import CHUNK_BYTES

_FLOAT32 = np.dtype("<f4")
_SCALE_BITS = np.uint32(0xFFFFFF00)
"""A scale has 16 significant bits: 127 times it, and that divided by 127, are exact."""
_SCALE_MIN, _SCALE_MAX = np.float32(2.0**-110), np.float32(2.679e36)
_SCALE_SURE = np.float32(2.0**50)
"""Below it, no scale makes anything of a chunk's steps that ``finite_rows`` refuses."""
_EXPONENT = np.uint16(0x7F80)
"""Of a bfloat16: all ones in NaN and infinity."""
_EXPONENT_SURE = np.uint16(59 + 127 << 7)
"""Of values of 2^59 or more: smaller ones fill no chunk that ``finite_rows`` refuses."""


def _encode(values: Floats) -> Bytes:
    return np.asarray(values, _FLOAT32).view(np.uint8)


def _decode(chunks: Bytes, out: Floats) -> None:
    out[:] = chunks.view(_FLOAT32)


def _add(values: Floats, weight: Floats, total: Floats) -> None:
    """``total += values * weight``, a weight per row."""
    first = weight[0]
    if len(weight) == 1 or (weight == first).all():
        if first == 1.0:
            total += values
        else:
            total += values * first
    else:
        total += values * weight[:, None]


def _accumulate(chunks: Bytes, weight: Floats, total: Floats) -> None:
    _add(chunks.view(_FLOAT32), weight, total)


def _finite(chunks: Bytes) -> Bools | None:
    return finite_rows(chunks.view(_FLOAT32))


fp32 = Codec(
    name="fp32",
    elements=CHUNK_BYTES // 4,
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    exact=True,
    finite=_finite,
)
"""Bit for bit."""


def _encode_bf16(values: Floats) -> Bytes:
    return to_bf16(values).astype("<u2", copy=False).view(np.uint8)


def _values_of_bf16(chunks: Bytes) -> Floats:
    return from_bf16(chunks.view("<u2"))


def _decode_bf16(chunks: Bytes, out: Floats) -> None:
    out[:] = _values_of_bf16(chunks)


def _accumulate_bf16(chunks: Bytes, weight: Floats, total: Floats) -> None:
    _add(_values_of_bf16(chunks), weight, total)


def _finite_bf16(chunks: Bytes) -> Bools | None:
    if ((chunks.view("<u2") & _EXPONENT) < _EXPONENT_SURE).all():
        return None
    return finite_rows(_values_of_bf16(chunks))


bf16 = Codec(
    name="bf16",
    elements=CHUNK_BYTES // 2,
    encode=_encode_bf16,
    decode=_decode_bf16,
    accumulate=_accumulate_bf16,
    exact=False,
    finite=_finite_bf16,
)
"""The nearest bfloat16 (relative error 2^-9 at most), half the bytes. Finite values stay finite."""


def _encode_int8(values: Floats) -> Bytes:
    k, n = values.shape
    scales = groups(n)
    padded = np.zeros((k, scales * GROUP), np.float32)
    padded[:, :n] = values
    table = padded.reshape(k, scales, GROUP)
    scale = np.maximum(table.max(axis=2), -table.min(axis=2)) / np.float32(127)
    (scale.view(np.uint32))[...] &= _SCALE_BITS
    scale[scale < _SCALE_MIN] = 0.0
    finite = np.isfinite(scale)
    np.minimum(scale, _SCALE_MAX, out=scale, where=finite)
    scale.view(np.uint32)[finite] &= _SCALE_BITS
    scale[~finite] = np.nan
    divisor = np.where(scale > 0, scale, np.float32(np.inf))
    if not finite.all():
        table[~finite] = 0.0
    table /= divisor[:, :, None]
    steps = np.clip(np.rint(table, out=table), -127, 127, out=table).astype(np.int8).reshape(padded.shape)
    chunks = np.empty((k, n + 4 * scales), np.uint8)
    chunks[:, : 4 * scales] = scale.astype("<f4", copy=False).view(np.uint8)
    chunks[:, 4 * scales :] = steps[:, :n].view(np.uint8)
    return chunks


def _values_of_int8(chunks: Bytes, n: int) -> Floats:
    k, scales = len(chunks), groups(n)
    scale = np.ascontiguousarray(chunks[:, : 4 * scales]).view("<f4")
    padded = np.zeros((k, scales * GROUP), np.float32)
    padded[:, :n] = chunks[:, 4 * scales : 4 * scales + n].view(np.int8)
    table = padded.reshape(k, scales, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):  # what a forged scale makes of it is not finite
        table *= scale[:, :, None]
    return padded[:, :n]


def _decode_int8(chunks: Bytes, out: Floats) -> None:
    out[:] = _values_of_int8(chunks, out.shape[1])


def _accumulate_int8(chunks: Bytes, weight: Floats, total: Floats) -> None:
    _add(_values_of_int8(chunks, total.shape[1]), weight, total)


def _finite_int8(chunks: Bytes) -> Bools | None:
    n = int8.elements
    scale = np.ascontiguousarray(chunks[:, : 4 * groups(n)]).view("<f4")
    if (np.abs(scale) < _SCALE_SURE).all():
        return None
    return finite_rows(_values_of_int8(chunks, n))


int8 = Codec(
    name="int8",
    elements=CHUNK_BYTES - 4 * groups(CHUNK_BYTES - 4 * groups(CHUNK_BYTES)),
    encode=_encode_int8,
    decode=_decode_int8,
    accumulate=_accumulate_int8,
    exact=False,
    finite=_finite_int8,
)
"""Steps of the largest magnitude over 127, for each 256 values: a quarter of the bytes, off by half a step.

A group in which something is not finite decodes to NaN throughout: nothing hides it.
"""

DenseName = Literal["fp32", "bf16", "int8"]
"""What a script calls them."""

DENSE = {codec.name: codec for codec in (fp32, bf16, int8)}
"""The dense codecs, by name."""


def known_name(codec: Codec) -> str:
    """The name by which a peer without the script finds a codec; empty: it is the script's own."""
    return codec.name if DENSE.get(codec.name) is codec else ""
