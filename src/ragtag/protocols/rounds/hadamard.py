"""A randomised Hadamard transform across the chunks of a round: it spreads what a burst of loss does.

Neighbouring chunks of one tensor form groups of a power of two. In a group each value gets a random sign, and
the values that stand in one place of its chunks are mixed by a Hadamard matrix. The mixed chunks of a group
are then sent far apart. So a burst takes a few of each of many groups, and what is lost of one takes a little
of all its chunks, where it would take all of some. After OptiReduce's dispersal (Warraich et al., NSDI 2025,
arXiv 2310.06993). Ours goes across datagrams, the unit of loss, and never across tensors: a mixed error is as
large for all values of a group, so a tensor whose values differ much between peers would drown one whose
values hardly do.

The transform is orthonormal: the squared error of a mean stays what it is, and only where it falls changes.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.core import seed as random
from ragtag.core.types import Bools, Floats, PeerSet

SIZE_MAX = 1024
"""Chunks that are mixed, at most."""
_BLOCK_VALUES = 1 << 16
"""So many values are transformed at a time: they stay in a processor's cache."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Unmixed(NamedTuple):
    """A round's outcome, chunk by chunk, after the transform was undone (see ``Outcome``)."""

    mean: Floats
    weight: Floats
    heard: PeerSet
    averaged: Bools
    told: Bools


class MixedGroups(NamedTuple):
    """Which chunks are mixed together, and the order in which they are sent.

    groups: of each size from 2 on, the first chunks of its groups.
    order: which mixed chunk is sent in each place, int64 ``[n_chunks]``.
    """

    groups: tuple[tuple[int, NDArray[np.int64]], ...]
    order: NDArray[np.int64]


@lru_cache(maxsize=64)
def mixing_of(n_chunks: int, size: int, edges: tuple[int, ...]) -> MixedGroups:
    """How a table is mixed. edges: chunks at which tensors begin.

    A tensor's chunks are cut into groups of ``size``, and what is left of them into ever smaller powers of
    two. A group's chunks are sent ``n_chunks`` over its size apart; where its first one is follows the golden
    ratio, so that no two groups march in step.
    """
    starts: dict[int, list[int]] = {}
    place = np.zeros(n_chunks, np.uint64)
    number = 0
    for start, stop in pairwise(sorted({0, n_chunks, *(edge for edge in edges if 0 < edge < n_chunks)})):
        while start < stop:
            many = min(size, 1 << ((stop - start).bit_length() - 1))
            apart = (1 << 64) // many
            place[start : start + many] = [(number * _GOLDEN + k * apart) & _MASK for k in range(many)]
            if many > 1:
                starts.setdefault(many, []).append(start)
            start, number = start + many, number + 1
    groups = tuple((many, np.array(of, np.int64)) for many, of in sorted(starts.items()))
    return MixedGroups(groups, np.argsort(place, kind="stable").astype(np.int64))


class Hadamard:
    """The transform of one round's table, float32 ``[n_chunks, elements]``.

    key: of the stream of signs, which all peers draw alike.
    size: how many chunks are mixed at most, a power of two.
    edges: chunks at which tensors begin.
    """

    def __init__(
        self, key: int, n_chunks: int, elements: int, size: int, edges: tuple[int, ...] = ()
    ) -> None:
        self._mixing = mixing_of(n_chunks, size, edges)
        most = max((many for many, _ in self._mixing.groups), default=0)
        drawn = random.bits(key, -(-most * elements // 64)).astype("<u8", copy=False).view(np.uint8)
        flips = np.unpackbits(drawn, count=most * elements).reshape(most, elements)
        self._signs = 1.0 - 2.0 * flips.astype(np.float32)

    def forward(self, values: Floats) -> Floats:
        """The transformed table, a new one."""
        table = values.copy()
        for many, at, signs in self._parts():
            table[at] = _mixed((values[at] * signs).reshape(-1, values.shape[1]), many).reshape(*at.shape, -1)
        return table[self._mixing.order]

    def inverse(self, values: Floats) -> Floats:
        """What ``forward`` was given, but for rounding; a new table."""
        table = np.empty_like(values)
        table[self._mixing.order] = values
        for many, at, signs in self._parts():
            table[at] = _mixed(table[at].reshape(-1, values.shape[1]), many).reshape(*at.shape, -1) * signs
        return table

    def undone(
        self, mean: Floats, weight: Floats, heard: PeerSet, averaged: Bools, told: Bools, own: Floats
    ) -> Unmixed:
        """A transformed table's outcome as one of what was transformed.

        own: this peer's values, untransformed: where nothing of a group came, they stay as they are, bit for
            bit. Elsewhere a chunk is averaged if any of its group is; it has all contributors of the group,
            and the mean of its weights. So it is told of, if any of its group is.
        """
        weights, heards = np.empty_like(weight), np.empty_like(heard)
        some, known = np.empty_like(averaged), np.empty_like(told)
        order = self._mixing.order
        weights[order], heards[order], some[order], known[order] = weight, heard, averaged, told
        for many, first in self._mixing.groups:
            at = first[:, None] + np.arange(many)
            weights[at] = weights[at].mean(axis=1, keepdims=True)
            heards[at] = np.bitwise_or.reduce(heards[at], axis=1, keepdims=True)
            for each in (some, known):
                each[at] = each[at].any(axis=1, keepdims=True)
        table = self.inverse(mean)
        table[~some] = own[~some]
        return Unmixed(table, weights, heards, some, known)

    def _parts(self) -> list[tuple[int, NDArray[np.int64], Floats]]:
        """Some groups of one size at a time: the size, their chunks ``[groups, size]``, and scaled signs."""
        elements, parts = self._signs.shape[1], []
        for many, first in self._mixing.groups:
            signs = self._signs[:many] / np.float32(np.sqrt(many))
            at, step = first[:, None] + np.arange(many), max(1, _BLOCK_VALUES // (many * elements))
            parts += [(many, at[i : i + step], signs) for i in range(0, len(at), step)]
        return parts


def _mixed(rows: Floats, size: int) -> Floats:
    """The Hadamard matrix (Sylvester's, not scaled) times each ``size`` rows of ``[k, elements]``.

    By its fast form, n log n. ``rows`` are written over.
    """
    now, after, half = rows, np.empty_like(rows), 1
    with np.errstate(over="ignore", invalid="ignore"):  # owners refuse what is not finite
        while half < size:
            shape = (len(rows) // (2 * half), 2, half, rows.shape[1])
            pairs, sums = now.reshape(shape), after.reshape(shape)
            np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
            now, after, half = after, now, 2 * half
    return now
