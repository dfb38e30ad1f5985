"""The runs of the Moshpit recipe, and the table that they are compared with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ragtag.core import seed as random
from ragtag.recipes.jobs import Job
from ragtag.recipes.moshpit.run import COARSE, TOLERANCE, Case, Doubles, Found, first_below, run


class Line(NamedTuple):
    """A line of the table. rounds: until variance < 1e-9, by method. coarse: until variance < 1e-4."""

    n: int
    sides: tuple[int, ...]
    p: float
    rounds: Mapping[str, float]
    coarse: Mapping[str, float]

    @property
    def name(self) -> str:
        """Peers, grid and p."""
        side = f"{self.sides[0]}^{len(self.sides)}"
        return f"{self.n} peers, {side}, p = {self.p:g}"


_32, _8 = (32, 32), (8, 8, 8)
_RANDOM, _MOSHPIT, _ALL, _GOSSIP, _PUSH = "random groups", "moshpit", "all-reduce", "gossip", "push-sum"


def _line(
    n: int,
    sides: tuple[int, ...],
    p: float,
    allreduce: float,
    gossip: float | None,
    push: tuple[float, float] | None,
    groups: tuple[float, float],
    moshpit: tuple[float, float],
) -> Line:
    rounds = {_ALL: allreduce, _RANDOM: groups[0], _MOSHPIT: moshpit[0]}
    coarse = {_RANDOM: groups[1], _MOSHPIT: moshpit[1]}
    if gossip is not None:
        rounds[_GOSSIP] = gossip
    if push is not None:
        rounds[_PUSH], coarse[_PUSH] = push
    return Line(n, sides, p, rounds, coarse)


TABLE = (
    _line(768, _32, 0, 1, 50, (43.2, 13.8), (6.2, 3), (6.0, 3)),
    _line(768, _32, 0.005, 28.7, 50, (43.2, 14.1), (6.6, 3), (6.6, 3)),
    _line(900, _32, 0, 1, 50, (45.0, 14.7), (6.4, 3), (5.0, 2.9)),
    _line(900, _32, 0.01, 50, 50, (45.6, 14.9), (7.0, 3.1), (6.5, 3)),
    _line(1024, _32, 0, 1, 50, (49.0, 16.2), (6.2, 3), (2, 2)),
    _line(1024, _32, 0.001, 2.0, 50, (49.0, 16.3), (6.5, 3), (3.5, 2.4)),
    _line(1024, _32, 0.005, 42.6, None, None, (6.7, 3), (4.9, 2.9)),
    _line(1024, _32, 0.01, 50, None, None, (6.9, 3.1), (5.5, 3)),
    _line(512, _8, 0, 1, None, None, (10.2, 5), (3, 3)),
    _line(512, _8, 0.01, 41.7, None, None, (10.6, 5), (8.3, 4)),
)
"""Means over ten seeds, capped at 50 rounds: the authors' own simulation, run again."""

ERRORS = {
    _MOSHPIT: (0.98, 3.6e-2, 2.9e-4, 1.2e-5, 2.6e-7, 1.1e-9),
    _RANDOM: (0.98, 3.6e-2, 1.3e-3, 4.5e-5, 1.7e-6, 6.2e-8),
}
"""Variance before and after rounds 1 to 5, for 1,024 peers at p = 0.005, from the same source."""
ERRORS_AT = Case(_MOSHPIT, 1024, _32, 0.005, chunks=4, rounds=5, until=0.0)

ERRORS_SEEDS = 6
"""At least so many of Moshpit's: with three, random groups' variance after four rounds and five passes."""

MIXING = ((8, 4, 1), (8, 4, 2), (1024, 32, 1), (1024, 32, 2))
"""Where the exact mixing factor is measured: peers, group, round."""
HALF_EMPTY = (512, _32)
"""A grid that is half full: the grid itself took 8.2 to 8.8 rounds, and random groups 6.1 to 6.6."""
OWN = {768: (28, 28), 900: (30, 30), 1024: _32, 512: (23, 23)}
"""The smallest square grid that holds so many peers."""
WITHIN = ((1024, _32, 0.001), (1024, _32, 0.005), (1024, _32, 0.01), (512, _8, 0.01))

Runs = dict[Case, list[Found]]


