"""The staleness recipe's four findings as numbers, and tables of all measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.staleness import coherent as staleness_coherent
from ragtag.recipes.staleness.measure import (
    BY_WORKERS,
    COMPARED,
    FAST_RATES,
    MANY,
    MIDDLE,
    OPTIMISERS,
    PAIR,
    WORKERS,
    Plan,
    Results,
    S,
    dnn,
    title,
)
from ragtag.recipes.staleness.others import subject

PAPER = "Dai et al., ICLR 2019"
ROBUST = ("SGD", "Adagrad")


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks. Equal values share a rank."""

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
        *_worker_rows(results),
        *_other_rows(plan, results),
        *staleness_coherent.rows(plan, results),
    ]


def growth(results: Results, model: str, optimiser: str) -> float:
    """The rank correlation of slow-down and s, over ``COMPARED``."""
    return spearman(COMPARED, [results.mean_slow_down(model, optimiser, WORKERS, s) for s in COMPARED])


def _depth_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Depth: SGD, {WORKERS} workers", []
    for s in (s for s in COMPARED if s):
        shown = [results.mean_slow_down(dnn(d), "SGD", WORKERS, s) for d in plan.depths]
        what, source = (
            f"s = {s}: rank correlation of depth and slow-down",
            f"{PAPER}: deeper nets suffer more",
        )
        found.append(row(what, spearman(plan.depths, shown), 0.8, 0.0, source, relation=">=", group=group))
        what, source = f"s = {s}: slow-down of MLR", f"{PAPER}: MLR hardly suffers"
        found.append(row(what, shown[0], 1.3, 0.0, source, relation="<=", group=group))
    deep = [growth(results, dnn(d), "SGD") for d in plan.depths if d > 0]
    what = "rank correlation of s and slow-down, mean over the nets with hidden layers"
    source = f"{PAPER}: grows with s"
    found.append(row(what, float(np.mean(deep)), 0.8, 0.0, source, relation=">=", group=group))
    return found


def suffers_more(results: Results, name: str, depths: Sequence[int]) -> float:
    """The share of seeds in which an optimiser is slowed down more than both SGD and Adagrad, by the
    geometric mean over nets of these depths, at s = S."""

    def slow(optimiser: str) -> np.ndarray:
        table = [results.slow_downs(dnn(d), optimiser, WORKERS, S) for d in depths]
        return np.asarray(np.log(table).mean(0))

    return float(np.mean(slow(name) > np.maximum(*(slow(o) for o in ROBUST))))


