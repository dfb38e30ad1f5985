"""Bounded collections that a report fills while it streams a trace."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(slots=True)
class Sample:
    """Values for quantiles: all of them up to ``values_max``, every 2nd, 4th, ... beyond.

    The largest, the count and the sum are always of all values.
    """

    values_max: int = 1 << 20
    seen: int = 0
    total: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf
    stride: int = 1
    _values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, value: float, n: int = 1, extreme: float | None = None) -> None:
        """One more value; or n values, of which these are the mean and the one farthest out."""
        left, at = n, self.seen
        while (first := -at % self.stride) < left:
            self._values.append(value)
            at, left = at + first + 1, left - first - 1
            if len(self._values) >= self.values_max:
                self._values = self._values[::2]
                self.stride *= 2
        self.seen += n
        self.total += n * value
        extreme = value if extreme is None else extreme
        self.largest = max(self.largest, value, extreme)
        self.smallest = min(self.smallest, value, extreme)

    def mean(self) -> float | None:
        """The mean of all values."""
        return self.total / self.seen if self.seen else None

    def quantile(self, q: float) -> float | None:
        """The ``q``-quantile, interpolated linearly."""
        return float(np.quantile(np.frombuffer(self._values), q)) if self._values else None


class Bins:
    """Means of values over columns of time, for several rows (peers).

    rows: keys in order. ``add`` with a key that is not there does nothing, so that a crowd can be charted
    by some of its peers.
    """

    def __init__(self, rows: list[int], columns: int, t0: float, t1: float) -> None:
        self.rows = {key: at for at, key in enumerate(rows)}
        self.columns, self._t0 = columns, t0
        self._per_s = columns / (t1 - t0) if t1 > t0 else 0.0
        self._sum = np.zeros((len(rows), columns))
        self._time = np.zeros((len(rows), columns))
        self.count = np.zeros((len(rows), columns), np.int64)

    def column(self, t: float) -> int:
        """The column of time ``t``; times outside belong to the outermost columns."""
        return min(self.columns - 1, max(0, int((t - self._t0) * self._per_s)))

    def add(self, key: int, t: float, value: float, n: int = 1) -> None:
        """One more value of a row; or n values with this mean."""
        row = self.rows.get(key)
        if row is None:
            return
        at = self.column(t)
        self._sum[row, at] += n * value
        self._time[row, at] += n * t
        self.count[row, at] += n

    def points(self, key: int) -> tuple[Array, Array]:
        """A row's (mean time, mean value) in every column that has values."""
        row = self.rows[key]
        some = np.flatnonzero(self.count[row])
        n = self.count[row, some]
        return self._time[row, some] / n, self._sum[row, some] / n

    def means(self) -> Array:
        """``[rows, columns]``, NaN where there are no values."""
        with np.errstate(invalid="ignore"):
            return np.where(self.count > 0, self._sum / np.maximum(self.count, 1), np.nan)


class Dots:
    """Points in time and a positive quantity, one for each occupied cell of a fine grid.

    The quantity's cells are 2 % wide, so a dot stands within 1 % of every value it stands for.
    """

    def __init__(self, columns: int, t0: float, t1: float) -> None:
        self._t0, self._columns = t0, columns
        self._per_s = columns / (t1 - t0) if t1 > t0 else 0.0
        self._cells: dict[tuple[int, int], int] = {}

    def add(self, t: float, value: float, n: int = 1) -> None:
        """One more point, or n at one place."""
        column = min(self._columns - 1, max(0, int((t - self._t0) * self._per_s)))
        cell = (column, round(math.log(max(value, 1e-9)) / 0.02))
        self._cells[cell] = self._cells.get(cell, 0) + n

    def points(self) -> list[tuple[float, float, int]]:
        """(time, value, how many) of each cell."""
        width = 1 / self._per_s if self._per_s else 0.0
        return [
            (self._t0 + (column + 0.5) * width, math.exp(0.02 * level), n)
            for (column, level), n in sorted(self._cells.items())
        ]
