"""One newcomer's connection, as its donor sees it: what it may ask, and how long it may take."""

from __future__ import annotations

import math
import secrets
import selectors
import socket
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from ragtag.network.transfer.budget import LinkBudget, delivery_rate
from ragtag.network.transfer.snapshots import Shelf, Snapshot
from ragtag.protocols.transfer.frame import Chunk, Reader, Session
from ragtag.protocols.transfer.types import OUTSTANDING_MAX
from ragtag.protocols.transfer.wire import (
    NONCE_BYTES,
    PROOF_BYTES,
    Behind,
    Gone,
    Here,
    Offering,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
    examined,
    greeting,
    verdict,
)

_PIECE_BYTES = 1 << 18
_READ_BYTES = 512  # some requests: what comes with them is one call of the system, as in sending
_ANSWERS_MAX = 64


@dataclass(frozen=True, slots=True)
class DonorLimits:
    """What a donor spends at most. Times bound strangers and peers that hang, not peers that are slow.

    strangers_max: connections that have not shown the key; the oldest gives way. members_max: newcomers
    served at once. handshake_s: to show the key. idle_s: without a word where one is due, or in one frame.
    chunk_s: to take one chunk. ask_s: to wait for a snapshot. keep_s: a snapshot that nobody reads is kept.
    cpu_share: of one core, for all of it (its trainer loses up to 1.4 times as much, as it finds its caches
    and the interpreter used by another: ``benchmarks/transfer.py``); cpu_burst_s: what is used of it at once.
    link_share: of the rate of the fastest path, for all newcomers together.
    """

    strangers_max: int = 16
    members_max: int = 32
    handshake_s: float = 5.0
    idle_s: float = 30.0
    chunk_s: float = 60.0
    ask_s: float = 600.0
    keep_s: float = 30.0
    cpu_share: float = 0.03
    cpu_burst_s: float = 0.00025
    link_share: float = 0.1


class Closed(Exception):
    """The connection is over; the message says why."""


class _Stage(Enum):
    STRANGER = auto()
    MEMBER = auto()
    LEAVING = auto()  # refused; open until the refusal is read


