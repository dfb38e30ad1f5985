"""The figures of the top-k recipe: training by steps and bytes, and what was measured of u on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Figure
from ragtag.recipes.drawing import FAINT, PALETTE, canvas, style, svg
from ragtag.recipes.topk_training import BINS, Trained


def training(runs: Sequence[Trained], task: str) -> Figure:
    """Training loss over steps and over bytes, of the runs that lose nothing."""
    drawn = canvas(11.0, 4.2)
    by_steps, by_bytes = drawn.subplots(1, 2, sharey=True)
    shown = [r for r in runs if not r.setup.loss and r.setup.selector != "sampled top-k"]
    names = sorted({r.setup.selector for r in shown})
    for run in shown:
        s = run.setup
        look = {
            "color": PALETTE[names.index(s.selector) % len(PALETTE)],
            "linewidth": 1.4,
            "linestyle": "--" if s.ratio < 0.005 else "-",
            "label": s.selector if s.selector == "dense" else f"{s.selector} {s.ratio:.1%}",
        }
        by_steps.plot(run.steps, run.losses, **look)
        by_bytes.plot(np.array(run.bytes_at) / 1e6, run.losses, **look)
    style(by_steps, f"{task}, {shown[0].setup.n} peers", "steps", "training loss")
    style(by_bytes, "the same, by what a peer sent", "MB")
    by_steps.set_yscale("log")
    by_bytes.set_xscale("log")
    by_bytes.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    return Figure("training", "Training loss; dashed: 0.1 %, drawn through: 1 %. One seed.", svg(drawn))


def measured(runs: Sequence[Trained]) -> Figure:
    """What top-k leaves of u beside the bounds, GaussianK's count, and the shape of u."""
    drawn = canvas(11.0, 3.9)
    left, count, shape = drawn.subplots(1, 3)
    for i, run in enumerate(r for r in runs if r.setup.selector == "top-k"):
        kept = 1 - run.k / run.size
        colour, name = PALETTE[i], f"{run.setup.ratio:.1%}"
        left.plot(run.off, color=colour, linewidth=1.0, label=f"top-k {name}")
        left.axhline(kept**2, color=colour, linewidth=1.0, linestyle="--")
        left.axhline(kept, color=colour, linewidth=1.0, linestyle=":")
    for i, run in enumerate(r for r in runs if r.setup.selector == "gaussian-k"):
        count.plot(run.share, color=PALETTE[i], linewidth=0.8, label=f"{run.setup.ratio:.1%}")
    count.axhspan(2 / 3, 4 / 3, color=FAINT, alpha=0.15)
    count.set_yscale("log")
    middle = (BINS[:-1] + BINS[1:]) / 2
    width = float(BINS[1] - BINS[0])
    chosen = next(r for r in runs if r.setup.selector == "top-k")
    for i, (step, histogram) in enumerate(chosen.histograms.items()):
        density = np.array(histogram) / width
        shape.plot(middle, np.where(density > 0, density, np.nan), color=PALETTE[i], label=f"step {step}")
    normal = np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi)
    shape.plot(middle, normal, color=FAINT, linestyle=":", label="normal")
    shape.set_yscale("log")
    shape.set_ylim(1e-5, None)
    style(left, "|u - Top_k(u)|² / |u|²", "step")
    style(count, "GaussianK: selected / k", "step")
    style(shape, f"u, top-k {chosen.setup.ratio:.1%}", "standard deviations", "density")
    for ax in (left, count, shape):
        ax.legend(fontsize=7, frameon=False, labelcolor=FAINT)
    caption = (
        "Left: what top-k leaves, beside (1 - k/d)² (dashed) and random-k's 1 - k/d (dotted). Middle: in the "
        "band GaussianK stops correcting. Right: u through training. One seed."
    )
    return Figure("measured", caption, svg(drawn))
