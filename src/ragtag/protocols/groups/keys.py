"""Which group a peer averages in: Moshpit's keys, and random groups to compare with.

The source is that of ``grid``. Beyond the paper: the grid's sides follow from the number of live peers. An
index stays with its peer while no other in the group holds it, so peers that miss a round find their cell
free. Peers leave a grid that is too empty for random groups until it fills again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragtag.core import seed as random
from ragtag.core.types import PEERS_MAX, PeerId
from ragtag.protocols.groups.grid import Cell, Grid, cells_of, grid_of, line_counts


class View:
    """The live peers, as one peer sees them. Immutable, so that many peers may share one.

    Each key has *hosts* where its peers meet: the peers that follow it on a ring of hashes (consistent
    hashing: Karger et al., STOC 1997). So views that differ in one peer differ in few hosts.
    """

    __slots__ = ("_cells", "_ring", "_ring_peers", "peers")

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.peers = tuple(sorted(set(peers)))
        if not self.peers:
            raise ValueError("a view of no peers: it holds at least the peer itself")
        keys = random.stream_keys(0, "ring", self.peers).tolist()
        order = sorted(zip(keys, self.peers, strict=True))
        self._cells: tuple[int, NDArray[np.int64], tuple[list[int], ...]] | None = None
        self._ring = [key for key, _ in order]
        self._ring_peers = [peer for _, peer in order]

    def __len__(self) -> int:
        return len(self.peers)

    def __contains__(self, peer: PeerId) -> bool:
        at = bisect_left(self.peers, peer)
        return at < len(self.peers) and self.peers[at] == peer

    def rank(self, peer: PeerId) -> int:
        """A peer's place among the live ones."""
        return bisect_left(self.peers, peer)

    def hosts(self, key: int, k: int) -> tuple[PeerId, ...]:
        """The first ``k`` hosts of a key, or all peers where there are fewer."""
        n, at = len(self._ring), bisect_left(self._ring, key)
        return tuple(self._ring_peers[(at + i) % n] for i in range(min(k, n)))

    def cells_on(self, grid: Grid, seed: int) -> tuple[NDArray[np.int64], tuple[list[int], ...]]:
        """Each peer's cell on a grid, by rank, and how many peers stand on each of its lines."""
        key = random.stream_key(seed, "cells", *grid.sides)
        if self._cells is None or self._cells[0] != key:
            self._cells = key, cells_of(grid, key, self.peers), line_counts(grid, key, self.peers)
        return self._cells[1:]

    def joined(self, peer: PeerId) -> View:
        """The view with one peer more."""
        return self if peer in self else View((*self.peers, peer))

    def left(self, peer: PeerId) -> View:
        """The view without a peer. The last peer stays."""
        if peer not in self or len(self.peers) == 1:
            return self
        return View(other for other in self.peers if other != peer)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer averages in a round.

    key: its group's.
    index: the one that it wants in the group.
    most: how many members to expect.
    """

    key: int
    index: int
    most: int


class Keys(Protocol):
    """How one peer chooses its group, round by round."""

    def place(self, round_: int, view: View) -> Place:
        """The peer's group in a round."""
        ...

    def moved(self, round_: int, index: int | None) -> None:
        """The round is over: the peer had this index in its group (``None``: it met no group)."""
        ...


