"""Peers meet: each tells the others a few bytes, and knows that they were heard.

Peers find each other so, and compare what they will average before any work is lost. What is not answered is
told again: after the time that an answer takes where that is measured, and else after a fixed pause, which
doubles (RFC 6298, section 5) up to a second until something comes from the peer. It costs a few datagrams and
decides no deadline.

A peer that has told another, and hears nothing of it, asks it. The other may have told already, for all that
it knows: the answer was lost, and it has done with the meeting, or it was taken for dead and forgotten.

A late peer meets peers that answer at once, so it measures how long an answer takes. Once half of them have
met it, it goes on without peers from which nothing comes for ``PATIENCE`` times as long. These are frozen,
dead or cut off, and are answered when they come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ragtag.core.types import (
    Arm,
    Arrived,
    Effect,
    Expired,
    Joined,
    Left,
    MessageKey,
    Met,
    PeerId,
    Run,
    Send,
    Tell,
    Timer,
    Visits,
)
from ragtag.core.types import Event as AnyEvent
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.base import Incoming, blob_message, whole_message

MEET = 255
"""The channel of meetings."""
BLOB_MAX = 1 << 20
TELL, TOLD, ASK = 0, 1, 2
MEETINGS_MAX = 32
"""How many meetings are kept that others alone have told of."""
HELD_MAX = 1024
"""How many of this peer's own are kept, to go on answering: some for each thing that it averages."""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.1, 1.0
PATIENCE = 4.0
"""A late peer waits so many times as long as the slowest answer (or the first pause) took. By then it has
told the peers that it waits for at least three times."""


