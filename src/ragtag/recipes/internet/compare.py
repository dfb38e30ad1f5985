"""What the recipes for the internet came to, beside what their papers say and what was set as a goal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragtag.recipes.base import Figure, Row, Table, number, row
from ragtag.recipes.drawing import FAINT, band, canvas, style, svg
from ragtag.recipes.internet.spot import SpotRun
from ragtag.recipes.internet.training import (
    ALONE,
    DECOUPLED,
    DILOCO,
    EVERY_STEP,
    MULOCO,
    NOLOCO,
    QUORATE,
    SHORT,
    SPARSELOCO,
    H,
    WayRun,
)

MISSING = (0.0, 0.1, 0.3)
WITH_MISSING = (DILOCO, SPARSELOCO, NOLOCO, QUORATE, DECOUPLED)
"""Those that also run with peers missing."""
SPARSE = "Sarfi et al., arXiv 2508.15706"
PAIRS = "Kolehmainen et al., arXiv 2506.10911"
PARTED = "Douillard et al., arXiv 2604.21428"
MUON = "Thérien et al., arXiv 2505.23725"
GOAL = "goal set before the runs"
NOBODY_OUT = "the same averages: with nobody missing a quorum leaves nobody out"
SAME = 1e-6
"""How far apart two losses may be that are to be the same."""


def ways_of(runs: Sequence[WayRun], way: str, missing: float = 0.0) -> list[WayRun]:
    """The runs of one kind, by seed."""
    return [run for run in runs if run.way == way and run.missing == missing]


def loss_ratios(
    runs: Sequence[WayRun], way: str, base: str, missing: float = 0.0, from_: float = 0.0
) -> list[float]:
    """Final losses over others, seed by seed."""
    return [
        a.loss / b.loss for a, b in zip(ways_of(runs, way, missing), ways_of(runs, base, from_), strict=True)
    ]


def loss_rows(runs: Sequence[WayRun]) -> list[Row]:
    """The end of training beside DiLoCo's, and what peers that are missing cost."""
    group = "Final loss over DiLoCo's"
    found = [
        _mean(SPARSELOCO, loss_ratios(runs, SPARSELOCO, DILOCO), 1.01, 0.0, "<=", GOAL, group),
        _mean(SHORT, loss_ratios(runs, SHORT, DILOCO), 1.01, 0.0, "<=", GOAL, group),
        _mean(NOLOCO, loss_ratios(runs, NOLOCO, DILOCO), 1.0, 0.04, "=", PAIRS, group),
        _mean(QUORATE, loss_ratios(runs, QUORATE, DILOCO), 1.0, SAME, "=", NOBODY_OUT, group),
        _mean(DECOUPLED, loss_ratios(runs, DECOUPLED, DILOCO), 1.0, 0.02, "=", PARTED, group),
        _mean(MULOCO, loss_ratios(runs, MULOCO, DILOCO), 1.0, 0.0, "<=", MUON, group),
        _mean(ALONE, loss_ratios(runs, ALONE, DILOCO), 1.05, 0.0, ">=", "averaging has to matter", group),
    ]
    group = "DiLoCo's final loss over that of gradients averaged at every step"
    found.append(_mean(DILOCO, loss_ratios(runs, DILOCO, EVERY_STEP), 1.0, 0.03, "=", GOAL, group))
    group = "Final loss with peers missing, over that with none missing"
    for missing, within in zip(MISSING[1:], (0.01, 0.02), strict=True):
        for way in WITH_MISSING:
            what = f"{way}, {missing:.0%} missing"
            found.append(_mean(what, loss_ratios(runs, way, way, missing), 1.0, within, "=", GOAL, group))
    return found


def byte_rows(runs: Sequence[WayRun]) -> list[Row]:
    """The bytes that a peer sends, over those of averages at every step."""
    group = "Bytes that a peer sends, over averages at every step"
    every = ways_of(runs, EVERY_STEP)[0]
    found = []
    for way, expected, relation, source in (
        (DILOCO, 1 / H, "=", "1 / H"),
        (SPARSELOCO, 0.01, "<=", GOAL),
        (SHORT, 0.01, "<=", GOAL),
        (
            NOLOCO,
            1 / H / (2 * 7 / 8),
            "=",
            "a vector there and back again in each pair, 7/4 of one by owners",
        ),
        (QUORATE, 1 / H, "=", "1 / H"),
        (DECOUPLED, 1 / H, "=", "1 / H"),
        (MULOCO, 1 / H, "=", "1 / H"),
    ):
        share = ways_of(runs, way)[0].bytes / every.bytes
        tolerance = 0.0 if relation == "<=" else 0.1 * expected
        found.append(row(way, share, expected, tolerance, source, relation=relation, group=group))
    return found


