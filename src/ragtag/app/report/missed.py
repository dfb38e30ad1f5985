"""The report's chart of who was missed when: a strip for each peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report.axes import Frame, Mark, Scale
from ragtag.app.report.data import Summary
from ragtag.app.report.drawing import frame, svg

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


def _bars(summary: Summary, at: int, place: Frame, base: int, row: int) -> Iterator[str]:
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


def _labels(summary: Summary, at: int, place: Frame, base: int, row: int) -> Iterator[str]:
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