def to_rows(blob: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A blob with its length in front, padded to whole chunks: uint8 ``[k, chunk_bytes]``."""
    if len(blob) > BLOB_MAX:
        raise ValueError(f"{len(blob)} bytes to tell; at most {BLOB_MAX} can be")
    data = len(blob).to_bytes(4, "little") + blob
    data += bytes(-len(data) % CHUNK_BYTES)
    return np.frombuffer(data, np.uint8).reshape(-1, CHUNK_BYTES)


def from_rows(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> bytes | None:
    """The blob in these rows, or None where its length does not fit them."""
    data = rows.tobytes()
    size = int.from_bytes(data[:4], "little")
    return data[4 : 4 + size] if size <= len(data) - 4 else None


class _Blob:
    """What has come of one peer's blob."""

    __slots__ = ("incoming", "rows")

    def __init__(self, total: int) -> None:
        self.rows = np.zeros((total, CHUNK_BYTES), np.uint8)
        self.incoming = Incoming(total)


class Meeting:
    """One meeting on one peer. It goes on answering after it is over.

    others: the peers whose blobs count.
    few: those of them that are told and waited for; ``None``: all.
    rtt_s: how long an answer takes, of the peers of which that is measured.
    """

    def __init__(
        self,
        others: frozenset[PeerId],
        number: int,
        few: frozenset[PeerId] | None = None,
        rtt_s: Mapping[PeerId, float] = MappingProxyType({}),
    ) -> None:
        self.number, self._rtt_s = number, rtt_s
        self._others, self._few = set(others), few
        self._expected = set(others if few is None else few)
        self._blobs: dict[PeerId, _Blob] = {}
        self._acked: set[PeerId] = set()
        self._tell: Tell | None = None
        self._told_s: dict[PeerId, float] = {}  # when each peer was told first
        self._pause_s: dict[PeerId, float] = {}  # since when nothing came: until it is told again,
        self._next_s: dict[PeerId, float] = {}  # and when that is
        self._again_s = math.inf
        self._slowest_s = _PAUSE_FIRST_S
        self._patient_until_s = -math.inf
        self.over = False

    @property
    def under_way(self) -> bool:
        """Whether this peer waits for its end."""
        return self._tell is not None and not self.over

    @property
    def held(self) -> bool:
        """Whether this peer has told its blob in it."""
        return self._tell is not None

    @property
    def awaited(self) -> frozenset[PeerId]:
        """The peers that it still waits for, which have told nothing (any thread may ask)."""
        return frozenset(self._expected).difference(tuple(self._blobs)) if self.under_way else frozenset()

    def without(self, absent: frozenset[PeerId]) -> None:
        """Do not wait for these peers. What they tell in time counts all the same."""
        self._expected -= absent

    def step(self, now_s: float, event: AnyEvent) -> list[Effect]:
        """Take one event; ``Met`` comes once, after ``Tell``."""
        effects: list[Effect] = []
        if isinstance(event, Arrived):
            for run in event.runs:
                effects += self._take(now_s, run) + self._here(now_s, run.peer)
        elif isinstance(event, Tell):
            if self._tell is not None:
                raise RuntimeError(f"meeting {self.number} has been held already; give each its own number")
            self._tell = event
            self._rows = to_rows(event.blob)
            effects += self._say(now_s)
            effects.append(Arm(self._timer("deadline"), event.deadline_s))
        elif isinstance(event, Expired) and self._tell is not None and not self.over:
            if event.timer.name == "deadline":
                return self._meet(force=True)
            if event.timer.name == "again" and now_s >= self._again_s:
                self._again_s = math.inf
                effects += self._say(now_s)
        elif isinstance(event, Left):
            self._expected.discard(event.peer)
        elif isinstance(event, Joined | Visits):
            self._others.add(event.peer)
            if isinstance(event, Joined) and (self._few is None or event.peer in self._few):
                self._expected.add(event.peer)
            self._acked.discard(event.peer)  # a new process has heard nothing, and may tell another blob
            self._blobs.pop(event.peer, None)
            self._told_s.pop(event.peer, None)
            self._next_s.pop(event.peer, None)
            self._pause_s.pop(event.peer, None)
            if self.under_way:
                effects += self._say(now_s)
        return effects + self._lose_patience(now_s) + self._meet(force=False)

    def _say(self, now_s: float) -> list[Effect]:
        """Tell those that are due for it, and have not acknowledged it; ask those that have."""
        assert self._tell is not None
        effects: list[Effect] = []
        next_s = math.inf
        for peer in sorted(self._unmet()):
            if self._next_s.get(peer, -math.inf) <= now_s:
                self._told_s.setdefault(peer, now_s)
                until_s = self._tell.deadline_s
                asks = peer in self._acked
                effects.append(self._small(peer, ASK, until_s) if asks else self._told(peer, until_s))
                pause_s = self._pause_s.get(peer) or self._first_pause_s(peer)
                self._next_s[peer], self._pause_s[peer] = now_s + pause_s, min(_PAUSE_MAX_S, 2 * pause_s)
            next_s = min(next_s, self._next_s[peer])
        return effects + self._arm(next_s)

    def _first_pause_s(self, peer: PeerId) -> float:
        return min(_PAUSE_MAX_S, self._rtt_s.get(peer, _PAUSE_FIRST_S))

    def _arm(self, at_s: float) -> list[Effect]:
        if at_s >= self._again_s:
            return []
        self._again_s = at_s
        return [Arm(self._timer("again"), at_s)]

    def _here(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Something came from a peer: it is there, and what it has not answered was lost."""
        if not self.under_way or peer not in self._next_s or peer not in self._unmet():
            return []
        pause_s = self._pause_s[peer] = self._first_pause_s(peer)
        self._next_s[peer] = min(self._next_s[peer], now_s + pause_s)
        return self._arm(self._next_s[peer])

    def _lose_patience(self, now_s: float) -> list[Effect]:
        """At a late peer: where most have answered, wait no longer for those from which nothing came."""
        if self._tell is None or self.over or not self._tell.late:
            return []
        met = self._met()
        for peer in met & self._told_s.keys():
            self._slowest_s = max(self._slowest_s, now_s - self._told_s.pop(peer))
        mute = self._expected - self._acked - self._blobs.keys()
        if not mute or 2 * len(met & self._expected) < len(self._expected):
            return []
        until_s = {p: self._told_s[p] + PATIENCE * self._slowest_s for p in mute & self._told_s.keys()}
        lost = {peer for peer, at_s in until_s.items() if at_s <= now_s}
        self._expected -= lost
        next_s = min((at_s for peer, at_s in until_s.items() if peer not in lost), default=math.inf)
        if next_s == math.inf or now_s < self._patient_until_s <= next_s:
            return []
        self._patient_until_s = next_s
        return [Arm(self._timer("patience"), next_s)]

    def _met(self) -> set[PeerId]:
        """The peers whose blob is here, and that have acknowledged this peer's."""
        return {peer for peer in self._acked if peer in self._blobs and not self._blobs[peer].incoming.left}

    def _unmet(self) -> set[PeerId]:
        """The peers that are told, or asked, until they have been met."""
        return self._expected - self._met()

    def _told(self, peer: PeerId, deadline_s: float) -> Effect:
        k = len(self._rows)
        weight, heard = np.zeros(k, np.float32), np.zeros(k, np.uint64)
        return Send(whole_message(peer, self._key(TELL), self._rows, weight, heard), deadline_s)

    def _small(self, peer: PeerId, stage: int, until_s: float) -> Effect:
        """An acknowledgement or a question."""
        return Send(blob_message(peer, self._key(stage), b""), until_s)

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        if run.peer not in self._others:
            return []
        if run.key.stage in (TOLD, ASK):
            if not len(run.payload) or (run.mask is not None and not run.mask.any()):
                return []
            (self._acked.add if run.key.stage == TOLD else self._acked.discard)(run.peer)
            return self._answer(now_s, run.peer)
        if run.key.stage != TELL or not 0 < run.total <= BLOB_MAX // CHUNK_BYTES + 1:
            return []
        blob = self._blobs.setdefault(run.peer, _Blob(run.total))
        if run.total != len(blob.rows) or run.first + len(run.payload) > run.total:
            return []
        for a, b in blob.incoming.fresh(run):
            blob.rows[run.first + a : run.first + b] = run.payload[a:b]
        if blob.incoming.left or not (run.ended or run.first + len(run.payload) == run.total):
            return []
        return [self._small(run.peer, TOLD, now_s + _PAUSE_MAX_S), *self._answer(now_s, run.peer)]

    def _answer(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Tell a peer that needs it, where this one tells it nothing by itself (any more)."""
        if self._tell is None or peer in self._acked or (peer in self._expected and not self.over):
            return []
        return [self._told(peer, now_s + _PAUSE_MAX_S)]

    def _meet(self, force: bool) -> list[Effect]:
        if self._tell is None or self.over:
            return []
        heard = {peer for peer, blob in self._blobs.items() if not blob.incoming.left}
        if not force and self._unmet():
            return []
        self.over = True
        blobs = {peer: from_rows(self._blobs[peer].rows) for peer in sorted(heard)}
        told = {peer: blob for peer, blob in blobs.items() if blob is not None}
        asked = self._others if self._few is None else self._few
        return [Met(self.number, told, tuple(sorted(asked - told.keys())))]

    def _key(self, stage: int) -> MessageKey:
        return MessageKey(MEET, self.number, stage, 0)

    def _timer(self, name: str) -> Timer:
        return Timer(MEET, self.number, name)


class Meetings:
    """All meetings of a peer, bounded.

    Of meetings that only others have told of the first to be forgotten are those of the highest number, as
    they are counted from 0 on. What others make up so pushes out no meeting that this peer holds: newcomers
    are answered in it, and a peer that comes to it later.
    """

    def __init__(self) -> None:
        self._meetings: dict[int, Meeting] = {}

    def of(self, number: int, make: Callable[[], Meeting]) -> Meeting:
        """The meeting with this number; ``make`` it, where it is new."""
        meeting = self._meetings.get(number)
        if meeting is None:
            heard_of = [other for other, known in self._meetings.items() if not known.held]
            if len(heard_of) >= MEETINGS_MAX:
                del self._meetings[max(heard_of)]
            elif len(self._meetings) >= MEETINGS_MAX + HELD_MAX:
                idle = [other for other, known in self._meetings.items() if not known.under_way]
                del self._meetings[min(idle or self._meetings)]
            meeting = self._meetings[number] = make()
        return meeting

    def awaited(self, number: int) -> frozenset[PeerId]:
        """The peers that a meeting still waits for (any thread may ask)."""
        meeting = self._meetings.get(number)
        return frozenset() if meeting is None else meeting.awaited

    def tell(self, now_s: float, event: Joined | Left | Visits) -> list[Effect]:
        """Tell all meetings of a peer that comes or goes."""
        return [effect for meeting in self._meetings.values() for effect in meeting.step(now_s, event)]
