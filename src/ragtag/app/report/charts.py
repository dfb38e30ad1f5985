"""The report's charts: each returns one SVG element as text, for a given width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report import axes
from ragtag.app.report.axes import Frame, Mark, Scale
from ragtag.app.report.data import ALL, Summary
from ragtag.app.report.series import Array

SHORTEST = 30.0
"""A logarithmic axis of round times begins at the median divided by this; shorter ones stand on its edge."""
COLOURED_MAX = 8
"""With more peers than this, only those with faults have colours of their own."""
GAP = 4.0
"""A line is interrupted where no value came for this many times its usual spacing."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. style: CSS classes; ends: a short name at its right end."""

    name: str
    style: str
    t: Array
    value: Array
    ends: str = ""


def style_of(peer: int, summary: Summary) -> str:
    """A peer's CSS class: its colour and dash pattern, or the plain grey of a crowd."""
    if len(summary.peers) <= COLOURED_MAX:
        return f"p{summary.charted.index(peer)}"
    faulty = sorted({f.peer for f in summary.faults if f.peer in summary.peers})
    return f"p{faulty.index(peer)}" if peer in faulty[:COLOURED_MAX] else "crowd"


def accuracy_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Accuracy of each peer's own model, of their mean, and of the mean model."""
    lines = _peer_lines(summary, lambda peer: summary.accuracy.points(peer))
    lines.append(Line("mean of the peers' own", "mean", *summary.own_mean.points(ALL), ends="mean"))
    lines.append(Line("the mean model", "model", *summary.mean_accuracy.points(ALL), ends="mean model"))
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
    lines = _peer_lines(summary, lambda peer: summary.loss.points(peer))
    lines.append(Line("mean of all peers", "mean", *summary.loss.points(ALL), ends="mean"))
    lines = [line for line in lines if len(line.t)]
    values = np.concatenate([line.value for line in lines]) if lines else np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high / low > 8
    span = (low * 0.9, high * 1.1, "log") if log else (min(0.0, low), high * 1.05 or 1.0, "linear")
    return _line_chart(summary, marks, width, 260, lines, span, lambda v: f"{v:.3g}", "Training loss")


def arrival_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Share of chunks averaged, mean over peers, in a band from the lowest peer to the highest."""
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
        edge = _points(place, scale, t[known], high) + _points(place, scale, t[known], low)[::-1]
        body.append(f'<path class="range" d="M{"L".join(edge)}Z"/>')
    line = Line("arrived, mean", "mean", t, mean, ends="mean")
    body += _lines(place, scale, [line])
    return _svg(summary, place, marks, scale, body, axes.percent, "Arrival rate", "share", rounds=True)


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
    heights = _spread([scale(median), scale(p95)], 13, place.top + 8, place.plot_bottom)
    for name, value, style, y in (("median", median, "median", heights[0]), ("p95", p95, "p95", heights[1])):
        x = place.width - place.right
        body.append(f'<path class="{style}" d="M{place.left} {scale(value):.1f}H{x}"/>')
        text = name if place.narrow else f"{name} {axes.seconds(value)}"
        body.append(f'<text class="endlab {style}t" x="{x + 5}" y="{y + 4:.1f}">{text}</text>')
    return _svg(summary, place, marks, scale, body, axes.seconds, "Round times", "seconds", rounds=True)


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
    return _svg(
        summary, place, marks, scale, body, axes.seconds, "Stages of a round", "", rounds=True, most=3
    )


def missed_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """A strip for each peer: how many of the others waited for it in vain, and when nobody waited."""
    rows = len(summary.charted)
    row = max(9, min(30, 900 // max(1, rows)))
    place = frame(summary, marks, width, rows * row + 4, rounds=True)
    column = (place.width - place.right - place.left) / summary.missed.shape[1]
    body = []
    any_waited = bool(summary.waited.any())
    every = 1 if row >= 12 else 2
    for at, peer in enumerate(summary.charted):
        base = place.top + 4 + (at + 1) * row - 2
        known = summary.rounds[at] > 0
        share = summary.missed[at] / np.maximum(summary.rounds[at], max(1, len(summary.peers) - 1))
        away = _carried(summary.waited[at] * 2 < summary.rounds[at], known & any_waited)
        for start, end in _stretches(away):
            x, w = place.left + start * column, (end - start) * column
            body.append(
                f'<rect class="away" x="{x:.1f}" y="{base - row + 4}" width="{w:.1f}" height="{row - 4}"/>'
            )
        bars = "".join(
            f"M{place.left + (k + 0.5) * column:.1f} {base}v-{max(2.0, float(share[k]) * (row - 4)):.1f}"
            for k in np.flatnonzero(share > 0)
        )
        body.append(f'<path class="base" d="M{place.left} {base}H{place.width - place.right}"/>')
        if bars:
            body.append(f'<path class="missed" stroke-width="{max(1.5, column * 0.85):.1f}" d="{bars}"/>')
        if at % every == 0:
            text = str(peer) if place.narrow or row < 12 else f"peer {peer}"
            body.append(
                f'<text class="lab end" x="{place.left - 6}" y="{base - row / 2 + 6:.1f}">{text}</text>'
            )
        total = summary.peers[peer].missed
        body.append(
            f'<rect class="hit" x="{place.left}" y="{base - row + 2}" height="{row}"'
            f' width="{place.width - place.right - place.left}">'
            f"<title>peer {peer}: missed {total:,} times in all</title></rect>"
        )
        if not place.narrow and row >= 12:
            body.append(
                f'<text class="lab" x="{place.width - place.right + 6}" y="{base - row / 2 + 6:.1f}">'
                f"{total:,} missed</text>"
            )
    scale = Scale(0.0, 1.0, place.plot_bottom, place.top)
    return _svg(summary, place, marks, scale, body, None, "Who was missed when", "", rounds=True)


# -- What the charts share


def frame(summary: Summary, marks: Sequence[Mark], width: int, height: int, rounds: bool = False) -> Frame:
    """The place of a chart over the whole run; ``height`` is the plot's."""
    t0, t1 = summary.extent.t0, max(summary.extent.t1, summary.extent.t0 + 1e-6)
    return axes.frame(width, height, marks, t0, t1, rounds, right=58 if width < 700 else 118)


