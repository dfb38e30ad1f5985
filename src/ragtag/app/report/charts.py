"""The report's charts, with their captions and keys, as HTML text.

Each ``_..._chart`` returns one SVG element for a given width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report.data import ALL, AVERAGE, COMPUTE, WAIT, Summary, Timeline
from ragtag.app.report.drawing import (
    Curve,
    Mark,
    Plot,
    Scale,
    draw_lines,
    frame,
    peer_lines,
    place_labels,
    points,
    spread,
    style_of,
    svg,
)
from ragtag.app.report.figures import round_times
from ragtag.app.report.html import cell, figure, legend, table
from ragtag.app.words import clock, percent, seconds

WIDE, NARROW = 1080, 460
SHORTEST = 30.0
"""A logarithmic axis of round times begins at the median divided by this; shorter ones stand on its edge."""
STAGES_MAX = 5.0
"""So many middle times high is the chart of stages. A peer that was frozen in a round took far longer."""
_CUT_WIDTH = 48.0
"""Room for the time of a bar that is cut, in pixels."""
KINDS = ((COMPUTE, "tcompute", "computing"), (AVERAGE, "taverage", "averaging"), (WAIT, "twait", "waiting"))
_WAITED_SHARE = 0.001
"""Less waiting than this share of a peer's time is not worth a name."""

Flags = NDArray[np.bool_]


def all_charts(summary: Summary, marks: Sequence[Mark]) -> str:
    """Every chart that the trace has data for."""

    def both(draw: Any) -> list[str]:
        return [draw(summary, marks, width) for width in (WIDE, NARROW)]

    peers = [(style_of(p, summary), f"peer {p}") for p in summary.charted]
    named = [entry for entry in peers if entry[0] != "crowd"]
    if len(named) < len(peers):
        left_out = len(summary.peers) - len(summary.charted)
        more = f" ({left_out} more are not drawn)" if left_out else ""
        named.append(("crowd", f"each of {len(peers) - len(named)} other peers{more}"))
    sections = []
    if summary.accuracy.count.any() or summary.mean_accuracy.count.any():
        keys = [*named, ("mean", "mean of the peers' own")]
        keys += [("model", "the mean model")] if summary.mean_accuracy.count.any() else []
        caption = (
            "Each peer's own model on the test data; the mean is of those that looked together. The axis is"
        )
        caption += " logarithmic in the error, so that the last points stand apart."
        sections.append(figure("Accuracy", caption, legend(keys), both(_accuracy_chart)))
    if summary.loss.count.any():
        keys = [*named, ("mean", "mean of all peers")]
        caption = "Loss of the batches that each peer trained on, a few steps to a point."
        sections.append(figure("Training loss", caption, legend(keys), both(_loss_chart)))
    if summary.coherence.count.any():
        keys = [*named, ("mean", "mean of all peers")]
        caption = (
            "Of each peer's gradients, the least product with one of its earlier ones over that one's squared"
            " length. Below the dashed line, at 0, a stale update does harm. Batches' noise draws it to 0."
        )
        sections.append(figure("Gradient coherence", caption, legend(keys), both(_coherence_chart)))
    if summary.round_s.seen:
        sections += _round_figures(summary, both)
    sections += _timeline(summary, both)
    if sections and summary.extent.t0 > 0:
        began = clock(round(summary.extent.t0, 1))
        caption = f"Times count from the start of the run; the charts begin with training, after {began}."
        sections.insert(0, f'<p class="cap">{caption}</p>')
    if sections and any(_numbered(marks, summary, width) for width in (WIDE, NARROW)):
        sections.insert(0, '<p class="cap">Numbers above the charts stand for the faults listed below.</p>')
    return "\n".join(sections)


def _numbered(marks: Sequence[Mark], summary: Summary, width: int) -> bool:
    """Whether there are too many faults for words in a chart of this width."""
    placed, _ = place_labels(marks, frame(summary, marks, width, 100).t)
    return any(text == str(mark.number) for mark, _, _, text in placed)


