"""What a report shows, gathered from a trace in two streamed passes and bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.app.report.series import Bins, Dots, Sample
from ragtag.app.tracefile import RunTrace
from ragtag.core import trace

COLUMNS = 240
STRIP_COLUMNS = 150
CHARTED_MAX = 64
"""Peers that are drawn; the figures are of all."""
ITEMS_MAX = 200
ALL = -2
"""The row of all peers together in a table of bins."""
KILLS = frozenset({"kill", "crash"})
FREEZES = frozenset({"freeze", "stall"})
LOST = frozenset({"killed", "failed", "lost", "no trace"})
STEPS_PER_POINT = 5
"""A training loss is of one small batch: a point in the chart is the mean of about this many."""


@dataclass(slots=True)
class Peer:
    """A peer's figures; ``missed``: how often others waited for it in vain; ``misses``: its own waits."""

    number: int
    state: str = "no trace"
    rounds: int = 0
    missed: int = 0
    misses: int = 0
    expired: int = 0
    arrived: float = 0.0
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    datagrams_lost: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    batch_losses_bad: int = 0
    bad_since_t: float | None = None
    error_t: float | None = None
    joined_t: float | None = None
    last_t: float | None = None
    left: bool = False
    round_s: Sample = field(default_factory=lambda: Sample(values_max=1 << 14))


@dataclass(slots=True)
class Item:
    """A line of the list of notes and errors; ``by``: the peers that said the same at about that time."""

    t: float
    what: str
    about: int
    detail: str
    error: bool
    by: set[int]


@dataclass(slots=True)
class Extent:
    """The first pass: how long the run is, and who takes part."""

    t0: float = 0.0
    t1: float = 0.0
    peers: list[int] = field(default_factory=list)
    steps_most: int = 0
    rounds_most: int = 0
    runs: int = 0
    killed_t: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Summary:
    """The second pass: all that the page and the headline figures are made of."""

    run: trace.Run | None
    extent: Extent
    peers: dict[int, Peer]
    charted: list[int]
    loss: Bins
    accuracy: Bins
    mean_accuracy: Bins
    own_mean: Bins
    arrived: Bins
    scatter: Bins
    gather: Bins
    round_number: Bins
    missed: NDArray[np.int64]
    waited: NDArray[np.int64]
    rounds: NDArray[np.int64]
    dots: Dots
    late_dots: Dots
    round_s: Sample = field(default_factory=Sample)
    arrival: Sample = field(default_factory=Sample)
    faults: list[trace.Fault] = field(default_factory=list)
    faults_left_out: int = 0
    results: list[trace.Result] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    items_left_out: int = 0
    errors: int = 0
    mean_eval: trace.Eval | None = None
    damage: list[str] = field(default_factory=list)

    @property
    def survivors(self) -> list[Peer]:
        """The peers that were not lost."""
        return [p for p in self.peers.values() if p.state not in LOST]

    @property
    def lost(self) -> list[int]:
        """The peers that were killed, failed, or ended without a word while others went on."""
        return [p.number for p in self.peers.values() if p.state in LOST - {"no trace"}]

    @property
    def finished(self) -> bool:
        """Whether anyone has left as planned."""
        return any(p.left for p in self.peers.values())


def measure(run: RunTrace) -> Extent:
    """The first pass over a trace."""
    extent = Extent()
    peers: set[int] = set(range(run.run.peers)) if run.run is not None else set()
    steps: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    for record in run.records():
        extent.t1 = max(extent.t1, record.t)
        extent.t0 = min(extent.t0, record.t)
        if isinstance(record, trace.Run):
            extent.runs += 1
        elif isinstance(record, trace.Step):
            steps[record.peer] += 1
        elif isinstance(record, trace.Round):
            rounds[record.peer] += 1
        elif isinstance(record, trace.Fault) and record.name in KILLS and record.peer >= 0:
            extent.killed_t[record.peer] = record.t
        if record.peer >= 0:
            peers.add(record.peer)
    extent.peers = sorted(peers)
    extent.steps_most = max(steps.values(), default=0)
    extent.rounds_most = max(rounds.values(), default=0)
    return extent


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
        peers={number: Peer(number) for number in extent.peers},
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
    )
    collector = _Collector(summary)
    for record in run.records():
        collector.take(record)
    collector.settle()
    summary.damage = run.damage.messages()
    if extent.runs > 1:
        summary.damage.append(f"{extent.runs} runs have written to this folder; the report mixes them")
    return summary


