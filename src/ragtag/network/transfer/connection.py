"""A newcomer's connection to one donor: from bytes to the machine's events."""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from ragtag.core.address import Address
from ragtag.protocols.transfer.frame import Chunk, Reader, Session
from ragtag.protocols.transfer.types import Came, Lost, Offer, Offered, Refused, Told, TransferEvent
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    NONCE_BYTES,
    VERDICT_BYTES,
    Behind,
    Gone,
    Here,
    Message,
    Offering,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
    judged,
    proof,
)

_READS_MAX = 64
_NO_KEY = (
    "does not have this peer's key: the token is of another crew, or of an earlier one of that name; run "
    "`ragtag invite` on one of the crew's machines"
)

Store = Callable[[int, memoryview], None]
"""Takes a chunk's index and bytes."""


class _Stage(Enum):
    CONNECTING = auto()
    GREETING = auto()
    VERDICT = auto()
    OPEN = auto()
    CLOSED = auto()


class Link:
    """One connection. ``Told`` is its first event; after ``Lost`` or ``Refused`` it is closed.

    store: is given each intact chunk before its ``Came``.
    """

    def __init__(self, name: str, address: Address, key: bytes, store: Store) -> None:
        self.name, self.address = name, address
        self._key, self._store = key, store
        self._stage = _Stage.CONNECTING
        self._reader = Reader(GREETING_BYTES)
        self._greeting = self._proof = b""
        self._session: Session | None = None
        self._out: deque[memoryview] = deque()
        self._number = 0
        self._wanted: set[int] = set()
        self.offer: Offer | None = None
        self.sock: socket.socket | None = None
        self._failed: Lost | Refused | None = None
        self._connect()

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = sock.connect_ex(self.address)
        except (OSError, OverflowError) as failed:  # a name that cannot be resolved, a port out of range
            sock.close()
            self._stage = _Stage.CLOSED
            self._failed = Refused(self.name, f"{self.address[0]}:{self.address[1]} is no address ({failed})")
            return
        self.sock = sock
        if error not in (0, errno.EINPROGRESS):
            self._failed = self._fail(error)

    def opened(self) -> list[TransferEvent]:
        """What came of connecting, where that is known at once."""
        return [] if self._failed is None else [self._failed]

    @property
    def interest(self) -> int:
        """Which of readable and writable to wait for."""
        if self._stage is _Stage.CONNECTING:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    # -- Out

    def ask(self, round_: int) -> None:
        """Ask for a snapshot."""
        self._say(Wanted(round_))

    def fetch(self, index: int) -> None:
        """Ask for a chunk of what was offered."""
        self._wanted.add(index)
        self._say(Want(self._number, index))

    def close(self) -> None:
        """The connection ends."""
        self._stage = _Stage.CLOSED
        if self.sock is not None:
            self.sock.close()

    def _say(self, message: Message) -> None:
        if self._session is not None and self._stage is _Stage.OPEN:
            self._out.append(memoryview(self._session.seal(message)))

    # -- In

    def ready(self, mask: int) -> list[TransferEvent]:
        """The socket is ready: what happened."""
        events: list[TransferEvent] = []
        try:
            if self._stage is _Stage.CONNECTING:
                self._connected()
            if mask & selectors.EVENT_WRITE:
                self.flush()
            if mask & selectors.EVENT_READ:
                self._read(events)
        except OSError as error:
            events.append(self._fail(error.errno or errno.EIO))
        except WireError as error:
            self.close()
            events.append(Refused(self.name, str(error)))
        except _Ended as ended:
            self.close()
            events.append(Lost(self.name, str(ended)))
        except _Turned as turned:
            self.close()
            events.append(Refused(self.name, str(turned)))
        return events

    def _connected(self) -> None:
        assert self.sock is not None
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self._stage = _Stage.GREETING

    def _fail(self, error: int) -> Lost | Refused:
        self.close()
        if error == errno.ECONNREFUSED:
            host, port = self.address
            return Refused(
                self.name, f"nobody listens at {host}:{port}; that peer has ended, or has no donor"
            )
        return Lost(self.name, f"the connection broke ({os.strerror(error)})")

    def flush(self) -> None:
        """Send what is to be sent."""
        assert self.sock is not None
        while self._out:
            try:
                n = self.sock.send(self._out[0])
            except BlockingIOError:
                return
            if n < len(self._out[0]):
                self._out[0] = self._out[0][n:]
            else:
                self._out.popleft()

    def _read(self, events: list[TransferEvent]) -> None:
        assert self.sock is not None
        for _ in range(_READS_MAX):
            try:
                n = self.sock.recv_into(self._reader.space())
            except BlockingIOError:
                return
            if n == 0:
                raise _Ended("ended the connection")
            if self._session is None:
                self._shake(n)
                continue
            frame = self._reader.filled(n)
            if frame is not None:
                self._take(self._session.open(frame), events)

    def _shake(self, n: int) -> None:
        """``n`` bytes of the handshake came."""
        greeting = self._stage is _Stage.GREETING
        part = self._reader.part(n, VERDICT_BYTES if greeting else 0)
        if part is None:
            return
        if greeting:
            self._greeting = part
            self._proof = proof(self._key, part, secrets.token_bytes(NONCE_BYTES))
            self._stage = _Stage.VERDICT
            self._out.append(memoryview(self._proof))
            self.flush()
            return
        verdict = judged(self._key, self._greeting, self._proof, part)
        if verdict is Verdict.BUSY:
            raise _Ended("is busy with other newcomers")
        if verdict is not Verdict.WELCOME:
            raise _Turned(_NO_KEY if verdict is Verdict.KEY else "has another version of Ragtag")
        self._session = Session(self._key, self._greeting, self._proof, donor=False)
        self._stage = _Stage.OPEN
        self._say(Status())
        self.flush()

    def _take(self, message: Message | Chunk, events: list[TransferEvent]) -> None:
        if isinstance(message, Chunk):
            events.append(self._chunk(message))
        elif isinstance(message, Here):
            events.append(Told(self.name, message.round, message.round_s))
        elif isinstance(message, Offering):
            self.offer, self._number = message.offer(), message.number
            self._reader.chunk_bytes_max = message.chunk_bytes
            events.append(Offered(self.name, self.offer))
        elif isinstance(message, Gone):
            raise _Ended("does not have its snapshot any more")
        elif isinstance(message, Behind):
            raise _Turned("catches up with the crew itself")
        else:
            raise WireError(f"sent {type(message).__name__}, which only newcomers send")

    def _chunk(self, chunk: Chunk) -> Came:
        if self.offer is None or chunk.number != self._number or chunk.index not in self._wanted:
            raise WireError(f"sent chunk {chunk.index}, which it was not asked for")
        first, until = self.offer.span(chunk.index)
        if len(chunk.data) != until - first:
            raise WireError(f"sent {len(chunk.data)} bytes as a chunk of {until - first}")
        self._wanted.remove(chunk.index)
        if chunk.intact:
            self._store(chunk.index, chunk.data)
        return Came(self.name, chunk.index, len(chunk.data), chunk.intact)


class _Ended(Exception):
    """The donor may be tried again."""


class _Turned(Exception):
    """The donor will not help."""
