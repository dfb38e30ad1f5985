"""The grouping recipe's numbers beside the expected ones, and where the expected ones come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Row, Table, number, row
from ragtag.recipes.grouping import compensation
from ragtag.recipes.grouping.measure import (
    BATCH,
    LEARNERS,
    LIVE_SLOWER,
    METHODS,
    PROGRESSIVE,
    SCENE_METHODS,
    SCENES,
    SYNC,
    N,
    Plan,
    Results,
)
from ragtag.recipes.grouping.training import Trial
from ragtag.schedules.grouping import predicted

PAPER = "Basu et al., HiPC 2018"
SOFT = "Zhang et al., IJCAI 2016"
FORMULA = "g / (g - k d/(1+d)), samples from one pool"
TARGET = 0.95
"""Times are measured until this accuracy."""
FAILED = 0.5
"""A model below this accuracy has not learned: chance is .1, and training that works reaches .96."""
_SLOW = 4.0
"""How many times as long a delayed peer's steps take in the scenes."""


def rows(plan: Plan, results: Results) -> list[Row]:
    """All comparisons."""
    return [
        *_table_rows(results),
        *_progressive_rows(plan, results),
        *_scene_rows(results),
        *_staleness_rows(results),
        *_soft_rows(plan, results),
        *_live_rows(results),
        *compensation.rows(results.compensated),
    ]


def _table_rows(results: Results) -> list[Row]:
    found = []
    for (delay, slow, g), ratio in results.table.items():
        expected = predicted(g, slow, delay)
        groups = "1 slow group" if slow == 1 else f"{slow} slow groups"
        group = f"T(g)/T0: {groups}, delayed {delay:.0%}"
        found.append(row(f"g = {g}", ratio, expected, 0.05 * expected, FORMULA, group=group))
    return found


def relative_times(results: Results, trials: Sequence[Trial]) -> list[float]:
    """Times, over those of synchronous training without delay, seed by seed."""
    return [t.took_s / base.took_s for t, base in zip(trials, results.trials[0.0, SYNC], strict=True)]


def accuracy_losses(results: Results, trials: Sequence[Trial]) -> list[float]:
    """How far the accuracy lies below synchronous training's, seed by seed."""
    return [base.accuracy - t.accuracy for t, base in zip(trials, results.trials[0.0, SYNC], strict=True)]


def _progressive_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"Progressive grouping, {N} peers, one delayed", []
    for delay in plan.delays:
        trials = results.trials[delay, PROGRESSIVE]
        times = relative_times(results, trials)
        what = f"{delay:.0%}: time over that without delay"
        source = "goal; the paper: 1.2 beyond 300 %"
        found.append(_mean(what, times, 1.1, 0.0, source, group, "<="))
        lost = accuracy_losses(results, trials)
        what = f"{delay:.0%}: accuracy below synchronous training"
        found.append(_mean(what, lost, 0.01, 0.0, "goal; the paper: .025", group, "<="))
    worst = max(plan.delays)
    limit = N / (N - 1 + 1 / (1 + worst))
    times = relative_times(results, results.trials[worst, PROGRESSIVE])
    what = f"{worst:.0%}: time beside the limit, where nobody waits"
    found.append(_mean(what, times, limit, 0.02, f"{N} / ({N - 1} + 1/(1+d))", group, "="))
    return found


def _scene_rows(results: Results) -> list[Row]:
    found = []
    changing, everywhere, still = SCENES
    group = "Delays that change, and more of them"
    trials = results.scenes[changing, PROGRESSIVE]
    for what, expected, at_s in (("before", 1, 79.0), ("during", 2, 199.0), ("after", 1, math.inf)):
        counts = [float(groups_at(t, at_s)) for t in trials]
        found.append(_mean(f"{changing}: groups {what}", counts, expected, 0.0, "by itself", group, "="))
    slow = sum(1 for _ in range(0, N, 4))
    limit = N / (N - slow + slow / _SLOW)
    times = relative_times(results, results.scenes[everywhere, PROGRESSIVE])
    source = "the limit, where nobody waits: 16 / (12 + 4/4)"
    found.append(_mean(f"{everywhere}: time", times, limit, 0.05 * limit, source, group, "="))
    fixed = relative_times(results, results.scenes[everywhere, "4 fixed groups"])
    source = "fixed groups each wait for theirs: 1 + d"
    found.append(_mean(f"{everywhere}: time, fixed groups", fixed, _SLOW, 0.1 * _SLOW, source, group, "="))
    times = relative_times(results, results.scenes[still, PROGRESSIVE])
    found.append(_mean(f"{still}: time", times, 1.1, 0.0, "goal: a round has a deadline", group, "<="))
    return found


def groups_at(trial: Trial, at_s: float) -> int:
    """How many groups there were at a time, by the run's notes."""
    counts = [int(what.split()[0]) for t, what in trial.notes if "group" in what and t <= at_s]
    return counts[-1] if counts else 1


