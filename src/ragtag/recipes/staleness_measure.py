"""What the staleness recipe measures: the list of studies, and their results by what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ragtag.recipes.jobs import Job
from ragtag.recipes.staleness_model import LEARNING_RATES, Found, Study, run

WORKERS = 8
DEPTHS = (0, 1, 2, 3, 4, 5, 6)
OPTIMISERS = tuple(LEARNING_RATES)
MANY = (1, 8, 16)
BY_WORKERS = (("SGD", 3), ("Adam", 1))
"""Optimiser and depth of the studies by number of workers."""
COHERENT = (("SGD", 2), ("Adam", 1))
"""Optimiser and depth of the studies of coherence."""
OTHER_RATES = (0.03, 0.1)
"""SGD at other learning rates, one hidden layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done. delays: s; optimiser_depths: hidden layers of the comparison of optimisers."""

    seeds: tuple[int, ...]
    delays: tuple[int, ...]
    depths: tuple[int, ...]
    optimiser_depths: tuple[int, ...]
    batches_max: int
    complete: bool

    @staticmethod
    def of(*, quick: bool, seeds: int) -> Plan:
        """Everything, or enough to see that it holds."""
        if quick:
            return Plan(tuple(range(min(2, seeds))), (0, 8, 16), DEPTHS, (1,), 6000, complete=False)
        return Plan(tuple(range(seeds)), (0, 4, 8, 16), DEPTHS, (1, 2, 3), 8000, complete=True)

    @property
    def s(self) -> int:
        """The largest delay."""
        return max(self.delays)

    def study(self, depth: int, optimiser: str, workers: int, s: int, seed: int) -> Study:
        """At the optimiser's own learning rate."""
        rate = LEARNING_RATES[optimiser]
        return Study(depth, optimiser, workers, s, seed, rate, batches_max=self.batches_max)

    def coherent(self, depth: int, optimiser: str, s: int, seed: int) -> Study:
        """The same, with coherence measured."""
        return replace(self.study(depth, optimiser, WORKERS, s, seed), coherence=True)

    def studies(self) -> list[Study]:
        """All, each once."""
        asked: list[Study] = []
        for seed in self.seeds:
            for s in self.delays:
                asked += [self.study(d, "SGD", WORKERS, s, seed) for d in self.depths]
                asked += [
                    self.study(d, o, WORKERS, s, seed) for d in self.optimiser_depths for o in OPTIMISERS
                ]
                asked += [self.study(d, o, p, s, seed) for o, d in BY_WORKERS for p in MANY]
            for s in (0, self.s):
                asked += [self.coherent(d, o, s, seed) for o, d in COHERENT]
                first = self.study(1, "SGD", WORKERS, s, seed)
                asked += [replace(first, learning_rate=rate) for rate in OTHER_RATES]
        return list(dict.fromkeys(asked))

    def jobs(self) -> list[Job]:
        """All measurements."""
        return [
            Job(f"{x.optimiser}, {x.depth} layers, {x.workers} workers, s = {x.s}, seed {x.seed}", run, (x,))
            for x in self.studies()
        ]


@dataclass(slots=True)
class Results:
    """What was found, by study."""

    plan: Plan
    found: dict[Study, Found] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, results: Sequence[Found]) -> Results:
        """The results of the plan's jobs, in their order."""
        return Results(plan, dict(zip(plan.studies(), results, strict=True)))

    def slow_down(self, study: Study) -> float:
        """Batches to the target over those at s = 0; a lower bound where it was not reached."""
        mine, base = self.found[study], self.found[replace(study, s=0)]
        return min(mine.batches, study.batches_max) / min(base.batches, study.batches_max)

    def slow_downs(self, depth: int, optimiser: str, workers: int, s: int) -> list[float]:
        """Seed by seed."""
        plan = self.plan
        return [self.slow_down(plan.study(depth, optimiser, workers, s, seed)) for seed in plan.seeds]

    def mean_slow_down(self, depth: int, optimiser: str, workers: int, s: int) -> float:
        """Geometric mean over seeds."""
        return float(np.exp(np.log(self.slow_downs(depth, optimiser, workers, s)).mean()))

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {"studies": [asdict(found) for found in self.found.values()]}


def dips(found: Found, window: int = 8) -> tuple[float, float]:
    """How fast the loss's logarithm falls, per step, in the first half of a run: in windows of negative
    coherence, and in the others (NaN: there are none)."""
    half = len(found.coherence) // 2
    mu = [value for _, value in found.coherence[:half]]
    logs = np.log([value for _, value in found.losses[: half + 1]])
    low: list[float] = []
    high: list[float] = []
    for at in range(window, len(mu) - window + 1, window):
        pace = float(logs[at] - logs[at + window]) / window
        (low if np.mean(mu[at : at + window]) < 0 else high).append(pace)
    return (float(np.mean(low)) if low else float("nan")), (float(np.mean(high)) if high else float("nan"))
