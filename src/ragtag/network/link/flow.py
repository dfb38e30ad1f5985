"""What a driver keeps for each peer: messages to send, and counts of what has come."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ragtag.core.address import Address
from ragtag.core.types import Bools, Measured, MessageKey, PeerId, Run
from ragtag.core.wire import DATAGRAM_BYTES
from ragtag.network.control.path import PINGS, Path

QUEUE_MAX = 4096
"""Messages that may wait for one peer. Beyond, the oldest is dropped, as its deadline is the nearest."""
ENDINGS_MAX = 4096
"""End markers remembered of a peer, to know copies: 1.3 MB, full after some minutes of rounds."""
ENDINGS_APART_MAX = 64
"""End markers remembered of a process that has no seat any more, as copies of its last ones may still come.
One takes 300 bytes: with ``ENDINGS_MAX`` of them each such process would hold a megabyte."""
LEAP_MAX = 1 << 20
"""Datagrams that may be missing in a row (a gigabyte). A sender has a few thousand on the way, and the marks
of their messages. A number that is further ahead, or as far behind, is made up."""
_U32 = 0xFFFFFFFF
_HALF = 1 << 31
_FORGET = 0.98  # each run in order; the measured delay halves in 34 runs, which are some rounds
_IN_ORDER_S = 1e-4  # a delay below this counts as none


@dataclass(slots=True)
class Outgoing:
    """A run on its way out.

    chunks: the indices to send, within the message.
    alive: which of them the injector spares; ``None``: all.
    deadline_s: when it is of no use any more.
    schema: its channel's hash when it was queued; the channel may be opened anew meanwhile.
    first: it leaves before those that came without this mark.
    at: how many of ``chunks`` have left.
    """

    run: Run
    chunks: NDArray[np.int64]
    alive: Bools | None
    deadline_s: float
    schema: int | None = None
    first: bool = False
    at: int = 0

    def detach(self) -> None:
        """Copy what is still to be sent: the round is done, so its values may change from now on."""
        run, low = self.run, int(self.chunks[self.at])
        rest = slice(low - run.first, None)
        self.run = Run(
            run.peer, run.key, low, run.total, run.payload[rest].copy(), run.weight[rest].copy(),
            run.heard[rest].copy(), None, run.ended,
        )  # fmt: skip


@dataclass(slots=True)
class Ending:
    """A message's end, which is marked again and again until it is answered.

    seq: the number of the message's last datagram.
    deadline_s: when it is of no use any more.
    next_s: when to repeat it.
    schema: the message's.
    repeat: copies so far.
    rounds: how often it was repeated; each time in one copy or more.
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
    """What has come from one process of a peer.

    epoch: the process; -1: nothing has come.
    since_s: when its first datagram was read.
    highest: the highest number that came.
    received: how many datagrams came.
    unanswered: how many came since the last answer.
    asked: whether one of these asks for an answer.
    unordered: whether any datagram came late or twice.
    reorder_s: how late datagrams come at most, lately; 0: they come in order.
    advanced_s: when ``highest`` last grew.
    came_ns: when the newest datagram reached this machine, by ``time.time_ns``; 0: not known.
    endings: end markers that came, to know copies.
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
        """Whether this epoch's datagrams are accepted: not an older process's. A newer one begins anew."""
        if epoch == self.epoch:
            return True
        if epoch < self.epoch:
            return False
        self.epoch, self.highest, self.received = epoch, 0, 0
        self.unanswered, self.asked, self.reorder_s, self.unordered = 0, False, 0.0, False
        self.endings.clear()
        return True

    def count(self, now_s: float, first_seq: int, last_seq: int, k: int) -> None:
        """``k`` datagrams with these numbers came. A number below the highest shows reordering.

        The first may have any number: the other may have sent for long to a process that was here before.
        """
        if self.received == 0:
            self.highest = first_seq - 1
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
        """Whether a number is made up: it is further ahead than any sender gets, even without answers."""
        return self.received > 0 and LEAP_MAX < (seq - self.highest & _U32) < _U32 - LEAP_MAX

    @property
    def whole(self) -> bool:
        """Whether all datagrams up to the highest have certainly come.

        Where some came late or twice it is not certain: a copy of one may stand in the count for a lost one.
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


