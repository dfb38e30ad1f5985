"""The figure of the DiLoCo recipe: loss against steps and against bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ragtag.recipes.base import Figure
from ragtag.recipes.diloco.training import Run
from ragtag.recipes.drawing import FAINT, band, canvas, style, svg

_COLOURS = ("#1b1f24", "#8a949e", "#e0902b", "#cf3a3a", "#3b4cc0", "#2a9d5c")


def training(runs: Sequence[Run]) -> Figure:
    """Every method's loss on text held out; mean and range over seeds."""
    drawn = canvas(11.0, 4.2)
    by_step, by_bytes = drawn.subplots(1, 2, sharey=True)
    methods = list(dict.fromkeys(run.setup.method for run in runs))
    for method, colour in zip(methods, _COLOURS, strict=True):
        mine = [run for run in runs if run.setup.method == method]
        curves = [run.losses for run in mine]
        how = {"color": colour, "linewidth": 1.5, "label": method.name}
        band(by_step, mine[0].steps, curves, **how)
        if mine[0].rounds:
            sent = [b / 1e6 for b in mine[0].bytes_at]
            band(by_bytes, sent[1:], [curve[1:] for curve in curves], **how)
    style(by_step, "By steps", "local steps of each peer", "loss on text held out, nats per byte")
    style(by_bytes, "By bytes", "MB that a peer has sent")
    by_bytes.set_xscale("log")
    by_step.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    setup = runs[0].setup
    seeds = len({run.setup.seed for run in runs})
    over = f"mean and range over {seeds} seeds" if seeds > 1 else "one seed"
    caption = f"{setup.n} peers, a transformer of {runs[0].size:,} values, {setup.steps:,} steps; {over}."
    return Figure("training", caption, svg(drawn))
