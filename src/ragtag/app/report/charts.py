"""The report's charts: each returns one SVG element as text, for a given width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report import axes
from ragtag.app.report.axes import Mark, Plot, Scale
from ragtag.app.report.data import ALL, Summary
from ragtag.app.report.drawing import Curve, draw_lines, frame, peer_lines, points, spread, svg

SHORTEST = 30.0
"""A logarithmic axis of round times begins at the median divided by this; shorter ones stand on its edge."""


def accuracy_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Accuracy of each peer's own model, of their mean, and of the mean model."""
    lines = peer_lines(summary, lambda peer: summary.accuracy.points(peer))
    lines.append(Curve("mean of the peers' own", "mean", *summary.own_mean.points(ALL), ends="mean"))
    lines.append(Curve("the mean model", "model", *summary.mean_accuracy.points(ALL), ends="mean model"))
    lines = [line for line in lines if len(line.t)]
    low = min((float(line.value.min()) for line in lines), default=0.0)
    high = max((float(line.value.max()) for line in lines), default=1.0)
    span = (0.0, max(0.5, min(1.0, high * 1.1)), "linear")
    if (
        high > 0.8
    ):  # logarithmic in the error, a little beyond the best and (unless it begins near 0) the worst
        best = max(0.0005, (1 - high) * 0.8)
        worst = max(1 - low, 2 * best)
        span = (0.0 if low < 0.4 else max(0.0, 1 - worst * 1.1), 1 - best, "error")
    return _line_chart(summary, marks, width, 290, lines, span, axes.percent, "Accuracy")


def loss_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Training loss of each peer, and of all steps together."""
    lines = peer_lines(summary, lambda peer: summary.loss.points(peer))
    lines.append(Curve("mean of all peers", "mean", *summary.loss.points(ALL), ends="mean"))
    lines = [line for line in lines if len(line.t)]
    values = np.concatenate([line.value for line in lines]) if lines else np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high / low > 8
    span = (low * 0.9, high * 1.1, "log") if log else (min(0.0, low), high * 1.05 or 1.0, "linear")
    return _line_chart(summary, marks, width, 260, lines, span, lambda v: f"{v:.3g}", "Training loss")


def coherence_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Each peer's gradient coherence, and the mean; what is far out stands on the edge."""
    lines = peer_lines(summary, lambda peer: summary.coherence.points(peer))
    lines.append(Curve("mean of all peers", "mean", *summary.coherence.points(ALL), ends="mean"))
    lines = [line for line in lines if len(line.t)]
    values = np.concatenate([line.value for line in lines])
    low, high = (float(q) for q in np.quantile(values, (0.02, 0.98)))
    room = max(0.05, 0.15 * (max(0.0, high) - min(0.0, low)))
    span = (min(0.0, low) - room, max(0.0, high) + room, "linear")
    return _line_chart(
        summary, marks, width, 220, lines, span, lambda v: f"{v:.2g}", "Gradient coherence", 0.0
    )


def arrival_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Share of what the others sent that was averaged: mean over peers, and a band from lowest to highest."""
    t, mean = summary.arrived.points(ALL)
    place = frame(summary, marks, width, 170, rounds=True)
    rows = summary.arrived.means()[:-1]
    some = summary.arrived.count[-1] > 0
    shown = rows[:, some]
    known = np.isfinite(shown).any(axis=0) if len(shown) else np.zeros(len(t), np.bool_)
    lowest = float(np.nanmin(shown)) if known.any() else float(mean.min(initial=1.0))
    scale = Scale(max(0.0, min(0.9, lowest - 0.03)), 1.0, place.plot_bottom, place.top + 8)
    body = []
    if known.any():
        low, high = np.nanmin(shown[:, known], axis=0), np.nanmax(shown[:, known], axis=0)
        edge = points(place, scale, t[known], high) + points(place, scale, t[known], low)[::-1]
        body.append(f'<path class="range" d="M{"L".join(edge)}Z"/>')
    line = Curve("arrived, mean", "mean", t, mean, ends="mean")
    body += draw_lines(place, scale, [line])
    return svg(summary, place, marks, scale, body, axes.percent, "Arrival rate", "share", rounds=True)


def round_time_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Each round's time as a dot, with the median and the 95th percentile."""
    place = frame(summary, marks, width, 230, rounds=True)
    median, p95 = summary.round_s.quantile(0.5) or 0.0, summary.round_s.quantile(0.95) or 0.0
    high = max(summary.round_s.largest, 1e-9)
    log = median > 0 and high / median > 8
    low = max(summary.round_s.smallest * 0.85, median / SHORTEST) if log else 0.0
    scale = Scale(low, high * 1.08, place.plot_bottom, place.top + 8, "log" if log else "linear")
    dots = "".join(f"M{place.t(t):.1f} {scale(v):.1f}h0" for t, v, _ in summary.dots.points())
    late = "".join(
        f"M{place.t(t) - 3:.1f} {scale(v) - 3:.1f}l6 6m0 -6l-6 6" for t, v, _ in summary.late_dots.points()
    )
    body = [f'<path class="dots" d="{dots}"/>'] if dots else []
    body += [f'<path class="late" d="{late}"/>'] if late else []
    heights = spread([scale(median), scale(p95)], 13, place.top + 8, place.plot_bottom)
    for name, value, style, y in (("median", median, "median", heights[0]), ("p95", p95, "p95", heights[1])):
        x = place.width - place.right
        body.append(f'<path class="{style}" d="M{place.left} {scale(value):.1f}H{x}"/>')
        text = name if place.narrow else f"{name} {axes.seconds(value)}"
        body.append(f'<text class="endlab {style}t" x="{x + 5}" y="{y + 4:.1f}">{text}</text>')
    return svg(summary, place, marks, scale, body, axes.seconds, "Round times", "seconds", rounds=True)


