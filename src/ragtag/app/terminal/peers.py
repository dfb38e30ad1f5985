"""What is known of each peer while a run goes on, from trace records as they come."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from ragtag.app.report.data import FREEZES, KILLS
from ragtag.app.words import UNTOLD, fault_text, in_words, seconds
from ragtag.core import trace

RECENT = 50
"""Rounds that the median and the arrival rate are taken over."""
STATES = (
    "failed",
    "gone",
    "frozen",
    "silent",
    "waiting",
    "auxiliary",
    "training",
    "elsewhere",
    "ended",
    "done",
)
"""From the one that wants most attention to the one that wants least. Once the run is over, a peer of which
no end was told has ended with it, or was started elsewhere and may go on."""
_STEADY = frozenset({"waiting", "training", "elsewhere", "ended"})
"""States that are no event."""

_MEMBERSHIP = frozenset({"comes", "takes part", "assists", "has left", "declared dead", "back", "healed"})
_OF_REPLICAS = frozenset({"replicas differ", "replicas alike"})
_NO_NEWS = {("frozen", "silent"), ("gone", "done")}
"""Changes of state that go without saying."""
_BECOMES = {"silent": in_words("silent"), "failed": "has failed", "done": in_words("has left")}


@dataclass(slots=True)
class PeerRow:
    """What is known of one peer."""

    joined: bool = False
    here: bool = False
    """Whether it has records of its own: others alone tell of a peer that was started elsewhere."""
    left: bool = False
    gone: bool = False
    failed_t: float | None = None
    told: str = ""
    told_t: float = -math.inf
    frozen_until: float | None = None
    away_t: float | None = None
    """Since when the others do not hear it, while that lasts."""
    silent_to: set[int] = field(default_factory=set)
    step: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    loss_bad: bool = False
    accuracy: float | None = None
    round: int | None = None
    round_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    arrived: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    apart: float | None = None
    missed: int = 0
    sent: int = 0
    received: int = 0
    shown_state: str = "waiting"
    assists: bool = False

    @property
    def steps_done(self) -> int:
        """Local steps; where no step is recorded, as in a simulated run, one for each round."""
        return self.step or (0 if self.round is None else self.round + 1)


class PeerTable:
    """The peers of a run; ``feed`` it records. Not thread-safe.

    n_peers: rows to begin with; peers that records name are added. events: (time, one line of text).
    """

    def __init__(self, n_peers: int) -> None:
        self.now_s = 0.0
        self.events: deque[tuple[float, str]] = deque(maxlen=200)
        self.rows: dict[int, PeerRow] = {peer: PeerRow() for peer in range(n_peers)}
        self.run: trace.Run | None = None
        self.mean_accuracy: float | None = None
        self.ended = False
        """Whether the launcher or the world has seen the run to its end."""
        self._up = set(self.rows)
        self._thaw_s = math.inf

    def feed(self, record: trace.Record) -> None:
        """One more record; they may come a little out of time order."""
        self.now_s = max(self.now_s, record.t)
        if isinstance(record, trace.Run):
            self._begin(record)
        elif isinstance(record, trace.Fault):
            self._fault(record)
        elif isinstance(record, trace.Note):
            self._note(record)
        elif isinstance(record, trace.Error):
            self._error(record)
        elif isinstance(record, trace.Eval) and record.model == "mean":
            self.mean_accuracy = record.accuracy
        elif isinstance(record, trace.Leave) and record.peer < 0:
            self.ended = True
        elif record.peer >= 0:
            self._peer(self.row(record.peer), record)
        if self.now_s >= self._thaw_s:
            self._thaw()

    @property
    def over(self) -> bool:
        """Whether every peer is done, gone or has failed."""
        return bool(self.rows) and all(
            row.left or row.gone or row.failed_t is not None for row in self.rows.values()
        )

    @property
    def progress(self) -> float | None:
        """The share of the run that is done, where the run says how long it is to be."""
        if self.run is None or not (self.run.steps_planned or self.run.planned_s):
            return None
        if self.over:
            return 1.0
        if self.run.steps_planned:
            live = [row.steps_done for row in self.rows.values() if not row.gone and row.failed_t is None]
            return min(1.0, sum(live) / max(1, len(live)) / self.run.steps_planned)
        if self.run.planned_s:
            return min(1.0, self.now_s / self.run.planned_s)
        return None

    def state(self, peer: int) -> str:
        """One of ``STATES``."""
        row = self.row(peer)
        if row.failed_t is not None:
            return "failed"
        if row.left:
            return "done"
        if row.gone:
            return "gone"
        if row.frozen_until is not None and self.now_s < row.frozen_until:
            return "frozen"
        if row.silent_to and 2 * len(row.silent_to & self._up) >= len(self._up - {peer}):
            return "silent"
        if self.ended and (row.joined or row.assists):
            return "ended" if row.here else "elsewhere"
        if row.assists:
            return "auxiliary"
        return "training" if row.joined else "waiting"

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the own models of the peers that are not gone."""
        known = [row.accuracy for row in self.rows.values() if not row.gone and row.accuracy is not None]
        return statistics.fmean(known) if known else None

    @property
    def apart(self) -> float | None:
        """The share of the model of which not all replicas are alike, as they last saw it when they were
        compared; ``None``: they are not.
        """
        known = [row.apart for row in self.rows.values() if not row.gone and row.apart is not None]
        return statistics.fmean(known) if known else None

    # -- Records

    def _begin(self, run: trace.Run) -> None:
        self.run = run
        for peer in range(min(run.peers, 4096)):
            self.row(peer)

    def row(self, peer: int) -> PeerRow:
        """A peer's row, made where there is none."""
        if peer not in self.rows:
            self.rows[peer] = PeerRow()
            self._up.add(peer)
        return self.rows[peer]

    def _peer(self, row: PeerRow, record: trace.Record) -> None:
        row.here = True
        if not row.joined:
            row.joined = True
            self._notice(record.peer)
        if row.failed_t is not None and record.t > row.failed_t and isinstance(record, trace.Step):
            row.failed_t = None  # it went on after all
            self._up.add(record.peer)
            self._notice(record.peer)
        if isinstance(record, trace.Step):
            row.step = max(row.step, record.step)
            if record.loss is None:
                row.loss_bad = True
            elif isinstance(record.loss, float):
                row.loss_bad = False
                row.losses.append(record.loss)
        elif isinstance(record, trace.Round):
            row.round = record.round if row.round is None else max(row.round, record.round)
            row.round_s.append(record.total_s)
            row.arrived.append(record.arrived)
            row.sent = max(row.sent, record.bytes_sent)
            row.received = max(row.received, record.bytes_received)
            for other, times in record.how_often_missed.items():
                self.row(other).missed += times
            for other in record.waited_for:
                if self.run is not None and other >= self.run.peers:  # whose trace may be elsewhere
                    self.row(other).joined = True
        elif isinstance(record, trace.Align):
            row.apart = record.apart / max(1, record.units)
        elif isinstance(record, trace.Eval):
            row.accuracy = record.accuracy
        elif isinstance(record, trace.Join):
            row.gone = row.left = False
            row.failed_t = None
            row.silent_to.clear()
            self._up.add(record.peer)
            self._notice(record.peer)
        elif isinstance(record, trace.Leave):
            row.left = not record.failed
            row.step = max(row.step, record.steps)
            row.sent = max(row.sent, record.bytes_sent)
            row.received = max(row.received, record.bytes_received)
            if record.failed:  # what failed is told by the launcher, once the process has ended
                row.failed_t, row.shown_state = record.t, "failed"
            self._end(record.peer)

    def _error(self, error: trace.Error) -> None:
        text = f"{_who(error.peer)}: {error.what}"
        told = any(t > error.t - 10.0 and printable(text) == said for t, said in self.events)
        if not told:  # a peer and its launcher may both tell of one error
            self._say(error.t, text)
        if error.peer >= 0:
            row = self.row(error.peer)
            row.failed_t, row.shown_state = error.t, "failed"
            self._up.discard(error.peer)

    def _fault(self, fault: trace.Fault) -> None:
        if fault.peer >= 0 and fault.name in KILLS:
            self.row(fault.peer).gone = True
            self._end(fault.peer)
        elif fault.peer >= 0 and fault.name in FREEZES:
            row = self.row(fault.peer)
            row.frozen_until = fault.until_t if fault.until_t is not None else math.inf
            self._thaw_s = min(self._thaw_s, row.frozen_until)
            self._notice(fault.peer)
        else:
            who = f"{_who(fault.peer)}: " if fault.peer >= 0 else ""
            self._say(fault.t, f"{who}{fault_text(fault)}")

    def _note(self, note: trace.Note) -> None:
        other = self.row(note.other) if note.other >= 0 else None
        if note.what in UNTOLD:
            return
        if other is not None and note.what == "silent":
            other.silent_to.add(note.peer)
            other.away_t = note.t if other.away_t is None else other.away_t
            self._notice(note.other)
        elif other is not None and note.what == "heard again":
            other.silent_to.discard(note.peer)
            if other.frozen_until == math.inf:
                other.frozen_until = None
            self._notice(note.other)
            if not other.silent_to and not other.gone:
                other.away_t = None
        elif other is not None and note.what == "left":
            self._left(note.other)
        elif other is not None and note.what in _MEMBERSHIP:
            self._moved(note, other)
        elif note.what == "lost" and note.peer >= 0:
            self._lost(note)
        elif note.what in _OF_REPLICAS:
            told = any(t > note.t - 2.0 and said.startswith(note.what) for t, said in self.events)
            if not told:  # all peers see the same
                self._say(note.t, f"{note.what}: {note.detail}")
        elif other is not None and note.other != note.peer:
            self._say(note.t, f"peer {note.other} {in_words(note.what, note.detail)}")
        else:
            self._say(note.t, f"{_who(note.peer)} {in_words(note.what, note.detail)}")

    def _lost(self, note: trace.Note) -> None:
        """Its launcher has seen its process end."""
        row = self.row(note.peer)
        row.gone, row.shown_state = True, "gone"
        self._up.discard(note.peer)
        self._say(note.t, f"peer {note.peer} {in_words('lost', note.detail)}")

    def _moved(self, note: trace.Note, row: PeerRow) -> None:
        """A peer came or went; several say the same, and a seat's next holder may come from elsewhere."""
        if note.t < row.told_t:
            return
        row.told_t = note.t
        if note.what in ("has left", "declared dead"):
            if not (row.left or row.gone or row.failed_t is not None):
                dead = note.what == "declared dead"
                row.away_t = (row.away_t or note.t) if dead else None
                if dead and self.state(note.other) == "frozen":
                    return  # which says more
                row.gone, row.shown_state = True, "gone"
                self._up.discard(note.other)
                self._say(note.t, f"peer {note.other} {in_words(note.what)}")
            return
        averages = note.what != "comes"
        known = self.state(note.other)
        if known == "training" or (row.told == note.what and (not averages or known == "auxiliary")):
            return
        row.told, row.assists = note.what, note.what == "assists"
        if row.assists:
            row.gone, row.left, row.away_t, row.shown_state = False, False, None, "auxiliary"
            row.silent_to.clear()
        elif averages:
            away = self._away(row)
            row.joined, row.gone, row.left, row.failed_t = True, False, False, None
            row.silent_to.clear()
            row.shown_state = "training"
            self._up.add(note.other)
            if note.what in ("back", "healed"):
                row.frozen_until = None
                self._say(note.t, f"peer {note.other} {away}is back")
                return
        self._say(note.t, f"peer {note.other} {in_words(note.what)}")

    def _away(self, row: PeerRow) -> str:
        """For how long nobody has heard a peer that is heard again now, in words."""
        since_t, row.away_t = row.away_t, None
        return "" if since_t is None else f"did not answer for {seconds(self.now_s - since_t)}, and "

    def _left(self, peer: int) -> None:
        """Others were told that a peer leaves; its own record may be read a moment later, or not at all."""
        row = self.row(peer)
        if row.left or row.gone or row.failed_t is not None or self.state(peer) == "frozen":
            return  # of one that stands still others are told the same
        row.gone, row.shown_state = True, "gone"
        self._up.discard(peer)
        self._say(self.now_s, f"peer {peer} {in_words('has left')}")

    def _end(self, peer: int) -> None:
        self._up.discard(peer)
        self._notice(peer)

    def _thaw(self) -> None:
        """The time that a frozen peer was to stand still is over."""
        for peer, row in self.rows.items():
            if row.frozen_until is not None and row.frozen_until <= self.now_s:
                row.frozen_until = None
                self._notice(peer)
        left = [row.frozen_until for row in self.rows.values() if row.frozen_until is not None]
        self._thaw_s = min(left, default=math.inf)

    def _notice(self, peer: int) -> None:
        """An event, if a peer's state has changed."""
        row, state = self.row(peer), self.state(peer)
        if state == row.shown_state:
            return
        if state == "training" and row.shown_state in ("silent", "frozen", "gone", "failed"):
            self._say(self.now_s, f"peer {peer} {self._away(row)}is back")
        elif state not in _STEADY and (row.shown_state, state) not in _NO_NEWS:
            self._say(self.now_s, f"peer {peer} {_BECOMES.get(state, f'is {state}')}")
        row.shown_state = state

    def _say(self, t: float, text: str) -> None:
        self.events.append((t, printable(text)))


def _who(peer: int) -> str:
    return f"peer {peer}" if peer >= 0 else "crew"


def printable(text: str) -> str:
    """One line without control characters: a trace must not steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:300])