def _peer_lines(summary: Summary, points: Callable[[int], tuple[Array, Array]]) -> list[Line]:
    lines = []
    for peer in summary.charted:
        style = style_of(peer, summary)
        lines.append(
            Line(f"peer {peer}", style, *points(peer), ends="" if style == "crowd" else f"peer {peer}")
        )
    return sorted(lines, key=lambda line: line.style != "crowd")


def _points(place: Frame, scale: Scale, t: Array, value: Array) -> list[str]:
    return [f"{place.t(float(a)):.1f} {scale(float(v)):.1f}" for a, v in zip(t, value, strict=True)]


def _path(place: Frame, scale: Scale, line: Line) -> str:
    gaps = np.diff(line.t)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    parts = _points(place, scale, line.t, line.value)
    if len(parts) == 1:
        return f"M{parts[0]}h0"
    joins = ["M", *("M" if gap > GAP * usual else "L" for gap in gaps)]
    return "".join(join + part for join, part in zip(joins, parts, strict=True))


def _lines(place: Frame, scale: Scale, lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        name = escape(line.name, quote=True)
        yield f'<path class="line {line.style}" data-name="{name}" d="{_path(place, scale, line)}"/>'
    ended = place.t.high - 0.06 * (place.t.high - place.t.low)
    named = [line for line in lines if line.ends and len(line.t) and line.t[-1] >= ended]
    if not place.narrow:
        heights = _spread(
            [scale(float(line.value[-1])) for line in named], 13, place.top + 6, place.plot_bottom
        )
        for line, y in zip(named, heights, strict=True):
            x, y0 = place.t(float(line.t[-1])), scale(float(line.value[-1]))
            edge = place.width - place.right
            yield f'<path class="leader {line.style}" d="M{x:.1f} {y0:.1f}L{edge + 8} {y:.1f}h5"/>'
            at = f'x="{edge + 16}" y="{y + 4:.1f}"'
            yield f'<text class="endlab {line.style}" {at}>{escape(line.ends)}</text>'


def _spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Heights near the wanted ones, at least ``gap`` apart, between ``top`` and ``bottom`` if they fit."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    placed = [0.0] * len(wanted)
    last = top - gap
    for k in order:
        last = placed[k] = max(wanted[k], last + gap)
    limit = bottom
    for k in reversed(order):
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    return placed


def _carried(flags: Flags, known: Flags) -> Flags:
    """Flags where they are known; between, the last known one goes on."""
    latest = np.maximum.accumulate(np.where(known, np.arange(len(flags)), -1))
    return np.where(latest >= 0, flags[np.maximum(latest, 0)], False)


def _stretches(flags: Flags) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _line_chart(
    summary: Summary,
    marks: Sequence[Mark],
    width: int,
    height: int,
    lines: Sequence[Line],
    span: tuple[float, float, str],
    form: Callable[[float], str],
    title: str,
) -> str:
    place = frame(summary, marks, width, height)
    scale = Scale(span[0], span[1], place.plot_bottom, place.top + 8, span[2])
    unit = "share" if form is axes.percent else ""
    return _svg(summary, place, marks, scale, list(_lines(place, scale, lines)), form, title, unit)


def _svg(
    summary: Summary,
    place: Frame,
    marks: Sequence[Mark],
    scale: Scale,
    body: Iterable[str],
    form: Callable[[float], str] | None,
    title: str,
    unit: str,
    rounds: bool = False,
    most: int = 5,
) -> str:
    """Axes and marks, then the data over them. The data attributes let the page's script read values back."""
    numbers, values = summary.round_number.points(ALL)

    def round_at(t: float) -> float | None:
        within = len(numbers) > 0 and numbers[0] <= t <= numbers[-1]
        return float(np.interp(t, numbers, values)) if within else None

    side = "narrow" if place.narrow else "wide"
    x1 = place.width - place.right
    head = (
        f'<svg class="chart {side}" viewBox="0 0 {place.width} {place.height}" role="img"'
        f' aria-label="{escape(title, quote=True)}" data-x="{place.left},{x1}"'
        f' data-t="{place.t.low:.6g},{place.t.high:.6g}" data-y="{scale.start:g},{scale.end:g}"'
        f' data-v="{scale.low:.6g},{scale.high:.6g}" data-form="{scale.form}" data-unit="{unit}">'
    )
    parts = [head]
    if form is not None:
        parts += axes.draw_values(place, scale, form, most)
    parts += axes.draw_spans(place, marks)
    parts += axes.draw_time(place, round_at if rounds else None)
    parts += body
    parts += axes.draw_marks(place, marks)
    parts.append("</svg>")
    return "\n".join(parts)
