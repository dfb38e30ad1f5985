"""The figures of the top-k recipe: training by steps and bytes, measurements of u, outer steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, PALETTE, canvas, style, svg
from ragtag.recipes.topk.compare import reason, title
from ragtag.recipes.topk.local import Outer
from ragtag.recipes.topk.plan import LOSSES, RATIOS, Plan, Results, select
from ragtag.recipes.topk.training import BINS, Trained

_SHOWN = ("dense", "gaussian-k", "random-k", "top-k")
_COLOURS = (PALETTE[0], PALETTE[2], PALETTE[6], PALETTE[10])


def figures(plan: Plan, results: Results, names: dict[str, str]) -> list[Figure]:
    """All figures, a pair for each part."""
    found = []
    for i, part in enumerate(plan.parts):
        runs, where = results.of_part(part), title(part, names)
        found += [_training(runs, where, i), _measured(runs, where, i)]
        found += [_losing(runs, where, i)] if part.lossy_seeds else []
    return [*found, _outer(results.local)]


def _training(all_runs: list[Trained], where: str, number: int) -> Figure:
    """Training loss over steps and over bytes, of the runs that lose nothing."""
    runs = [r for r in all_runs if r.setup.seed == 0 and not r.setup.loss]
    drawn = canvas(11.0, 4.2)
    by_steps, by_bytes = drawn.subplots(1, 2, sharey=True)
    for run in runs:
        s = run.setup
        if s.selector not in _SHOWN:
            continue
        look = {
            "color": _COLOURS[_SHOWN.index(s.selector)],
            "linewidth": 1.4,
            "linestyle": "--" if s.selector != "dense" and s.ratio == RATIOS[0] else "-",
            "label": s.selector if s.selector == "dense" else f"{s.selector} {s.ratio:.1%}",
        }
        by_steps.plot(run.steps, run.losses, **look)
        by_bytes.plot(np.array(run.bytes_at) / 1e6, run.losses, **look)
    style(by_steps, where, "steps", "training loss")
    style(by_bytes, "the same, by what a peer sent", "MB")
    by_steps.set_yscale("log")
    by_bytes.set_xscale("log")
    by_bytes.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    caption = (
        f"{where}: training loss; dashed: 0.1 %, drawn through: 1 %. SampledTopK lies on top-k, and "
        "so does strict GaussianK. One seed."
    )
    return Figure(f"training-{number}", caption, svg(drawn))


def _measured(all_runs: list[Trained], where: str, number: int) -> Figure:
    """The share of u that top-k takes, beside the bounds; GaussianK's count; the shape of u."""
    runs = [r for r in all_runs if r.setup.seed == 0]
    drawn = canvas(11.0, 3.9)
    left, count, shape = drawn.subplots(1, 3)
    fitted = []
    for i, ratio in enumerate(RATIOS):
        (exact,), (gaussian,) = select(runs, "top-k", ratio), select(runs, "gaussian-k", ratio)
        kept, look = 1 - exact.k / exact.size, {"color": PALETTE[3 * i], "linewidth": 1.0}
        left.plot(1 - np.array(exact.off), label=f"top-k {ratio:.1%}", **look)
        left.plot(1 - np.array(exact.off_random), label=f"random-k {ratio:.1%}", alpha=0.35, **look)
        left.axhline(1 - kept**2, linestyle="--", **look)
        left.axhline(1 - kept, linestyle=":", **look)
        count.plot(gaussian.share, label=f"{ratio:.1%}", **look)
        fitted.append(f"at {ratio:.1%} {reason([gaussian])}")
    left.set_yscale("log")
    left.set_ylim(None, 30.0)  # room for the legend
    left.plot([], [], color=FAINT, linestyle="--", linewidth=1.0, label="top-k's bound, 1 - (1 - k/d)²")
    left.plot([], [], color=FAINT, linestyle=":", linewidth=1.0, label="random-k's mean, k/d")
    count.axhspan(2 / 3, 4 / 3, color=FAINT, alpha=0.15)
    count.set_yscale("log")
    _shape(shape, select(runs, "top-k", RATIOS[-1])[0])
    style(left, "captured: 1 - |u - Top_k(u)|² / |u|²", "step")
    style(count, "GaussianK: selected / k", "step")
    style(shape, f"u, top-k {RATIOS[-1]:.1%}", "standard deviations", "density")
    for ax in (left, count, shape):
        ax.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    caption = (
        f"{where}. Left: what top-k and random-k take of |u|²; top-k takes more than the paper's bound. "
        "Middle: in the band GaussianK stops correcting. Right: u through training. One seed. GaussianK "
        f"misses because {'; '.join(fitted)}."
    )
    return Figure(f"measured-{number}", caption, svg(drawn))


