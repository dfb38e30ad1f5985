"""The figures of the staleness recipe: slow-down against s, and coherence over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, PALETTE, canvas, style, svg
from ragtag.recipes.staleness.measure import (
    BY_WORKERS,
    COHERENT,
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
from ragtag.recipes.staleness.model import LOOK_BACK
from ragtag.recipes.staleness.others import OTHERS, SLOW, SLOW_MAX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1b1f24", "#3b4cc0", "#1f8fb5", "#2a9d5c", "#e0902b", "#cf3a3a", "#7b4fa3")
_TICKS = (0.5, 1, 2, 5, 10, 20, 50)
_RATIO = "batches / batches at s = 0"


def slow_downs(plan: Plan, results: Results) -> Figure:
    """Normalised batches against s: by depth, by optimiser, by number of workers; by optimiser and depth."""
    drawn = canvas(11.0, 7.4)
    (by_depth, by_optimiser), (by_both, by_workers) = drawn.subplots(2, 2)
    for depth, colour in zip(plan.depths, _COLOURS, strict=False):
        _curve(by_depth, plan, results, (dnn(depth), "SGD", WORKERS), title(dnn(depth)), colour)
    for name, colour in zip(OPTIMISERS, _COLOURS, strict=False):
        _curve(by_optimiser, plan, results, (MIDDLE, name, WORKERS), name, colour)
        cells = [results.slow_downs(dnn(d), name, WORKERS, S) for d in plan.optimiser_depths]
        _band(by_both, plan.optimiser_depths, cells, name, colour)
    for (optimiser, model), dashes in zip(BY_WORKERS, ("-", "--"), strict=True):
        for workers, colour in zip(MANY, (_COLOURS[0], _COLOURS[2], _COLOURS[5]), strict=True):
            label = f"{optimiser}, {workers}"
            _curve(by_workers, plan, results, (model, optimiser, workers), label, colour, dashes)
    style(by_depth, f"By hidden layers: SGD, {WORKERS} workers", "s, largest delay in steps", _RATIO)
    style(by_optimiser, f"By optimiser: {title(MIDDLE)}, {WORKERS} workers", "s, largest delay in steps")
    style(by_both, f"By optimiser and depth: s = {S}, {WORKERS} workers", "hidden layers", _RATIO)
    style(by_workers, f"By optimiser and workers: {title(MIDDLE)}", "s, largest delay in steps")
    by_both.set_xticks(plan.optimiser_depths)
    for ax in (by_depth, by_optimiser, by_workers):
        ax.set_xticks(plan.delays)
    for ax in (by_depth, by_optimiser, by_both, by_workers):
        _ratios(ax)
    return Figure("slow-downs", _caption(plan, plan.seeds), svg(drawn))


def other_models(plan: Plan, results: Results) -> Figure:
    """The same for the other models, beside MLR and the middle net."""
    drawn = canvas(11.0, 3.9)
    axes = drawn.subplots(1, len(PAIR), sharey=True)
    for ax, optimiser in zip(axes, PAIR, strict=True):
        for model, colour in zip((MIDDLE, *plan.others), _COLOURS, strict=False):
            name = f"fully connected, {title(model)}" if model == MIDDLE else title(model)
            _curve(ax, plan, results, (model, optimiser, WORKERS), name, colour)
        style(ax, f"{optimiser}, {WORKERS} workers", "s, largest delay in steps")
        ax.set_xticks(plan.delays)
        _ratios(ax)
    axes[0].set_ylabel(_RATIO)
    return Figure("other-models", _caption(plan, plan.other_seeds), svg(drawn))


def _caption(plan: Plan, seeds: Sequence[int]) -> str:
    less = min(plan.batches_max, SLOW_MAX)
    over = f"geometric mean and range over {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    return (
        f"Batches of all workers until the target, over those without delay; {over}. Open circles: a seed "
        f"did not reach the target in {plan.batches_max:,} batches ({less:,} of {' and '.join(SLOW)}), and "
        f"counts with these: a lower bound."
    )


def _ratios(ax: Axes) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if not 0 < low < high < np.inf:  # nothing was reached: an empty frame
        low, high = 0.5, 50.0
    ax.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
    ticks = [t for t in _TICKS if low <= t <= 1.2 * high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.axhline(1.0, color=FAINT, linewidth=0.8, zorder=0)
    ax.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="upper left", ncols=2)


def _curve(
    ax: Axes,
    plan: Plan,
    results: Results,
    of: tuple[str, str, int],
    label: str,
    colour: str,
    dashes: str = "-",
) -> None:
    cells = [results.slow_downs(*of, s) for s in plan.delays]
    mean = _band(ax, plan.delays, cells, label, colour, dashes)
    bounds = [(s, m) for s, m in zip(plan.delays, mean, strict=True) if results.open(*of, s)]
    if bounds:
        x, y = zip(*bounds, strict=True)
        ax.scatter(x, y, s=26, facecolors="white", edgecolors=colour, zorder=3)


def _band(
    ax: Axes,
    x: Sequence[float],
    cells: Sequence[Sequence[float]],
    label: str,
    colour: str,
    dashes: str = "-",
) -> np.ndarray:
    table = np.array(cells)
    mean = np.exp(np.log(table).mean(1))
    ax.plot(x, mean, color=colour, linewidth=1.6, linestyle=dashes, marker="o", markersize=3, label=label)
    ax.fill_between(x, table.min(1), table.max(1), color=colour, alpha=0.1, linewidth=0)
    return np.asarray(mean)


def coherence(plan: Plan, results: Results) -> Figure:
    """Coherence and training loss over batches, with and without delay."""
    shown = [(o, m) for o, m in COHERENT if m not in OTHERS or m in plan.others]
    drawn = canvas(3.6 * len(shown), 5.4)
    axes = drawn.subplots(2, len(shown), squeeze=False)
    for column, (optimiser, model) in enumerate(shown):
        top, below = axes[0][column], axes[1][column]
        for s, colour in ((0, PALETTE[9]), (S, PALETTE[3])):
            for i, seed in enumerate(plan.seeds_of(model)):
                found = results.found[plan.coherent(model, optimiser, s, seed)]
                label = f"s = {s}" if i == 0 else None
                for ax, series in ((top, found.coherence), (below, found.losses)):
                    x, y = zip(*series, strict=True)
                    ax.plot(x, _smooth(np.array(y)), color=colour, linewidth=1.1, alpha=0.7, label=label)
        top.axhline(0.0, color=FAINT, linewidth=0.8)
        top.set_ylim(-2.0, 1.2)
        style(top, f"{optimiser}, {title(model)}", "")
        below.set_yscale("log")
        style(below, "", "batches of all workers")
    axes[0][0].set_ylabel("coherence mu")
    axes[0][0].legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="lower right")
    axes[1][0].set_ylabel("training loss")
    caption = (
        f"Gradient coherence (least over the last {LOOK_BACK} steps of <grad now, grad then> / |grad then|²) "
        "on training samples that stay the same, at the first worker's copy, mean of 8 steps; one "
        f"line per seed; {WORKERS} workers. Values below -2 lie under the frame."
    )
    return Figure("coherence", caption, svg(drawn))


def _smooth(values: np.ndarray, window: int = 8) -> np.ndarray:
    filled = np.where(np.isfinite(values), values, 1.0)
    total = np.cumsum(np.concatenate([[0.0], filled]))
    ends = np.arange(1, len(filled) + 1)
    begins = np.maximum(0, ends - window)
    return np.asarray((total[ends] - total[begins]) / (ends - begins))
