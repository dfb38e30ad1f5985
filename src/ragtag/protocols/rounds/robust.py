"""Guards: what an owner makes of its peers' shares where some of the peers may lie.

A mean follows any one peer as far as that peer likes. An owner sees each peer's share of its blocks. So it
can keep the shares apart until all are there, and reduce them by a rule that no few peers can move far:

- ``TrimmedMean``: of each value the lowest and the highest are left out ("Byzantine-Robust Distributed
  Learning", Yin et al., ICML 2018, definition 2). It looks at each value alone, so owners of blocks come to
  exactly what one owner of all would come to.
- ``CentredClipping``: what lies far from a centre is pulled towards it ("Learning from History for Byzantine
  Robust Optimization", Karimireddy et al., ICML 2021, equation 1). Distances are those of one chunk, which
  is what gets lost and has contributors of its own. The paper's centre is the last mean, its radius a number
  found by trial. Here the centre is the median of each value, as the owner of this round need not have been
  there in the last one. The radius is the largest distance of a peer that is not one of the farthest, so it
  has the scale of each chunk. What the paper proves of a memory of earlier rounds does not hold of this.

Krum (Blanchard et al., NeurIPS 2017) is not here. It takes one peer's whole vector, by its distances to the
others. An owner sees distances in its blocks only. By these the result would be pieced together from
different peers: another rule, without Krum's proof, that throws away the shares of all but one.

Both rules hold against ``f`` liars: ``liars`` of the peers that the owner knows to live, rounded up. Where
fewer than ``2 f + 1`` shares of a chunk came, liars may be the majority of those, and the chunk has no
average: each peer keeps its own values. So a crew of two never averages with a guard. One that is founded too
small for its guard is refused (``require_enough``). Whatever ``f`` liars send, each value of a trimmed mean
lies between the least and the greatest that an honest peer sent. Each value of the median does, too, and a
clipped share lies no farther from it than an honest one.

A peer claims the weight of its own share. What exceeds ``heaviest`` times the middle one of the weights is
not believed. A share counts for the peer that sent it, whatever contributors it names.

An owner that lies about the *result* is not met by this. It could be found out by a second owner that reduces
the same shares, or by peers that sign what they send and compare.

Memory: an owner keeps each member's share of its own blocks, one vector in all while every peer owns a block,
for the round under way and for those that faster peers have begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import PEERS_MAX, Audited, Floats, PeerId, PeerSet

_SLICE_VALUES = 1 << 17
"""About so many values are reduced at a time: half a megabyte, so that they stay in a processor's caches."""
FAR_MAX = 1e9
"""Distances are told up to this many times the middle one."""


class RobustMean(Protocol):
    """How an owner reduces shares of which some may be lies. All peers of a channel have the same.

    liars: the share of the living peers that may lie, above 0 and below a half.
    heaviest: how many times the middle weight a peer's weight may be.
    name: what peers compare when they meet.
    """

    @property
    def liars(self) -> float: ...  # noqa: D102
    @property
    def heaviest(self) -> float: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102

    def reduce(self, shares: Floats, weight: Floats, f: int) -> tuple[Floats, Floats]:
        """The result, float32 ``[k, elements]``, and the part of each share that was cut, float32 ``[m, k]``.

        shares: float32 ``[m, k, elements]``, finite.
        weight: float32 ``[m, k]``; 0: that share is not there.
        f: how many of the ``m`` may be lies. Of a chunk with fewer than ``2 f + 1`` shares the result is 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The weighted mean of each value without the lowest and the highest ones.

    liars: the share of the living peers that may lie; so many are left out at either end.
    heaviest: how many times the middle weight a peer may weigh. Above 1, liars may outweigh their number.
    Raises ValueError where these make no sense.
    """

    liars: float = 0.2
    heaviest: float = 1.0

    def __post_init__(self) -> None:
        _require(self)

    @property
    def name(self) -> str:
        """What peers compare."""
        return f"trimmed mean ({self.liars:g}, {self.heaviest:g})"

    def reduce(self, shares: Floats, weight: Floats, f: int) -> tuple[Floats, Floats]:
        """See ``RobustMean``. Of equal values all stay or all go."""
        if len(shares) <= f:
            return np.zeros_like(shares[0]), np.zeros_like(weight)
        ordered, count = _ordered(shares, weight)
        high = _at(ordered, count - 1 - f)
        kept = (shares >= ordered[f]) & (shares <= high)
        kept &= (weight > 0)[:, :, None]
        part = kept * weight[:, :, None]
        total = part.sum(axis=0)
        part *= shares
        some = total > 0
        mean = np.divide(part.sum(axis=0), total, out=np.zeros_like(total), where=some)
        cut = 1.0 - np.count_nonzero(kept, axis=2).astype(np.float32) / np.float32(shares.shape[2])
        return mean, np.where(weight > 0, cut, np.float32(0.0))