def _round_figures(summary: Summary, both: Any) -> list[str]:
    times = round_times(summary)
    late = sum(p.expired for p in summary.peers.values())
    dots = (
        f"Each dot is one peer's round ({times['count']:,} in all); a cross is a round that a deadline ended"
        f" ({late:,}). Median {seconds(times['median'])}, 95th percentile {seconds(times['p95'])},"
        f" longest {seconds(times['max'])}. What is out of scale stands on the edge."
    )
    arrival = (
        "Share of chunks that a round averaged; elsewhere a peer kept its own values. The line is the mean"
        " over peers, the band reaches from the lowest peer to the highest."
    )
    in_vain = (
        "A bar grows with the share of the other peers that waited for this one in vain. Hatched: most of"
        " them did not wait for it (it was known to be silent, or gone)."
    )
    stage_times = (
        "Mean time of the two stages. A bar that is out of scale is cut, and has its time beside it; so it is"
        " where a peer was frozen in a round."
    )
    keys = (
        f'<span><svg width="14" height="12"><rect class="{name}" width="14" height="12"/></svg>{text}</span>'
        for name, text in (("scatter", "scatter (below)"), ("gather", "gather (above)"))
    )
    stages = f'<div class="legend">{"".join(keys)}</div>'
    return [
        figure("Arrival rate", arrival, "", both(_arrival_chart)),
        figure("Round times", dots, "", both(_round_time_chart)),
        figure("Stages of a round", stage_times, stages, both(_stage_chart)),
        figure("Who was missed when", in_vain, "", both(_missed_chart)),
    ]


# -- Lines over time


def _accuracy_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
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
    return _line_chart(summary, marks, width, 290, lines, span, percent, "Accuracy")


