"""One newcomer's connection at its donor: what a newcomer may ask, and how long it may take."""

from __future__ import annotations

import math
import secrets
import selectors
import socket
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from ragtag.network.transfer.budget import LinkBudget, delivery_rate
from ragtag.protocols.sealing.noise import KEY_BYTES, KeyPair
from ragtag.protocols.transfer.frame import (
    CONTROL_BYTES_MAX,
    FRAME_BYTES_MAX,
    PIECE_BYTES,
    FrameSeal,
    Reader,
)
from ragtag.protocols.transfer.snapshots import Shelf, Snapshot
from ragtag.protocols.transfer.types import OUTSTANDING_MAX
from ragtag.protocols.transfer.wire import (
    NONCE_BYTES,
    Behind,
    FrameKeys,
    Gone,
    Here,
    Offering,
    Prover,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
    answered,
    greeting,
    hello_bytes,
)

_WRITE_BYTES = FRAME_BYTES_MAX + CONTROL_BYTES_MAX
_READ_BYTES = 512  # several requests: one system call takes them all, as in sending
_ANSWERS_MAX = 64
_PROVEN_S = 1.0
"""So often a newcomer's person is looked at again while chunks go out. A look takes .2 ms of a core, so all
of them a five-thousandth of it. A revocation takes tenths of a second to come here, so looking more often
would hardly keep more of a state from one that is put out."""


