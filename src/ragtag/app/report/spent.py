"""Where each peer's time went, gathered from a trace in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.core import trace

COMPUTE, AVERAGE, WAIT = range(3)


class Timeline:
    """Seconds of each kind by peer and column of time; what a peer waited for; how stale it was.

    seconds: float64 ``[peers, kinds, columns]``. The others have an entry for each of ``peers``.
    """

    def __init__(self, peers: Sequence[int], columns: int, t0: float, t1: float) -> None:
        self.peers = list(peers)
        self._row = {peer: at for at, peer in enumerate(self.peers)}
        self._t0, self._column_s = t0, max(t1 - t0, 1e-6) / columns
        self.seconds: NDArray[np.float64] = np.zeros((len(self.peers), 3, columns))
        self.total_s: NDArray[np.float64] = np.zeros((len(self.peers), 3))
        self.lost_s = [0.0] * len(self.peers)
        self.waited_s: list[Counter[int]] = [Counter() for _ in self.peers]
        self.stale: list[Counter[int]] = [Counter() for _ in self.peers]

    @property
    def any(self) -> bool:
        """Whether any peer told where its time went."""
        return bool(self.total_s.any())

    def add(self, record: trace.Pace) -> None:
        """One record; its time is spread over the columns that it lies in."""
        row = self._row.get(record.peer)
        if row is None:
            return
        kinds = np.array([record.compute_s, record.average_s, record.wait_s])
        self.total_s[row] += kinds
        self.lost_s[row] += record.lost_s
        for other, s in zip(record.waited_for, record.waited_s, strict=False):
            if other in self._row:
                self.waited_s[row][other] += s  # type: ignore[assignment]  # a Counter adds floats as well
        for at, count in enumerate(record.stale):
            self.stale[row][at] += count
        self._spread(row, record.t - float(kinds.sum()), record.t, kinds)

    def _spread(self, row: int, begin: float, end: float, kinds: NDArray[np.float64]) -> None:
        if not end > begin:
            return
        columns = self.seconds.shape[2]
        a, b = ((t - self._t0) / self._column_s for t in (begin, end))
        edges = np.arange(columns + 1)
        covered = np.clip(np.minimum(edges[1:], b) - np.maximum(edges[:-1], a), 0.0, None)
        self.seconds[row] += kinds[:, None] * (covered / (b - a))
