"""Whether low gradient coherence and slow learning coincide: in delayed runs, and beside those without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ragtag.recipes.base import Row, row
from ragtag.recipes.staleness.measure import COHERENT, WORKERS, Plan, Results, S, title
from ragtag.recipes.staleness.model import Found
from ragtag.recipes.staleness.others import OTHERS

SOURCE = "Dai et al., ICLR 2019: dips of coherence and slow learning coincide"
STEPS = 8
"""Coherence and the loss's pace are averaged over stretches of so many steps."""
SHARE_MIN = 0.1
"""The two sides of 0 are not compared where fewer stretches than this share lie on one of them."""


def stretches(found: Found) -> list[tuple[float, float]]:
    """Of each stretch of the first half: mean coherence, and how much the loss's logarithm falls per step."""
    half = len(found.coherence) // 2
    mu = [value for _, value in found.coherence[:half]]
    logs = np.log([value for _, value in found.losses[: half + 1]])
    begins = range(STEPS, len(mu) - STEPS + 1, STEPS)
    return [(float(np.mean(mu[i : i + STEPS])), float(logs[i] - logs[i + STEPS]) / STEPS) for i in begins]


def dips(runs: Sequence[Found]) -> tuple[list[float], list[float]]:
    """The paces of all runs' stretches with coherence below 0, and those of the others."""
    every = [pair for run in runs for pair in stretches(run)]
    return [pace for mu, pace in every if mu < 0], [pace for mu, pace in every if mu >= 0]


def comparable(low: Sequence[float], high: Sequence[float]) -> bool:
    """Whether there are enough stretches on both sides."""
    return min(len(low), len(high)) >= SHARE_MIN * (len(low) + len(high)) > 0


def early(delayed: Found, calm: Found) -> tuple[float, float]:
    """While the run without delay lasts: the delayed run's mean coherence less the other's, and its loss's
    pace over the other's; NaN: the run without delay has less than two steps."""
    steps = min(len(calm.coherence), len(delayed.coherence))
    if steps < 2:
        return math.nan, math.nan

    def look(found: Found) -> tuple[float, float]:
        mu = [value for _, value in found.coherence[1:steps]]
        return float(np.mean(mu)), math.log(found.losses[0][1] / found.losses[steps - 1][1])

    (low, slow), (high, fast) = look(delayed), look(calm)
    return low - high, slow / fast if fast else math.nan


def rows(plan: Plan, results: Results) -> list[Row]:
    """Stretches of a run are compared with each other where possible, then the run with one without delay."""
    group, found = f"Coherence: {WORKERS} workers, s = {S}, first half of training", []
    for name, runs, _ in _studies(plan, results):
        low, high = dips(runs)
        if comparable(low, high):
            what = f"{name}: pace of the loss where coherence is below 0, over elsewhere"
            ratio = float(np.mean(low) / np.mean(high))
            found.append(row(what, ratio, 1.0, 0.0, SOURCE, relation="<=", group=group))
    group = f"Coherence: {WORKERS} workers, s = {S} beside s = 0, as long as that takes to its target"
    for name, runs, calm in _studies(plan, results):
        pairs = [early(a, b) for a, b in zip(runs, calm, strict=True)]
        lower, slower = (float(np.mean(values)) for values in zip(*pairs, strict=True))
        what = f"{name}: mean coherence less that at s = 0"
        found.append(row(what, lower, 0.0, 0.0, SOURCE, relation="<=", group=group))
        what = f"{name}: pace of the loss over that at s = 0"
        found.append(row(what, slower, 1.0, 0.0, SOURCE, relation="<=", group=group))
    return found


def left_out(plan: Plan, results: Results) -> list[str]:
    """What was not compared and why, in words."""
    found = []
    for name, runs, _ in _studies(plan, results):
        low, high = dips(runs)
        if not comparable(low, high):
            count = len(low) + len(high)
            found.append(
                f"{name}, s = {S}: coherence is below 0 in {len(low)} of {count} stretches of {STEPS} steps, "
                f"so within these runs there is too little else to compare the dips with."
            )
    return found


def _studies(plan: Plan, results: Results) -> Iterator[tuple[str, list[Found], list[Found]]]:
    """Each study's title, its delayed runs, and those without delay, by seed."""
    for optimiser, model in COHERENT:
        if model in OTHERS and model not in plan.others:
            continue
        delayed, calm = (
            [results.found[plan.coherent(model, optimiser, s, seed)] for seed in plan.seeds_of(model)]
            for s in (S, 0)
        )
        yield f"{optimiser}, {title(model)}", delayed, calm