def _optimiser_rows(plan: Plan, results: Results) -> list[Row]:
    depths = plan.optimiser_depths
    names = ", ".join(str(d) for d in depths)
    group = f"Optimiser: {WORKERS} workers, s = {S}, mean over nets of depth {names}"
    majority = (len(plan.seeds) // 2 + 1) / len(plan.seeds)
    found = []
    for name in (o for o in OPTIMISERS if o not in ROBUST):
        what = f"{name}: share of seeds slowed down more than with SGD and with Adagrad"
        share = suffers_more(results, name, depths)
        found.append(row(what, share, majority, 0.0, f"{PAPER}; a majority", relation=">=", group=group))
    return found


def _worker_rows(results: Results) -> list[Row]:
    group, found = f"Workers: s = {S}", []
    for optimiser, model in BY_WORKERS:
        shown = {p: results.mean_slow_down(model, optimiser, p, S) for p in MANY}
        for few, more in pairwise(MANY):
            if results.open(model, optimiser, few, S):
                continue  # a ratio to a lower bound says nothing: see ``failures``
            what = f"{optimiser}, {title(model)}: slow-down of {more} workers over that of {few}"
            source, ratio = f"{PAPER}: more workers amplify it", shown[more] / shown[few]
            found.append(row(what, ratio, 1.0, 0.0, source, relation=">=", group=group))
    return found


def _other_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Other models: {WORKERS} workers", []
    for model in plan.others:
        for o in PAIR:
            if results.open(model, o, WORKERS, COMPARED[1]):
                continue  # two lower bounds tell nothing of their order: see ``failures``
            what, source = f"{model}, {o}: rank correlation of s and slow-down", f"{PAPER}: grows with s"
            grown = growth(results, model, o)
            found.append(row(what, grown, 0.8, 0.0, source, relation=">=", group=group))
    if len(plan.other_workers) > 1:
        few, more = plan.other_workers[0], plan.other_workers[-1]
        group = f"Other models: s = {S}"
        for model in plan.others:
            for o in PAIR:
                if results.open(model, o, few, S):
                    continue
                less, most = (results.mean_slow_down(model, o, p, S) for p in (few, more))
                what = f"{model}, {o}: slow-down of {more} workers over that of {few}"
                source = f"{PAPER}: more workers amplify it"
                found.append(row(what, most / less, 1.0, 0.0, source, relation=">=", group=group))
    return found


def failures(plan: Plan, results: Results) -> list[str]:
    """Where a finding does not hold in each cell, though it may on the whole, in words."""
    found = []
    for d in plan.optimiser_depths:
        fewer = [o for o in OPTIMISERS if o not in ROBUST and suffers_more(results, o, [d]) <= 0.5]
        if fewer:
            names = " and ".join(fewer)
            found.append(
                f"At depth {d}, slowed down more than SGD and Adagrad in no majority of seeds: {names}."
            )
    by_workers = [(m, o, few) for o, m in BY_WORKERS for few, _ in pairwise(MANY)]
    by_workers += [(m, o, plan.other_workers[0]) for m in plan.others for o in PAIR]
    for model, o, few in by_workers:
        if len(plan.other_workers) == 1 and model in plan.others:
            continue
        if results.open(model, o, few, S):
            found.append(
                f"{title(model)}, {o}, s = {S}: {_count(few, 'worker')} did not reach the target, so whether "
                f"more of them suffer more was not measured."
            )
    found += [
        f"{title(model)}, {o}: no target reached at s = {COMPARED[1]}, so whether {COMPARED[2]} slow it down "
        "more was not measured."
        for model in plan.others
        for o in PAIR
        if results.open(model, o, WORKERS, COMPARED[1])
    ]
    flat = [d for d in plan.depths[1:] if growth(results, dnn(d), "SGD") < 0.8]
    if flat:
        depths = ", ".join(str(d) for d in flat)
        found.append(f"At depth {depths}, SGD's slow-down does not grow with s over s = 0, 8, 16.")
    return found + staleness_coherent.left_out(plan, results)


def tables(plan: Plan, results: Results) -> list[Table]:
    """Slow-downs by depth, optimiser, workers and model; SGD at other rates; the subjects."""
    seeds = f"geometric mean over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    fewer = f"geometric mean over {len(plan.other_seeds)} seeds" if len(plan.other_seeds) > 1 else "one seed"
    columns = ("", "batches at s = 0", *(f"s = {s}" for s in plan.delays if s))

    def line(name: str, model: str, optimiser: str, workers: int) -> tuple[str, ...]:
        cells = (_cell(results, model, optimiser, workers, s) for s in plan.delays if s)
        return (name, _base(plan, results, model, optimiser, workers), *cells)

    by_depth = tuple(line(title(dnn(d)), dnn(d), "SGD", WORKERS) for d in plan.depths)
    by_optimiser = tuple(line(o, MIDDLE, o, WORKERS) for o in OPTIMISERS)
    shown = [
        Table(f"Slow-down by depth, SGD, {WORKERS} workers: {seeds}", columns, by_depth),
        Table(f"Slow-down by optimiser, {title(MIDDLE)}, {WORKERS} workers: {seeds}", columns, by_optimiser),
        _optimisers_by_depth(plan, results, seeds),
    ]
    for optimiser, model in BY_WORKERS:
        lines = tuple(line(_count(p, "worker"), model, optimiser, p) for p in MANY)
        shown.append(Table(f"Slow-down by workers, {optimiser}, {title(model)}: {seeds}", columns, lines))
    lines = tuple(line(f"{m}, {o}", m, o, WORKERS) for m in plan.others for o in PAIR)
    shown.append(Table(f"Slow-down of other models, {WORKERS} workers: {fewer}", columns, lines))
    if len(plan.other_workers) > 1:
        shown.append(_others_by_workers(plan, results, fewer))
    return [*shown, _rates(plan, results, seeds), _subjects(plan)]


def _cell(results: Results, model: str, optimiser: str, workers: int, s: int) -> str:
    mark = "> " if results.open(model, optimiser, workers, s) else ""
    return mark + number(results.mean_slow_down(model, optimiser, workers, s))


def _base(plan: Plan, results: Results, model: str, optimiser: str, workers: int) -> str:
    studies = [plan.study(model, optimiser, workers, 0, seed) for seed in plan.seeds_of(model)]
    return number(float(np.mean([results.found[x].batches for x in studies])))


def _optimisers_by_depth(plan: Plan, results: Results, seeds: str) -> Table:
    columns = ("", *(f"depth {d}" for d in plan.optimiser_depths))
    lines = tuple(
        (o, *(_cell(results, dnn(d), o, WORKERS, S) for d in plan.optimiser_depths)) for o in OPTIMISERS
    )
    return Table(f"Slow-down by optimiser and depth, s = {S}, {WORKERS} workers: {seeds}", columns, lines)


def _others_by_workers(plan: Plan, results: Results, seeds: str) -> Table:
    columns = ("", *(_count(p, "worker") for p in plan.other_workers))
    lines = tuple(
        (f"{m}, {o}", *(_cell(results, m, o, p, S) for p in plan.other_workers))
        for m in plan.others
        for o in PAIR
    )
    return Table(f"Slow-down of other models by workers, s = {S}: {seeds}", columns, lines)


def _rates(plan: Plan, results: Results, seeds: str) -> Table:
    lines = []
    own = plan.study(MIDDLE, "SGD", WORKERS, S, 0).learning_rate
    for rate in (own, *FAST_RATES):
        studies = [
            replace(plan.study(MIDDLE, "SGD", WORKERS, S, seed), learning_rate=rate) for seed in plan.seeds
        ]
        open_ = any(math.isinf(results.found[x].batches) for x in studies)
        slow = float(np.exp(np.mean([math.log(results.slow_down(x)) for x in studies])))
        base = float(np.mean([results.found[replace(x, s=0)].batches for x in studies]))
        reached = math.isfinite(base)
        shown = ("> " if open_ else "") + number(slow) if reached else "-"
        lines.append((number(rate), number(base) if reached else "not reached", shown))
    named = f"SGD by learning rate, {title(MIDDLE)}, {WORKERS} workers: {seeds}"
    return Table(named, ("learning rate", "batches at s = 0", f"slow-down, s = {S}"), tuple(lines))


def _subjects(plan: Plan) -> Table:
    lines = []
    for model in (*(dnn(d) for d in plan.depths), *plan.others):
        study = plan.study(model, "SGD", WORKERS, 0, 0)
        trained = subject(model, study.data)
        goal = f"{'at least' if trained.rises else 'at most'} {number(trained.target)}"
        rates = (number(trained.rates[o]) for o in PAIR)
        values = f"{len(trained.initial(0)):,}"
        lines.append((title(model), values, f"{trained.samples:,}", str(trained.batch), goal, *rates))
    columns = ("model", "values", "samples", "batch", "target", "rate, SGD", "rate, Adam")
    return Table("What is trained", columns, tuple(lines))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
