"""A newcomer fetches the training state from several donors at once.

A ``Line`` is a connection to one donor. It turns bytes into events of the machine in ``protocols.transfer``,
which decides what to ask of which donor.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ragtag.core.address import Address
from ragtag.network.link.sealed import fast_suite
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.transfer.frame import Chunk, FrameSeal, Reader
from ragtag.protocols.transfer.machine import Transfer
from ragtag.protocols.transfer.types import (
    BLOB_BYTES_MAX,
    Arm,
    Ask,
    Came,
    Connect,
    Drop,
    Expired,
    Fetch,
    Fetched,
    Finished,
    GaveUp,
    Lost,
    Need,
    Offer,
    Offered,
    Refused,
    Start,
    Told,
    TransferEffect,
    TransferError,
    TransferEvent,
)
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    KEY_BYTES,
    VERDICT_BYTES,
    Behind,
    Gone,
    Here,
    Message,
    NewcomerEnd,
    Offering,
    Prover,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
)

_READS_MAX = 64
_NO_KEY = (
    "does not have this peer's key: the token is of another crew, or of an earlier one of that name; run "
    "`ragtag invite` on one of the crew's machines"
)

Store = Callable[[int, memoryview], None]
"""Keeps a chunk, given its index and bytes."""


class _Stage(Enum):
    CONNECTING = auto()
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSED = auto()


class Line:
    """A connection to one donor.

    ``Told`` is its first event, unless connecting fails. After ``Lost`` or ``Refused`` it is closed.

    store: called with each intact chunk before its ``Came``.
    offer: the snapshot that the donor has offered; ``None``: none yet.
    sock: the socket; ``None``: the address is no address.
    """

    def __init__(
        self, name: str, address: Address, key: bytes, store: Store, persons: Prover | None = None
    ) -> None:
        self.name, self.address = name, address
        self._key, self._store, self._persons = key, store, persons
        self._stage = _Stage.CONNECTING
        self._reader = Reader(GREETING_BYTES)
        self._hello: NewcomerEnd | None = None
        self._session: FrameSeal | None = None
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
        """The failure to connect, where that is known at once; else nothing."""
        return [] if self._failed is None else [self._failed]

    @property
    def interest(self) -> int:
        """Which of readable and writable to wait for."""
        if self._stage is _Stage.CONNECTING:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    # -- Out

    def ask(self, round_: int) -> None:
        """Ask for a snapshot of a round or of the first after it."""
        self._say(Wanted(round_))

    def fetch(self, index: int) -> None:
        """Ask for a chunk of what was offered."""
        self._wanted.add(index)
        self._say(Want(self._number, index))

    def close(self) -> None:
        """End the connection; no more is said or read."""
        self._stage = _Stage.CLOSED
        if self.sock is not None:
            self.sock.close()

    def _say(self, message: Message) -> None:
        if self._session is not None and self._stage is _Stage.OPEN:
            self._out.append(memoryview(self._session.seal(message)))

    # -- In

    def ready(self, mask: int) -> list[TransferEvent]:
        """Read and write as the selector's mask says; returns what happened."""
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
        self._stage = _Stage.HANDSHAKE

    def _fail(self, error: int) -> Lost | Refused:
        self.close()
        if error == errno.ECONNREFUSED:
            host, port = self.address
            return Refused(
                self.name, f"nobody listens at {host}:{port}; that peer has ended, or has no donor"
            )
        return Lost(self.name, f"the connection broke ({os.strerror(error)})")

    def flush(self) -> None:
        """Send as much of what waits as the socket takes."""
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
        part = self._reader.part(n, VERDICT_BYTES if self._hello is None else 0)
        if part is None:
            return
        if self._hello is None:
            ephemeral = KeyPair(secrets.token_bytes(KEY_BYTES))
            self._hello = NewcomerEnd(self._key, part, fast_suite(), ephemeral, self._persons)
            self._out.append(memoryview(self._hello.data))
            self.flush()
            return
        keys = self._hello.judged(part)
        if keys is Verdict.BUSY:
            raise _Ended("is busy with other newcomers")
        if keys is Verdict.PERSON:
            raise _Turned("gives it to none whose token has ended or was revoked, or whose clock is wrong")
        if isinstance(keys, Verdict):
            raise _Turned(_NO_KEY if keys is Verdict.KEY else "has another version of Ragtag")
        self._session = FrameSeal(keys)
        self._stage = _Stage.OPEN
        self._say(Status())
        self.flush()

    def _take(self, message: Message | Chunk | None, events: list[TransferEvent]) -> None:
        if message is None:
            return  # part of a chunk
        if isinstance(message, Chunk):
            events.append(self._chunk(message))
        elif isinstance(message, Here):
            events.append(Told(self.name, message.round, message.round_s))
        elif isinstance(message, Offering):
            self.offer, self._number = message.offer(), message.number
            self._reader.takes_chunks = True
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


Note = Callable[[str, str, str], None]
"""Called with what happened, the donor's name, and a detail."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A peer that may have the state.

    name: the peer's name.
    address: the IP address and the TCP port at which it gives the state away.
    """

    name: str
    address: Address


