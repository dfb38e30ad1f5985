"""Moshpit's grid: which peers average together in which round.

"Moshpit SGD", Ryabinin, Gorbunov, Plokhotnyuk, Pekhimenko, NeurIPS 2021 (arXiv 2103.03239), section 3.1 and
algorithm 1. Peers stand in the cells of a grid of d dimensions; in round t those average that differ only in
their index on axis t mod d. With a full grid and no failure the mean is exact after d rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ragtag.core import seed as random
from ragtag.core.types import PEERS_MAX

Cell = tuple[int, ...]
CELLS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid with ``sides[a]`` cells along axis ``a``.

    The paper's key is the queue of the last d-1 indices. All peers append in the same round, so the queue is
    the cell's indices without that of the axis whose turn it is, in cyclic order: the same groups.
    """

    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sides or min(self.sides) < 1 or max(self.sides) > PEERS_MAX:
            raise ValueError(f"a grid of sides {self.sides}: one or more, each from 1 to {PEERS_MAX} cells")
        if math.prod(self.sides) > CELLS_MAX:
            raise ValueError(f"a grid of sides {self.sides} has more than {CELLS_MAX} cells; take fewer axes")

    @property
    def cells(self) -> int:
        """How many peers it holds, one in each cell."""
        return math.prod(self.sides)

    def axis(self, round_: int) -> int:
        """The axis along which a round averages."""
        return round_ % len(self.sides)

    def place(self, number: int) -> Cell:
        """Cell ``number``, row by row."""
        cell = []
        for side in reversed(self.sides):
            number, index = divmod(number, side)
            cell.append(index)
        return tuple(reversed(cell))

    def line(self, cell: Cell, axis: int, seed: int) -> int:
        """The 64-bit key of the group of a cell along an axis; lines of other grids have other keys."""
        return random.stream_key(seed, "line", *self.sides, axis, *cell[:axis], *cell[axis + 1 :])

    def thin(self, n: int) -> bool:
        """Whether ``n`` peers on this grid mix worse than in random groups of the same size.

        After d rounds on a grid that is filled to a share f, the groups' means differ by about
        ``(1 - f) (f M)^-d`` of the variance (a sample of f M of M lines); random groups of M leave ``M^-d``.
        So a grid is thin where ``1 - f > f^d``: below 62 % in two dimensions, 68 % in three.
        """
        d, full = len(self.sides), n / self.cells
        return d > 1 and 1.0 - full > full**d


@lru_cache(maxsize=256)
def grid_of(n: int, group: int) -> Grid:
    """The grid for ``n`` live peers in groups of at most ``group``.

    As few axes as hold them, and sides that differ by at most one: then more than ``1 - 1/M`` of the cells
    are filled, so a grid that follows the live number is thin only where sides are of 2 or 3 cells.

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


@lru_cache(maxsize=32)
def standing(grid: Grid, key: int, n: int, axis: int) -> dict[Cell, int]:
    """How many of the first ``n`` cells of a permutation stand on each line along an axis, by what is left
    of their cells without that axis."""
    count: dict[Cell, int] = {}
    for number in shuffled(key, grid.cells)[:n]:
        cell = grid.place(number)
        line = cell[:axis] + cell[axis + 1 :]
        count[line] = count.get(line, 0) + 1
    return count


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
