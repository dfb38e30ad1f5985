"""Ascending indices in few bits, in pieces that each decode alone: Rice-coded gaps, and 64K blocks.

Rice (1979): of each gap less one, the low ``b`` bits as they are and the rest in unary. All quotients come
first (zeros, then a one, from the lowest bit of a byte up), then from the next byte on all remainders: two
streams that numpy reads without a loop. The first index of a piece is not coded; it is the piece's base.

Blocks: how many blocks of 65,536 are touched, for each how many blocks on and how many indices, then the
low 16 bits of each index. Larger (16.5 bits an index at a density of 0.1 %, where Rice needs 11.5), and
without any loop over bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import Bytes
from ragtag.core.wire import CHUNK_BYTES

Indices = NDArray[np.int64]

HEADER_BYTES = 14
ROOM = CHUNK_BYTES - HEADER_BYTES
COUNT_MAX = (1 << 11) - 1
B_MAX = 31
RICE, BLOCKS = 0, 1


class Sizes(NamedTuple):
    """Bits of one value, and bytes of scales for each 256 of them (0: none)."""

    bits: int
    scale: int

    def values(self, n: int) -> int:
        """Bytes that ``n`` values take, without their scales."""
        return (n * self.bits + 7) // 8


class Pieces(NamedTuple):
    """How entries are cut into pieces, a fragment each.

    starts: int64 ``[n + 1]``, the first entry of each piece.
    parameter: ``[n]``, Rice's b (Blocks: 0).
    """

    starts: Indices
    parameter: Indices


class Malformed(ValueError):
    """A chunk that no encoder has written."""


def rice_parameter(span: int, gaps: int) -> int:
    """b for ``gaps`` gaps that add up to ``span`` (each less one): about log2 of their mean times ln 2."""
    return max(0, (span * 45426 // (gaps << 16)).bit_length() - 1) if gaps > 0 else 0


def cut_rice(indices: Indices, sizes: Sizes) -> Pieces:
    """As many indices in each piece as fit, with the b that suits the piece."""
    starts, parameters, at, n = [0], [], 0, len(indices)
    guess = 8 * ROOM // (sizes.bits + 8)
    while at < n:
        gaps = np.diff(indices[at : at + COUNT_MAX]) - 1
        first = min(len(gaps), guess - 1)
        b = rice_parameter(int(gaps[:first].sum()), first)
        taken = _rice_fit(gaps, b, sizes)
        if taken > 1:
            b = rice_parameter(int(gaps[: taken - 1].sum()), taken - 1)
            taken = _rice_fit(gaps, b, sizes)
            for other in (
                b - 1,
                b + 1,
            ):  # of clustered gaps, the mean says too much
                more = _rice_fit(gaps, other, sizes) if 0 <= other <= B_MAX else 0
                if more > taken:
                    b, taken = other, more
        parameters.append(b)
        at += taken
        starts.append(at)
    return Pieces(np.array(starts, np.int64), np.array(parameters, np.int64))


def _rice_fit(gaps: Indices, b: int, sizes: Sizes) -> int:
    """How many entries fit, the first of which has no gap."""
    n = np.arange(2, len(gaps) + 2)
    unary = np.cumsum((gaps >> b) + 1)
    need = _value_bytes(n, sizes) + (unary + 7) // 8 + ((n - 1) * b + 7) // 8
    return 1 + int(np.searchsorted(need, ROOM, "right"))


def _value_bytes(n: Indices, sizes: Sizes) -> Indices:
    return (n * sizes.bits + 7) // 8 + (n + 255) // 256 * sizes.scale


def rice(indices: Indices, b: int) -> Bytes:
    """The gaps between a piece's ascending indices in Rice code: unary ends, then ``b`` low bits of each."""
    gaps = np.diff(indices) - 1
    if not len(gaps):
        return np.zeros(0, np.uint8)
    ends = np.cumsum((gaps >> b) + 1)
    unary = np.zeros(int(ends[-1]), np.uint8)
    unary[ends - 1] = 1
    low = (gaps[:, None] >> np.arange(b)).astype(np.uint8) & 1
    return np.concatenate([np.packbits(unary, bitorder="little"), np.packbits(low, bitorder="little")])


def unrice(data: Bytes, base: int, count: int, b: int) -> Indices:
    """The ``count`` indices of a piece. Raises Malformed where ``data`` ends before they do."""
    if count == 1:
        return np.array([base], np.int64)
    bits = np.unpackbits(data, bitorder="little")
    ones = np.flatnonzero(bits)[: count - 1]
    if len(ones) < count - 1:
        raise Malformed("its indices are cut short")
    at = (int(ones[-1]) // 8 + 1) * 8
    low = bits[at : at + (count - 1) * b]
    if len(low) < (count - 1) * b:
        raise Malformed("its indices are cut short")
    gaps = (np.diff(ones, prepend=-1) - 1) << b
    gaps += low.reshape(count - 1, b).astype(np.int64) @ (1 << np.arange(b, dtype=np.int64))
    return np.concatenate([[base], base + np.cumsum(gaps + 1)])


def cut_blocks(indices: Indices, sizes: Sizes) -> Pieces:
    """As many indices in each piece as fit."""
    starts, at, n = [0], 0, len(indices)
    while at < n:
        block = indices[at : at + COUNT_MAX] >> 16
        many = np.arange(1, len(block) + 1)
        touched = 1 + np.cumsum(np.diff(block, prepend=block[0]) > 0)
        need = _value_bytes(many, sizes) + 2 + 4 * touched + 2 * many
        at += int(np.searchsorted(need, ROOM, "right"))
        starts.append(at)
    return Pieces(np.array(starts, np.int64), np.zeros(len(starts) - 1, np.int64))


def blocks(indices: Indices) -> Bytes:
    """A piece's ascending indices: its blocks of 65,536 with a count each, then 16 bits of each index."""
    block, counts = np.unique(indices >> 16, return_counts=True)
    table = np.stack([np.diff(block, prepend=block[0]), counts], axis=1).astype("<u2")
    parts = [np.array([len(block)], "<u2"), table.reshape(-1), (indices & 0xFFFF).astype("<u2")]
    return np.concatenate(parts).view(np.uint8)


def unblocks(data: Bytes, base: int, count: int) -> Indices:
    """The ``count`` indices of a piece. Raises Malformed."""
    words = np.frombuffer(data[: len(data) // 2 * 2].tobytes(), "<u2").astype(np.int64)
    touched = int(words[0]) if len(words) else 0
    if len(words) < 1 + 2 * touched + count:
        raise Malformed("its indices are cut short")
    on, counts = words[1 : 1 + 2 * touched : 2], words[2 : 2 + 2 * touched : 2]
    if int(counts.sum()) != count:
        raise Malformed(f"its blocks hold {int(counts.sum())} indices where {count} were named")
    block = (base >> 16) + np.cumsum(on)
    found = np.repeat(block << 16, counts) + words[1 + 2 * touched : 1 + 2 * touched + count]
    if int(found[0]) != base or not (np.diff(found) > 0).all():
        raise Malformed("its indices do not ascend from its base")
    return np.asarray(found, np.int64)
