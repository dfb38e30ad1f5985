"""The runs of the Moshpit recipe, and the table that they are compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ragtag.recipes.jobs import Job
from ragtag.recipes.moshpit.run import Case, Found, run


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

MIXING = ((8, 4, 1), (8, 4, 2), (1024, 32, 1), (1024, 32, 2))
"""Where the exact mixing factor is measured: peers, group, round."""
HALF_EMPTY = (512, _32, 6.6)
"""A grid that is half full, and the rounds that random groups took (the grid itself took 8.2 to 8.8)."""
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
                plan[table_case(line, method)] = _seeds_of(method, line, seeds, quick)
        for method in ERRORS:
            plan[replace(ERRORS_AT, method=method)] = seeds
        plan |= {mixing_case(8, 4, 1): 400, mixing_case(1024, 32, 2): 16 if quick else 40}
        if not quick:  # how groups of two rounds overlap varies a lot among 8 peers
            plan[mixing_case(8, 4, 2)] = 8000
        plan[Case(_MOSHPIT, HALF_EMPTY[0], HALF_EMPTY[1], chunks=4)] = seeds
        for n, sides in {(line.n, line.sides) for line in lines} | {HALF_EMPTY[:2]}:
            plan[Case("moshpit, own grid", n, sides, chunks=4)] = min(seeds, 3)
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
_QUICK = {(768, 0), (1024, 0), (1024, 0.005), (512, 0.01)}


def _seeds_of(method: str, line: Line, seeds: int, quick: bool) -> int:
    """How many seeds a cell has. All-reduce's rounds vary as much as their mean, so it has many."""
    if method == _ALL:
        if line.p == 0 or line.rounds[_ALL] == 50:
            return min(seeds, 3)
        return 0 if quick else max(seeds, _ALL_SEEDS.get((line.n, line.p), 0))
    return min(seeds, 3) if method == _GOSSIP else min(seeds, 5) if method == _PUSH else seeds


def table_case(line: Line, method: str) -> Case:
    """The runs behind a cell of the table."""
    chunks = 4 if method in (_RANDOM, _MOSHPIT) else 1
    return Case(method, line.n, line.sides, line.p, chunks=chunks)


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
