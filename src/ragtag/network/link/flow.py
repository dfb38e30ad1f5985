"""What a driver keeps for each peer: what is to be sent, and what has come."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.core.address import Address
from ragtag.core.types import Bools, MessageKey, PeerId, Run
from ragtag.network.control.path import Path

QUEUE_MAX = 4096
"""Messages that wait for one peer; beyond, the oldest is dropped (its deadline is the nearest)."""
ENDINGS_MAX = 4096
"""End markers that are remembered of a peer: 1.3 MB, full after some minutes of rounds."""
ENDINGS_APART_MAX = 64
"""End markers that are remembered of a process that has no seat any more: copies of its last ones may still
come. One takes 300 bytes: with ``ENDINGS_MAX`` of them each process that is gone would hold a megabyte."""
LEAP_MAX = 1 << 20
"""Datagrams that may be missing in a row, a gigabyte: a sender has a window of a few thousand on the way, and
the marks of the messages in it. What is further ahead, or as far behind, is made up."""
PINGS = 6
"""Requests for an answer at the measured pace; only a longer silence makes them rarer."""
_U32 = 0xFFFFFFFF
_HALF = 1 << 31
_FORGET = 0.98  # half in 34 runs in order: some rounds
_IN_ORDER_S = 1e-4


@dataclass(slots=True)
class Outgoing:
    """A message on its way out. ``chunks``: the indices to send; ``alive``: those the injector spares;
    ``schema``: of its channel, as it was when this was sent: the channel may be opened anew meanwhile.
    """

    run: Run
    chunks: NDArray[np.int64]
    alive: Bools | None
    deadline_s: float
    schema: int | None = None
    at: int = 0

    def detach(self) -> None:
        """Copy what is still to be sent: the round is done and its values may change from now on."""
        run, low = self.run, int(self.chunks[self.at])
        rest = slice(low - run.first, None)
        self.run = Run(
            run.peer, run.key, low, run.total, run.payload[rest].copy(), run.weight[rest].copy(),
            run.heard[rest].copy(), None, run.ended,
        )  # fmt: skip


@dataclass(slots=True)
class Ending:
    """A message's end, which is repeated until it is answered. seq: the number of its last datagram; schema:
    the message's.
    """

    key: MessageKey
    total: int
    seq: int
    deadline_s: float
    next_s: float
    schema: int | None = None
    repeat: int = 0
    rounds: int = 0


@dataclass(slots=True)
class Inbound:
    """What has come from a peer in this epoch of its process, since ``since_s``.

    came_ns: when the newest of it reached this machine, by ``time.time_ns``.
    """

    epoch: int = -1
    since_s: float = 0.0
    highest: int = 0
    received: int = 0
    unanswered: int = 0
    asked: bool = False
    unordered: bool = False
    reorder_s: float = 0.0
    advanced_s: float = 0.0
    came_ns: int = 0
    endings: OrderedDict[tuple[MessageKey, int], None] = field(default_factory=OrderedDict)

    def enter(self, epoch: int) -> bool:
        """Whether this epoch is accepted: an older process's datagrams are not, a newer one begins anew."""
        if epoch == self.epoch:
            return True
        if epoch < self.epoch:
            return False
        self.epoch, self.highest, self.received = epoch, 0, 0
        self.unanswered, self.asked, self.reorder_s, self.unordered = 0, False, 0.0, False
        self.endings.clear()
        return True

    def count(self, now_s: float, first_seq: int, last_seq: int, k: int) -> None:
        """``k`` datagrams with these numbers came. A number below the highest shows reordering."""
        self.received += k
        self.unanswered += k
        ahead = last_seq - self.highest & _U32
        if not 0 < ahead < _HALF:  # numbers wrap after 2^32 datagrams
            ahead = first_seq - self.highest & _U32
        if 0 < ahead < _HALF:
            self.highest, self.advanced_s = self.highest + ahead, now_s
            if self.reorder_s:  # one late copy must not hold up the ends of messages for ever
                self.reorder_s = _FORGET * self.reorder_s if self.reorder_s > _IN_ORDER_S else 0.0
        else:
            self.unordered = True
            self.reorder_s = max(self.reorder_s, now_s - self.advanced_s)

    def leaps(self, seq: int) -> bool:
        """Whether a number is further ahead than a sender can be that has had no answer for long."""
        return LEAP_MAX < (seq - self.highest & _U32) < _U32 - LEAP_MAX

    @property
    def whole(self) -> bool:
        """Whether all up to the highest have certainly come.

        Where some came late or twice, one that was lost may have been made up for by a copy of another.
        """
        return self.received == self.highest and not self.unordered

    def new_ending(self, key: MessageKey, number: int) -> bool:
        """Whether this end marker is new (its copies are not)."""
        if (key, number) in self.endings:
            return False
        self.endings[key, number] = None
        if len(self.endings) > ENDINGS_MAX:
            self.endings.popitem(last=False)
        return True


class Flow:
    """All that concerns one peer.

    process: the epoch that its datagrams must carry, where membership has told (``None``: not yet). mute: it
    is gone for now; nothing is sent to it, and what is known of it is kept. doubted: it has been noted that
    datagrams in its name come from elsewhere. answers: how many were sent to it, numbered apart from what is
    counted.
    """

    def __init__(self, peer: PeerId, address: Address) -> None:
        self.peer, self.address = peer, address
        self.process: int | None = None
        self.mute = False
        self.path = Path()
        self.answers = 0
        self.queue: deque[Outgoing] = deque()
        self.endings: dict[int, Ending] = {}
        self.inbound = Inbound()
        self.ping_s = 0.0
        self.pings = 0
        self.dropped_late = 0
        self.doubted = False
        self._asked = 0

    def hear(self, now_s: float) -> None:
        """Something came from this peer: ask for the answer that is overdue now, not when patience ends."""
        if self.pings > PINGS:
            self.ping_s, self.pings = min(self.ping_s, now_s), 0

    def asks(self, n: int) -> bool:
        """Whether the last of the next ``n`` datagrams asks for an answer: eight times in a window.

        What is answered at once makes a burst, and the window has to have room for it beyond what fills the
        path.

        Until a round trip is known for sure, each does; so does what leaves first, while no queue is full.
        """
        path = self.path
        if (
            path.sure
            and path.in_flight
            and path.sent + n - self._asked < path.limit // 8
            and path.allowance > n
        ):
            return False
        self._asked = path.sent + n
        return True

    def push(self, outgoing: Outgoing) -> None:
        """Queue a message."""
        if len(self.queue) >= QUEUE_MAX:
            self.queue.popleft()
            self.dropped_late += 1
        self.queue.append(outgoing)

    def expire(self, now_s: float) -> None:
        """Drop what can no longer come in time."""
        queue = self.queue
        while queue and queue[0].deadline_s <= now_s:
            queue.popleft()
            self.dropped_late += 1
        for number in [n for n, ending in self.endings.items() if ending.deadline_s <= now_s]:
            del self.endings[number]

    def clear(self) -> None:
        """Nothing that waits is sent any more; what is known of the peer is kept."""
        self.queue.clear()
        self.endings.clear()

    def retire(self) -> None:
        """Nothing goes to this process or comes from it for now, and maybe never again: keep its counts."""
        self.clear()
        endings = self.inbound.endings
        kept = list(endings)[-ENDINGS_APART_MAX:]
        self.inbound.endings = OrderedDict.fromkeys(kept)  # a dict that only shrinks gives no memory back

    def unwrap(self, low: int) -> int:
        """The full number of a datagram of ours from its low 32 bits."""
        return self.path.sent - ((self.path.sent - low) & _U32)