def stage_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Mean time of the two stages, stacked."""
    place = frame(summary, marks, width, 130, rounds=True)
    t, scatter = summary.scatter.points(ALL)
    _, gather = summary.gather.points(ALL)
    both = scatter + gather
    scale = Scale(0.0, float(both.max(initial=1e-9)) * 1.08, place.plot_bottom, place.top + 8)
    column = (place.width - place.right - place.left) / summary.scatter.columns
    w = max(1.0, column - 1.0)
    body = []
    for at, first, total in zip(t, scatter, both, strict=True):
        x = place.left + column * summary.scatter.column(float(at))
        y1, y2 = scale(float(first)), scale(float(total))
        title = f"<title>{axes.clock(float(at))}: scatter {axes.seconds(float(first))}, gather"
        title += f" {axes.seconds(float(total - first))}</title>"
        body.append(
            f'<g><rect class="scatter" x="{x:.1f}" y="{y1:.1f}" width="{w:.1f}"'
            f' height="{place.plot_bottom - y1:.1f}"/>'
            f'<rect class="gather" x="{x:.1f}" y="{y2:.1f}" width="{w:.1f}" height="{y1 - y2:.1f}"/>'
            f"{title}</g>"
        )
    return svg(summary, place, marks, scale, body, axes.seconds, "Stages of a round", "", rounds=True, most=3)


def _line_chart(
    summary: Summary,
    marks: Sequence[Mark],
    width: int,
    height: int,
    lines: Sequence[Curve],
    span: tuple[float, float, str],
    form: Callable[[float], str],
    title: str,
    rule: float | None = None,
) -> str:
    """rule: a value at which a dashed line is drawn."""
    place = frame(summary, marks, width, height)
    scale = Scale(span[0], span[1], place.plot_bottom, place.top + 8, span[2])
    unit = "share" if form is axes.percent else ""
    body = list(draw_lines(place, scale, lines))
    if rule is not None:
        body.insert(0, f'<path class="p95" d="M{place.left} {scale(rule):.1f}H{place.width - place.right}"/>')
    return svg(summary, place, marks, scale, body, form, title, unit)


Flags = NDArray[np.bool_]


def missed_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """A strip for each peer: how many of the others waited for it in vain, and when nobody waited."""
    rows = len(summary.charted)
    row = max(9, min(30, 900 // max(1, rows)))
    place = frame(summary, marks, width, rows * row + 4, rounds=True)
    body: list[str] = []
    for at in range(rows):
        base = place.top + 4 + (at + 1) * row - 2
        body += _bars(summary, at, place, base, row)
        body += _labels(summary, at, place, base, row)
    scale = Scale(0.0, 1.0, place.plot_bottom, place.top)
    return svg(summary, place, marks, scale, body, None, "Who was missed when", "", rounds=True)


def _bars(summary: Summary, at: int, place: Plot, base: int, row: int) -> Iterator[str]:
    """The data of strip ``at``, which stands on ``base`` and is ``row`` pixels high."""
    column = (place.width - place.right - place.left) / summary.missed.shape[1]
    known = (summary.rounds[at] > 0) & bool(summary.waited.any())
    share = summary.missed[at] / np.maximum(summary.rounds[at], max(1, len(summary.peers) - 1))
    for start, end in _stretches(_carried(summary.waited[at] * 2 < summary.rounds[at], known)):
        x, w = place.left + start * column, (end - start) * column
        yield f'<rect class="away" x="{x:.1f}" y="{base - row + 4}" width="{w:.1f}" height="{row - 4}"/>'
    bars = "".join(
        f"M{place.left + (k + 0.5) * column:.1f} {base}v-{max(2.0, float(share[k]) * (row - 4)):.1f}"
        for k in np.flatnonzero(share > 0)
    )
    yield f'<path class="base" d="M{place.left} {base}H{place.width - place.right}"/>'
    if bars:
        yield f'<path class="missed" stroke-width="{max(1.5, column * 0.85):.1f}" d="{bars}"/>'


def _labels(summary: Summary, at: int, place: Plot, base: int, row: int) -> Iterator[str]:
    """A strip's name at its left, and how often its peer was missed at its right."""
    peer, middle, roomy = summary.charted[at], base - row / 2 + 6, row >= 12
    if roomy or at % 2 == 0:
        text = str(peer) if place.narrow or not roomy else f"peer {peer}"
        yield f'<text class="lab end" x="{place.left - 6}" y="{middle:.1f}">{text}</text>'
    total, right = summary.peers[peer].missed, place.width - place.right
    yield (
        f'<rect class="hit" x="{place.left}" y="{base - row + 2}" height="{row}"'
        f' width="{right - place.left}"><title>peer {peer}: missed {total:,} times in all</title></rect>'
    )
    if not place.narrow and roomy:
        yield f'<text class="lab" x="{right + 6}" y="{middle:.1f}">{total:,} missed</text>'


def _carried(flags: Flags, known: Flags) -> Flags:
    """Flags where they are known; between, the last known one goes on."""
    latest = np.maximum.accumulate(np.where(known, np.arange(len(flags)), -1))
    return np.where(latest >= 0, flags[np.maximum(latest, 0)], False)


def _stretches(flags: Flags) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
