"""Moshpit's grid: which peers average together in which round.

"Moshpit SGD", Ryabinin, Gorbunov, Plokhotnyuk, Pekhimenko, NeurIPS 2021 (arXiv 2103.03239), section 3.1 and
algorithm 1. Peers stand in the cells of a grid of d dimensions. In round t peers that differ only in their
index on axis t mod d average. With a full grid and no failure the mean is exact after d rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ragtag.core import seed as random
from ragtag.core.types import PEERS_MAX, PeerId

Cell = tuple[int, ...]
CELLS_MAX = 1 << 20
PROBES = 64
"""A peer tries so many cells of its own. In a full grid two in a hundred peers find none of theirs free."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid with ``sides[a]`` cells along axis ``a``.

    The paper's key is the queue of the last d-1 indices. All peers append in the same round, so the queue
    holds the cell's indices except that of the axis whose turn it is, in cyclic order. The groups are the
    same.
    """

    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sides or min(self.sides) < 1 or max(self.sides) > PEERS_MAX:
            raise ValueError(f"a grid of sides {self.sides}: one or more, each from 1 to {PEERS_MAX} cells")
        if math.prod(self.sides) > CELLS_MAX:
            raise ValueError(f"a grid of sides {self.sides} has more than {CELLS_MAX} cells; take fewer axes")

    @property
    def cells(self) -> int:
        """How many peers the grid holds, one in each cell."""
        return math.prod(self.sides)

    def axis(self, round_: int) -> int:
        """The axis along which a round averages."""
        return round_ % len(self.sides)

    def cell(self, number: int) -> Cell:
        """The indices of cell ``number``, counted row by row."""
        cell = []
        for side in reversed(self.sides):
            number, index = divmod(number, side)
            cell.append(index)
        return tuple(reversed(cell))

    def line_number(self, cell: Cell, axis: int) -> int:
        """The number of a cell's line along an axis, among the lines along that axis."""
        number = 0
        for other, side in enumerate(self.sides):
            if other != axis:
                number = number * side + cell[other]
        return number

    def line_key(self, cell: Cell, axis: int, seed: int) -> int:
        """The 64-bit key of the group on a cell's line along an axis; other grids' lines have other keys."""
        return random.stream_key(seed, "line", *self.sides, axis, *cell[:axis], *cell[axis + 1 :])

    def thin(self, n: int) -> bool:
        """Whether ``n`` peers on this grid mix worse than in random groups of the same size.

        After d rounds on a grid filled to a share f, the groups' means differ by about ``(1 - f) (f M)^-d``
        of the variance (a sample of f M of M lines). Random groups of M leave ``M^-d``. So a grid is thin
        where ``1 - f > f^d``: below 62 % in two dimensions, 68 % in three.
        """
        d, full = len(self.sides), n / self.cells
        return d > 1 and 1.0 - full > full**d


@lru_cache(maxsize=256)
def grid_of(n: int, group: int) -> Grid:
    """The grid for ``n`` live peers in groups of at most ``group``.

    It has as few axes as hold the peers, and sides that differ by at most one. So more than ``1 - 1/M`` of
    the cells are filled, and a grid that follows the live number is thin only where sides have 2 or 3 cells.

    Raises:
        ValueError: ``group`` is not between 2 and 64, or ``n`` is below 1 or needs too many cells.
    """
    if not 2 <= group <= PEERS_MAX:
        raise ValueError(f"groups of {group}: a group has 2 to {PEERS_MAX} peers")
    if not 1 <= n <= CELLS_MAX:
        raise ValueError(f"a grid for {n} peers: there must be 1 to {CELLS_MAX}")
    d = 1
    while group**d < n:
        d += 1
    side = 1
    while side**d < n:
        side += 1
    sides = [side] * d
    for axis in reversed(range(d)):
        if math.prod(sides) // sides[axis] * (sides[axis] - 1) >= n:
            sides[axis] -= 1
    return Grid(tuple(sides))


@lru_cache(maxsize=64)
def cells_of(grid: Grid, key: int, peers: tuple[PeerId, ...]) -> NDArray[np.int64]:
    """The number of each peer's cell: int64 ``[n]``, no two the same while there are enough cells.

    Each peer tries cells of its own, one after the other, in step with all others. Of several at a free cell
    the first by a hash gets it. So views that differ in one peer differ in one to three cells more (of a
    thousand, nine in ten of them taken), where a permutation of ranks would move half of all peers. A peer
    that finds none in ``PROBES`` tries takes one that is left.
    """
    n, cells = len(peers), grid.cells
    if n > cells:
        return np.arange(n) % cells
    left = np.argsort(random.stream_keys(key, "before", peers), kind="stable")
    at, taken = np.full(n, -1, np.int64), np.zeros(cells, np.bool_)
    names = np.array(peers, np.int64)
    for probe in range(PROBES):
        wanted = random.stream_keys(key, "wanted", names[left].tolist(), [probe] * len(left))
        cell = (wanted % np.uint64(cells)).astype(np.int64)
        found, first = np.unique(np.where(taken[cell], cells, cell), return_index=True)
        free = found < cells
        at[left[first[free]]] = found[free]
        taken[found[free]] = True
        left = left[at[left] < 0]
        if not len(left):
            break
    at[left] = np.flatnonzero(~taken)[: len(left)]
    at.setflags(write=False)
    return at


@lru_cache(maxsize=64)
def line_counts(grid: Grid, key: int, peers: tuple[PeerId, ...]) -> tuple[list[int], ...]:
    """How many peers stand on each line along each axis, by the line's number (``Grid.line_number``)."""
    at = np.unravel_index(cells_of(grid, key, peers), grid.sides)
    counts = []
    for axis, length in enumerate(grid.sides):
        number = np.zeros(len(peers), np.int64)
        for other, side in enumerate(grid.sides):
            if other != axis:
                number = number * side + at[other]
        counts.append(np.bincount(number, minlength=grid.cells // length).tolist())
    return tuple(counts)


@lru_cache(maxsize=32)
def shuffled(key: int, n: int) -> tuple[int, ...]:
    """A random permutation of ``range(n)``, made once for all peers of a process."""
    return random.permutation(key, n)


@lru_cache(maxsize=32)
def places(key: int, n: int) -> tuple[int, ...]:
    """Where each number stands in ``shuffled(key, n)``."""
    inverse = [0] * n
    for place, number in enumerate(shuffled(key, n)):
        inverse[number] = place
    return tuple(inverse)
