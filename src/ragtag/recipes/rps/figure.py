"""The figures of the RPS recipe: training under loss, and the mixing matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, INK, TITLE, canvas, quiet, svg
from ragtag.recipes.rps.theory import Closed, Doubles, Mixing
from ragtag.recipes.rps.training import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {1.0: INK, 0.99: "#3b4cc0", 0.95: "#1f8fb5", 0.9: "#2a9d5c", 0.8: "#e0902b", 0.6: "#cf3a3a"}
"""One colour for each rate of arrival, the same in all panels."""
_CIRCLE: dict[str, Any] = {"fmt": "o", "markersize": 5, "markerfacecolor": "white"}


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over several seeds: the middle and the extremes."""

    steps: Doubles
    mean: Doubles
    low: Doubles
    high: Doubles

    @staticmethod
    def of(curves: Sequence[Curve], what: str) -> Band:
        """Geometric mean and range of a ``Point``'s field over seeds."""
        steps = np.array([p.step for p in curves[0].points], np.float64)
        table = np.array([[getattr(p, what) for p in c.points] for c in curves], np.float64)
        table = np.maximum(table, 1e-6)
        return Band(steps, np.exp(np.log(table).mean(0)), table.min(0), table.max(0))


def training(panels: Mapping[tuple[bool, str], Mapping[float, Sequence[Curve]]], task: str) -> Figure:
    """Training loss over steps: columns models and gradients, rows IID and label-sorted shards."""
    from matplotlib.ticker import LogLocator, NullFormatter

    drawn = canvas(9.6, 7.4)
    axes = drawn.subplots(2, 2, sharex=True, sharey=True)
    named = []
    for (by_label, what), curves in panels.items():
        row, column = int(by_label), int(what == "gradients")
        ax = axes[row][column]
        ax.set_yscale("log")
        ends = []
        for arrival in sorted(curves, reverse=True):
            band = Band.of(curves[arrival], "loss")
            colour = COLOURS[arrival]
            ax.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
            dash = (0, (4, 2)) if arrival == 1.0 else "-"
            ax.plot(band.steps, band.mean, color=colour, linewidth=1.7, linestyle=dash)
            label = "no loss" if arrival == 1.0 else f"{arrival:.0%}".replace("%", " %")
            ends.append((float(band.mean[-1]), label, colour))
        ax.margins(x=0)
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        quiet(ax)
        named.append((ax, ends))
    for ax, ends in named:  # only now all panels have their common scale
        _label_ends(ax, ends)
    seeds = max(len(c) for curves in panels.values() for c in curves.values())
    for column, title in enumerate(("Models averaged by RPS", "Gradients averaged over the same channel")):
        axes[0][column].set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
        axes[1][column].set_xlabel("step", color=FAINT)
    for row, shards in enumerate(("IID shards", "shards sorted by label")):
        axes[row][0].set_ylabel(f"{shards}\ntraining loss", color=INK)
    over = f"geometric mean and range over {seeds} seeds" if seeds > 1 else "one seed"
    return Figure(
        "training",
        f"{task}, 16 peers: training loss, mean over the peers' own models; {over}. Labels: share of "
        f"datagrams that arrive. Dashed: all-reduce without loss.",
        svg(drawn),
    )


def mixing(by_loss: Mapping[float, Mixing], by_n: Mapping[int, Mixing], n: int, by_n_loss: float) -> Figure:
    """alpha1 and alpha2 over the rate of loss at 16 peers, and alpha2 over the number of peers."""
    drawn = canvas(9.6, 3.3)
    left, middle, right = drawn.subplots(1, 3)
    ps = np.linspace(0.002, 0.45, 120)
    for ax, name, colour in ((left, "alpha1", COLOURS[0.99]), (middle, "alpha2", COLOURS[0.6])):
        ax.plot(ps, [getattr(Closed(n, p), name) for p in ps], color=colour, linewidth=1.5)
        for p, found in by_loss.items():
            e = getattr(found, name)
            ax.errorbar(p, e.value, 2 * e.error, color=colour, **_CIRCLE)
        ax.set_title(f"{name}, {n} peers", **TITLE)
        ax.set_xlabel("loss p", color=FAINT)
        ax.set_xlim(0, 0.46)
        ax.set_ylim(0)
    ns = np.array(sorted(by_n), np.float64)
    right.loglog(ns, [Closed(int(k), by_n_loss).alpha2 for k in ns], color=COLOURS[0.9], linewidth=1.5)
    for k, found in by_n.items():
        e = found.alpha2
        right.errorbar(k, e.value, 2 * e.error, color=COLOURS[0.9], **_CIRCLE)
    right.set_title(f"alpha2 at p = {by_n_loss:g}: the 1/n law", **TITLE)
    right.set_xlabel("peers n", color=FAINT)
    right.set_xticks(ns, [f"{int(k)}" for k in ns])
    right.minorticks_off()
    for ax in (left, middle, right):
        quiet(ax)
    caption = "RPS's mixing matrix: lines are closed forms, circles what was measured (two standard errors)."
    return Figure("mixing", caption, svg(drawn))


def _label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name each curve at its end. Names that would touch move apart, in the order of the curves."""
    gap, (low, high) = 0.058, np.log(ax.get_ylim())
    ranked = sorted(ends)
    at = [(float(np.log(value)) - low) / (high - low) for value, _, _ in ranked]
    for _ in range(200):
        for i in range(len(at) - 1):
            push = max(0.0, gap - (at[i + 1] - at[i])) / 2
            at[i], at[i + 1] = at[i] - push, at[i + 1] + push
    for place, (_, label, colour) in zip(at, ranked, strict=True):
        ax.annotate(
            label,
            (1.0, place),
            xytext=(6, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=colour,
            fontsize=9,
            fontweight="bold",
            va="center",
        )
