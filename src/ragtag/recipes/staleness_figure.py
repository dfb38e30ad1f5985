"""The figures of the staleness recipe: slow-down against s, and coherence over training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, PALETTE, canvas, style, svg
from ragtag.recipes.staleness_measure import (
    BY_WORKERS,
    COHERENT,
    MANY,
    OPTIMISERS,
    WORKERS,
    Plan,
    Results,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1b1f24", "#3b4cc0", "#1f8fb5", "#2a9d5c", "#e0902b", "#cf3a3a", "#7b4fa3")


def slow_downs(plan: Plan, results: Results) -> Figure:
    """Normalised batches against s: by depth, by optimiser, by number of workers."""
    drawn = canvas(11.0, 3.9)
    by_depth, by_optimiser, by_workers = drawn.subplots(1, 3, sharey=True)
    for depth, colour in zip(plan.depths, _COLOURS, strict=False):
        _curve(by_depth, plan, results, (depth, "SGD", WORKERS), f"{depth}", colour)
    first = plan.optimiser_depths[0]
    for name, colour in zip(OPTIMISERS, _COLOURS, strict=False):
        _curve(by_optimiser, plan, results, (first, name, WORKERS), name, colour)
    optimiser, depth = BY_WORKERS[0]
    for workers, colour in zip(MANY, _COLOURS, strict=False):
        _curve(by_workers, plan, results, (depth, optimiser, workers), f"{workers}", colour)
    style(
        by_depth,
        "By hidden layers: SGD, 8 workers",
        "s, largest delay in steps",
        "batches / batches at s = 0",
    )
    style(by_optimiser, f"By optimiser: depth {first}, 8 workers", "s")
    style(by_workers, f"By workers: {optimiser}, depth {depth}", "s")
    for ax in (by_depth, by_optimiser, by_workers):
        ax.set_yscale("log")
        ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        ax.minorticks_off()
        ax.set_xticks(plan.delays)
        ax.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    over = f"geometric mean and range over {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "one seed"
    caption = (
        f"Batches until 92 % of digits are right, over those without delay; {over}. Where the target was not "
        f"reached in {plan.batches_max} batches, these count: a lower bound."
    )
    return Figure("slow-downs", caption, svg(drawn))


def _curve(ax: Axes, plan: Plan, results: Results, of: tuple[int, str, int], label: str, colour: str) -> None:
    depth, optimiser, workers = of
    table = np.array([results.slow_downs(depth, optimiser, workers, s) for s in plan.delays])
    mean = np.exp(np.log(table).mean(1))
    ax.plot(plan.delays, mean, color=colour, linewidth=1.6, marker="o", markersize=3, label=label)
    ax.fill_between(plan.delays, table.min(1), table.max(1), color=colour, alpha=0.12, linewidth=0)


def coherence(plan: Plan, results: Results) -> Figure:
    """Coherence and training loss over batches, with and without delay."""
    drawn = canvas(11.0, 5.4)
    axes = drawn.subplots(2, len(COHERENT), squeeze=False)
    for column, (optimiser, depth) in enumerate(COHERENT):
        top, below = axes[0][column], axes[1][column]
        for s, colour in ((0, PALETTE[9]), (plan.s, PALETTE[3])):
            for i, seed in enumerate(plan.seeds):
                found = results.found[plan.coherent(depth, optimiser, s, seed)]
                label = f"s = {s}" if i == 0 else None
                for ax, series in ((top, found.coherence), (below, found.losses)):
                    x, y = zip(*series, strict=True)
                    smooth = _smooth(np.array(y))
                    ax.plot(x, smooth, color=colour, linewidth=1.2, alpha=0.75, label=label)
        top.axhline(0.0, color=FAINT, linewidth=0.8)
        top.set_ylim(-2.0, 1.2)
        top.legend(frameon=False, fontsize=8, labelcolor=FAINT)
        style(top, f"Coherence mu: {optimiser}, depth {depth}, 8 workers", "")
        below.set_yscale("log")
        style(below, "Training loss", "batches of all workers")
    caption = (
        "Gradient coherence (least over the last s steps of <grad now, grad then> / |grad then|²) on all "
        "training samples at the first worker's copy, mean of 8 steps; one line per seed."
    )
    return Figure("coherence", caption, svg(drawn))


def _smooth(values: np.ndarray, window: int = 8) -> np.ndarray:
    filled = np.where(np.isfinite(values), values, 1.0)
    total = np.cumsum(np.concatenate([[0.0], filled]))
    ends = np.arange(1, len(filled) + 1)
    begins = np.maximum(0, ends - window)
    return np.asarray((total[ends] - total[begins]) / (ends - begins))