@dataclass(frozen=True, slots=True)
class DonorLimits:
    """What a donor spends at most. Times bound strangers and peers that hang, not peers that are slow.

    strangers_max: connections that have not shown the key. One more, and the oldest of them gives way.
    members_max: newcomers served at once. One more, and one gives way of the host that has the most of them,
        where that is two more than its own has: no host holds all places.
    handshake_s: how long a stranger has to show the key.
    idle_s: how long a newcomer may say nothing when it is its turn, and how long one frame may take.
    chunk_s: how long a newcomer has to take one chunk, and at least has for a snapshot that others wait for.
    ask_s: how long a newcomer may wait for a snapshot.
    keep_s: how long to keep a snapshot that nobody reads.
    cpu_share: the share of one core, for all that the thread does. The trainer loses up to 1.4 times as much,
        as another thread uses its caches and the interpreter (``benchmarks/transfer.py``).
    cpu_burst_s: seconds of a core used at once.
    link_share: the share of the fastest path's rate, for all newcomers together.
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
    """One connection. Its methods raise ``Closed`` when it is over.

    A newcomer asks once for each thing: how far the donor is, a snapshot, each of its chunks. So a connection
    ends, however long a newcomer would hold its place.

    link: the budget that all newcomers share.
    persons: in a crew that takes persons.
    host: from where it comes, as the server tells.
    given_bytes: bytes of chunks that have left.
    watched: the events for which the server's selector watches the socket; 0: none.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        shelf: Shelf,
        limits: DonorLimits,
        link: LinkBudget,
        now_s: float,
        persons: Prover | None = None,
    ) -> None:
        self.sock, self.host = sock, ""
        self._key, self._shelf, self._limits, self._persons = key, shelf, limits, persons
        self._stage = _Stage.STRANGER
        self._greeting = greeting(secrets.token_bytes(NONCE_BYTES))
        self._reader = Reader(hello_bytes(persons))
        self._session: FrameSeal | None = None
        self._keys: FrameKeys | None = None
        self._out: deque[memoryview] = deque([memoryview(self._greeting)])
        self._wants: deque[Want] = deque()
        self._asked = False
        self._once: set[object] = set()
        self._in_vain = 0
        self._front_s = now_s  # since when the chunk that it waits for is the next one
        self._link = link
        self._chunk: memoryview | None = None  # what is being sent; ``None``: no chunk is
        self._cut = 0  # so many of its bytes are encrypted
        self._piece = memoryview(b"")  # memory for one encrypted piece of it
        self.began_s = self._heard_s = self._taken_s = self._proven_s = now_s
        self._frame_s = math.inf
        self.given_bytes = 0
        self.watched = 0

    @property
    def member(self) -> bool:
        """Whether the other side has shown the key."""
        return self._stage is _Stage.MEMBER

    @property
    def _writing(self) -> bool:
        """Whether something is on its way out."""
        return bool(self._out) or self._chunk is not None

    # -- What to wait for

    def interest(self, now_s: float) -> int:
        """Which of readable and writable to wait for; 0: neither."""
        reading = len(self._out) < _ANSWERS_MAX
        writing = self._writing or (self._wants and now_s >= self._link.free_s)
        return (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if writing else 0)

    def wakes_s(self) -> float:
        """When the server must look at it again although nothing came."""
        ready_s = self._link.free_s if self._wants and not self._writing else math.inf
        return min(self.ends_s(), ready_s)

    def ends_s(self) -> float:
        """When the server cuts the connection off, unless something comes or leaves before."""
        if self._stage is not _Stage.MEMBER:
            return self.began_s + self._limits.handshake_s
        ends_s = self._frame_s + self._limits.idle_s
        if self._writing:
            return min(ends_s, self._taken_s + self._limits.chunk_s)
        if self._asked:
            return min(ends_s, self._heard_s + self._limits.ask_s)
        return math.inf if self._wants else min(ends_s, self._heard_s + self._limits.idle_s)

    # -- In

    def read(self, now_s: float, round_s: float, *, room: bool) -> None:
        """Take what can be read.

        round_s: how long a round of the trainer takes, for a newcomer that asks.
        room: whether the donor can serve one more newcomer.
        """
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
            hello = self._reader.part(n, 0)
            if hello is not None:
                self._answer(now_s, hello, room)
            return
        frame = self._reader.filled(n)
        if frame is None:
            self._frame_s = min(self._frame_s, now_s)
            return
        self._frame_s, self._heard_s = math.inf, now_s
        message = self._session.open(frame)
        if isinstance(message, Status):
            self._first_time(Status)
            self._say(now_s, Behind() if self._shelf.closed else Here(self._shelf.round, round_s))
        elif isinstance(message, Wanted):
            self._require_person(now_s)
            self._first_time(Wanted)
            self._asked = True
            self._wants.clear()
            self._offer(now_s, self._shelf.ask(self, message.round))
        elif isinstance(message, Want):
            self._want(now_s, message)
        else:
            raise Closed(f"sent {type(message).__name__}, which only donors send")

    def _answer(self, now_s: float, hello: bytes, room: bool) -> None:
        ephemeral = KeyPair(secrets.token_bytes(KEY_BYTES))
        data, keys = answered(self._key, self._greeting, hello, ephemeral, room=room, persons=self._persons)
        self._out.append(memoryview(data))
        self._taken_s = self._heard_s = now_s
        if isinstance(keys, Verdict):
            self._stage = _Stage.LEAVING
        else:
            self._stage = _Stage.MEMBER
            self._session, self._keys, self._proven_s = FrameSeal(keys), keys, now_s

    def _require_person(self, now_s: float) -> None:
        """A pass may end, or be revoked, while its holder's connection is open."""
        self._proven_s, keys = now_s, self._keys
        if self._persons is None or keys is None or self._persons.proven(keys.what, keys.proof):
            return
        raise Closed("its person may not be in the crew any more")

    def _want(self, now_s: float, want: Want) -> None:
        snapshot = self._shelf.given(self)
        if snapshot is None or want.number != snapshot.number:
            self._in_vain += 1
            if self._in_vain > 2 * OUTSTANDING_MAX:  # it has been told that the snapshot is gone
                raise Closed("asked on for a snapshot that is gone")
            self._say(now_s, Gone(want.number))
        elif want.index >= snapshot.offer.n_chunks:
            raise Closed(f"asked for chunk {want.index} of {snapshot.offer.n_chunks}")
        elif len(self._wants) >= 2 * OUTSTANDING_MAX:
            raise Closed(f"asked for more than {2 * OUTSTANDING_MAX} chunks at a time")
        else:
            self._first_time(want)
            if not self._wants and self._chunk is None:
                self._front_s = now_s
            self._wants.append(want)

    def _first_time(self, asked: object) -> None:
        if asked in self._once:
            raise Closed("asked twice for the same")
        self._once.add(asked)

    # -- Out

    def look(self, now_s: float) -> None:
        """A snapshot may have come to the shelf: offer it to a newcomer that waits for one."""
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
        self._say(now_s, Offering.of(snapshot.number, snapshot.offer))

    def _say(self, now_s: float, message: Here | Offering | Gone | Behind) -> None:
        assert self._session is not None
        self._push(now_s, memoryview(self._session.seal(message)))

    def _push(self, now_s: float, data: memoryview) -> None:
        if not self._writing:
            self._taken_s = now_s
        self._out.append(data)

    def write(self, now_s: float) -> None:
        """Encrypt and write one piece at most, so that newcomers take turns."""
        if (self._chunk is not None or self._wants) and now_s - self._proven_s >= _PROVEN_S:
            self._require_person(now_s)
        if not self._writing and self._wants and now_s >= self._link.free_s:
            self._next_chunk(now_s)
        elif self._chunk is not None and not self._out:
            self._next_piece()
        left = _WRITE_BYTES
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
        """The next ``n_bytes`` at most, for one system call: a piece goes with what stands before it."""
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
        if self._chunk is not None and self._cut == len(self._chunk):
            self._link.sent(now_s, len(self._chunk), delivery_rate(self.sock))
            self._shelf.took(now_s - self._front_s)
            self._front_s = now_s
            self.given_bytes += len(self._chunk)
            self._chunk = None
            self._heard_s = now_s
        if self._stage is _Stage.LEAVING:
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                raise Closed("was refused, and is gone") from None

    def _next_chunk(self, now_s: float) -> None:
        assert self._session is not None
        want = self._wants[0]
        snapshot = self._shelf.given(self)
        if snapshot is None or snapshot.number != want.number:
            self._wants.popleft()
            self._say(now_s, Gone(want.number))
            return
        digest = snapshot.hash(want.index, PIECE_BYTES)
        if digest is None:
            return  # go on in the next turn
        self._wants.popleft()
        data = self._data(snapshot, want.index)
        self._push(now_s, memoryview(self._session.seal_chunk(want.number, want.index, digest, len(data))))
        self._chunk, self._cut = data, 0
        self._next_piece()

    def _next_piece(self) -> None:
        """Encrypt the next piece. The one before it has left, so its memory is free."""
        assert self._session is not None and self._chunk is not None
        piece = self._chunk[self._cut : self._cut + PIECE_BYTES]
        if not self._piece:
            self._piece = memoryview(bytearray(FRAME_BYTES_MAX))
        self._out.append(self._session.seal_piece(piece, self._piece))
        self._cut += len(piece)

    def _data(self, snapshot: Snapshot, index: int) -> memoryview:
        """The bytes to send for a chunk. Tests override it to damage them."""
        return snapshot.chunk(index)

    def close(self) -> None:
        """Leave the shelf, and close the socket."""
        self._shelf.leave(self)
        self.sock.close()
