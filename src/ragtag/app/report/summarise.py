"""Gathers a summary from a trace in two streamed passes and bounded memory."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from ragtag.app.report.collect import Collector
from ragtag.app.report.data import ALL, KILLS, Extent, PeerFigures, Summary, Timeline
from ragtag.app.report.series import Bins, Dots
from ragtag.app.tracefile import RunTrace, run_key
from ragtag.core import trace

COLUMNS = 240
_COMES = frozenset({"comes", "takes part", "assists"})
STRIP_COLUMNS = 150
CHARTED_MAX = 64
"""Peers that are drawn; the figures are of all."""
START_SHARE = 0.1
"""Where nothing is to be drawn for more than this share of a run, its charts begin later."""
MARGIN_SHARE = 0.02
STEPS_PER_POINT = 5
"""A training loss is of one small batch: a point in the chart is the mean of about this many."""


def measure(run: RunTrace) -> Extent:
    """The first pass over a trace.

    Raises:
        ValueError: it holds no record.
    """
    extent = Extent()
    peers: set[int] = set(range(run.run.peers)) if run.run is not None else set()
    steps: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    runs: set[object] = set()
    any_record, first_t = False, math.inf
    for record in run.records():
        any_record = True
        extent.lasted_s = max(extent.lasted_s, record.t)
        if record.peer >= 0 or isinstance(record, trace.Eval | trace.Fault):  # not the launcher's waiting
            extent.t1 = max(extent.t1, record.t)
        extent.t0 = min(extent.t0, record.t)
        if isinstance(record, trace.Step | trace.Round | trace.Eval):
            first_t = min(first_t, record.t)
        if isinstance(record, trace.Run):
            runs.add(run_key(record))
        elif isinstance(record, trace.Step):
            steps[record.peer] += record.of
        elif isinstance(record, trace.Round):
            rounds[record.peer] += record.of
        elif isinstance(record, trace.Fault) and record.name in KILLS and record.peer >= 0:
            extent.killed_t[record.peer] = record.t
        elif isinstance(record, trace.Note) and record.what in _COMES and record.other >= 0:
            peers.add(record.other)  # a newcomer's own trace is in its own folder
            (extent.auxiliary.add if record.what == "assists" else extent.auxiliary.discard)(record.other)
        if record.peer >= 0:
            peers.add(record.peer)
    if not any_record:
        raise ValueError(_nothing(run))
    if START_SHARE * extent.t1 < first_t < extent.t1:  # processes start, and import what they need
        extent.t0 = first_t - MARGIN_SHARE * (extent.t1 - first_t)
    extent.runs = len(runs)
    extent.peers = sorted(peers)
    extent.steps_most = max(steps.values(), default=0)
    extent.rounds_most = max(rounds.values(), default=0)
    return extent


def _nothing(run: RunTrace) -> str:
    """Why there is nothing to report on."""
    files = ", ".join(path.name for path in run.files[:3]) + (", ..." if len(run.files) > 3 else "")
    damage = run.damage.messages()
    why = f" ({damage[0]})" if damage else ": empty. Was the disk full, or has the run only begun?"
    return f"no trace to read: no record in {files} of {run.folder}{why}"


def summarise(run: RunTrace) -> Summary:
    """Read a trace twice: once for its extent, once for its contents."""
    extent = measure(run)
    charted = _charted(run, extent)
    t0, t1 = extent.t0, extent.t1
    loss_columns = min(COLUMNS, max(24, extent.steps_most // STEPS_PER_POINT))
    # In a column of the strips nearly every peer should have a round, and in a bar of the stages too.
    strip_columns = min(STRIP_COLUMNS, max(12, extent.rounds_most // 2))
    stage_columns = min(COLUMNS // 4, strip_columns)
    strip = (len(charted), strip_columns)
    summary = Summary(
        run=run.run,
        extent=extent,
        peers={p: PeerFigures(p, auxiliary=p in extent.auxiliary) for p in extent.peers},
        charted=charted,
        loss=Bins([*charted, ALL], loss_columns, t0, t1),
        accuracy=Bins(charted, COLUMNS, t0, t1),
        mean_accuracy=Bins([ALL], COLUMNS, t0, t1),
        own_mean=Bins([ALL], COLUMNS, t0, t1),
        arrived=Bins([*charted, ALL], min(COLUMNS // 2, max(24, extent.rounds_most)), t0, t1),
        scatter=Bins([ALL], stage_columns, t0, t1),
        gather=Bins([ALL], stage_columns, t0, t1),
        round_number=Bins([ALL], COLUMNS, t0, t1),
        missed=np.zeros(strip, np.int64),
        waited=np.zeros(strip, np.int64),
        rounds=np.zeros(strip, np.int64),
        dots=Dots(COLUMNS * 2, t0, t1),
        late_dots=Dots(COLUMNS * 2, t0, t1),
        timeline=Timeline(charted, STRIP_COLUMNS, t0, t1),
        coherence=Bins([*charted, ALL], loss_columns, t0, t1),
    )
    collector = Collector(summary)
    for record in run.records():
        collector.take(record)
    collector.settle()
    summary.damage = run.damage.messages()
    if summary.thinned:
        summary.damage.append(
            f"the trace of this long run was thinned as it grew: {summary.thinned_rounds:,} rounds stand in "
            f"{summary.thinned:,} records; counts, means and extremes are exact, medians and percentiles near"
        )
    if extent.runs > 1:
        summary.damage.append(f"{extent.runs} runs have written to this folder; the report mixes them")
    return summary


def _charted(run: RunTrace, extent: Extent) -> list[int]:
    """The peers to draw: all but auxiliaries, or those that had faults and an even sample of the others."""
    drawn = [peer for peer in extent.peers if peer not in extent.auxiliary]
    if len(drawn) <= CHARTED_MAX:
        return drawn
    faulty = sorted({r.peer for r in run.records() if isinstance(r, trace.Fault) and r.peer >= 0})
    chosen = faulty[: CHARTED_MAX // 2]
    others = [p for p in drawn if p not in set(chosen)]
    room = CHARTED_MAX - len(chosen)
    return sorted({*chosen, *(others[i * len(others) // room] for i in range(room))})