@dataclass(frozen=True, slots=True)
class CentredClipping:
    """The median of each value, and the weighted mean of how far the shares are from it, the farthest ones
    clipped.

    liars: the share of the living peers that may lie; so many of the farthest are clipped to the next one's
        distance, in each chunk.
    heaviest: how many times the middle weight a peer may weigh.
    Raises ValueError where these make no sense.
    """

    liars: float = 0.2
    heaviest: float = 1.0

    def __post_init__(self) -> None:
        _require(self)

    @property
    def name(self) -> str:
        """What peers compare."""
        return f"centred clipping ({self.liars:g}, {self.heaviest:g})"

    def reduce(self, shares: Floats, weight: Floats, f: int) -> tuple[Floats, Floats]:
        """See ``RobustMean``."""
        ordered, count = _ordered(shares, weight)
        half = np.float32(0.5)
        centre = half * _at(ordered, (count - 1) // 2) + half * _at(ordered, count // 2)
        there = weight > 0
        centre[~there.any(axis=0)] = 0.0
        off = shares - centre
        if not there.all():
            off[~there] = 0.0
        squares = np.einsum("mke,mke->mk", off, off)
        distance = np.where(there, np.sqrt(squares), np.float32(np.inf))
        radius = _at(_sorted(distance), count - 1 - f)
        factor = np.divide(radius, distance, out=np.ones_like(distance), where=distance > radius)
        total = weight.sum(axis=0)
        part = np.divide(weight * factor, total, out=np.zeros_like(weight), where=total > 0)
        mean = centre + np.einsum("mk,mke->ke", part, off)
        mean[count < 2 * f + 1] = 0.0
        return mean, np.where(there, 1.0 - factor, np.float32(0.0))


def _require(guard: RobustMean) -> None:
    if not 0 < guard.liars < 0.5:
        raise ValueError(f"liars is {guard.liars}; it is a share of the peers, above 0 and below a half")
    if not 1 <= guard.heaviest < math.inf:
        raise ValueError(f"heaviest is {guard.heaviest}; it is a finite number, 1 or more")


def _ordered(shares: Floats, weight: Floats) -> tuple[list[Floats], NDArray[np.intp]]:
    """Each value's shares in ascending order, those that are not there last; and how many are, ``[k]``."""
    there = weight > 0
    if not there.all():
        shares = shares.copy()
        shares[~there] = np.inf
    return _sorted(shares), there.sum(axis=0)


def _sorted(rows: Floats) -> list[Floats]:
    """Rows ``[m, ...]`` such that each value of one is at most that of the next.

    A sorting network: all values of two rows are put in order at once, which numpy does four times as fast as
    it sorts columns of ten.
    """
    ordered = list(rows.copy())
    spare = np.empty_like(ordered[0])
    for i, j in _network(len(ordered)):
        np.minimum(ordered[i], ordered[j], out=spare)
        np.maximum(ordered[i], ordered[j], out=ordered[j])
        ordered[i], spare = spare, ordered[i]
    return ordered


@lru_cache(maxsize=PEERS_MAX)
def _network(n: int) -> tuple[tuple[int, int], ...]:
    """Which of ``n`` to put in order, pair after pair, so that all are (Batcher's merge exchange: Knuth, "The
    Art of Computer Programming", volume 3, algorithm 5.2.2M).
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(pairs)


def _at(ordered: Sequence[Floats], rank: NDArray[np.intp]) -> Floats:
    """Of each chunk the values of its rank ``[k]``: ``[k, ...]``, a copy."""
    rank = np.maximum(rank, 0)
    first = int(rank[0])
    if (rank == first).all():
        return np.array(ordered[first])
    return np.stack(ordered)[rank, np.arange(len(rank))]


def believed(weight: Floats, heaviest: float) -> Floats:
    """Weights ``[m, k]``, none above ``heaviest`` times the (lower) middle one of its chunk; 0: not there."""
    there = weight > 0
    ordered = np.sort(np.where(there, weight, np.float32(np.inf)), axis=0)
    middle = _at(list(ordered), (there.sum(axis=0) - 1) // 2)
    found: Floats = np.minimum(weight, np.float32(heaviest) * middle)
    return found


class _Share:
    """One peer's share of a block: values ``[size, elements]``, and a weight per chunk (0: not there)."""

    __slots__ = ("values", "weight")

    def __init__(self, size: int, elements: int) -> None:
        self.values = np.zeros((size, elements), np.float32)
        self.weight = np.zeros(size, np.float32)


class Shares:
    """What has come of the blocks of one owner in one round, each peer's apart, and what was made of it.

    live: how many peers the owner knows to live.
    """

    def __init__(self, guard: RobustMean, live: int, sizes: dict[int, int], elements: int) -> None:
        self._guard, self._live, self._elements = guard, live, elements
        self._blocks: dict[int, dict[PeerId, _Share]] = {block: {} for block in sizes}
        self._sizes = sizes
        self._audit: dict[PeerId, NDArray[np.float64]] = {}
        self._short = 0

    def of(self, peer: PeerId, block: int) -> _Share:
        """Where a peer's share of a block is kept."""
        shares = self._blocks[block]
        share = shares.get(peer)
        if share is None:
            share = shares[peer] = _Share(self._sizes[block], self._elements)
        return share

    def reduce(self, block: int, mean: Floats, weight: Floats, heard: PeerSet) -> None:
        """Reduce a block into ``mean [size, elements]``, with its weight and contributors, and forget it.

        Of a chunk of which too few shares came the weight is 0.
        """
        shares = self._blocks.pop(block)
        heard[:], weight[:] = 0, 0.0
        peers = sorted(shares)
        if not peers:
            return
        f = liars_among(self._guard, max(self._live, len(peers)))
        claimed = np.stack([shares[peer].weight for peer in peers])
        counted = believed(claimed, self._guard.heaviest)
        enough = (counted > 0).sum(axis=0) >= 2 * f + 1
        self._short += int((~enough).sum())
        weight[enough] = counted.sum(axis=0)[enough]
        for row, peer in zip(claimed, peers, strict=True):
            heard[row > 0] |= np.uint64(1 << peer)
        found = np.zeros((4, len(peers)))
        judged = (counted > 0) & enough
        found[0] = judged.sum(axis=1) * float(self._elements)
        found[3] = ((counted < claimed) & enough).sum(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            many = max(1, _SLICE_VALUES // (len(peers) * self._elements))
            for at in range(0, len(mean), many):
                span = slice(at, min(at + many, len(mean)))
                table = np.stack([shares[peer].values[span] for peer in peers])
                mean[span], cut = self._guard.reduce(table, counted[:, span], f)
                table -= mean[span]
                found[1] += (cut * judged[:, span]).sum(axis=1) * self._elements
                found[2] += (np.einsum("mke,mke->mk", table, table) * judged[:, span]).sum(axis=1)
        for column, peer in zip(found.T, peers, strict=True):
            self._audit[peer] = self._audit.get(peer, np.zeros(4)) + column

    def judged(self) -> Audited:
        """What became of each peer's shares in the blocks that were reduced."""
        peers = tuple(peer for peer in sorted(self._audit) if self._audit[peer][0] > 0)
        if not peers:
            return Audited((), (), (), (), (), self._short)
        values, cut, squares, capped = np.array([self._audit[peer] for peer in peers]).T
        distance = np.sqrt(squares / values)
        middle = float(np.sort(distance)[(len(distance) - 1) // 2])
        with np.errstate(divide="ignore", invalid="ignore"):
            far = np.where(distance > 0, distance / middle, 0.0)
        return Audited(
            peers,
            tuple(map(int, values.tolist())),
            tuple((cut / values).tolist()),
            tuple(np.minimum(np.nan_to_num(far, nan=FAR_MAX, posinf=FAR_MAX), FAR_MAX).tolist()),
            tuple(map(int, capped.tolist())),
            self._short,
        )


def liars_among(guard: RobustMean, peers: int) -> int:
    """How many of so many peers may lie: the guard's share of them, rounded up."""
    return math.ceil(guard.liars * peers - 1e-9)


def shares_for(guard: RobustMean, peers: int) -> int:
    """Of how many peers an average takes the shares, in a crew of so many: there is none of fewer."""
    return 2 * liars_among(guard, peers) + 1


def require_enough(guard: RobustMean, peers: int) -> None:
    """Raise ValueError where the shares of all of so many peers are too few for any average."""
    least = shares_for(guard, peers)
    if peers >= least:
        return
    may = (peers - 1) // 2 * 100 // peers  # rounded down, so that what is said will do
    instead = (
        f"write liars={may / 100:g} or less" if may else "begin with 3 peers or more, or leave out guard"
    )
    raise ValueError(
        f"guard={guard!r}: of {peers} peers {least // 2} may lie, and an average takes the shares of "
        f"{least}, so there would be none: {instead}"
    )
