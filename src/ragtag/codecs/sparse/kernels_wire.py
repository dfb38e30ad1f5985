"""Loops of the sparse wire format that numba compiles; imported where ``fast.compiled()`` says so.

They write the same bytes as, and read what, ``ragtag.codecs.sparse.indices`` and ``ragtag.codecs.values`` do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.sparse.kernels import Indices
from ragtag.core.compiled import compile_
from ragtag.core.types import Bools, Bytes, Floats

_HEADER = 14
_ROOM = 1088 - _HEADER
_COUNT_MAX = 2047
_B_MAX = 31
_SCALE_MAX = 0x7C00
_LEVEL_MAX = 0x7F7F


@compile_
def _parameter(span: int, gaps: int) -> int:
    if gaps <= 0:
        return 0
    mean, b = span * 45426 // (gaps << 16), 0
    while mean > 1:
        mean >>= 1
        b += 1
    return b


@compile_
def _fit(at: Indices, start: int, b: int, bits: int, scale: int) -> int:
    n, unary = 1, 0
    for i in range(start + 1, min(start + _COUNT_MAX, at.size)):
        unary += ((at[i] - at[i - 1] - 1) >> b) + 1
        need = ((n + 1) * bits + 7) // 8 + (n + 256) // 256 * scale + (unary + 7) // 8 + (n * b + 7) // 8
        if need > _ROOM:
            break
        n += 1
    return n


@compile_
def cut_rice(at: Indices, bits: int, scale: int, starts: Indices, parameter: Indices) -> int:
    """Where pieces start, and their b; how many there are."""
    n, start = 0, 0
    starts[0] = 0
    while start < at.size:
        gaps = min(8 * _ROOM // (bits + 8), at.size - start, _COUNT_MAX) - 1
        b = _parameter(at[start + gaps] - at[start] - gaps, gaps)
        taken = _fit(at, start, b, bits, scale)
        if taken > 1:
            b = _parameter(at[start + taken - 1] - at[start] - (taken - 1), taken - 1)
            taken = _fit(at, start, b, bits, scale)
            middle = b
            for other in (middle - 1, middle + 1):
                more = _fit(at, start, other, bits, scale) if 0 <= other <= _B_MAX else 0
                if more > taken:
                    b, taken = other, more
        parameter[n] = b
        n += 1
        start += taken
        starts[n] = start
    return n


@compile_
def _write_values(row: Bytes, values: Floats, coding: int) -> int:
    n = values.size
    bits = values.view(np.uint32)
    if coding == 0:
        for i in range(n):
            for byte in range(4):
                row[_HEADER + 4 * i + byte] = np.uint8(bits[i] >> np.uint32(8 * byte) & np.uint32(255))
        return _HEADER + 4 * n
    if coding == 1:
        for i in range(n):
            half = (bits[i] + np.uint32(0x7FFF) + (bits[i] >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            if half & np.uint32(0x7FFF) > np.uint32(0x7F7F):
                half = half & np.uint32(0x8000) | np.uint32(0x7F7F) if half < np.uint32(0x10000) else half
            row[_HEADER + 2 * i] = np.uint8(half & np.uint32(255))
            row[_HEADER + 2 * i + 1] = np.uint8(half >> np.uint32(8) & np.uint32(255))
        return _HEADER + 2 * n
    groups = (n + 255) // 256
    if coding == 3:  # they are written already
        return _HEADER + 4 * groups + (n + 3) // 4
    at = _HEADER + 2 * groups
    one = np.empty(1, np.float32)
    as_bits = one.view(np.uint32)
    for group in range(groups):
        first, last = 256 * group, min(256 * group + 256, n)
        top = np.float32(0)
        for i in range(first, last):
            top = max(top, abs(values[i]))
        one[0] = top / np.float32(127)
        half = min((as_bits[0] + np.uint32(0xFFFF)) >> np.uint32(16), np.uint32(_SCALE_MAX))
        row[_HEADER + 2 * group] = np.uint8(half & np.uint32(255))
        row[_HEADER + 2 * group + 1] = np.uint8(half >> np.uint32(8))
        as_bits[0] = half << np.uint32(16)
        scale = one[0] if half else np.float32(np.inf)
        for i in range(first, last):
            step = np.rint(values[i] / scale)
            row[at + i] = np.uint8(np.int8(min(max(step, np.float32(-127)), np.float32(127))))
    return at + n


@compile_
def _write_gaps(row: Bytes, at: Indices, start: int, end: int, b: int, byte: int) -> None:
    bit = 8 * byte
    for i in range(start + 1, end):
        bit += (at[i] - at[i - 1] - 1) >> b
        row[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit += 1
    byte = (bit + 7) >> 3
    held, kept = np.uint64(0), 0
    low = (1 << b) - 1
    for i in range(start + 1, end):
        held |= np.uint64((at[i] - at[i - 1] - 1) & low) << np.uint64(kept)
        kept += b
        while kept >= 8:
            row[byte] = np.uint8(held & np.uint64(255))
            byte += 1
            held >>= np.uint64(8)
            kept -= 8
    if kept:
        row[byte] = np.uint8(held & np.uint64(255))


@compile_
def write(
    table: Bytes, at: Indices, values: Floats, starts: Indices, parameter: Indices, coding: int
) -> None:
    """Values and indices of all fragments, behind their headers."""
    for n in range(parameter.size):
        start, end = starts[n], starts[n + 1]
        byte = _write_values(table[n], values[start:end], coding)
        _write_gaps(table[n], at, start, end, parameter[n], byte)


@compile_
def _read_2bit(row: Bytes, out: Floats) -> tuple[int, int]:
    """As ``_read_values``: a sign and one of the group's two levels, four values a byte."""
    n = out.size
    groups = (n + 255) // 256
    begin = _HEADER + 4 * groups
    if begin + (n + 3) // 4 > row.size:
        return 0, 1
    levels = np.empty(2 * groups, np.float32)
    bits = levels.view(np.uint32)
    for i in range(2 * groups):
        half = np.uint32(row[_HEADER + 2 * i]) | np.uint32(row[_HEADER + 2 * i + 1]) << np.uint32(8)
        if half > np.uint32(_LEVEL_MAX):
            return 0, 6
        bits[i] = half << np.uint32(16)
    for i in range(n):
        code = row[begin + (i >> 2)] >> np.uint8(2 * (i & 3)) & np.uint8(3)
        level = levels[2 * (i >> 8) + (code & 1)]
        out[i] = -level if code & 2 else level
    return begin + (n + 3) // 4, 0