def fetch_state(
    key: bytes,
    donors: Sequence[Donor],
    *,
    schema: int,
    deadline_s: float,
    layout_hash_of: Callable[[bytearray], int] | None = None,
    on_note: Note | None = None,
    agreed_min: int = 1,
    blob_bytes_max: int = BLOB_BYTES_MAX,
    persons: Prover | None = None,
) -> Fetched:
    """Get the state from several donors at once, in this thread, within ``deadline_s`` seconds.

    key: the crew's, 32 bytes.
    donors: three to eight are a good number, since each one that is asked takes a snapshot.
    schema: the hash of this peer's model.
    layout_hash_of: computes from the whole blob the layout hash that donors have told; ``None``: unchecked.
    on_note: called with (what, donor, detail). what: ``asked``, ``agreed`` (on a round), ``lost`` or
        ``dropped``.
    agreed_min: see ``protocols.transfer.types``.
    blob_bytes_max: a few times this peer's own state, so that a donor gone mad cannot fill its memory.
    persons: in a crew that takes persons, whose process this is.

    Raises:
        TransferError: no donor could complete it; the message says why and what to do.
        ValueError: the key has not 32 bytes, the deadline is not above 0, a donor is named twice, or there
            is none.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"fetch: the crew's key has {len(key)} bytes; it must have {KEY_BYTES}")
    if not deadline_s > 0:
        raise ValueError(f"fetch: the deadline is {deadline_s} s; it must be above 0")
    machine = Transfer([donor.name for donor in donors], Need(schema, agreed_min, blob_bytes_max))
    driver = _Fetch(key, donors, machine, on_note, persons)
    try:
        ended = driver.run(deadline_s)
    finally:
        driver.close()
    outcome = ended.outcome
    if isinstance(ended, GaveUp):
        raise TransferError(ended.reason, outcome)
    told = None if outcome.offer is None else outcome.offer.layout_hash
    if layout_hash_of is not None and layout_hash_of(driver.blob) != told:
        raise TransferError(
            "the state that came is not built as its donors said (its layout hash differs); run the same "
            "version of Ragtag and of the script on all machines",
            outcome,
        )
    return Fetched.of(outcome, driver.blob)


class _Fetch:
    """Runs the transfer machine over a line to each donor."""

    def __init__(
        self,
        key: bytes,
        donors: Sequence[Donor],
        machine: Transfer,
        on_note: Note | None,
        persons: Prover | None,
    ) -> None:
        self._key, self._machine, self._persons = key, machine, persons
        self._addresses = {donor.name: donor.address for donor in donors}
        self._note = on_note if on_note is not None else lambda what, donor, detail: None
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, Line] = {}
        self._watched: dict[str, int] = {}
        self._wake_s = math.inf
        self._events: deque[TransferEvent] = deque()
        self._ended: Finished | GaveUp | None = None
        self._chunk_bytes = 0
        self.blob = bytearray()

    def run(self, deadline_s: float) -> Finished | GaveUp:
        """Run until the machine has finished or given up; it does so by the deadline."""
        self._events.append(Start(time.monotonic() + deadline_s))
        while True:
            self._work()
            if self._ended is not None:
                return self._ended
            self._watch()
            timeout_s = max(0.0, self._wake_s - time.monotonic())
            for selected, mask in self._selector.select(timeout_s):
                link: Line = selected.data
                if self._links.get(link.name) is link:
                    self._events += link.ready(mask)
                    self._work()
            if time.monotonic() >= self._wake_s:
                self._wake_s = math.inf
                self._events.append(Expired())

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._selector.close()

    def _work(self) -> None:
        """Step the machine with the events that wait, and carry out its effects."""
        while self._events and self._ended is None:
            event = self._events.popleft()
            if isinstance(event, Lost | Refused):
                self._note("lost", event.donor, event.why)
                self._forget(event.donor)
            for effect in self._machine.step(time.monotonic(), event):
                self._apply(effect)

    def _apply(self, effect: TransferEffect) -> None:
        if isinstance(effect, Finished | GaveUp):
            self._ended = effect
        elif isinstance(effect, Arm):
            self._wake_s = min(self._wake_s, effect.at_s)
        elif isinstance(effect, Connect):
            at = self._addresses[effect.donor]
            link = Line(effect.donor, at, self._key, self._store, self._persons)
            self._links[effect.donor] = link
            self._events += link.opened()
        elif isinstance(effect, Ask):
            self._note("asked", effect.donor, f"round {effect.round}")
            self._links[effect.donor].ask(effect.round)
        elif isinstance(effect, Fetch):
            self._fetch(self._links[effect.donor], effect.index)
        elif isinstance(effect, Drop):
            self._note("dropped", effect.donor, effect.why)
            self._forget(effect.donor)

    def _fetch(self, link: Line, index: int) -> None:
        offer = link.offer
        assert offer is not None
        if not self._chunk_bytes:
            try:
                self.blob = bytearray(offer.total_bytes)
            except MemoryError:
                raise TransferError(
                    f"the state has {offer.total_bytes} bytes, for which this machine has not enough memory"
                ) from None
            self._chunk_bytes = offer.chunk_bytes
            self._note("agreed", link.name, f"round {offer.round}, {offer.total_bytes} bytes")
        link.fetch(index)

    def _store(self, index: int, data: memoryview) -> None:
        first = index * self._chunk_bytes
        self.blob[first : first + len(data)] = data

    def _forget(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is None:
            return
        if self._watched.pop(name, 0) and link.sock is not None:
            self._selector.unregister(link.sock)
        link.close()

    def _watch(self) -> None:
        for name, link in self._links.items():
            before = self._watched.get(name, 0)
            if link.sock is None or before == link.interest:
                continue
            if before:
                self._selector.modify(link.sock, link.interest, link)
            else:
                self._selector.register(link.sock, link.interest, link)
            self._watched[name] = link.interest
