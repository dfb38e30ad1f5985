"""The figures of the grouping recipe: time and accuracy by delay, training over time, groups over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, PALETTE, band, canvas, style, svg
from ragtag.recipes.grouping.compare import (
    accuracy_losses,
    groups_at,
    nobody_waits,
    relative_times,
)
from ragtag.recipes.grouping.measure import CHANGING, NAMES, N, Plan, Results
from ragtag.recipes.grouping.methods import PROGRESSIVE, SYNC

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(NAMES, PALETTE, strict=False))


def methods(plan: Plan, results: Results) -> Figure:
    """Time and accuracy of progressive grouping by delay; all methods over time at the longest delay."""
    drawn = canvas(11.0, 7.6)
    (a, b), (c, d) = drawn.subplots(2, 2)
    percent = [100 * delay for delay in plan.delays]
    how = {"color": COLOURS[PROGRESSIVE], "linewidth": 2.2, "label": PROGRESSIVE}
    trials = [results.trials[delay, PROGRESSIVE] for delay in plan.delays]
    times = [relative_times(results, of) for of in trials]
    band(a, percent, list(zip(*times, strict=True)), **how)
    limits = [nobody_waits(delay) for delay in plan.delays]
    a.plot(percent, limits, color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
    style(
        a, "Progressive grouping: time over that without delay (dashed: none waits)", "delay of one peer, %"
    )
    losses = [[100 * loss for loss in accuracy_losses(results, of)] for of in trials]
    band(b, percent, list(zip(*losses, strict=True)), **how)
    style(b, "Progressive grouping: points of accuracy below synchronous training", "delay of one peer, %")
    grid = np.linspace(0.0, max(t.took_s for of in trials for t in of), 120)
    for name, colour in COLOURS.items():
        if (plan.worst, name) not in results.trials:
            continue
        curves = [
            np.interp(
                grid,
                [0.0, *(look.at_s for look in t.looks)],
                [10.0, *(100 * look.accuracy for look in t.looks)],
            )
            for t in results.trials[plan.worst, name]
        ]
        wide = 2.2 if name == PROGRESSIVE else 1.2
        band(c, list(grid), [list(curve) for curve in curves], color=colour, linewidth=wide, label=name)
    c.set_ylim(80, 98)
    style(c, f"Accuracy over time, one peer delayed {plan.worst:.0%}", "virtual seconds")
    _groups(d, results)
    handles, labels = c.get_legend_handles_labels()
    drawn.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=FAINT
    )
    over = f"mean and range over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    caption = (
        f"Digits, {N} peers, one of them delayed, the same number of samples for all methods; progressive "
        f"grouping: {over}. Below right: the number of groups as one peer is slow from 80 to 200 s."
    )
    return Figure("methods", caption, svg(drawn))


def _groups(ax: Axes, results: Results) -> None:
    trials = results.scenes[CHANGING, PROGRESSIVE]
    grid = np.linspace(0.0, max(t.took_s for t in trials), 400)
    held = [[groups_at(t, at_s) for at_s in grid] for t in trials]
    ax.step(grid, np.mean(held, axis=0), where="post", color=COLOURS[PROGRESSIVE], linewidth=1.6)
    ax.axvspan(80, 200, color=COLOURS[SYNC], alpha=0.06, linewidth=0)
    ax.set_ylim(0.5, None)
    ax.set_yticks([1, 2, 3])
    style(ax, "Groups, while one peer is slow (shaded)", "virtual seconds")


def staleness(results: Results) -> Figure:
    """The distribution of n-softsync's staleness."""
    drawn = canvas(9.6, 3.0)
    ax = drawn.subplots()
    for (n, trial), colour in zip(results.staleness.items(), PALETTE, strict=False):
        total = sum(trial.staleness.values())
        x = [k / n for k in trial.staleness]
        ax.plot(x, [v / total for v in trial.staleness.values()], color=colour, marker="o", markersize=3)
        ax.plot([], [], color=colour, label=f"n = {n}")
    ax.set_yscale("log")
    ax.axvline(2.0, color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
    ax.legend(frameon=False, fontsize=9, ncols=2)
    style(ax, "n-softsync, 30 learners: share of updates by staleness", "staleness / n")
    caption = "Staleness of updates under n-softsync; dashed: 2n, beyond which the paper finds none."
    return Figure("staleness", caption, svg(drawn))