def several(case: Case, seeds: Sequence[int]) -> list[Found]:
    """One run for each seed."""
    return [run(case, seed) for seed in seeds]


@dataclass(frozen=True, slots=True)
class Mixed:
    """Variance by round, mean over runs, relative to that before the first. error: its standard error."""

    factor: tuple[float, ...]
    error: tuple[float, ...]


def mixed(found: Iterable[Found]) -> Mixed:
    """The mixing factor after 1, 2, ... rounds: a ratio of means over runs."""
    table = np.array([f.variance for f in found])
    mean = table.mean(axis=0)
    error = table.std(axis=0, ddof=1) / np.sqrt(len(table)) if len(table) > 1 else np.zeros(len(mean))
    return Mixed(tuple((mean / mean[0]).tolist()[1:]), tuple((error / mean[0]).tolist()[1:]))


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases that are run, and how many seeds of each."""

    seeds: Mapping[Case, int]
    quick: bool = False

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """The whole table with ``seeds`` seeds (all-reduce has more, as it varies most), or a part of it."""
        plan: dict[Case, int] = {}
        lines = [line for line in TABLE if not quick or (line.n, line.p) in _QUICK]
        for line in lines:
            for method in line.rounds:
                if line.p == 0 or method not in (_GOSSIP, _PUSH):  # there is no law of these with peers away
                    plan[table_case(line, method)] = _seeds_of(method, line, seeds, quick)
        for method in ERRORS:
            plan[replace(ERRORS_AT, method=method)] = max(seeds, ERRORS_SEEDS if method == _MOSHPIT else 1)
        plan |= {mixing_case(8, 4, 1): 400, mixing_case(1024, 32, 2): 16 if quick else 40}
        if not quick:  # how groups of two rounds overlap varies a lot among 8 peers
            plan[mixing_case(8, 4, 2)] = 8000
        plan[Case(_MOSHPIT, HALF_EMPTY[0], HALF_EMPTY[1], chunks=4)] = seeds
        for n, sides in {(line.n, line.sides) for line in lines} | {HALF_EMPTY}:
            plan[own_case(n, sides)] = min(seeds, 3)
        for n in sorted({line.n for line in lines if _PUSH in line.rounds}):
            plan[Case("random pairs", n, _32)] = min(seeds, 3)
        for n, sides, p in WITHIN[1:2] if quick else WITHIN:
            for method in (_MOSHPIT, _RANDOM):
                plan[within_case(method, n, sides, p)] = seeds
        return Plan({case: count for case, count in plan.items() if count}, quick)

    def jobs(self) -> list[Job]:
        """Parts of about equal length."""
        jobs = []
        for case, seeds in self.seeds.items():
            step = max(1, min(seeds, 200_000 // (case.n * (20 if "all" in case.method else 10))))
            for first in range(0, seeds, step):
                part = tuple(range(first, min(seeds, first + step)))
                name = f"{case.method}, {case.n} peers, p = {case.p:g}" + (", within" if case.within else "")
                jobs.append(Job(name, several, (case, part)))
        return jobs

    def sort(self, results: Iterable[list[Found]]) -> Results:
        """The jobs' results by case."""
        runs: Runs = defaultdict(list)
        for job, found in zip(self.jobs(), results, strict=True):
            runs[job.arguments[0]] += found
        return Results(runs)


_ALL_SEEDS = {(1024, 0.001): 400, (768, 0.005): 100, (1024, 0.005): 60, (512, 0.01): 60}
"""So many runs bring the standard error near half of a tenth. A quick plan leaves these cells out."""
_MOSHPIT_SEEDS = {(1024, 0.001): 40}
"""Where a single peer that is away, or none, decides between 2 rounds and 5."""
_MOSHPIT_QUICK_SEEDS: dict[tuple[int, float], int] = {(768, 0): 8}
"""Where random groups come so near that they pass now and then beside a law for three seeds."""
_QUICK = {(768, 0), (1024, 0), (1024, 0.005), (512, 0.01)}


def _seeds_of(method: str, line: Line, seeds: int, quick: bool) -> int:
    """How many seeds a cell has. All-reduce's rounds vary as much as their mean, so it has many."""
    if method == _ALL:
        if line.p == 0 or line.rounds[_ALL] == 50:
            return min(seeds, 3)
        return 0 if quick else max(seeds, _ALL_SEEDS.get((line.n, line.p), 0))
    if method == _MOSHPIT:
        more = (_MOSHPIT_QUICK_SEEDS if quick else _MOSHPIT_SEEDS).get((line.n, line.p), 0)
        return max(seeds, more)
    return min(seeds, 3) if method == _GOSSIP else min(seeds, 5) if method == _PUSH else seeds


