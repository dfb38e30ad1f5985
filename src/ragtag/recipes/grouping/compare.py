"""The grouping recipe's numbers beside the expected ones, and where the expected ones come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Row, Table, number, row, worst
from ragtag.recipes.grouping import compensation, counts, gossip
from ragtag.recipes.grouping.measure import (
    BATCH,
    CHANGING,
    EVERYWHERE,
    LEARNERS,
    NAMES,
    STILL,
    TIMED_DELAY,
    N,
    Plan,
    Results,
)
from ragtag.recipes.grouping.methods import (
    ASYNC,
    BACKUP,
    BOUND,
    BOUNDS,
    DISCARD_FROM,
    DROP,
    DSSP,
    FIXED,
    PARTIAL,
    PROGRESSIVE,
    RINGMASTER,
    SSP,
    SYNC,
)
from ragtag.recipes.grouping.training import STEP_S, Trial
from ragtag.schedules.grouping import predicted

PAPER = "Basu et al., HiPC 2018"
SOFT = "Zhang et al., IJCAI 2016"
FORMULA = "g / (g - k d/(1+d)), samples from one pool"
TARGET = 0.95
"""Times are measured until this accuracy."""
FAILED = 0.5
"""A model below this accuracy has not learned: chance is .1, and training that works reaches .96."""
TIME = 0.02
"""Relative tolerance of times. Waiting for the last of 15 peers takes .9 % at a jitter of .5 %, and a run of
a hundred steps is cut within one of them."""
LOST = 0.15
"""Tolerance of a share that is left out, in parts of the slow peer's: a dozen steps, give or take one."""
COUNT = 0.03
"""Relative tolerance of what an update counts. Staleness is a whole number of about 16, give or take the way
of a message; speeds are measured."""

NOT_REPRODUCED = (
    (
        "Prague (random groups)",
        "The page has no figure for it. It trains and is timed here by RandomGroups, in the tables.",
    ),
    (
        gossip.NAME,
        "It is not in the library: a simulated baseline, on the same loop and cost of steps. It waits for "
        "nobody as it is written, so its time is in the tables and in no row.",
    ),
)
"""What the comparison names and no judged row of the library shows."""


