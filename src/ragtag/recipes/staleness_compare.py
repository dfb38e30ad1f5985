"""The staleness recipe's four findings as numbers, and tables of all that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.staleness_measure import (
    BY_WORKERS,
    COHERENT,
    MANY,
    OPTIMISERS,
    OTHER_RATES,
    WORKERS,
    Plan,
    Results,
    dips,
)

PAPER = "Dai et al., ICLR 2019"
ROBUST = ("SGD", "Adagrad")


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        table = np.asarray(values, np.float64)
        return np.array([(table < v).sum() + ((table == v).sum() - 1) / 2 for v in table])

    a, b = ranks(x), ranks(y)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def rows(plan: Plan, results: Results) -> list[Row]:
    """All comparisons."""
    return [
        *_depth_rows(plan, results),
        *_optimiser_rows(plan, results),
        *_worker_rows(plan, results),
        *_coherence_rows(plan, results),
    ]


def _depth_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Depth: SGD, {WORKERS} workers", []
    delays = [s for s in plan.delays if s >= 8]
    for s in delays:
        shown = [results.mean_slow_down(d, "SGD", WORKERS, s) for d in plan.depths]
        source = f"{PAPER}: deeper nets suffer more"
        what = f"s = {s}: rank correlation of depth and slow-down"
        found.append(row(what, spearman(plan.depths, shown), 0.8, 0.0, source, relation=">=", group=group))
        source = f"{PAPER}: logistic regression hardly suffers"
        found.append(
            row(
                f"s = {s}: slow-down without hidden layers",
                shown[0],
                1.3,
                0.0,
                source,
                relation="<=",
                group=group,
            )
        )
    by_depth = [
        spearman(plan.delays, [results.mean_slow_down(d, "SGD", WORKERS, s) for s in plan.delays])
        for d in plan.depths
        if d > 0
    ]
    what = "rank correlation of s and slow-down, mean over the nets with hidden layers"
    mean = float(np.mean(by_depth))
    found.append(row(what, mean, 0.8, 0.0, f"{PAPER}: grows with s", relation=">=", group=group))
    return found


def _optimiser_rows(plan: Plan, results: Results) -> list[Row]:
    found = []
    majority = (len(plan.seeds) // 2 + 1) / len(plan.seeds)
    for depth in (d for d in plan.optimiser_depths if d <= 2):
        group = f"Optimiser: {WORKERS} workers, s = {plan.s}, {_count(depth, 'hidden layer')}"
        bar = [
            max(pair)
            for pair in zip(*(results.slow_downs(depth, o, WORKERS, plan.s) for o in ROBUST), strict=True)
        ]
        for name in (o for o in OPTIMISERS if o not in ROBUST):
            mine = results.slow_downs(depth, name, WORKERS, plan.s)
            share = float(np.mean([a > b for a, b in zip(mine, bar, strict=True)]))
            what = f"{name}: share of seeds slowed down more than with SGD and with Adagrad"
            found.append(row(what, share, majority, 0.0, f"{PAPER}; a majority", relation=">=", group=group))
    return found


def _worker_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Workers: s = {plan.s}", []
    for optimiser, depth in BY_WORKERS:
        shown = {p: results.mean_slow_down(depth, optimiser, p, plan.s) for p in MANY}
        for few, more in pairwise(MANY):
            what = f"{optimiser}, depth {depth}: slow-down of {more} workers over that of {few}"
            source = f"{PAPER}: more workers amplify it"
            ratio = shown[more] / shown[few]
            found.append(row(what, ratio, 1.0, 0.0, source, relation=">=", group=group))
    return found


def _coherence_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Coherence: {WORKERS} workers, s = {plan.s}, first half of training", []
    for optimiser, depth in COHERENT:
        pairs = [dips(results.found[plan.coherent(depth, optimiser, plan.s, seed)]) for seed in plan.seeds]
        low, high = (_mean_of_known(side) for side in zip(*pairs, strict=True))
        what = f"{optimiser}, depth {depth}: pace of the loss where coherence is below 0, over elsewhere"
        source = f"{PAPER}: dips of coherence and slow learning coincide"
        found.append(row(what, low / high, 1.0, 0.0, source, relation="<=", group=group))
    return found


def _mean_of_known(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def tables(plan: Plan, results: Results) -> list[Table]:
    """Slow-downs by depth, optimiser and workers; SGD at other rates."""
    seeds = f"geometric mean over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    columns = ("", "batches at s = 0", *(f"s = {s}" for s in plan.delays if s))
    shown = []

    def line(name: str, depth: int, optimiser: str, workers: int) -> tuple[str, ...]:
        base = [results.found[plan.study(depth, optimiser, workers, 0, seed)].batches for seed in plan.seeds]
        cells = []
        for s in (s for s in plan.delays if s):
            open_ = any(
                math.isinf(results.found[plan.study(depth, optimiser, workers, s, seed)].batches)
                for seed in plan.seeds
            )
            cells.append(
                ("> " if open_ else "") + number(results.mean_slow_down(depth, optimiser, workers, s))
            )
        return (name, number(float(np.mean(base))), *cells)

    lines = tuple(line(_count(d, "hidden layer"), d, "SGD", WORKERS) for d in plan.depths)
    shown.append(Table(f"Slow-down by depth, SGD, {WORKERS} workers: {seeds}", columns, lines))
    for d in plan.optimiser_depths:
        lines = tuple(line(o, d, o, WORKERS) for o in OPTIMISERS)
        title = f"Slow-down by optimiser, {_count(d, 'hidden layer')}, {WORKERS} workers: {seeds}"
        shown.append(Table(title, columns, lines))
    for optimiser, depth in BY_WORKERS:
        lines = tuple(line(_count(p, "worker"), depth, optimiser, p) for p in MANY)
        shown.append(Table(f"Slow-down by workers, {optimiser}, depth {depth}: {seeds}", columns, lines))
    shown.append(_rates(plan, results, seeds))
    return shown


def _rates(plan: Plan, results: Results, seeds: str) -> Table:
    lines = []
    own = plan.study(1, "SGD", WORKERS, plan.s, 0).learning_rate
    for rate in (own, *OTHER_RATES):
        studies = [
            replace(plan.study(1, "SGD", WORKERS, plan.s, seed), learning_rate=rate) for seed in plan.seeds
        ]
        open_ = any(math.isinf(results.found[x].batches) for x in studies)
        slow = float(np.exp(np.mean([math.log(results.slow_down(x)) for x in studies])))
        base = float(np.mean([results.found[replace(x, s=0)].batches for x in studies]))
        lines.append((number(rate), number(base), ("> " if open_ else "") + number(slow)))
    title = f"SGD by learning rate, 1 hidden layer, {WORKERS} workers: {seeds}"
    return Table(title, ("learning rate", "batches at s = 0", f"slow-down, s = {plan.s}"), tuple(lines))
