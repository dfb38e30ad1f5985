"""How a chart of the report is drawn, as SVG text: scales, fault marks, axes, and lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ragtag.app.report.data import ALL, FREEZES, KILLS, Summary
from ragtag.app.report.series import Array
from ragtag.app.words import clock, fault_text, seconds
from ragtag.core import trace

CHAR = 6.4
"""Width of a character of the charts' text, roughly."""
LANE = 16
"""Height of one row of fault labels."""
LANES_MAX = 3
ERROR_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
NARROW_BELOW = 700
"""Pixels: a chart that is narrower leaves out names at its right."""
COLOURED_MAX = 8
"""With more peers than this, only those with faults have colours of their own."""
GAP = 4.0
"""A line is interrupted where no value came for this many times its usual spacing."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``end``.

    form: "linear", "log", or "error": logarithmic in 1 - value, so that accuracies near 1 stand apart.
    """

    low: float
    high: float
    start: float
    end: float
    form: str = "linear"

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside go to the edge."""
        if self.form == "log":
            share = math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        elif self.form == "error":
            share = math.log(max(1 - value, 1e-12) / (1 - self.low)) / math.log(
                (1 - self.high) / (1 - self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most about ``most``."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 (or fewer) in every decade from ``low`` to ``high``."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    every = max(1, len(decades) // 6)
    return [
        f * 10.0**d
        for d in decades
        if d % every == 0
        for f in factors
        if low <= f * 10.0**d * 1.0001 <= high * 1.0002
    ]


# -- Fault marks, and the place of a chart


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault on the time axis.

    style: "kill" (a line), "freeze" (a span) or "band" (a strip at the top).
    """

    number: int
    style: str
    label: str
    short: str
    t0: float
    t1: float


def marks_of(faults: Sequence[trace.Fault], t_end: float) -> list[Mark]:
    """Faults as marks, in time order."""
    marks = []
    for number, fault in enumerate(sorted(faults, key=lambda f: f.t), 1):
        who = f"peer {fault.peer} " if fault.peer >= 0 else ""
        until = t_end if fault.until_t is None else min(fault.until_t, t_end)
        style, what = "band", fault.name
        if fault.name in KILLS:
            style, what, until = "kill", "killed" if fault.name == "kill" else "crashed", fault.t
        elif fault.name in FREEZES:
            style, what = "freeze", f"frozen {seconds(max(0.0, until - fault.t))}"
        elif fault.detail:
            what = fault_text(fault)
        label = f"{who}{what}"
        marks.append(
            Mark(number, style, label if len(label) <= 44 else label[:43] + "…", label, fault.t, until)
        )
    return marks


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart's place: width, height, and the plot inside it (x to right, y top to bottom, in pixels)."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    t: Scale
    narrow: bool

    @property
    def plot_bottom(self) -> int:
        """The y of the time axis."""
        return self.height - self.bottom