def rows(plan: Plan, results: Results) -> list[Row]:
    """All comparisons."""
    return [
        *_table_rows(results),
        *_progressive_rows(plan, results),
        *_time_rows(results),
        *_scene_rows(results),
        *_count_rows(results),
        *_staleness_rows(results),
        *_soft_rows(plan, results),
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
    return [t.took_s / base.took_s for t, base in zip(trials, results.trials[0.0, SYNC], strict=False)]


def accuracy_losses(results: Results, trials: Sequence[Trial]) -> list[float]:
    """How far the accuracy lies below synchronous training's, seed by seed."""
    return [base.accuracy - t.accuracy for t, base in zip(trials, results.trials[0.0, SYNC], strict=False)]


def nobody_waits(delay: float) -> float:
    """The time of a crew of which one is delayed and none waits, over that without delay."""
    return N / (N - 1 + 1 / (1 + delay))


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
    return found


def expected_times() -> dict[str, tuple[float, str]]:
    """Of each method that is judged by time: over that without delay, and the source."""
    none = nobody_waits(TIMED_DELAY), "nobody waits: 16 / (15 + 1/(1+d))"
    without = N / (N - 1), "the slow one's updates are left out: 16 / 15"
    return {
        SYNC: (1 + TIMED_DELAY, "all wait: 1 + d"),
        BACKUP: (without[0], f"{without[1]} (Chen et al., 2016: the first N count)"),
        DROP: (none[0], f"{none[1]} (Giladi et al., 2023: each joins with what it has)"),
        ASYNC: none,
        RINGMASTER: (without[0], f"{without[1]} (Maranjyan et al., 2025: it is {DISCARD_FROM} old)"),
        SSP: (1 + TIMED_DELAY, "all wait, once ahead by the bound: 1 + d"),
        DSSP: (1 + TIMED_DELAY, "the same"),
        PARTIAL: none,
        FIXED: (predicted(4, 1, TIMED_DELAY), FORMULA),
        PROGRESSIVE: none,
    }


def _time_rows(results: Results) -> list[Row]:
    group, found = f"Time over that without delay, {N} peers, one delayed {TIMED_DELAY:.0%}, once settled", []
    for name, (expected, source) in expected_times().items():
        took = results.times[name].settled_s / _ideal_s(results.times[name])
        found.append(row(name, took, expected, TIME * expected, source, group=group))
    group = "Which updates are in the model"
    stale = results.times[ASYNC].staleness_mean
    source = "as many as there are other peers"
    found.append(row(f"{ASYNC}: mean staleness", stale, N - 1, TIME * (N - 1), source, group=group))
    slow = (1 / (1 + TIMED_DELAY)) / (N - 1 + 1 / (1 + TIMED_DELAY))
    for name, expected in ((BACKUP, slow), (RINGMASTER, slow), (ASYNC, 0.0), (DROP, 0.0)):
        lost, source = results.times[name].left_out, "the slow one's samples" if expected else "none"
        allowed = LOST * slow
        found.append(row(f"{name}: share left out", lost, expected, allowed, source, group=group))
    for name in (SSP, DSSP, PARTIAL):
        what, kept = f"{name}: share in no average with others", results.times[name].kept_alone
        source = "none: who is late gives it to the next"
        found.append(row(what, kept, 0.0, LOST * slow, source, group=group))
    for name, limit in ((BACKUP, 0), (RINGMASTER, DISCARD_FROM - 1)):
        what = f"{name}: oldest, in versions"
        oldest = worst(results.times[name].staleness)
        found.append(row(what, oldest, limit, 0.0, "older ones are left out", relation="<=", group=group))
    group = "Steps ahead of the slowest"
    source = "the bound, and the step that is averaged once the slowest has come nearer"
    for name, limit in ((SSP, BOUND + 1), (DSSP, BOUNDS[1] + 1)):
        found.append(row(f"{name}: the most", results.times[name].lead, limit, 0.0, source, group=group))
    return found


def _ideal_s(trial: Trial) -> float:
    """How long the samples of a trial take where nobody is delayed and nobody waits."""
    return trial.used / (N * BATCH) * STEP_S


def _scene_rows(results: Results) -> list[Row]:
    found = []
    group = "Delays that change, and more of them: progressive grouping"
    trials = results.scenes[CHANGING, PROGRESSIVE]
    for what, expected, at_s in (("before", 1, 79.0), ("during", 2, 199.0), ("after", 1, math.inf)):
        held = [float(groups_at(t, at_s)) for t in trials]
        found.append(_mean(f"{CHANGING}: groups {what}", held, expected, 0.0, "by itself", group, "="))
    slow = len(range(0, N, 4))
    limit = N / (N - slow + slow / 4)
    times = [t.settled_s / _ideal_s(t) for t in results.scenes[EVERYWHERE, PROGRESSIVE]]
    source = "the limit, where nobody waits: 16 / (12 + 4/4)"
    found.append(_mean(f"{EVERYWHERE}: time", times, limit, 0.05 * limit, source, group, "="))
    fixed = [t.settled_s / _ideal_s(t) for t in results.scenes[EVERYWHERE, FIXED]]
    source = "fixed groups each wait for theirs: 1 + d"
    found.append(_mean(f"{EVERYWHERE}: time, fixed groups", fixed, 4, 0.05 * 4, source, group, "="))
    times = [t.took_s / _ideal_s(t) for t in results.scenes[STILL, PROGRESSIVE]]
    found.append(_mean(f"{STILL}: time", times, 1.1, 0.0, "goal: a round has a deadline", group, "<="))
    return found


def groups_at(trial: Trial, at_s: float) -> int:
    """How many groups there were at a time, by the run's notes."""
    told = [detail for t, what, detail in trial.notes if what == "groups" and t <= at_s]
    return int(told[-1].split()[0]) if told else 1


def _count_rows(results: Results) -> list[Row]:
    """What the library's central state does with updates, beside the closed form."""
    group, found = "How much an update counts under progressive grouping", []
    n, d = counts.CREW, counts.DELAY
    crew = n - 1 + 1 / (1 + d)
    source = "its part of the samples per second; those of one group share it"
    slow, fast = results.slow_share[n - 1], results.slow_share[0]
    for what, found_, expected in (
        (f"{n} peers, one delayed {d:.0%}: the slow one's", slow, 1 / (1 + d) / crew),
        (f"{n} peers, one delayed {d:.0%}: another's", fast, 1 / crew),
    ):
        found.append(row(what, found_.movement, expected, COUNT * expected, source, group=group))
    late = results.stale_share[1]
    expected = 1 / counts.RATIO / counts.LARGE_PEERS
    what = f"one of {counts.LARGE_PEERS} in a group that is {counts.RATIO} versions behind"
    source = "alpha_0 / tau (Zhang et al.), less than its part of the samples"
    found.append(row(what, late.movement, expected, COUNT * expected, source, group=group))
    what = "the same: staleness"
    found.append(
        row(what, late.stale, counts.RATIO, COUNT * counts.RATIO, "batches 16 times as large", group=group)
    )
    group = f"A parabola at {counts.CURVATURE:g} of its largest learning rate of 2: error after a stale step"
    for corrected, name in ((True, "stale updates count 1/tau"), (False, "they count by their samples only")):
        expected = counts.expected_growth(corrected)
        source = "closed form" if corrected else "closed form: it diverges"
        found.append(row(name, results.growth[corrected], expected, COUNT * expected, source, group=group))
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
    """Every method at the longest delay; their times; n-softsync; what is not reproduced."""
    seeds = f"mean (range) over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    columns = (
        "method",
        "time / T0",
        f"time to {TARGET:.0%} / T0",
        "accuracy",
        "mean staleness",
        "lost",
    )
    shown = []
    for delay in sorted({delay for delay, _ in results.trials}):
        lines = tuple(
            _line(results, m, results.trials[delay, m]) for m in NAMES if (delay, m) in results.trials
        )
        title = f"{N} peers, batch {BATCH}, one delayed {delay:.0%}: {seeds} of {SYNC} and {PROGRESSIVE}"
        shown.append(Table(title, columns, lines))
    timed = tuple(
        (name, number(t.settled_s / _ideal_s(t)), number(t.took_s / _ideal_s(t)), f"{t.left_out:.1%}")
        for name, t in results.times.items()
    )
    title = f"{N} peers without a model, one delayed {TIMED_DELAY:.0%}"
    shown.append(Table(title, ("method", "time / T0, settled", "from the start", "lost"), timed))
    soft = []
    for (n, corrected), trials in results.soft.items():
        name = f"n = {n}, {'rate over tau' if corrected else 'fixed rate'}" if n else "hard sync"
        staleness = [t.staleness_mean for t in trials]
        soft.append((name, _over([t.accuracy for t in trials]), _over(staleness)))
    title = f"n-softsync, {LEARNERS} learners, batch {BATCH // 2}: {seeds}"
    shown.append(Table(title, ("rule", "accuracy", "mean staleness"), tuple(soft)))
    shown.append(compensation.table(results.compensated))
    shown.append(Table("Not reproduced with the library", ("what", "why"), NOT_REPRODUCED))
    return shown


def _line(results: Results, method: str, trials: Sequence[Trial]) -> tuple[str, ...]:
    base = [t.took_s for t in results.trials[0.0, SYNC]]
    reached = [t.reached_s(TARGET) / b for t, b in zip(trials, base, strict=False)]
    return (
        method,
        _over(relative_times(results, trials)),
        _over(reached),
        _over([t.accuracy for t in trials]),
        number(float(np.mean([t.staleness_mean for t in trials]))),
        f"{np.mean([t.left_out for t in trials]):.1%}",
    )


def _over(values: Sequence[float]) -> str:
    mean, low, high = float(np.mean(values)), min(values), max(values)
    if len(values) == 1 or low == high:
        return number(mean)
    return f"{number(mean)} ({number(low)} to {number(high)})"