def _loss_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Training loss of each peer, and of all steps together."""
    lines = peer_lines(summary, lambda peer: summary.loss.points(peer))
    lines.append(Curve("mean of all peers", "mean", *summary.loss.points(ALL), ends="mean"))
    lines = [line for line in lines if len(line.t)]
    values = np.concatenate([line.value for line in lines]) if lines else np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high / low > 8
    span = (low * 0.9, high * 1.1, "log") if log else (min(0.0, low), high * 1.05 or 1.0, "linear")
    return _line_chart(summary, marks, width, 260, lines, span, lambda v: f"{v:.3g}", "Training loss")


def _coherence_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
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


def _arrival_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
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
    return svg(summary, place, marks, scale, body, percent, "Arrival rate", "share", rounds=True)


def _round_time_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
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
        text = name if place.narrow else f"{name} {seconds(value)}"
        body.append(f'<text class="endlab {style}t" x="{x + 5}" y="{y + 4:.1f}">{text}</text>')
    return svg(summary, place, marks, scale, body, seconds, "Round times", "seconds", rounds=True)


def _stage_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """Mean time of the two stages, stacked. What is far longer than the middle bar is cut."""
    place = frame(summary, marks, width, 130, rounds=True)
    t, scatter = summary.scatter.points(ALL)
    _, gather = summary.gather.points(ALL)
    both = scatter + gather
    high = min(float(both.max(initial=1e-9)), STAGES_MAX * float(np.median(both)) if len(both) else np.inf)
    scale = Scale(0.0, max(high, 1e-9) * 1.08, place.plot_bottom, place.top + 8)
    free_x = 0.0
    column = (place.width - place.right - place.left) / summary.scatter.columns
    w = max(1.0, column - 1.0)
    body = []
    for at, first, total in zip(t, scatter, both, strict=True):
        x = place.left + column * summary.scatter.column(float(at))
        y1, y2 = scale(float(first)), scale(float(total))
        title = f"<title>{clock(float(at))}: scatter {seconds(float(first))}, gather"
        title += f" {seconds(float(total - first))}</title>"
        body.append(
            f'<g><rect class="scatter" x="{x:.1f}" y="{y1:.1f}" width="{w:.1f}"'
            f' height="{place.plot_bottom - y1:.1f}"/>'
            f'<rect class="gather" x="{x:.1f}" y="{y2:.1f}" width="{w:.1f}" height="{y1 - y2:.1f}"/>'
            f"{title}</g>"
        )
        if total > scale.high and x >= free_x:
            at = f'x="{x + w + 3:.1f}" y="{y2 + 9:.1f}"'
            body.append(f'<text class="lab" {at}>{seconds(float(total))}</text>')
            free_x = x + _CUT_WIDTH
    return svg(summary, place, marks, scale, body, seconds, "Stages of a round", "", rounds=True, most=3)


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
    unit = "share" if form is percent else ""
    body = list(draw_lines(place, scale, lines))
    if rule is not None:
        body.insert(0, f'<path class="p95" d="M{place.left} {scale(rule):.1f}H{place.width - place.right}"/>')
    return svg(summary, place, marks, scale, body, form, title, unit)


def _missed_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """A strip for each peer: how many of the others waited for it in vain, and when nobody waited."""
    rows = len(summary.charted)
    row = max(9, min(30, 900 // max(1, rows)))
    place = frame(summary, marks, width, rows * row + 4, rounds=True)
    body: list[str] = []
    for at in range(rows):
        base = place.top + 4 + (at + 1) * row - 2
        body += _missed_bars(summary, at, place, base, row)
        peer = summary.charted[at]
        total = summary.peers[peer].missed
        told = f"missed {total:,} times in all"
        body += _strip_labels(peer, at, place, base, row, told, f"{total:,} missed")
    scale = Scale(0.0, 1.0, place.plot_bottom, place.top)
    return svg(summary, place, marks, scale, body, None, "Who was missed when", "", rounds=True)


def _missed_bars(summary: Summary, at: int, place: Plot, base: int, row: int) -> Iterator[str]:
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


def _carried(flags: Flags, known: Flags) -> Flags:
    """Flags where they are known; between, the last known one goes on."""
    latest = np.maximum.accumulate(np.where(known, np.arange(len(flags)), -1))
    return np.where(latest >= 0, flags[np.maximum(latest, 0)], False)


def _stretches(flags: Flags) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# -- Who did what when


def _timeline(
    summary: Summary, both: Callable[[Callable[[Summary, Sequence[Mark], int], str]], list[str]]
) -> list[str]:
    """The timeline with its table; nothing where no peer told where its time went."""
    if not summary.timeline.any:
        return []
    caption = (
        "Each peer's time, from the start of the run to its end: the height of a colour is the share of that"
        " moment. Averaging is the exchange and the wait for others in it; waiting is what a schedule put"
        " off. Where a strip is empty the peer was not training, or told nothing."
    )
    keys = "".join(
        f'<span><svg width="14" height="12" aria-hidden="true"><rect class="{style}" width="14" height="12"/>'
        f"</svg>{name}</span>"
        for _, style, name in KINDS
    )
    drawn = figure("Who did what when", caption, f'<div class="legend">{keys}</div>', both(_timeline_chart))
    return [drawn.replace("</section>", _timeline_table(summary.timeline) + "</section>")]


def _timeline_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """A strip for each peer."""
    rows = len(summary.timeline.peers)
    row = max(10, min(34, 900 // max(1, rows)))
    place = frame(summary, marks, width, rows * row + 4, rounds=True)
    body: list[str] = []
    for at in range(rows):
        base = place.top + 4 + (at + 1) * row - 2
        body += _timeline_strip(summary.timeline, at, place, base, row)
        told, beside = _times(summary.timeline, at)
        body += _strip_labels(summary.timeline.peers[at], at, place, base, row, told, beside)
    scale = Scale(0.0, 1.0, place.plot_bottom, place.top)
    return svg(summary, place, marks, scale, body, None, "Who did what when", "", rounds=True)


def _timeline_strip(of: Timeline, at: int, place: Plot, base: float, row: int) -> Iterator[str]:
    """One peer's columns, a path for each colour; a column of which half is on record is half as high."""
    spent = of.seconds[at]
    columns = spent.shape[1]
    column_s = (place.t.high - place.t.low) / columns
    pixels = (place.width - place.right - place.left) / columns
    full = np.maximum(spent.sum(axis=0), column_s)
    heights = spent / full * (row - 4)
    feet = base - np.cumsum(heights, axis=0) + heights
    for kind, style, _ in KINDS:
        bars = "".join(
            f"M{place.left + k * pixels:.1f} {feet[kind, k]:.1f}"
            f"h{pixels:.2f}v-{heights[kind, k]:.1f}h-{pixels:.2f}z"
            for k in np.flatnonzero(heights[kind] >= 0.05)
        )
        if bars:
            yield f'<path class="{style}" d="{bars}"/>'
    yield f'<path class="base" d="M{place.left} {base}H{place.width - place.right}"/>'