def _live_rows(results: Results) -> list[Row]:
    """The figure of ``benchmarks/stragglers.py``, which has real processes on loopback, in virtual time."""
    group, found = "The machines that run live: 4 peers, steps of 50 ms, 20 s", []
    calm = results.live[LIVE_SLOWER[0]]
    for slower in LIVE_SLOWER[1:]:
        pairs = list(zip(results.live[slower], calm, strict=True))
        kept = [a.steps_per_s / b.steps_per_s for a, b in pairs]
        what = f"one {slower:g} times slower: the others' throughput"
        found.append(_mean(what, kept, 0.95, 0.0, "goal", group, ">="))
        lost = [b.quality - a.quality for a, b in pairs]
        what = f"one {slower:g} times slower: accuracy below calm"
        found.append(_mean(what, lost, 0.01, 0.0, "goal", group, "<="))
    return found


def _staleness_rows(results: Results) -> list[Row]:
    group, found = f"n-softsync, {LEARNERS} learners: staleness", []
    for n, trial in results.staleness.items():
        what = f"n = {n}: mean staleness"
        found.append(row(what, trial.staleness_mean, n, 0.1 * n, f"{SOFT}: about n", group=group))
        what = f"n = {n}: share older than 2n"
        source = f"{SOFT}: P(tau > 2n) < 1e-3"
        found.append(row(what, trial.beyond(2 * n), 1e-3, 0.0, source, relation="<=", group=group))
    return found


def _soft_rows(plan: Plan, results: Results) -> list[Row]:
    group, found = f"n-softsync, {LEARNERS} learners: training", []
    hard = [t.accuracy for t in results.soft[0, False]]
    for n in plan.softened:
        lost = [h - t.accuracy for h, t in zip(hard, results.soft[n, True], strict=True)]
        what = f"n = {n}, rate over tau: accuracy below hard sync"
        found.append(_mean(what, lost, 0.01, 0.0, f"{SOFT}: as hard sync", group, "<="))
    for n in (n for n in plan.softened if n >= 15):
        best = max(t.accuracy for t in results.soft[n, False])
        what = f"n = {n}, fixed rate: the best seed's accuracy"
        source = f"{SOFT}: does not converge"
        found.append(row(what, best, FAILED, 0.0, source, relation="<=", group=group))
    return found


def _mean(
    what: str, values: Sequence[float], expected: float, tolerance: float, source: str, group: str, sign: str
) -> Row:
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    mean = float(np.mean(values))
    return row(what, mean, expected, tolerance, source, relation=sign, error=error, group=group)


def tables(plan: Plan, results: Results) -> list[Table]:
    """Every method at every delay; the scenes; n-softsync."""
    seeds = f"mean (range) over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    columns = (
        "method",
        "time / T0",
        f"time to {TARGET:.0%} / T0",
        "accuracy",
        "mean staleness",
        "lost",
        "busy",
    )
    shown = []
    for delay in plan.delays:
        lines = tuple(_line(results, m, results.trials[delay, m]) for m in METHODS)
        shown.append(Table(f"{N} peers, batch {BATCH}, one delayed {delay:.0%}: {seeds}", columns, lines))
    for scene in SCENES:
        lines = tuple(_line(results, m, results.scenes[scene, m]) for m in SCENE_METHODS)
        shown.append(Table(f"{N} peers, {scene}: {seeds}", columns, lines))
    soft = []
    for (n, corrected), trials in results.soft.items():
        name = f"n = {n}, {'rate over tau' if corrected else 'fixed rate'}" if n else "hard sync"
        staleness = [t.staleness_mean for t in trials]
        soft.append((name, _over([t.accuracy for t in trials]), _over(staleness)))
    title = f"n-softsync, {LEARNERS} learners, batch {BATCH // 2}: {seeds}"
    shown.append(Table(title, ("rule", "accuracy", "mean staleness"), tuple(soft)))
    shown.append(compensation.table(results.compensated))
    return shown


def _line(results: Results, method: str, trials: Sequence[Trial]) -> tuple[str, ...]:
    base = [t.took_s for t in results.trials[0.0, SYNC]]
    reached = [t.reached_s(TARGET) / b for t, b in zip(trials, base, strict=True)]
    lost = [t.dropped / (t.used + t.dropped) for t in trials]
    return (
        method,
        _over(relative_times(results, trials)),
        _over(reached),
        _over([t.accuracy for t in trials]),
        number(float(np.mean([t.staleness_mean for t in trials]))),
        f"{np.mean(lost):.1%}",
        f"{np.mean([t.busy for t in trials]):.0%}",
    )


def _over(values: Sequence[float]) -> str:
    mean, low, high = float(np.mean(values)), min(values), max(values)
    if len(values) == 1 or low == high:
        return number(mean)
    return f"{number(mean)} ({number(low)} to {number(high)})"