def labels_in_lanes(
    marks: Sequence[Mark], scale: Scale, words: bool
) -> tuple[list[tuple[Mark, float, int, str]], int]:
    """Place each mark's label (x of its left end, lane) so that none overlap; returns the lanes used."""
    ends: list[float] = []
    placed = []
    for mark in marks:
        text = mark.label if words else str(mark.number)
        width = len(text) * CHAR + 10
        x = scale(mark.t0)
        if x + width > scale.end + 4:
            x = max(scale.start, scale.end + 4 - width)
        lane = next((k for k, end in enumerate(ends) if end <= x), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = x + width
        placed.append((mark, x, lane, text))
    return placed, len(ends)


def place_labels(marks: Sequence[Mark], scale: Scale) -> tuple[list[tuple[Mark, float, int, str]], int]:
    """Labels in words where they fit in ``LANES_MAX`` rows, else the numbers of the list of faults."""
    placed, lanes = labels_in_lanes(marks, scale, words=True)
    if lanes > LANES_MAX:
        placed, lanes = labels_in_lanes(marks, scale, words=False)
    return [p for p in placed if p[2] < LANES_MAX], min(lanes, LANES_MAX)


def frame(summary: Summary, marks: Sequence[Mark], width: int, height: int, rounds: bool = False) -> Plot:
    """The place of a chart over the whole run: room above for fault labels, below for the time axis.

    height: the plot's, in pixels.
    rounds: the axis has the rounds' numbers, too.
    """
    t0, t1 = summary.extent.t0, max(summary.extent.t1, summary.extent.t0 + 1e-6)
    narrow = width < NARROW_BELOW
    left, right = (54, 58) if narrow else (58, 118)
    time = Scale(t0, t1, left, width - right)
    _, lanes = place_labels(marks, time)
    top = 8 + lanes * LANE + (6 if lanes else 0)
    bottom = 38 if rounds else 24
    return Plot(width, top + height + bottom, left, right, top, bottom, time, narrow)


# -- Axes and marks, as SVG


def draw_spans(place: Plot, marks: Sequence[Mark]) -> Iterator[str]:
    """What lies behind the data: frozen spans, and strips for faults that last."""
    top, bottom = place.top, place.plot_bottom
    for mark in marks:
        x0, x1 = place.t(mark.t0), place.t(mark.t1)
        title = f"<title>{escape(mark.short)}</title>"
        if mark.style == "freeze":
            size = f'width="{max(1.5, x1 - x0):.1f}" height="{bottom - top}"'
            yield f'<rect class="freeze" x="{x0:.1f}" y="{top}" {size}>{title}</rect>'
        elif mark.style == "band":
            size = f'width="{max(2.0, x1 - x0):.1f}" height="5"'
            yield f'<rect class="band" x="{x0:.1f}" y="{top}" {size}>{title}</rect>'


def draw_marks(place: Plot, marks: Sequence[Mark]) -> Iterator[str]:
    """What lies over the data: the edges of spans, the lines of kills, and all labels above the plot."""
    top, bottom = place.top, place.plot_bottom
    placed, _ = place_labels(marks, place.t)
    lanes = {mark.number: 8 + lane * LANE for mark, _, lane, _ in placed}
    for mark in marks:
        x0, x1 = place.t(mark.t0), place.t(mark.t1)
        y = lanes.get(mark.number, top)
        if mark.style == "freeze":
            edge = max(x0 + 1.5, x1)
            yield f'<path class="freezeedge" d="M{x0:.1f} {y}V{bottom}M{edge:.1f} {top}V{bottom}"/>'
        elif mark.style == "kill":
            title = f"<title>{escape(mark.short)}</title>"
            yield f'<path class="kill" d="M{x0:.1f} {y}V{bottom}">{title}</path>'
            yield f'<path class="cross" d="M{x0 - 4:.1f} {bottom - 4}l8 8m0 -8l-8 8"/>'
        else:
            yield f'<path class="bandedge" d="M{x0:.1f} {y}V{top + 5}"/>'
    for mark, x, lane, text in placed:
        at = f'x="{x + 4:.1f}" y="{8 + lane * LANE + 11}"'
        yield f'<text class="mark {mark.style}t" {at}>{escape(text)}</text>'


def draw_time(place: Plot, round_at: Callable[[float], float | None] | None) -> Iterator[str]:
    """The time axis; where rounds are known, their numbers stand below the times."""
    y = place.plot_bottom
    yield f'<path class="axis" d="M{place.left} {y}H{place.width - place.right}"/>'
    for t in ticks(place.t.low, place.t.high, 5 if place.narrow else 10):
        x = place.t(t)
        yield f'<path class="tick" d="M{x:.1f} {y}v4"/>'
        yield f'<text class="lab mid" x="{x:.1f}" y="{y + 16}">{clock(t)}</text>'
        number = round_at(t) if round_at else None
        if number is not None:
            yield f'<text class="lab mid faint" x="{x:.1f}" y="{y + 30}">round {number:.0f}</text>'


def draw_values(place: Plot, scale: Scale, form: Callable[[float], str], most: int = 5) -> Iterator[str]:
    """Grid lines and numbers of the upright axis."""
    if scale.form == "log":
        values = log_ticks(scale.low, scale.high)
    elif scale.form == "error":
        values = [v for v in ERROR_TICKS if scale.low <= v <= scale.high]
    else:
        values = ticks(scale.low, scale.high, most)
    for value in values:
        y = scale(value)
        yield f'<path class="grid" d="M{place.left} {y:.1f}H{place.width - place.right}"/>'
        yield f'<text class="lab end" x="{place.left - 6}" y="{y + 4:.1f}">{escape(form(value))}</text>'


# -- Lines, and the whole chart


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    style: CSS classes.
    ends: a short name at its right end.
    """

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
        parts += draw_values(place, scale, form, most)
    parts += draw_spans(place, marks)
    parts += draw_time(place, round_at if rounds else None)
    parts += body
    parts += draw_marks(place, marks)
    parts.append("</svg>")
    return "\n".join(parts)
