"""Values in fewer bits: bfloat16, and int8 with a scale for every 256.

Both never make a value that is not finite out of a finite one: what would round up to infinity saturates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import Bytes, Floats

GROUP = 256
"""Values that share a scale."""
_SCALE_MAX = np.uint16(0x7C00)
"""The largest scale, as bfloat16 bits: 127 times it is finite."""

Halves = NDArray[np.uint16]


def to_bf16(values: Floats) -> Halves:
    """Bits of the nearest bfloat16 (ties to even), saturating; NaN stays NaN and infinity infinity."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    top = bits & 0x7FFFFFFF
    over = (top > 0x7F7F7FFF) if top.size and int(top.max()) > 0x7F7F7FFF else None
    if over is not None:
        special = top >= 0x7F800000
        rounded[over & ~special] = (bits[over & ~special] >> 16 & 0x8000) | 0x7F7F
        rounded[special] = bits[special] >> 16 | np.where(top[special] > 0x7F800000, 0x40, 0)
    return rounded.astype(np.uint16)


def from_bf16(halves: Halves) -> Floats:
    """The float32 values of bfloat16 bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def groups(n: int) -> int:
    """How many scales ``n`` values have."""
    return -(-n // GROUP)


def to_int8(values: Floats) -> tuple[Halves, Bytes]:
    """Scales (bfloat16 bits ``[groups(n)]``) and int8 values (as uint8 ``[n]``) of finite float32 ``[n]``.

    A scale is the group's largest magnitude over 127, rounded up, so nothing saturates below 1e36; each
    value is off by at most half a scale.
    """
    n = len(values)
    padded = np.zeros(groups(n) * GROUP, np.float32)
    padded[:n] = values
    table = padded.reshape(-1, GROUP)
    exact = np.abs(table).max(axis=1) / np.float32(127)
    scales = np.minimum(((exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16), _SCALE_MAX)
    scale = from_bf16(scales)
    scale[scale == 0] = math.inf
    steps = np.clip(np.rint(table / scale[:, None]), -127, 127)
    return scales, steps.astype(np.int8).reshape(-1)[:n].view(np.uint8)


def from_int8(scales: Halves, steps: Bytes) -> Floats:
    """The float32 ``[n]`` that scales and steps stand for. Raises ValueError for a scale that cannot be."""
    if (scales > _SCALE_MAX).any():
        raise ValueError("a scale is negative, not finite or too large")
    spread = np.repeat(from_bf16(scales), GROUP)[: len(steps)]
    return np.asarray(steps.view(np.int8) * spread, np.float32)
