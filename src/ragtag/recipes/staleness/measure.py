"""The measurements of the staleness recipe: the list of studies, and their results by study.

The grids of the other models were fixed before any delayed run of them. The nets' grids are all depths, or
the middle one; an earlier grid, chosen by results, had been run before. No cell is left out. A ratio to a
lower bound is no comparison, and is marked so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.recipes.jobs import Job
from ragtag.recipes.staleness.model import Found, Study, run
from ragtag.recipes.staleness.others import OTHERS, SLOW, SLOW_MAX, subject
from ragtag.recipes.staleness.tasks import DEPTHS, LEARNING_RATES

WORKERS = 8
MANY = (1, 8, 16)
S = 16
"""The delay at which optimisers and numbers of workers are compared."""
COMPARED = (0, 8, 16)
"""The delays over which growth is judged."""
OPTIMISERS = tuple(LEARNING_RATES)
MIDDLE = "DNN 3"
"""The middle of the depths: workers and coherence are studied on it."""
BY_WORKERS = (("SGD", MIDDLE), ("Adam", MIDDLE))
PAIR = ("SGD", "Adam")
"""The optimisers of the other models."""
COHERENT = (("SGD", MIDDLE), ("Adam", MIDDLE), ("SGD", "ResNet"), ("Adam", "ResNet"))
"""Optimiser and model of the studies of coherence."""
FAST_RATES = (0.03, 0.1)
"""SGD at other learning rates, on ``MIDDLE``."""


def dnn(depth: int) -> str:
    """The name of a fully connected net."""
    return f"DNN {depth}"


def title(model: str) -> str:
    """A model's name in words."""
    if model == dnn(0):
        return "MLR"
    return f"depth {model.removeprefix('DNN ')}" if model.startswith("DNN ") else model


@dataclass(frozen=True, slots=True)
class Plan:
    """The studies to make.

    delays: values of s.
    depths: hidden layers of the nets.
    optimiser_depths: those at which all optimisers are compared.
    other_seeds, other_workers: for the other models.
    arrays, text: a subject's data.
    """

    seeds: tuple[int, ...]
    other_seeds: tuple[int, ...]
    delays: tuple[int, ...]
    depths: tuple[int, ...]
    optimiser_depths: tuple[int, ...]
    others: tuple[str, ...]
    other_workers: tuple[int, ...]
    batches_max: int = 8000
    arrays: Path | None = None
    text: Path | None = None

    @staticmethod
    def of(*, quick: bool, seeds: int, arrays: Path | None = None, text: Path | None = None) -> Plan:
        """All studies; quick: enough to see that the findings hold."""
        some = tuple(range(min(2 if quick else 3, seeds)))
        if quick:
            return Plan(
                some, some[:1], (0, 8, 16), DEPTHS, (1, 3, 5), OTHERS, (WORKERS,), arrays=arrays, text=text
            )
        every = tuple(range(seeds))
        return Plan(
            every, some, (0, 4, 8, 16, 32), DEPTHS, DEPTHS[1:], OTHERS, MANY, arrays=arrays, text=text
        )

    def study(self, model: str, optimiser: str, workers: int, s: int, seed: int) -> Study:
        """A study at the optimiser's own learning rate."""
        data = {"ResNet": self.arrays, "LSTM": self.text}.get(model)
        rate = subject(model, data).rates[optimiser]
        most = min(self.batches_max, SLOW_MAX) if model in SLOW else self.batches_max
        return Study(model, optimiser, workers, s, seed, rate, most, data=data)

    def coherent(self, model: str, optimiser: str, s: int, seed: int) -> Study:
        """A study that measures coherence."""
        return replace(self.study(model, optimiser, WORKERS, s, seed), coherence=True)

    def seeds_of(self, model: str) -> tuple[int, ...]:
        """A model's seeds; the other models have fewer."""
        return self.other_seeds if model in OTHERS else self.seeds

    def studies(self) -> list[Study]:
        """All studies, each once, the longest first."""
        asked: list[Study] = []
        for seed in self.other_seeds:
            for model in (m for m in reversed(OTHERS) if m in self.others):
                for o in PAIR:
                    asked += [self.study(model, o, WORKERS, s, seed) for s in self.delays]
                    asked += [self.study(model, o, p, s, seed) for p in self.other_workers for s in (0, S)]
        for seed in self.seeds:
            for s in self.delays:
                asked += [self.study(dnn(d), "SGD", WORKERS, s, seed) for d in self.depths]
                asked += [self.study(m, o, p, s, seed) for o, m in BY_WORKERS for p in MANY]
                asked += [self.study(MIDDLE, o, WORKERS, s, seed) for o in OPTIMISERS]
            for s in (0, S):
                cells = [(d, o) for d in self.optimiser_depths for o in OPTIMISERS]
                asked += [self.study(dnn(d), o, WORKERS, s, seed) for d, o in cells]
                own = self.study(MIDDLE, "SGD", WORKERS, s, seed)
                asked += [replace(own, learning_rate=rate) for rate in FAST_RATES]
                seen = [(o, m) for o, m in COHERENT if m not in OTHERS or m in self.others]
                asked += [self.coherent(m, o, s, seed) for o, m in seen if seed in self.seeds_of(m)]
        return list(dict.fromkeys(asked))

    def jobs(self) -> list[Job]:
        """All measurements."""
        return [
            Job(f"{x.model}, {x.optimiser}, {x.workers} workers, s = {x.s}, seed {x.seed}", run, (x,))
            for x in self.studies()
        ]


@dataclass(slots=True)
class Results:
    """The results, by study."""

    plan: Plan
    found: dict[Study, Found] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, results: Sequence[Found]) -> Results:
        """The results of the plan's jobs, in their order."""
        return Results(plan, dict(zip(plan.studies(), results, strict=True)))

    def slow_down(self, study: Study) -> float:
        """Batches to the target over those at s = 0: a lower bound where the target was not reached, NaN
        where it was not reached at s = 0 either."""
        mine, base = self.found[study], self.found[replace(study, s=0)]
        if base.batches > study.batches_max:
            return math.nan
        return min(mine.batches, study.batches_max) / max(base.batches, 1.0)

    def slow_downs(self, model: str, optimiser: str, workers: int, s: int) -> list[float]:
        """Slow-downs, seed by seed."""
        plan = self.plan
        seeds = plan.seeds_of(model)
        return [self.slow_down(plan.study(model, optimiser, workers, s, seed)) for seed in seeds]

    def mean_slow_down(self, model: str, optimiser: str, workers: int, s: int) -> float:
        """The slow-downs' geometric mean over seeds."""
        return float(np.exp(np.log(self.slow_downs(model, optimiser, workers, s)).mean()))

    def open(self, model: str, optimiser: str, workers: int, s: int) -> bool:
        """Whether a seed did not reach its target: the slow-down is a lower bound."""
        plan = self.plan
        studies = [plan.study(model, optimiser, workers, s, seed) for seed in plan.seeds_of(model)]
        return any(self.found[x].batches > x.batches_max for x in studies)

    def to_json(self) -> dict[str, Any]:
        """All results as plain values, without the folder of data."""
        studies = [asdict(replace(f, study=replace(f.study, data=None))) for f in self.found.values()]
        return {"studies": studies}