class DonorSession:
    """A connection; its methods raise ``Closed`` when it is over. link: what all newcomers share."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        shelf: Shelf,
        limits: DonorLimits,
        link: LinkBudget,
        now_s: float,
    ) -> None:
        self.sock = sock
        self._key, self._shelf, self._limits = key, shelf, limits
        self._stage = _Stage.STRANGER
        self._greeting = greeting(secrets.token_bytes(NONCE_BYTES))
        self._reader = Reader(PROOF_BYTES)
        self._session: Session | None = None
        self._out: deque[memoryview] = deque([memoryview(self._greeting)])
        self._wants: deque[Want] = deque()
        self._asked = False
        self._link = link
        self._chunk_bytes = 0  # of the chunk under way
        self.began_s = self._heard_s = self._taken_s = now_s
        self._frame_s = math.inf
        self.given_bytes = 0
        self.watched = 0  # by the server's selector

    @property
    def member(self) -> bool:
        """Whether the other side has shown the key."""
        return self._stage is _Stage.MEMBER

    # -- What to wait for

    def interest(self, now_s: float) -> int:
        """Which of readable and writable to wait for; 0: neither."""
        reading = len(self._out) < _ANSWERS_MAX
        writing = self._out or (self._wants and now_s >= self._link.free_s)
        return (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if writing else 0)

    def wakes_s(self) -> float:
        """When to look at it again although nothing came."""
        ready_s = self._link.free_s if self._wants and not self._out else math.inf
        return min(self.ends_s(), ready_s)

    def ends_s(self) -> float:
        """When it is cut off."""
        if self._stage is not _Stage.MEMBER:
            return self.began_s + self._limits.handshake_s
        ends_s = self._frame_s + self._limits.idle_s
        if self._out:
            return min(ends_s, self._taken_s + self._limits.chunk_s)
        if self._asked:
            return min(ends_s, self._heard_s + self._limits.ask_s)
        return math.inf if self._wants else min(ends_s, self._heard_s + self._limits.idle_s)

    # -- In

    def read(self, now_s: float, round_s: float, *, room: bool) -> None:
        """Something can be read. room: for one more newcomer."""
        if len(self._out) >= _ANSWERS_MAX:
            return
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(f"broke off ({error.strerror})") from None
        if not data:
            raise Closed("ended")
        left = memoryview(data)
        while left:
            space = self._reader.space()
            n = min(len(space), len(left))
            space[:n] = left[:n]
            left = left[n:]
            try:
                self._filled(now_s, n, round_s, room)
            except WireError as error:
                raise Closed(str(error)) from None

    def _filled(self, now_s: float, n: int, round_s: float, room: bool) -> None:
        if self._stage is _Stage.LEAVING:
            raise Closed("was refused")
        if self._session is None:
            proved = self._reader.part(n, 0)
            if proved is not None:
                self._prove(now_s, proved, room)
            return
        frame = self._reader.filled(n)
        if frame is None:
            self._frame_s = min(self._frame_s, now_s)
            return
        self._frame_s, self._heard_s = math.inf, now_s
        message = self._session.open(frame)
        if isinstance(message, Status):
            self._say(now_s, Behind() if self._shelf.closed else Here(self._shelf.round, round_s))
        elif isinstance(message, Wanted):
            self._asked = True
            self._wants.clear()
            self._offer(now_s, self._shelf.ask(self, message.round))
        elif isinstance(message, Want):
            self._want(now_s, message)
        else:
            what = "a chunk" if isinstance(message, Chunk) else type(message).__name__
            raise Closed(f"sent {what}, which only donors send")

    def _prove(self, now_s: float, proved: bytes, room: bool) -> None:
        code = examined(self._key, self._greeting, proved, room=room)
        self._out.append(memoryview(verdict(self._key, self._greeting, proved, code)))
        self._taken_s = self._heard_s = now_s
        if code is Verdict.WELCOME:
            self._stage = _Stage.MEMBER
            self._session = Session(self._key, self._greeting, proved, donor=True)
        else:
            self._stage = _Stage.LEAVING

    def _want(self, now_s: float, want: Want) -> None:
        snapshot = self._shelf.given(self)
        if snapshot is None or want.number != snapshot.number:
            self._say(now_s, Gone(want.number))
        elif want.index >= snapshot.offer.n_chunks:
            raise Closed(f"asked for chunk {want.index} of {snapshot.offer.n_chunks}")
        elif len(self._wants) >= 2 * OUTSTANDING_MAX:
            raise Closed(f"asked for more than {2 * OUTSTANDING_MAX} chunks at a time")
        else:
            self._wants.append(want)

    # -- Out

    def look(self, now_s: float) -> None:
        """A snapshot may have come to the shelf."""
        if self._asked:
            self._offer(now_s, self._shelf.given(self))

    def _offer(self, now_s: float, snapshot: Snapshot | None) -> None:
        if snapshot is None and not self._shelf.closed:
            return
        self._asked = False
        self._heard_s = now_s
        if snapshot is None:
            self._say(now_s, Behind())
            return
        o = snapshot.offer
        self._say(
            now_s,
            Offering(snapshot.number, o.round, o.step, o.schema, o.layout_hash, o.total_bytes, o.chunk_bytes),
        )

    def _say(self, now_s: float, message: Here | Offering | Gone | Behind) -> None:
        assert self._session is not None
        self._push(now_s, memoryview(self._session.seal(message)))

    def _push(self, now_s: float, data: memoryview) -> None:
        if not self._out:
            self._taken_s = now_s
        self._out.append(data)

    def write(self, now_s: float) -> None:
        """Something can be written: at most one piece, so that newcomers take turns."""
        if not self._out and self._wants and now_s >= self._link.free_s:
            self._next_chunk(now_s)
        left = _PIECE_BYTES
        while self._out and left > 0:
            try:
                n = self.sock.sendmsg(self._first(left))
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed(f"broke off ({error.strerror})") from None
            left -= n
            self._sent(n)
        if not self._out:
            self._flushed(now_s)

    def _first(self, n_bytes: int) -> list[memoryview]:
        """What comes next, ``n_bytes`` at most: a chunk goes with what stands before it, in one call."""
        first = []
        for data in self._out:
            if n_bytes <= 0:
                break
            first.append(data[:n_bytes])
            n_bytes -= len(data)
        return first

    def _sent(self, n_bytes: int) -> None:
        while n_bytes >= len(self._out[0]):
            n_bytes -= len(self._out.popleft())
            if not self._out:
                return
        self._out[0] = self._out[0][n_bytes:]

    def _flushed(self, now_s: float) -> None:
        if self._chunk_bytes:
            self._link.sent(now_s, self._chunk_bytes, delivery_rate(self.sock))
            self.given_bytes += self._chunk_bytes
            self._chunk_bytes = 0
            self._heard_s = now_s
        if self._stage is _Stage.LEAVING:
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                raise Closed("was refused, and is gone") from None

    def _next_chunk(self, now_s: float) -> None:
        assert self._session is not None
        want = self._wants.popleft()
        snapshot = self._shelf.given(self)
        if snapshot is None or snapshot.number != want.number:
            self._say(now_s, Gone(want.number))
            return
        data = self._data(snapshot, want.index)
        head = self._session.seal_chunk(want.number, want.index, snapshot.hash(want.index), len(data))
        self._push(now_s, memoryview(head))
        self._push(now_s, data)
        self._chunk_bytes = len(data)

    def _data(self, snapshot: Snapshot, index: int) -> memoryview:
        """The bytes that are sent for a chunk."""
        return snapshot.chunk(index)

    def close(self) -> None:
        """Give everything back."""
        self._shelf.leave(self)
        self.sock.close()
