"""Axes and fault marks of the report's charts, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ragtag.app.report.data import FREEZES, KILLS
from ragtag.core import trace
from ragtag.core.faults import Faults, Loss
from ragtag.core.faultspec import parse_faults

CHAR = 6.4
"""Width of a character of the charts' text, roughly."""
LANE = 16
"""Height of one row of fault labels."""
LANES_MAX = 3
ERROR_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


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


def seconds(value: float) -> str:
    """A duration, to three figures, with its unit."""
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 120 else clock(value)


def clock(value: float) -> str:
    """A time since the start: 12 s, 3:05, 2:00:00."""
    if value < 120:
        return f"{value:.4g} s"
    whole = round(value)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.3g} %"


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault on the time axis. style: "kill" (a line), "freeze" (a span) or "band" (a strip at the top)."""

    number: int
    style: str
    label: str
    short: str
    t0: float
    t1: float


def fault_text(fault: trace.Fault) -> str:
    """A fault in words; a detail that is the fault as it was asked for ("loss=0.1") says it all."""
    if not fault.detail:
        return fault.name
    if not fault.detail.startswith(f"{fault.name}="):
        return f"{fault.name}: {fault.detail}"
    try:
        faults = parse_faults(fault.detail)
    except ValueError:
        return fault.detail
    return _in_words(fault.name, faults) or fault.detail


def _in_words(name: str, faults: Faults) -> str:
    """The only fault in ``faults``; empty where it is as well said as it was asked for."""
    if name == "loss" and isinstance(faults.loss, Loss):
        return f"loss {percent(faults.loss.p)}"
    if name in ("delay", "jitter"):
        return f"{name} {seconds(faults.latency_s if name == 'delay' else faults.jitter_s)}"
    if name in ("duplicate", "reorder"):
        return f"{name} {percent(faults.duplicate if name == 'duplicate' else faults.reorder)}"
    if name == "slow" and len(faults.slow) == 1:
        return f"slowed {faults.slow[0].factor:g}\N{MULTIPLICATION SIGN}"
    return ""


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


def frame(
    width: int, plot_height: int, marks: Sequence[Mark], t0: float, t1: float, rounds: bool, right: int
) -> Plot:
    """The place of a time chart: room above for fault labels, below for the axis."""
    narrow = width < 700
    left = 54 if narrow else 58
    time = Scale(t0, t1, left, width - right)
    _, lanes = place_labels(marks, time)
    top = 8 + lanes * LANE + (6 if lanes else 0)
    bottom = 38 if rounds else 24
    return Plot(width, top + plot_height + bottom, left, right, top, bottom, time, narrow)


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
