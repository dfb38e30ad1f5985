"""Loops that numba compiles; imported where ``fast.compiled()`` says so, and only there.

Vectors come as their bits, uint32: without the sign bit, floats order as their bits do, so a maximum of
bits is a maximum of magnitudes that vectorises without leave to ignore NaN, and anything from
``0x7F800000`` up is NaN or infinity. Each function has its twin in numpy, which gives the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragtag.core.compiled import compile_
from ragtag.core.types import Floats

Bits = NDArray[np.uint32]
Indices = NDArray[np.int64]

BLOCK = 64
"""Elements looked at together: few enough that most blocks hold nothing above a threshold."""
_SIGNLESS = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)


@compile_
def collect(bits: Bits, least: np.uint32, out: Indices) -> int:
    """Indices of what is at least ``least`` in magnitude, into ``out`` while it has room; their number."""
    n, room, d = 0, out.size, bits.size
    whole = d // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        block = bits[start : start + BLOCK]
        top = np.uint32(0)
        for j in range(BLOCK):
            top = max(top, block[j] & _SIGNLESS)
        if top >= least:
            for j in range(BLOCK):
                if block[j] & _SIGNLESS >= least:
                    if n < room:
                        out[n] = start + j
                    n += 1
    for i in range(whole, d):
        if bits[i] & _SIGNLESS >= least:
            if n < room:
                out[n] = i
            n += 1
    return n


@compile_
def largest(bits: Bits) -> np.uint32:
    """The largest magnitude, as bits: one read."""
    top, d = np.uint32(0), bits.size
    whole = d // 1024 * 1024
    for start in range(0, whole, 1024):
        block = bits[start : start + 1024]
        for j in range(1024):
            top = max(top, block[j] & _SIGNLESS)
    for i in range(whole, d):
        top = max(top, bits[i] & _SIGNLESS)
    return top


@compile_
def add_select_clear(
    residual: Floats, gradient: Floats, least: np.float32, out: Indices, values: Floats
) -> tuple[int, int]:
    """``residual += gradient``; what is then at least ``least`` goes to ``out`` and ``values`` and becomes 0.

    Returns how many there are (those beyond the room of ``out`` stay in the residual), and how far it came:
    less than the size where a sum is not finite; its block is left as it was.
    """
    n, room, d = 0, out.size, residual.size
    for start in range(0, d, BLOCK):
        k = min(BLOCK, d - start)
        old, new = residual[start : start + k], gradient[start : start + k]
        hits = np.int32(0)
        if k == BLOCK:  # a constant number of turns is what vectorises
            for j in range(BLOCK):
                hits += np.int32(0) if abs(old[j] + new[j]) < least else np.int32(1)
        else:
            hits = np.int32(1)
        if hits == 0:
            for j in range(BLOCK):
                old[j] += new[j]
            continue
        for j in range(k):
            if not np.isfinite(old[j] + new[j]):
                return n, start
        for j in range(k):
            value = old[j] + new[j]
            old[j] = value
            if not abs(value) < least:
                if n < room:
                    out[n] = start + j
                    values[n] = value
                    old[j] = 0.0
                n += 1
    return n, d
