"""Values in fewer bits: bfloat16, int8 with a scale for every 256, and 2 bits with two levels for every 256.

None ever makes a value that is not finite out of a finite one: what would round up to infinity saturates.
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

_LEVEL_MAX = np.uint16(0x7F7F)
"""The largest finite bfloat16."""
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)
_PLACES = np.array([1, 4, 16, 64], np.uint8)

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
    value is off by at most half a scale. Of a group with nothing above 63 of the smallest float32 (8.9e-44)
    scale and values are 0.
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


def to_2bit(values: Floats) -> tuple[Halves, Bytes]:
    """Levels (bfloat16 bits ``[groups(n), 2]``) and codes (uint8, four a byte) of finite float32 ``[n]``.

    A value becomes its sign and one of its group's two levels: the pair of magnitudes with the least squared
    error there is (2-means, exactly: every cut of the sorted magnitudes is tried; Lloyd, "Least squares
    quantization in PCM", 1982, gives such levels iteratively). What top-k selects has no small magnitudes, so
    that evenly spaced levels would serve it badly.
    """
    n = len(values)
    if not n:
        return np.zeros((0, 2), np.uint16), np.zeros(0, np.uint8)
    table = np.full((groups(n), GROUP), np.inf)
    table.reshape(-1)[:n] = np.abs(values)
    levels = to_bf16(_two_means(table).astype(np.float32).reshape(-1)).reshape(-1, 2)
    low, high = from_bf16(levels).astype(np.float64).T
    larger = (table > ((low + high) / 2)[:, None]).reshape(-1)[:n]
    codes = np.zeros((n + 3) // 4 * 4, np.uint8)
    codes[:n] = larger + 2 * np.signbit(values)
    return levels, np.asarray(codes.reshape(-1, 4) @ _PLACES, np.uint8)


def from_2bit(levels: Halves, packed: Bytes, n: int) -> Floats:
    """The float32 ``[n]`` that levels and codes stand for. Raises ValueError for a level that cannot be."""
    if (levels > _LEVEL_MAX).any():
        raise ValueError("a level is negative or not finite")
    codes = (packed[:, None] >> _SHIFTS & 3).reshape(-1)[:n].astype(np.int64)
    magnitudes = from_bf16(levels.reshape(-1))[2 * (np.arange(n) // GROUP) + (codes & 1)]
    return np.where(codes & 2, -magnitudes, magnitudes)


def _two_means(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[g, 2]``: of each row's magnitudes (``inf``: none there) the means below and above the best cut."""
    sorted_ = np.sort(table, axis=1)
    there = np.isfinite(sorted_)
    below = np.cumsum(np.where(there, sorted_, 0.0), axis=1)
    count = there.sum(1)[:, None]
    many = np.arange(1, table.shape[1] + 1)
    total, rest = below[:, -1:], np.maximum(count - many, 1)
    spread = np.where(there, below**2 / many + (total - below) ** 2 / rest, -1.0)
    cut = spread.argmax(1)[:, None]
    low = np.take_along_axis(below, cut, 1) / (cut + 1)
    above = np.take_along_axis(total - below, cut, 1) / np.maximum(count - cut - 1, 1)
    return np.concatenate([low, np.where(count > cut + 1, above, low)], axis=1)