@compile_
def _read_values(row: Bytes, out: Floats, coding: int) -> tuple[int, int]:
    """Where the indices begin, and the status."""
    n = out.size
    bits = out.view(np.uint32)
    groups = (n + 255) // 256
    if coding == 3:
        return _read_2bit(row, out)
    begin = _HEADER + (2 * groups if coding == 2 else 0)
    size = 4 if coding == 0 else (2 if coding == 1 else 1)
    if begin + n * size > row.size:
        return 0, 1
    if coding == 2:
        one = np.empty(1, np.float32)
        as_bits = one.view(np.uint32)
        for group in range(groups):
            half = np.uint32(row[_HEADER + 2 * group]) | np.uint32(row[_HEADER + 2 * group + 1]) << np.uint32(
                8
            )
            if half > np.uint32(_SCALE_MAX):
                return 0, 4
            as_bits[0] = half << np.uint32(16)
            for i in range(256 * group, min(256 * group + 256, n)):
                out[i] = np.float32(np.int8(row[begin + i])) * one[0]
        return begin + n, 0
    for i in range(n):
        word = np.uint32(0)
        for byte in range(size):
            word |= np.uint32(row[begin + size * i + byte]) << np.uint32(8 * byte)
        bits[i] = word if coding == 0 else word << np.uint32(16)
    for i in range(n):
        if not np.isfinite(out[i]):
            return 0, 3
    return begin + n * size, 0


@compile_
def _read_gaps(row: Bytes, base: int, b: int, byte: int, d: int, out: Indices) -> int:
    bit, end = 8 * byte, 8 * row.size
    n = out.size
    out[0] = base
    if n == 1:
        return 0
    for i in range(1, n):
        quotient = 0
        while bit < end and not (row[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1):
            quotient += 1
            bit += 1
        if bit >= end:
            return 2
        bit += 1
        out[i] = quotient
    byte = ((bit - 1) >> 3) + 1
    if 8 * byte + (n - 1) * b > end:
        return 2
    held, kept, low = np.uint64(0), 0, np.uint64((1 << b) - 1)
    for i in range(1, n):
        while kept < b:
            held |= np.uint64(row[byte]) << np.uint64(kept)
            byte += 1
            kept += 8
        out[i] = out[i - 1] + 1 + (out[i] << b) + np.int64(held & low)
        held >>= np.uint64(b)
        kept -= b
    return 5 if out[n - 1] >= d else 0


@compile_
def read(
    table: Bytes,
    rows: Bools,
    base: Indices,
    parameter: Indices,
    coding: int,
    d: int,
    starts: Indices,
    indices: Indices,
    values: Floats,
    status: NDArray[np.uint8],
) -> None:
    """Entries of the fragments in ``rows``; ``status`` says what is wrong with one."""
    for n in range(rows.size):
        if rows[n]:
            start, end = starts[n], starts[n + 1]
            byte, wrong = _read_values(table[n], values[start:end], coding)
            if wrong == 0:
                wrong = _read_gaps(table[n], base[n], parameter[n], byte, d, indices[start:end])
            status[n] = wrong