def table_case(line: Line, method: str) -> Case:
    """The runs behind a cell of the table."""
    chunks = 4 if method in (_RANDOM, _MOSHPIT) else 1
    return Case(method, line.n, line.sides, line.p, chunks=chunks)


def own_case(n: int, sides: tuple[int, ...]) -> Case:
    """The runs of Moshpit on a grid that it chooses, for groups of at most the longest side."""
    return Case("moshpit, own grid", n, sides, chunks=4)


def mixing_case(n: int, group: int, round_: int) -> Case:
    """The runs behind a mixing factor. Those of many peers serve for two rounds."""
    rounds = 2 if n > 64 else round_
    return Case(_RANDOM, n, (group,), chunks=4 if n > 64 else 1, rounds=rounds, until=0.0)


def within_case(method: str, n: int, sides: tuple[int, ...], p: float) -> Case:
    """The runs in which peers die within the round, with more chunks, as deaths affect each differently."""
    return Case(method, n, sides, p, within=True, chunks=8)


@dataclass(slots=True)
class Results:
    """The runs, by case."""

    runs: Runs = field(default_factory=dict)

    def mean(self, case: Case, what: str = "rounds") -> float:
        """The mean of a field of ``Found`` over seeds."""
        return float(np.mean([getattr(found, what) for found in self.runs[case]]))

    def error(self, case: Case, what: str = "rounds") -> float | None:
        """The standard error of ``mean``; ``None``: there is one seed."""
        values = [getattr(found, what) for found in self.runs[case]]
        return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None

    def variance(self, case: Case) -> tuple[float, ...]:
        """Variance by round, mean over seeds, as far as all runs went."""
        length = min(len(found.variance) for found in self.runs[case])
        return tuple(np.mean([found.variance[:length] for found in self.runs[case]], axis=0).tolist())

    def log_variance(self, case: Case, round_: int) -> tuple[float, float | None]:
        """The decimal logarithm of the variance after a round: mean over seeds, and its standard error."""
        values = np.log10([max(_NOTHING, found.variance[round_]) for found in self.runs[case]])
        n = len(values)
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None

    def to_json(self) -> list[dict[str, Any]]:
        """Everything, as plain values."""
        return [
            {
                "method": case.method,
                "peers": case.n,
                "sides": list(case.sides),
                "p": case.p,
                "within": case.within,
                "chunks": case.chunks,
                "seeds": len(found),
                "rounds": self.mean(case),
                "rounds_error": self.error(case),
                "rounds_to_1e-4": self.mean(case, "coarse"),
                "variance": self.variance(case),
                "drift": self.mean(case, "drift"),
                "mosaic": self.mean(case, "mosaic"),
                "failed": self.mean(case, "failed"),
                "events": sum(f.events for f in found),
            }
            for case, found in self.runs.items()
        ]


def all_reduce_law(n: int, p: float, cap: int) -> float:
    """Expected rounds of an all-or-nothing all-reduce: a geometric law, capped at ``cap``.

    An attempt succeeds if no peer is away, with probability ``q = (1 - p)^n``.
    """
    q = (1 - p) ** n
    return (1 - (1 - q) ** cap) / q


class Law(NamedTuple):
    """What a figure comes to by a method's definition.

    mean: over runs.
    apart: a run's standard deviation.
    draws: of how many runs ``mean`` is, where it is itself drawn; 0: it is exact.
    """

    mean: float
    apart: float
    draws: int = 0

    def tolerance(self, seeds: int) -> float:
        """How far a mean over ``seeds`` runs may lie away: four standard deviations, which one that keeps to
        the definition exceeds about once in ten thousand times.
        """
        return 4 * self.apart * math.sqrt(1 / seeds + (1 / self.draws if self.draws else 0.0))


_DRAWS, _SCALARS = 200, 32
_NOTHING = 1e-14
"""What float32 leaves of a variance of 1 where all agree."""
UNSEEN = 9 / _DRAWS
"""What none of ``_DRAWS`` runs did has a smaller chance than this; with a greater one, one of them would have
done it, but for once in ten thousand times."""