def _charted(run: RunTrace, extent: Extent) -> list[int]:
    """The peers to draw: all, or those that had faults and an even sample of the others."""
    if len(extent.peers) <= CHARTED_MAX:
        return extent.peers
    faulty = sorted({r.peer for r in run.records() if isinstance(r, trace.Fault) and r.peer >= 0})
    chosen = faulty[: CHARTED_MAX // 2]
    others = [p for p in extent.peers if p not in set(chosen)]
    room = CHARTED_MAX - len(chosen)
    return sorted({*chosen, *(others[i * len(others) // room] for i in range(room))})


class _Collector:
    """Takes one record after the other."""

    def __init__(self, summary: Summary) -> None:
        self._to = summary
        self._row = {peer: at for at, peer in enumerate(summary.charted)}
        self._latest: dict[int, float] = {}
        self._strip = Bins([], summary.missed.shape[1], summary.extent.t0, summary.extent.t1)

    def take(self, record: trace.Record) -> None:
        """One record."""
        peer = self._to.peers.get(record.peer)
        if isinstance(record, trace.Fault):
            self._fault(record)
            return
        if peer is not None:
            peer.last_t = max(record.t, peer.last_t or 0.0)
        if isinstance(record, trace.Round) and peer is not None:
            self._round(peer, record)
        elif isinstance(record, trace.Step) and peer is not None:
            self._step(peer, record)
        elif isinstance(record, trace.Eval):
            self._eval(peer, record)
        elif isinstance(record, trace.Join) and peer is not None:
            peer.joined_t = record.t
        elif isinstance(record, trace.Leave) and peer is not None:
            self._leave(peer, record)
        elif isinstance(record, trace.Note):
            self._item(Item(record.t, record.what, record.other, record.detail, False, {record.peer}))
        elif isinstance(record, trace.Error):
            self._error(peer, record)
        elif isinstance(record, trace.Result) and len(self._to.results) < ITEMS_MAX:
            self._to.results.append(record)

    def _round(self, peer: Peer, record: trace.Round) -> None:
        to, t = self._to, record.t
        peer.rounds += 1
        peer.error_t = None  # it went on after all
        peer.misses += len(record.missed)
        peer.expired += record.expired
        peer.arrived += record.arrived
        peer.bytes_sent = max(peer.bytes_sent, record.bytes_sent)
        peer.bytes_received = max(peer.bytes_received, record.bytes_received)
        peer.round_s.add(record.total_s)
        to.round_s.add(record.total_s)
        to.arrival.add(record.arrived)
        (to.late_dots if record.expired else to.dots).add(t, record.total_s)
        for key in (record.peer, ALL):
            to.arrived.add(key, t, record.arrived)
        to.scatter.add(ALL, t, record.scatter_s)
        to.gather.add(ALL, t, record.gather_s)
        to.round_number.add(ALL, t, record.round)
        column = self._strip.column(t)
        to.rounds[:, column] += 1
        own = self._row.get(record.peer)
        if own is not None:
            to.rounds[own, column] -= 1
        rows = [self._row[other] for other in set(record.waited_for) if other in self._row]
        to.waited[rows, column] += 1
        for other in set(record.missed):
            if other in to.peers:
                to.peers[other].missed += 1
            if other in self._row:
                to.missed[self._row[other], column] += 1

    def _step(self, peer: Peer, record: trace.Step) -> None:
        peer.steps = max(peer.steps, record.step)
        peer.samples = max(peer.samples, record.samples)
        if record.loss is None or not math.isfinite(record.loss):
            peer.batch_losses_bad += 1
            peer.bad_since_t = record.t if peer.bad_since_t is None else peer.bad_since_t
            return
        for key in (record.peer, ALL):
            self._to.loss.add(key, record.t, record.loss)

    def _eval(self, peer: Peer | None, record: trace.Eval) -> None:
        if record.model == "mean":
            self._to.mean_eval = record
            if record.accuracy is not None:
                self._to.mean_accuracy.add(ALL, record.t, record.accuracy)
        elif record.model == "own" and peer is not None:
            peer.loss, peer.accuracy = record.loss, record.accuracy
            if record.accuracy is not None:
                self._to.accuracy.add(record.peer, record.t, record.accuracy)
                self._latest[record.peer] = record.accuracy
                for gone in [p for p in self._latest if self._killed(p, record.t)]:
                    del self._latest[gone]
                if self._latest:
                    mean = sum(self._latest.values()) / len(self._latest)
                    self._to.own_mean.add(ALL, record.t, mean)

    def _killed(self, peer: int, t: float) -> bool:
        """Whether a peer had been killed by ``t``, and has not joined again since."""
        killed_t = self._to.extent.killed_t.get(peer)
        return killed_t is not None and killed_t <= t and (self._to.peers[peer].joined_t or 0.0) <= killed_t

    def _error(self, peer: Peer | None, record: trace.Error) -> None:
        if peer is not None:
            peer.error_t = record.t
        for earlier in self._to.items[-64:]:  # a peer and its launcher may both tell of one error
            if earlier.error and earlier.about == record.peer and record.t - earlier.t < 10.0:
                a, b = earlier.what, record.what
                if a.endswith(b) or b.endswith(a):
                    earlier.detail = earlier.detail or record.detail
                    return
        self._to.errors += 1
        self._item(Item(record.t, record.what, record.peer, record.detail, True, {record.peer}))

    def _leave(self, peer: Peer, record: trace.Leave) -> None:
        peer.left = True
        peer.steps = max(peer.steps, record.steps)
        peer.samples = max(peer.samples, record.samples)
        peer.bytes_sent = max(peer.bytes_sent, record.bytes_sent)
        peer.bytes_received = max(peer.bytes_received, record.bytes_received)
        peer.datagrams_lost = record.datagrams_lost

    def _fault(self, record: trace.Fault) -> None:
        if len(self._to.faults) < ITEMS_MAX:
            self._to.faults.append(record)
        else:
            self._to.faults_left_out += 1

    def _item(self, item: Item) -> None:
        items = self._to.items
        for earlier in items[:-65:-1]:  # peers notice the same thing within a moment of each other
            if item.t - earlier.t > 2.0:
                break
            same = (earlier.what, earlier.about) == (item.what, item.about)
            if same and not (earlier.error or item.error or earlier.by & item.by):
                earlier.by |= item.by
                return
        if len(items) < ITEMS_MAX:
            items.append(item)
        else:
            self._to.items_left_out += 1

    def settle(self) -> None:
        """Say what became of each peer."""
        frozen = {
            f.peer
            for f in self._to.faults
            if f.name in FREEZES and (f.until_t is None or f.until_t > self._to.extent.t1)
        }
        finished = self._to.finished
        for peer in self._to.peers.values():
            if self._killed(peer.number, math.inf):
                peer.state = "killed"
            elif peer.error_t is not None:
                peer.state = "failed"
            elif peer.left:
                peer.state = "ended"
            elif peer.last_t is None:
                peer.state = "no trace"
            elif finished:
                peer.state = "lost"
            else:
                peer.state = "frozen" if peer.number in frozen else "running"
