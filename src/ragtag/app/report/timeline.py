"""The report's timeline of the peers: computing, averaging, waiting; and who waited for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ragtag.app.report.axes import Mark, Plot, Scale, percent, seconds
from ragtag.app.report.data import AVERAGE, COMPUTE, WAIT, Summary, Timeline
from ragtag.app.report.drawing import frame, svg
from ragtag.app.report.html import cell, figure, table

KINDS = ((COMPUTE, "tcompute", "computing"), (AVERAGE, "taverage", "averaging"), (WAIT, "twait", "waiting"))
_WAITED_SHARE = 0.001
"""Less waiting than this share of a peer's time is not worth a name."""


def section(
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
    drawn = figure("Who did what when", caption, f'<div class="legend">{keys}</div>', both(timeline_chart))
    return [drawn.replace("</section>", _table(summary.timeline) + "</section>")]


def timeline_chart(summary: Summary, marks: Sequence[Mark], width: int) -> str:
    """A strip for each peer."""
    rows = len(summary.timeline.peers)
    row = max(10, min(34, 900 // max(1, rows)))
    place = frame(summary, marks, width, rows * row + 4, rounds=True)
    body: list[str] = []
    for at in range(rows):
        base = place.top + 4 + (at + 1) * row - 2
        body += _strip(summary.timeline, at, place, base, row)
        body += _labels(summary.timeline, at, place, base, row)
    scale = Scale(0.0, 1.0, place.plot_bottom, place.top)
    return svg(summary, place, marks, scale, body, None, "Who did what when", "", rounds=True)


def _strip(of: Timeline, at: int, place: Plot, base: float, row: int) -> Iterator[str]:
    """One peer's columns, as one path for each colour; a column of which little is told is as much lower."""
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


def _labels(of: Timeline, at: int, place: Plot, base: float, row: int) -> Iterator[str]:
    peer, middle, roomy = of.peers[at], base - row / 2 + 4, row >= 12
    if roomy or at % 2 == 0:
        text = str(peer) if place.narrow or not roomy else f"peer {peer}"
        yield f'<text class="lab end" x="{place.left - 6}" y="{middle:.1f}">{text}</text>'
    total_s, right = float(of.total_s[at].sum()), place.width - place.right
    if not total_s:
        return
    told = ", ".join(f"{name} {seconds(float(of.total_s[at, kind]))}" for kind, _, name in KINDS)
    yield (
        f'<rect class="hit" x="{place.left}" y="{base - row + 4}" height="{row - 4}"'
        f' width="{right - place.left}"><title>peer {peer}: {told}</title></rect>'
    )
    if not place.narrow and roomy:
        computing = percent(float(of.total_s[at, COMPUTE]) / total_s)
        yield f'<text class="lab" x="{right + 6}" y="{middle:.1f}">{computing} computing</text>'


def _table(of: Timeline) -> str:
    """Who waited for whom and for how long, what was lost, and how stale each was."""
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
        cells += [cell(_share(float(of.total_s[at, kind]), total_s), "n") for kind, _, _ in KINDS]
        cells.append(cell(_mostly(of.waited_s[at], total_s)))
        cells.append(cell(_share(of.lost_s[at], float(of.total_s[at, COMPUTE])), "n"))
        if shown:
            cells.append(cell(_stale(of.stale[at]), "n"))
        rows.append("".join(cells))
    return table(heads, rows, "tight")


def _share(part_s: float, of_s: float) -> str:
    return f"{seconds(part_s)} ({percent(part_s / of_s)})" if of_s > 0 and part_s > 0 else seconds(part_s)


def _mostly(waited_s: Counter[int], total_s: float) -> str | None:
    """The two peers that it waited for longest."""
    most = [(peer, float(s)) for peer, s in waited_s.most_common(2) if float(s) >= _WAITED_SHARE * total_s]
    return ", ".join(f"peer {peer} ({seconds(s)})" for peer, s in most) or None


def _stale(classes: Counter[int]) -> str | None:
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