@lru_cache(maxsize=128)
def groups_law(case: Case) -> Mapping[str, tuple[Law, ...]]:
    """What Moshpit on a given grid, or random groups, come to by their definition, as arithmetic.

    Peers stand in cells drawn without replacement, or are cut anew into groups of about equal size; in each
    round those that are not away (probability ``p``) take the mean of their group's. There are no messages
    and no deadlines, and nothing here is the library's. Runs are drawn: a seed of their own, fewer scalars.

    Returns: ``rounds``, ``coarse`` (one law each), and ``log variance``: the decimal logarithm by round, from
    before the first one on, as far as all runs went.
    """
    found: dict[str, list[Any]] = {"rounds": [], "coarse": [], "log variance": []}
    for draw in range(_DRAWS):
        table = _defined(case, random.generator(draw, "moshpit/law", case.n, len(case.sides)))
        found["rounds"].append(first_below(table, TOLERANCE, case.rounds))
        found["coarse"].append(first_below(table, COARSE, case.rounds))
        found["log variance"].append(np.log10(np.maximum(table.mean(axis=1), _NOTHING)))
    length = min(map(len, found["log variance"]))
    found["log variance"] = [run[:length] for run in found["log variance"]]
    laws = {}
    for what, runs in found.items():
        columns = np.reshape(runs, (_DRAWS, -1))
        apart = columns.std(axis=0, ddof=1)
        laws[what] = tuple(
            Law(float(m), float(s), _DRAWS) for m, s in zip(columns.mean(0), apart, strict=True)
        )
    return laws


def _defined(case: Case, drawn: np.random.Generator) -> Doubles:
    """One run's variance by round and scalar."""
    n, sides = case.n, case.sides
    values = drawn.standard_normal((n, _SCALARS))
    cells = np.stack(np.unravel_index(drawn.permutation(math.prod(sides))[:n], sides))
    history = [values.var(axis=0)]
    while len(history) <= case.rounds and history[-1].max() >= case.until:
        if case.method == _RANDOM:
            groups = n // max(sides)
            group = drawn.permutation(n) * groups // n
        else:
            axis = (len(history) - 1) % len(sides)
            cut = [side for other, side in enumerate(sides) if other != axis]
            groups, group = math.prod(cut), np.ravel_multi_index(tuple(np.delete(cells, axis, axis=0)), cut)
        there = drawn.random(n) >= case.p
        member = (group == np.arange(groups)[:, None]) & there
        means = member @ values / np.maximum(member.sum(axis=1), 1)[:, None]
        values[there] = means[group[there]]
        history.append(values.var(axis=0))
    return np.array(history)


def push_sum_law(n: int, rounds: int) -> float:
    """The factor by which push-sum's potential shrinks in expectation, where nobody is away.

    With ``u_i`` what peer i holds beyond its share of the mean (sum - weight * mean), the potential is the
    sum of their squares. In a round ``u_i' = u_i / 2 + sum of u_k / 2`` over those that send to i, each
    of the others with probability 1/(n-1), and all u sum to 0. (Kempe, Dobra, Gehrke, FOCS 2003, lemma 2.3,
    has 1/2 - 1/(2n), where a peer may send to itself.)
    """
    return (0.5 - 0.5 / (n - 1) - 0.25 * (n - 2) / (n - 1) ** 2) ** rounds


@lru_cache(maxsize=8)
def ring_law(n: int, rounds: int, scalars: int) -> Law:
    """The variance that pairwise gossip on a ring leaves of a variance of 1: even and odd edges in turn.

    All is linear, ``x' = W x`` with W doubly stochastic: the variance is ``x^T M x / n``, and for Gaussian x
    it has mean ``tr M / n`` and variance ``2 tr(M^2) / n^2``. n: even. scalars: of so many the law is a mean.
    """
    w = np.eye(n) - 1 / n
    for round_ in range(rounds):
        pairs = np.roll(np.arange(n), -(round_ % 2)).reshape(-1, 2)
        w[pairs] = w[pairs].mean(axis=1, keepdims=True)
    m = w.T @ w
    return Law(float(np.trace(m)) / n, float(np.sqrt(2 * np.square(m).sum() / scalars)) / n)
