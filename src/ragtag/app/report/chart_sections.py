"""The report's charts with their captions and keys, as HTML text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragtag.app.report import axes, charts, drawing, timeline
from ragtag.app.report.axes import Mark, clock, seconds
from ragtag.app.report.data import Summary
from ragtag.app.report.figures import round_times
from ragtag.app.report.html import figure, legend

WIDE, NARROW = 1080, 460


def all_charts(summary: Summary, marks: Sequence[Mark]) -> str:
    """Every chart that the trace has data for."""

    def both(draw: Any) -> list[str]:
        return [draw(summary, marks, width) for width in (WIDE, NARROW)]

    peers = [(drawing.style_of(p, summary), f"peer {p}") for p in summary.charted]
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
        sections.append(figure("Accuracy", caption, legend(keys), both(charts.accuracy_chart)))
    if summary.loss.count.any():
        keys = [*named, ("mean", "mean of all peers")]
        caption = "Loss of the batches that each peer trained on, a few steps to a point."
        sections.append(figure("Training loss", caption, legend(keys), both(charts.loss_chart)))
    if summary.coherence.count.any():
        keys = [*named, ("mean", "mean of all peers")]
        caption = (
            "Of each peer's gradients, the least product with one of its earlier ones over that one's squared"
            " length. Below the dashed line, at 0, a stale update does harm. Batches' noise draws it to 0."
        )
        sections.append(figure("Gradient coherence", caption, legend(keys), both(charts.coherence_chart)))
    if summary.round_s.seen:
        sections += _round_figures(summary, both)
    sections += timeline.section(summary, both)
    if sections and summary.extent.t0 > 0:
        began = clock(round(summary.extent.t0, 1))
        caption = f"Times count from the start of the run; the charts begin with training, after {began}."
        sections.insert(0, f'<p class="cap">{caption}</p>')
    if sections and any(numbered(marks, summary, width) for width in (WIDE, NARROW)):
        sections.insert(0, '<p class="cap">Numbers above the charts stand for the faults listed below.</p>')
    return "\n".join(sections)


def numbered(marks: Sequence[Mark], summary: Summary, width: int) -> bool:
    """Whether there are too many faults for words in a chart of this width."""
    placed, _ = axes.place_labels(marks, drawing.frame(summary, marks, width, 100).t)
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
    keys = (
        f'<span><svg width="14" height="12"><rect class="{name}" width="14" height="12"/></svg>{text}</span>'
        for name, text in (("scatter", "scatter (below)"), ("gather", "gather (above)"))
    )
    stages = f'<div class="legend">{"".join(keys)}</div>'
    return [
        figure("Arrival rate", arrival, "", both(charts.arrival_chart)),
        figure("Round times", dots, "", both(charts.round_time_chart)),
        figure("Stages of a round", "Mean time of the two stages.", stages, both(charts.stage_chart)),
        figure("Who was missed when", in_vain, "", both(charts.missed_chart)),
    ]
