"""How fast each peer goes: posted on the notice board, read by the schedules that ask for it."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low

from ragtag.core.channels import topic_of
from ragtag.core.types import Noted, PeerId
from ragtag.protocols.crew.board import Notices
from ragtag.schedules.grouping import plausible
from ragtag.training.transport import Peers

SHARE_MAX = 0.01
"""Posting takes at most this share of the time, by what a post was measured to take."""
_WINDOW = 9
_STEPS_MAX = 1 << 53
_POST = struct.Struct("<BQdd")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Pace:
    """What a peer posts: steps taken; seconds of computing per step; what an average takes beside waits."""

    steps: int
    step_s: float
    exchange_s: float

    def encode(self) -> bytes:
        """The post on the notice board (``decode`` reads it)."""
        return _POST.pack(_VERSION, self.steps, self.step_s, self.exchange_s)


def decode(blob: bytes) -> Pace | None:
    """What was posted; ``None``: it is of another version, or no pace that can be."""
    if len(blob) != _POST.size:
        return None
    version, steps, step_s, exchange_s = _POST.unpack(blob)
    if version != _VERSION or steps > _STEPS_MAX:
        return None
    if not (step_s > 0 and math.isfinite(step_s)) or not (exchange_s >= 0 and math.isfinite(exchange_s)):
        return None
    return Pace(steps, step_s, exchange_s)


@dataclass(frozen=True, slots=True)
class Paces:
    """What is known of all peers that post and answer, this one included (``live``).

    steps: that each has taken, and those that this one took while it went on without it: a peer that comes
        back is as far behind as it was when it was last waited for, and has nothing to make up.
    step_s: seconds that a step of each takes, where what it posts is believed.
    since_s: how long ago each was seen to have taken a step.
    exchange_s: the middle of what averages take.
    """

    steps: dict[PeerId, int]
    step_s: dict[PeerId, float]
    since_s: dict[PeerId, float]
    exchange_s: float
    live: frozenset[PeerId]


class Pacer:
    """Measures this peer's steps, posts them, and reads the others'.

    name: of the channel whose schedule asks.
    note: told of speeds that are not believed, once for each peer until it posts one that is.
    """

    def __init__(
        self,
        peers: Peers,
        name: str,
        note: Callable[[Noted], None] | None = None,
    ) -> None:
        self._peers, self._topic, self._note, self._clock = peers, topic_of(f"{name}/pace"), note, peers.now_s
        self._took_s: deque[float] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._exchange_s = 0.0
        self._posted = -1
        self._posted_s = -math.inf
        self._post_s = 0.0
        self._seen: dict[PeerId, tuple[int, float]] = {}
        self._doubted: set[PeerId] = set()
        self._overdue: dict[PeerId, int] = {}
        self._without: dict[PeerId, int] = {}
        """Steps that this peer took while it did not wait for another."""
        self._live: frozenset[PeerId] = frozenset()

    def stepped(self, steps: int, took_s: float) -> None:
        """This peer has taken ``steps`` in all; the last took so long to compute."""
        for peer in self._seen:
            if peer in self._overdue or peer not in self._live:
                self._without[peer] = self._without.get(peer, 0) + max(0, steps - self._steps)
        self._steps = steps
        if took_s > 0:
            self._took_s.append(took_s)
        if self._clock() - self._posted_s >= self._post_s / SHARE_MAX:
            self.post()

    def averaged(self, exchange_s: float) -> None:
        """An average took so long beside waiting for others."""
        self._exchange_s = exchange_s

    def post(self) -> None:
        """Tell the others, if there is news."""
        if self._posted == self._steps or not self._took_s:
            return
        self._posted = self._steps
        began_s = self._clock()
        self._peers.post_soon(self._topic, self._mine().encode())
        self._posted_s = self._clock()
        took_s = self._posted_s - began_s
        self._post_s = took_s if self._post_s == 0.0 else self._post_s + (took_s - self._post_s) / 8

    def overdue(self, peer: PeerId) -> None:
        """A wait for a peer has run its time: it is not waited for before it takes another step."""
        seen = self._seen.get(peer)
        if seen is not None:
            self._overdue[peer] = seen[0]

    def read(self) -> Paces:
        """What the notice board says now of the peers that post and answer, and this one's own."""
        now_s = self._clock()
        notices = self._peers.notices(self._topic)
        me = self._peers.me
        # not those that are live in rounds: between averages a peer is silent there, and yet at work
        live = frozenset(notices.posts) - notices.silent | {me}
        rows = self._rows(notices, live)
        steps, since_s = {me: self._steps}, {me: 0.0}
        for peer, row in rows.items():
            before, at_s = self._seen.get(peer, (-1, now_s))
            if row.steps != before:
                at_s = now_s
                self._overdue.pop(peer, None)
            self._seen[peer] = row.steps, at_s
            since_s[peer] = now_s - at_s
            if peer not in self._overdue:
                # one that took over the state of others has taken their steps with it
                without = min(self._without.get(peer, 0), max(0, self._steps - row.steps))
                self._without[peer] = without
                steps[peer] = row.steps + without
        told = {peer: row.step_s for peer, row in rows.items()}
        if self._took_s:
            told[me] = self._mine().step_s
        exchange_s = median([self._exchange_s, *(row.exchange_s for row in rows.values())])
        self._live = live
        return Paces(steps, self._believed(told), since_s, exchange_s, live)

    def _mine(self) -> Pace:
        return Pace(self._steps, median_low(self._took_s), self._exchange_s)

    def _rows(self, notices: Notices, live: frozenset[PeerId]) -> dict[PeerId, Pace]:
        rows: dict[PeerId, Pace] = {}
        for peer, posted in notices.posts.items():
            if peer == self._peers.me or peer not in live:
                continue
            row = decode(posted.blob)
            if row is None:
                self._doubt(peer, "what it posts of its pace cannot be read or cannot be")
            else:
                rows[peer] = row
        return rows

    def _believed(self, told: dict[PeerId, float]) -> dict[PeerId, float]:
        good, doubted = plausible(told) if len(told) > 2 else (told, {})
        for peer, s in doubted.items():
            self._doubt(peer, f"{s:g} s a step, far from the others'")
        self._doubted &= {peer for peer in self._doubted if peer not in good}
        return good

    def _doubt(self, peer: PeerId, why: str) -> None:
        if peer not in self._doubted:
            self._doubted.add(peer)
            if self._note is not None:
                self._note(Noted("speed not believed", peer, why))