def _strip_labels(
    peer: int, at: int, place: Plot, base: float, row: int, told: str, beside: str
) -> Iterator[str]:
    """The name of strip ``at`` at its left, ``beside`` at its right; ``told`` under a pointer."""
    middle, roomy, right = base - row / 2 + 6, row >= 12, place.width - place.right
    if roomy or at % 2 == 0:
        text = str(peer) if place.narrow or not roomy else f"peer {peer}"
        yield f'<text class="lab end" x="{place.left - 6}" y="{middle:.1f}">{text}</text>'
    if not told:
        return
    yield (
        f'<rect class="hit" x="{place.left}" y="{base - row + 2}" height="{row}"'
        f' width="{right - place.left}"><title>peer {peer}: {told}</title></rect>'
    )
    if not place.narrow and roomy:
        yield f'<text class="lab" x="{right + 6}" y="{middle:.1f}">{beside}</text>'


def _times(of: Timeline, at: int) -> tuple[str, str]:
    """What strip ``at`` comes to, and the share of computing in it; nothing where its peer told nothing."""
    total_s = float(of.total_s[at].sum())
    if not total_s:
        return "", ""
    told = ", ".join(f"{name} {seconds(float(of.total_s[at, kind]))}" for kind, _, name in KINDS)
    return told, f"{percent(float(of.total_s[at, COMPUTE]) / total_s)} computing"


def _timeline_table(of: Timeline) -> str:
    """Which peers each one waited for and how long, what was lost, and how stale each was."""
    heads = [
        ("Peer", ""),
        ("Computing", "n"),
        ("Averaging", "n"),
        ("Waiting", "n"),
        ("Waited mostly for", ""),
        ("Compute lost", "n"),
    ]
    shown = any(of.stale)
    if shown:
        heads.append(("Staleness in rounds: median, most", "n"))
    rows = []
    for at, peer in enumerate(of.peers):
        total_s = float(of.total_s[at].sum())
        if not total_s:
            continue
        cells = [cell(f"peer {peer}", "nw")]
        cells += [cell(_part(float(of.total_s[at, kind]), total_s), "n") for kind, _, _ in KINDS]
        cells.append(cell(_mostly(of.waited_s[at], total_s)))
        cells.append(cell(_part(of.lost_s[at], float(of.total_s[at, COMPUTE])), "n"))
        if shown:
            cells.append(cell(_staleness(of.stale[at]), "n"))
        rows.append("".join(cells))
    return table(heads, rows, "tight")


def _part(part_s: float, of_s: float) -> str:
    return f"{seconds(part_s)} ({percent(part_s / of_s)})" if of_s > 0 and part_s > 0 else seconds(part_s)


def _mostly(waited_s: Counter[int], total_s: float) -> str | None:
    """The two peers that it waited for longest."""
    most = [(peer, float(s)) for peer, s in waited_s.most_common(2) if float(s) >= _WAITED_SHARE * total_s]
    return ", ".join(f"peer {peer} ({seconds(s)})" for peer, s in most) or None


def _staleness(classes: Counter[int]) -> str | None:
    """Median and most of the staleness in rounds, as far as its classes (0, 1, 2 to 3, 4 to 7, ...) tell."""
    total = sum(classes.values())
    if not total:
        return None
    seen = 0
    for at in sorted(classes):
        seen += classes[at]
        if 2 * seen >= total:
            return f"{_class(at)}, {_class(max(c for c in classes if classes[c]))}"
    return None  # pragma: no cover


def _class(at: int) -> str:
    low, high = (0, 0) if at == 0 else (1 << (at - 1), (1 << at) - 1)
    return str(low) if low == high else f"{low} to {high}"