class Hold(StrEnum):
    """What keeps a message from leaving.

    KEYS: a handshake is under way. SOCKET: its buffer is full. RECEIVER: as much is under way as it has room
    for. WINDOW: as much as rate control allows. RATE: the next train has its time. DRIVER: it is the turn of
    others.
    """

    KEYS = "keys"
    SOCKET = "socket"
    RECEIVER = "receiver"
    WINDOW = "window"
    RATE = "rate"
    DRIVER = "driver"


class Flow:
    """Both directions between this peer and another one.

    process: the epoch that its datagrams must carry, as membership tells (``None``: it has not told).
    mute: whether the peer is gone for now. Nothing is sent to it, and what is known of it is kept.
    barred: whether nothing that comes from it is taken: the crew has put it out.
    path: numbers and measures what is sent to it.
    answers: how many answers were sent to it. They have numbers of their own.
    queue: messages that wait.
    endings: end markers without an answer, by the number of the message's last datagram.
    inbound: what has come from it.
    ping_s, pings: when next to request an answer, and how many requests had none.
    dropped_late: messages that were dropped unsent.
    knock_s, knocks: when next to send something only so that a router in front of this peer lets answers in,
        and how often that was done since the address is known.
    held, held_s: what keeps the next message from leaving now (``None``: nothing waits), and for how long
        each such thing has kept some, in seconds.
    doubted: whether it was noted that datagrams in its name come from another address.
    """

    def __init__(self, peer: PeerId, address: Address) -> None:
        self.peer, self.address = peer, address
        self.process: int | None = None
        self.mute = self.barred = False
        self.path = Path()
        self.answers = 0
        self.queue: deque[Outgoing] = deque()
        self.endings: dict[int, Ending] = {}
        self.inbound = Inbound()
        self.ping_s = 0.0
        self.pings = 0
        self.dropped_late = 0
        self.doubted = False
        self.knock_s, self.knocks = 0.0, 0
        self.held: Hold | None = None
        self.held_s: dict[Hold, float] = {}
        self._asked = 0

    @property
    def measured(self) -> Measured | None:
        """What is known of the way to the peer; ``None``: it has answered nothing yet."""
        path = self.path
        if path.srtt_s <= 0:
            return None
        shortest_s = path.min_rtt_s if path.min_rtt_s < math.inf else 0.0
        rate = path.control.bandwidth * DATAGRAM_BYTES if path.control.found else 0.0
        return Measured(self.peer, path.rto_s, shortest_s, rate)

    def hear(self, now_s: float) -> None:
        """Something came from this peer. If requests had become rare, the next one leaves at once."""
        if self.pings > PINGS:
            self.ping_s, self.pings = min(self.ping_s, now_s), 0

    def asks(self, n: int) -> bool:
        """Whether the last of the next ``n`` datagrams asks for an answer.

        One asks about eight times in a window, and when the window is full. With fewer answers, each would
        let a longer burst leave, and the window would need room for it beyond what fills the path. Until a
        round trip is known for sure, every train asks. So does a train that leaves while nothing is under
        way: it meets no full queue.
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
        """Queue a message, last or behind those that leave first; at ``QUEUE_MAX``, drop the oldest."""
        if len(self.queue) >= QUEUE_MAX:
            self.queue.popleft()
            self.dropped_late += 1
        if outgoing.first:
            self.queue.insert(
                next((i for i, one in enumerate(self.queue) if not one.first), len(self.queue)), outgoing
            )
        else:
            self.queue.append(outgoing)

    def expire(self, now_s: float) -> None:
        """Drop messages and end markers whose deadline has passed."""
        queue = self.queue
        while queue and queue[0].deadline_s <= now_s:
            queue.popleft()
            self.dropped_late += 1
        for number in [n for n, ending in self.endings.items() if ending.deadline_s <= now_s]:
            del self.endings[number]

    def clear(self) -> None:
        """Drop what waits to be sent; what is known of the peer is kept."""
        self.queue.clear()
        self.endings.clear()

    def retire(self) -> None:
        """This process has lost its seat, maybe for ever: keep its counts, and few of its end markers."""
        self.clear()
        endings = self.inbound.endings
        kept = list(endings)[-ENDINGS_APART_MAX:]
        self.inbound.endings = OrderedDict.fromkeys(kept)  # a dict that only shrinks gives no memory back

    def unwrap(self, low: int) -> int:
        """The full number of a datagram of ours from its low 32 bits."""
        return self.path.sent - ((self.path.sent - low) & _U32)
