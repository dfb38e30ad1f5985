"""What the report's charts share: their place, their lines, and the axes around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ragtag.app.report import axes
from ragtag.app.report.axes import Mark, Plot, Scale
from ragtag.app.report.data import ALL, Summary
from ragtag.app.report.series import Array

COLOURED_MAX = 8
"""With more peers than this, only those with faults have colours of their own."""
GAP = 4.0
"""A line is interrupted where no value came for this many times its usual spacing."""


@dataclass(frozen=True, slots=True)
class Curve:
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


def frame(summary: Summary, marks: Sequence[Mark], width: int, height: int, rounds: bool = False) -> Plot:
    """The place of a chart over the whole run; ``height`` is the plot's."""
    t0, t1 = summary.extent.t0, max(summary.extent.t1, summary.extent.t0 + 1e-6)
    return axes.frame(width, height, marks, t0, t1, rounds, right=58 if width < 700 else 118)


def peer_lines(summary: Summary, points_of: Callable[[int], tuple[Array, Array]]) -> list[Curve]:
    """A line for each charted peer, those of the crowd first, so that they lie below the others."""
    lines = []
    for peer in summary.charted:
        style = style_of(peer, summary)
        lines.append(
            Curve(f"peer {peer}", style, *points_of(peer), ends="" if style == "crowd" else f"peer {peer}")
        )
    return sorted(lines, key=lambda line: line.style != "crowd")


def points(place: Plot, scale: Scale, t: Array, value: Array) -> list[str]:
    """Where values stand, as "x y" in pixels."""
    return [f"{place.t(float(a)):.1f} {scale(float(v)):.1f}" for a, v in zip(t, value, strict=True)]


def _path(place: Plot, scale: Scale, line: Curve) -> str:
    gaps = np.diff(line.t)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    parts = points(place, scale, line.t, line.value)
    if len(parts) == 1:
        return f"M{parts[0]}h0"
    joins = ["M", *("M" if gap > GAP * usual else "L" for gap in gaps)]
    return "".join(join + part for join, part in zip(joins, parts, strict=True))


def draw_lines(place: Plot, scale: Scale, lines: Sequence[Curve]) -> Iterator[str]:
    """Lines as paths; those that reach the right end have their names there."""
    for line in lines:
        name = escape(line.name, quote=True)
        yield f'<path class="line {line.style}" data-name="{name}" d="{_path(place, scale, line)}"/>'
    ended = place.t.high - 0.06 * (place.t.high - place.t.low)
    named = [line for line in lines if line.ends and len(line.t) and line.t[-1] >= ended]
    if not place.narrow:
        heights = spread(
            [scale(float(line.value[-1])) for line in named], 13, place.top + 6, place.plot_bottom
        )
        for line, y in zip(named, heights, strict=True):
            x, y0 = place.t(float(line.t[-1])), scale(float(line.value[-1]))
            edge = place.width - place.right
            yield f'<path class="leader {line.style}" d="M{x:.1f} {y0:.1f}L{edge + 8} {y:.1f}h5"/>'
            at = f'x="{edge + 16}" y="{y + 4:.1f}"'
            yield f'<text class="endlab {line.style}" {at}>{escape(line.ends)}</text>'


def spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
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


def svg(
    summary: Summary,
    place: Plot,
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
