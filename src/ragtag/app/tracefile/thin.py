"""What keeps a trace file bounded: in a long run a record stands for ever more rounds or steps.

Files are only ever appended to. While a file fills its n-th ``LEVEL_BYTES``, neighbouring records of rounds,
selections, steps and times are written as one for each 2**n of them, with their sums, means and extremes; so
each level lasts twice as long as the one before, and what a chart of the whole run needs is there at any
time. Beyond ``ROUNDS_BYTES`` they are written once more, at the end. All other records are written as they
are, up to ``ALL_BYTES``; then only those that a run has few of. Before
one of those comes what waits for others to stand with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from ragtag.core import trace

LEVEL_BYTES = 4 << 20
ROUNDS_BYTES = 64 << 20
ALL_BYTES = 96 << 20
LAST_BYTES = 128 << 20
_COHERENCE_MAX = 256
_FEW = (trace.Run, trace.Join, trace.Error, trace.Result, trace.Link, trace.Leave)

_R = TypeVar("_R", bound=trace.Base)


class Thinner:
    """Decides which records are written now, by how large the file is."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int, int | str], tuple[trace.Known, int]] = {}
        self.left_out = 0
        """Records that the limit kept out, and that no other one stands for."""

    def take(self, record: trace.Known, size_bytes: int) -> list[trace.Known]:
        """What is to be written in place of a record that comes now."""
        merge: Callable[[Any, Any], trace.Known] | None = _MERGES.get(type(record))
        if merge is None:
            if size_bytes >= LAST_BYTES and not isinstance(record, trace.Leave):
                self.left_out += 1
                return []
            if size_bytes >= ALL_BYTES and not isinstance(record, _FEW):
                self.left_out += 1
                return []
            return [*self.rest(), record] if isinstance(record, _FEW) else [record]
        key = trace.kind_of(record), record.peer, getattr(record, "channel", 0)
        before, n = self._pending.pop(key, (None, 0))
        merged = record if before is None else merge(before, record)
        if size_bytes < ROUNDS_BYTES and n + 1 >= 1 << (size_bytes // LEVEL_BYTES):
            return [merged]
        self._pending[key] = merged, n + 1
        return []

    def rest(self) -> list[trace.Known]:
        """What waits for others to stand with."""
        rest = [record for record, _ in self._pending.values()]
        self._pending.clear()
        return sorted(rest, key=lambda record: record.t)


def _mean(a: float, n_a: int, b: float, n_b: int) -> float:
    return (a * n_a + b * n_b) / (n_a + n_b)


def _means(a: _R, n_a: int, b: _R, n_b: int, *names: str) -> dict[str, float]:
    return {name: _mean(getattr(a, name), n_a, getattr(b, name), n_b) for name in names}


def _sums(a: _R, b: _R, *names: str) -> dict[str, Any]:
    return {name: getattr(a, name) + getattr(b, name) for name in names}


def _counted(a: Counter[int], b: Counter[int], name: str) -> dict[str, list[int]]:
    both = a + b
    return {name: list(both), f"{name}_times": list(both.values())}


def _rounds(a: trace.Round, b: trace.Round) -> trace.Round:
    return replace(
        b,
        of=a.of + b.of,
        expired=a.expired or b.expired,
        expired_times=a.how_often_expired + b.how_often_expired,
        longest_s=max(a.longest, b.longest),
        lowest_arrived=min(a.lowest, b.lowest),
        **_means(a, a.of, b, b.of, "scatter_s", "gather_s", "total_s", "arrived", "contributors"),
        **_counted(a.how_often_waited_for, b.how_often_waited_for, "waited_for"),
        **_counted(a.how_often_missed, b.how_often_missed, "missed"),
    )


def _selections(a: trace.Sparse, b: trace.Sparse) -> trace.Sparse:
    sums = _sums(a, b, "entries", "bytes", "dense_bytes", "committed", "restored", "late", "given_up")
    means = _means(a, a.of, b, b.of, "captured", "density")
    whole = a.how_often_dense + b.how_often_dense
    return replace(b, of=a.of + b.of, dense=whole > 0, dense_times=whole, **sums, **means)


def _steps(a: trace.Step, b: trace.Step) -> trace.Step:
    good, bad = a.how_often_good + b.how_often_good, a.how_often_bad + b.how_often_bad
    loss: float | msgspec.UnsetType | None = None if bad else msgspec.UNSET
    told = [(step.loss, step.how_often_good) for step in (a, b) if step.how_often_good]
    if told:
        loss = sum(mean * n for mean, n in told if isinstance(mean, float)) / good
    return replace(b, of=a.of + b.of, loss=loss, finite=good, not_finite=bad)


def _paces(a: trace.Pace, b: trace.Pace) -> trace.Pace:
    waited = dict(zip(a.waited_for, a.waited_s, strict=False))
    for peer, waited_s in zip(b.waited_for, b.waited_s, strict=False):
        waited[peer] = waited.get(peer, 0.0) + waited_s
    length = max(len(a.stale), len(b.stale))
    longer = [[*stale, *[0] * (length - len(stale))] for stale in (a.stale, b.stale)]
    coherence, steps = [*a.coherence, *b.coherence], [*a.coherence_steps, *b.coherence_steps]
    while len(coherence) > _COHERENCE_MAX:
        coherence, steps = coherence[1::2], steps[1::2]
    return replace(
        b,
        **_sums(a, b, "steps", "averages", "compute_s", "average_s", "wait_s", "lost_s"),
        waited_for=list(waited),
        waited_s=list(waited.values()),
        stale=[x + y for x, y in zip(*longer, strict=True)],
        coherence=coherence,
        coherence_steps=steps,
    )


_MERGES: dict[type, Callable[[Any, Any], trace.Known]] = {
    trace.Round: _rounds,
    trace.Sparse: _selections,
    trace.Step: _steps,
    trace.Pace: _paces,
}