def time_rows(runs: Sequence[WayRun]) -> list[Row]:
    """How much of the time peers compute while others are missing."""
    group = "Share of the time in which a peer computes"
    return [
        _mean(
            f"{DECOUPLED}, {missing:.0%} missing",
            [run.computing for run in ways_of(runs, DECOUPLED, missing)],
            0.88,
            0.0,
            ">=",
            f"{PARTED}: goodput",
            group,
        )
        for missing in MISSING
    ]


def spot_rows(run: SpotRun) -> list[Row]:
    """The share of what spot machines could compute that ends in the model."""
    group = "Spot machines that live 20 minutes, on lines of 20 to 1,000 Mbit/s"
    what = f"goodput, {run.setup.peers:,} machines"
    return [row(what, run.goodput, 0.88, 0.0, f"{PARTED}: 88 %", relation=">=", group=group)]


def spot_table(run: SpotRun) -> Table:
    """What became of the time of spot machines."""
    parts = (
        ("useful", run.useful),
        ("died with a machine", run.died),
        ("until a machine had joined", run.joined),
        ("waited for an average", run.waited),
    )
    lines = [(what, f"{seconds / run.all:.1%}") for what, seconds in parts]
    lines += [
        ("machines that died", f"{run.deaths:,}"),
        ("averages that a machine took part in", f"{run.rounds:,}"),
        ("of which alone", f"{run.alone / max(1, run.rounds):.1%}"),
    ]
    minutes = f"{run.setup.until_s / 60:.0f} minutes of {run.setup.peers:,} machines"
    return Table(f"Where time went: {minutes}", ("time", "share"), tuple(lines))


def _mean(
    what: str, values: Sequence[float], expected: float, tolerance: float, sign: str, source: str, group: str
) -> Row:
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    mean = float(np.mean(values))
    return row(what, mean, expected, tolerance, source, relation=sign, error=error, group=group)


def ways_table(runs: Sequence[WayRun]) -> Table:
    """All kinds of runs."""
    kinds = list(dict.fromkeys((run.way, run.missing) for run in runs))
    base, every = ways_of(runs, DILOCO), ways_of(runs, EVERY_STEP)[0].bytes
    lines = []
    for way, missing in sorted(kinds, key=lambda kind: (kind[1], list(dict.fromkeys(kinds)).index(kind))):
        mine = ways_of(runs, way, missing)
        beside = [a.loss / b.loss - 1 for a, b in zip(mine, base, strict=True)]
        spread = f" ({min(beside):+.2%} to {max(beside):+.2%})" if len(beside) > 1 else ""
        lines.append(
            (
                way,
                f"{missing:.0%}",
                number(float(np.mean([run.loss for run in mine]))),
                f"{np.mean(beside):+.2%}{spread}",
                f"{mine[0].bytes / 1e6:,.2f}",
                f"{every / mine[0].bytes:,.0f}" if mine[0].bytes else "",
                f"{np.mean([run.computing for run in mine]):.1%}",
                f"{np.mean([run.without for run in mine]):.1%}",
            )
        )
    columns = (
        "recipe",
        "missing",
        "final loss",
        "beside DiLoCo, none missing",
        "MB sent per peer",
        "fewer bytes",
        "computing",
        "not averaged",
    )
    over = f"mean over {len(base)} seeds" if len(base) > 1 else "one seed"
    return Table(f"The end of training: {over}", columns, tuple(lines))


_COLOURS = ("#8a949e", "#1b1f24", "#e0902b", "#cf3a3a", "#3b4cc0", "#2a9d5c", "#7b4fa0", "#3fa7b5", "#b58a3f")


def ways_figure(runs: Sequence[WayRun]) -> Figure:
    """Losses by step, and at the end by how many peers are missing."""
    drawn = canvas(11.0, 4.2)
    by_step, by_missing = drawn.subplots(1, 2)
    for way, colour in zip(dict.fromkeys(run.way for run in runs), _COLOURS, strict=True):
        mine = ways_of(runs, way)
        band(by_step, mine[0].steps, [r.losses for r in mine], color=colour, linewidth=1.5, label=way)
        if way in WITH_MISSING:
            means = [float(np.mean([run.loss for run in ways_of(runs, way, m)])) for m in MISSING]
            by_missing.plot([100 * m for m in MISSING], means, color=colour, linewidth=1.5, marker="o")
    style(by_step, "None missing", "local steps of each peer", "loss on text held out, nats per byte")
    style(by_missing, "With peers missing", "share of rounds from which a peer is missing, %", "final loss")
    by_step.legend(frameon=False, fontsize=8, labelcolor=FAINT)
    setup = runs[0].setup
    caption = f"{setup.n} peers, a transformer of {runs[0].size:,} values, {setup.steps:,} steps."
    return Figure("training", caption, svg(drawn))