def n_groups(n: int, group: int) -> int:
    """Into how many groups of about ``group`` peers ``n`` peers are cut.

    The number is rounded to its first five bits, so that one peer more or less hardly ever moves all the
    cuts.
    """
    least = -(-n // PEERS_MAX)
    exact = max(1, n // group, least)
    step = 1 << max(0, exact.bit_length() - 5)
    rounded = exact - exact % step
    return rounded if rounded >= least else rounded + step


@lru_cache(maxsize=32)
def random_ranks(key: int, peers: tuple[PeerId, ...]) -> tuple[int, ...]:
    """Each peer's rank in a random order. Which of two peers comes first does not depend on the others."""
    order = np.argsort(random.stream_keys(key, "drawn", peers), kind="stable")
    places = np.empty(len(peers), np.int64)
    places[order] = np.arange(len(peers))
    return tuple(places.tolist())


class RandomKeys:
    """Groups of about ``group`` drawn anew each round: a permutation of the live peers, cut in pieces.

    Paper, section 4.1: "averaging in random groups as a simpler version". There are about ``n // group``
    groups (``n_groups``), whose sizes differ by at most one. Each peer's place follows from a hash of its
    own. So peers whose views differ in one peer differ in one member of their group, and meet all the same.
    That matters in a large crew, where a peer comes or goes in most rounds and not all hear of it before the
    same one.
    """

    def __init__(self, me: PeerId, seed: int, group: int) -> None:
        if not 2 <= group <= PEERS_MAX:
            raise ValueError(f"groups of {group}: a group has 2 to {PEERS_MAX} peers")
        self._me, self._seed, self._group = me, seed, group

    def place(self, round_: int, view: View) -> Place:
        """The piece of this round's permutation in which the peer stands."""
        n = len(view)
        groups = n_groups(n, self._group)
        at = random_ranks(random.stream_key(self._seed, "random groups", round_), view.peers)[
            view.rank(self._me)
        ]
        piece = at * groups // n
        first, until = (-(-i * n // groups) for i in (piece, piece + 1))
        return Place(random.stream_key(self._seed, "random group", round_, piece), at - first, until - first)

    def moved(self, round_: int, index: int | None) -> None:
        """Nothing: no round is remembered."""


class MoshpitKeys:
    """Moshpit's keys, on a grid that follows the number of live peers or on a given one."""

    def __init__(self, me: PeerId, seed: int, group: int, grid: Grid | None = None) -> None:
        self._me, self._seed, self._group, self._fixed = me, seed, group, grid
        self._random = RandomKeys(me, seed, group)
        self._grid: Grid | None = None
        self._view: View | None = None
        self._cell: Cell = ()
        self._line_counts: tuple[list[int], ...] = ()
        self.thin = False

    @property
    def grid(self) -> Grid | None:
        """The grid that the peer stands on; ``None``: it has not begun."""
        return self._grid

    @property
    def cell(self) -> Cell:
        """The peer's cell."""
        return self._cell

    def place(self, round_: int, view: View) -> Place:
        """The line through the peer's cell along this round's axis."""
        n = len(view)
        grid = self._fixed or grid_of(n, self._group)
        if grid != self._grid or view is not self._view:
            self._settle(grid, view)
        if self.thin:
            return self._random.place(round_, view)
        axis, cell = grid.axis(round_), self._cell
        expected = max(1, self._line_counts[axis][grid.line_number(cell, axis)])
        return Place(grid.line_key(cell, axis, self._seed), cell[axis], expected)

    def _settle(self, grid: Grid, view: View) -> None:
        """Take a cell that no other peer takes, as long as views agree; a group gives peers of one cell two
        indices.

        When peers come or go all take cells anew, so that each knows how many to expect on every line. A
        grid is too thin also where that leaves a peer alone on its line: it would average with nobody each
        time that this axis comes, as one of five on three by two cells does.
        """
        self._grid, self._view = grid, view
        cells, self._line_counts = view.cells_on(grid, self._seed)
        n, alone = len(view), len(grid.sides) > 1 and any(1 in counts for counts in self._line_counts)
        self.thin = grid.thin(n) or n > grid.cells or alone
        self._cell = grid.cell(int(cells[view.rank(self._me)]))

    def moved(self, round_: int, index: int | None) -> None:
        """Drop the oldest index and append the new one. A peer that met no other appends the one it drops."""
        if index is None or self.thin or self._grid is None:
            return
        axis = self._grid.axis(round_)
        if index < self._grid.sides[axis]:
            self._cell = (*self._cell[:axis], index, *self._cell[axis + 1 :])