def _shape(ax: object, run: Trained) -> None:
    """u's histogram at some steps, beside the normal's density."""
    plot = ax.plot  # type: ignore[attr-defined]
    middle, width = (BINS[:-1] + BINS[1:]) / 2, float(BINS[1] - BINS[0])
    for i, (step, histogram) in enumerate(run.histograms.items()):
        density = np.array(histogram) / width
        plot(middle, np.where(density > 0, density, np.nan), color=PALETTE[2 * i], label=f"step {step}")
    plot(middle, np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi), color=FAINT, linestyle=":", label="normal")
    ax.set_yscale("log")  # type: ignore[attr-defined]
    ax.set_ylim(1e-5, None)  # type: ignore[attr-defined]


def _losing(all_runs: list[Trained], where: str, number: int) -> Figure:
    """Training where messages are lost: with tickets, and cleared as if they had been sent."""
    runs = [r for r in all_runs if r.setup.seed == 0]
    drawn = canvas(11.0, 3.6)
    for ax, loss in zip(drawn.subplots(1, len(LOSSES), sharey=True, squeeze=False)[0], LOSSES, strict=True):
        series = (
            ("nothing lost", select(runs, "sampled top-k", RATIOS[-1]), PALETTE[0], "-"),
            ("tickets", select(runs, "sampled top-k", RATIOS[-1], loss), PALETTE[10], "-"),
            ("cleared as if sent", select(runs, "sampled top-k", RATIOS[-1], loss, False), PALETTE[3], "--"),
        )
        for label, (run,), colour, line in series:
            ax.plot(run.steps, run.losses, color=colour, linestyle=line, label=label, linewidth=1.4)
        ax.set_yscale("log")
        style(ax, f"{loss:.0%} of messages lost", "steps", "training loss" if loss == LOSSES[0] else "")
        ax.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    caption = f"{where}: SampledTopK at 1 % with messages lost. One seed."
    return Figure(f"losing-{number}", caption, svg(drawn))


def _outer(runs: Sequence[Outer]) -> Figure:
    """Local steps, then a dense or a sparse outer step: loss by steps and by bytes."""
    drawn = canvas(11.0, 3.9)
    by_steps, by_bytes = drawn.subplots(1, 2, sharey=True)
    for i, run in enumerate(runs):
        look = {"color": PALETTE[2 * i], "linewidth": 1.4, "label": run.setup.name}
        steps = run.setup.local_steps * np.arange(1, len(run.losses) + 1)
        by_steps.plot(steps, run.losses, **look)
        by_bytes.plot(np.array(run.bytes_at) / 1e6, run.losses, **look)
    style(by_steps, "outer steps after local ones", "local steps", "training loss")
    style(by_bytes, "the same, by what a peer sent", "MB")
    by_bytes.set_xscale("log")
    by_bytes.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    caption = (
        "A small transformer on text. Top-k: 64 of each 4,096 entries of the difference to the anchor, "
        "error feedback with a decay of .95, the outer step is the mean. One seed."
    )
    return Figure("outer", caption, svg(drawn))
