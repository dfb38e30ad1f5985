"""TCP connections that carry datagrams, where UDP does not get through.

A socket for datagrams has one of these beside it. Others connect to the same host and port, and it connects
to theirs. By its address a connection is like any place that datagrams come from: that of the end which
listens (``core.address.by_stream``), or, at that end, that from which the other has connected
(``from_stream``). Nobody is asked for a name or a password here: what goes over a connection is sealed and
proves itself, as over UDP, and nothing is answered but what is such a datagram.

**Framing.** Each datagram stands behind its length, as RFC 4571 has it for RTP (section 2):

    4 bytes  "RTG1"; once, from the end that has connected
    2 bytes  length, most significant first
    length   the datagram; 0: there is none (a null packet)

What cannot go on in this way (another first word, a length beyond any datagram) ends the connection: a stream
that has lost its place does not find it again.

**One direction.** What comes may be answered by another way, or not at all. An end that has sent nothing for
``ANSWER_S`` since something came sends a null packet, so that the other one sees a connection that lives.

**Late is lost.** A connection that takes no more keeps one datagram at most. ``room`` says so, and the
caller's messages wait where their deadlines are known. The kernel is asked to keep little that it has not
sent (TCP_NOTSENT_LOWAT).

**Strangers.** At most ``UNPROVEN_MAX`` connections of others are kept from which nothing authentic has come,
the newest ones; each for ``SILENT_S`` at most, and with one unfinished datagram at most.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import sys
from collections import OrderedDict, deque

import numpy as np

from ragtag.core.address import Address, dials, from_stream, unusable, without_stream
from ragtag.core.errors import Error
from ragtag.core.types import Bytes
from ragtag.network.link.udp import bound
from ragtag.protocols.membership.pace import INITIAL_RTO_S

MAGIC = b"RTG1"
LENGTH_BYTES = 2
STREAMS_MAX = 256
"""Connections; beyond, the one that was idle for longest is closed."""
UNPROVEN_MAX, UNPROVEN_BYTES_MAX = 32, 64 << 10
"""Connections of others from which nothing authentic has come, and what each may bring until then: a hello,
or a question of a newcomer, takes less than a kilobyte."""
SILENT_S = 8 * INITIAL_RTO_S
"""A connection on which so long nothing came, although three datagrams were sent or more, is broken; so is
one that is not made by then (TCP's own attempts are 1, 2 and 4 s apart, RFC 6298)."""
ANSWER_S = SILENT_S / 4
"""How long after something came a connection's own end has to send something: the other end waits for it."""
IDLE_S = 60.0
"""A connection that carried nothing for so long is of no use: those in use carry a hello or a ping each 15
s."""
UNSENT_BYTES = 128 << 10
"""What the kernel may keep of what it has not sent: some milliseconds on the lines that fill it."""
BACKLOG = 32
_ASKED = 3
_SHORT_BYTES_MAX = 64 << 10
"""Short datagrams may wait on a connection that takes no more, up to so many bytes; others are lost."""
_READ_BYTES, _PASS_BYTES = 256 << 10, 1 << 20
_AGAIN_FIRST_S, _AGAIN_MAX_S = INITIAL_RTO_S / 8, 16 * INITIAL_RTO_S
_FAILED_MAX = 4096
_NOT_SENT_LOW_WATER = getattr(socket, "TCP_NOTSENT_LOWAT", 0x201 if sys.platform == "darwin" else None)


class Garbled(Exception):
    """What has come over a connection is no sequence of datagrams."""


def framed(data: memoryview | bytes, size: int) -> Bytes:
    """Datagrams of ``size`` bytes each, the last perhaps smaller, behind their lengths; uint8 ``[n]``."""
    flat = np.frombuffer(data, np.uint8)
    whole, rest = divmod(len(flat), size)
    out = np.empty(whole * (LENGTH_BYTES + size) + (LENGTH_BYTES + rest if rest else 0), np.uint8)
    table = out[: whole * (LENGTH_BYTES + size)].reshape(whole, LENGTH_BYTES + size)
    table[:, 0], table[:, 1] = size >> 8, size & 0xFF
    table[:, LENGTH_BYTES:] = flat[: whole * size].reshape(whole, size)
    if rest:
        tail = out[table.size :]
        tail[0], tail[1] = rest >> 8, rest & 0xFF
        tail[LENGTH_BYTES:] = flat[whole * size :]
    return out


class Unframer:
    """Cuts what comes over a connection into datagrams again, however TCP has cut it.

    longest: bytes of the longest datagram that is taken. Of one that has not come whole no more is kept.
    opens: whether the other end has to begin with the magic word.
    """

    def __init__(self, longest: int, opens: bool) -> None:
        self._longest, self._opens = longest, opens
        self._kept = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The datagrams that are whole now. Raises Garbled; what came with that is dropped."""
        data = self._kept + data if self._kept else data
        at, found = 0, list[bytes]()
        if self._opens:
            if data[: len(MAGIC)] != MAGIC[: len(data)]:
                raise Garbled("it does not begin as a peer's does")
            if len(data) < len(MAGIC):
                self._kept = data
                return []
            self._opens, at = False, len(MAGIC)
        while at + LENGTH_BYTES <= len(data):
            size = data[at] << 8 | data[at + 1]
            if size > self._longest:
                raise Garbled(f"it tells of a datagram of {size} bytes")
            until = at + LENGTH_BYTES + size
            if until > len(data):
                break
            if size:
                found.append(data[at + LENGTH_BYTES : until])
            at = until
        self._kept = data[at:]
        return found


class _Stream:
    """One connection. waiting: what is to go out before anything else.

    proven: whether it is of this end's making, or something authentic has come.
    asked, asked_s: datagrams that were sent since anything came, and when the first of them was.
    owes_s: until when something is to be sent, as datagrams have come since anything was.
    used_s: when it carried something last. brought: bytes that have come.
    """

    def __init__(self, sock: socket.socket, address: Address, dialled: bool, longest: int, now_s: float):
        self.sock, self.address, self.dialled = sock, address, dialled
        self.connected = self.proven = not dialled
        self.proven = dialled
        self.began_s = self.used_s = self.asked_s = now_s
        self.owes_s = math.inf
        self.asked = self.brought = 0
        self.waiting = memoryview(MAGIC if dialled else b"")
        self.unframer = Unframer(longest, opens=not dialled)

    @property
    def room(self) -> bool:
        """Whether it takes datagrams now."""
        return self.connected and not self.waiting


class Streams:
    """The connections of one socket, by their addresses; used by one thread at a time, and never waits.

    listens: where others connect (``None``: nowhere). unheard: why nobody can, although it should be so.
    longest: bytes of the longest datagram that is taken.
    came: datagrams that have come, each with its connection's address.
    closed: addresses of connections that have ended. The caller that looks at either clears it.
    refused: connections that were closed as what came over them was no sequence of datagrams, or as there
        were too many.
    """

    def __init__(self, family: int, longest: int, listens: Address | None) -> None:
        self.selector = selectors.DefaultSelector()
        self.came: deque[tuple[Address, bytes]] = deque()
        self.closed: list[Address] = []
        self.refused = 0
        self.unheard = ""
        self._family, self._longest = family, longest
        self._streams: dict[Address, _Stream] = {}
        self._again: OrderedDict[Address, tuple[float, float]] = OrderedDict()
        self._now_s, self._look_s, self._listen_s = 0.0, math.inf, math.inf
        self._listener: socket.socket | None = None
        if listens is not None:
            self._listen(listens)

    def _listen(self, at: Address) -> None:
        try:
            self._listener = bound(socket.SOCK_STREAM, at, again=True)
        except OSError as error:
            self.unheard = str(error) if isinstance(error, Error) else str(error.strerror)
            return
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self.selector.register(self._listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._streams)

    @property
    def due_s(self) -> float:
        """When to call ``turn`` although nothing has come."""
        return min(self._look_s, self._listen_s)

    def close(self) -> None:
        """End all connections. What the kernel has taken still goes out."""
        for stream in self._streams.values():
            stream.sock.close()
        self._streams.clear()
        if self._listener is not None:
            self._listener.close()
        self.selector.close()

    # -- Out

    def room(self, address: Address) -> bool:
        """Whether a connection takes more now; one that is not there, or is yet to be made, takes what is
        short."""
        stream = self._streams.get(address)
        return stream is None or stream.room

    def send(self, data: memoryview | bytes, size: int, address: Address) -> int:
        """Send datagrams of ``size`` bytes each, the last perhaps smaller; how many of all bytes were taken.

        Where there is no connection one is begun, unless one has failed just before, or nobody listens there.
        What finds none is lost.
        """
        stream = self._streams.get(address) or self._dial(address)
        if stream is None:
            return len(data)
        self._sending(stream)
        if not stream.room:
            short = len(data) == size and len(stream.waiting) + size <= _SHORT_BYTES_MAX
            if short:
                stream.waiting = memoryview(bytes(stream.waiting) + framed(data, size).tobytes())
            return len(data) if short or not stream.connected else 0
        out, each = framed(data, size).data, LENGTH_BYTES + size
        try:
            sent = stream.sock.send(out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(stream)
            return len(data)
        until = min(len(out), max(each, -(-sent // each) * each))  # what is begun is finished
        stream.waiting = memoryview(bytes(out[sent:until]))
        self._watch(stream)
        return len(data) if until == len(out) else until // each * size

    def _sending(self, stream: _Stream) -> None:
        stream.used_s, stream.owes_s = self._now_s, math.inf
        if stream.asked == 0:
            stream.asked_s = self._now_s
            self._look_s = min(self._look_s, self._now_s + SILENT_S)
        stream.asked += 1

    def _dial(self, address: Address) -> _Stream | None:
        there = without_stream(address)
        again_s, pause_s = self._again.get(address, (-math.inf, _AGAIN_FIRST_S))
        if self._now_s < again_s or not dials(address) or unusable(there, self._family):
            return None
        self._again[address] = self._now_s + pause_s, min(2 * pause_s, _AGAIN_MAX_S)
        self._again.move_to_end(address)
        if len(self._again) > _FAILED_MAX:
            self._again.popitem(last=False)
        try:
            sock = socket.socket(socket.AF_INET6 if self._family == 6 else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left
            return None
        sock.setblocking(False)
        failed = sock.connect_ex(there)
        if failed not in (0, errno.EINPROGRESS):
            sock.close()
            return None
        return self._add(sock, address, dialled=True)

    def _add(self, sock: socket.socket, address: Address, dialled: bool) -> _Stream:
        with contextlib.suppress(OSError):  # ended already; the next use finds out
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _NOT_SENT_LOW_WATER is not None:
                sock.setsockopt(socket.IPPROTO_TCP, _NOT_SENT_LOW_WATER, UNSENT_BYTES)
        if len(self._streams) >= STREAMS_MAX:
            self.refused += 1
            self._end(min(self._streams.values(), key=lambda stream: stream.used_s))
        stream = self._streams[address] = _Stream(sock, address, dialled, self._longest, self._now_s)
        self.selector.register(sock, selectors.EVENT_READ, stream)
        self._watch(stream)
        self._look_s = min(self._look_s, self._now_s + SILENT_S)
        return stream

    def _watch(self, stream: _Stream) -> None:
        """Have the selector wake for room where something waits for it."""
        wanted = selectors.EVENT_READ
        if stream.waiting or not stream.connected:
            wanted |= selectors.EVENT_WRITE
        if self.selector.get_key(stream.sock).events != wanted:
            self.selector.modify(stream.sock, wanted, stream)

    def _end(self, stream: _Stream) -> None:
        if self._streams.get(stream.address) is stream:
            del self._streams[stream.address]
            self.selector.unregister(stream.sock)
            stream.sock.close()
            self.closed.append(stream.address)

    # -- In

    def strange(self, address: Address) -> bool:
        """Whether a connection is of a stranger's making, and nothing authentic has come over it."""
        stream = self._streams.get(address)
        return stream is not None and not stream.proven

    def proven(self, address: Address) -> None:
        """Something authentic has come over a connection: whoever has made it is no stranger."""
        stream = self._streams.get(address)
        if stream is not None:
            stream.proven = True

    def turn(self, now_s: float) -> None:
        """Close what is of no use any more. now_s: the caller's clock; all times here are its."""
        self._now_s = now_s
        if self._listener is not None and now_s >= self._listen_s:
            self._listen_s = math.inf
            self.selector.register(self._listener, selectors.EVENT_READ)
        if now_s < self._look_s:
            return
        self._look_s = math.inf
        for stream in list(self._streams.values()):
            ends_s = stream.used_s + IDLE_S
            if not (stream.proven and stream.connected):
                ends_s = stream.began_s + SILENT_S
            elif stream.asked >= _ASKED:
                ends_s = stream.asked_s + SILENT_S
            if ends_s <= now_s:
                self._end(stream)
                continue
            if stream.owes_s <= now_s:
                self._answer(stream)
            self._look_s = min(self._look_s, ends_s, stream.owes_s, now_s + SILENT_S)

    def _answer(self, stream: _Stream) -> None:
        """Send a null packet, unless more is on its way out; a stranger is told nothing."""
        stream.owes_s = math.inf
        if stream.proven and stream.room:
            stream.waiting = memoryview(bytes(LENGTH_BYTES))
            self._write(stream)

    def take(self) -> bool:
        """Take what has come, about a megabyte at most, into ``came``; whether nothing was left.

        What else is registered with the selector is not read here. It is looked at again each time.
        """
        left = _PASS_BYTES
        for key, events in self.selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Stream):
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                if events & selectors.EVENT_READ and left > 0:
                    left -= self._read(key.data)
        return left > 0

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(BACKLOG):
            try:
                sock, source = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # no descriptor is left, say: later
                self.selector.unregister(self._listener)
                self._listen_s = self._now_s + INITIAL_RTO_S
                return
            address = from_stream((source[0], source[1]))
            before = self._streams.get(address)
            if before is not None:  # its end was not heard of
                self._end(before)
            sock.setblocking(False)
            strangers = [stream for stream in self._streams.values() if not stream.proven]
            if len(strangers) >= UNPROVEN_MAX:
                self.refused += 1
                self._end(min(strangers, key=lambda stream: stream.began_s))
            self._add(sock, address, dialled=False)

    def _write(self, stream: _Stream) -> None:
        if self._streams.get(stream.address) is not stream:
            return
        if not stream.connected:
            if stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._end(stream)
                return
            stream.connected = True
        try:
            sent = stream.sock.send(stream.waiting) if stream.waiting else 0
        except BlockingIOError:
            return
        except OSError:
            self._end(stream)
            return
        stream.waiting = stream.waiting[sent:]
        self._watch(stream)

    def _read(self, stream: _Stream) -> int:
        """Read once; how many bytes."""
        if self._streams.get(stream.address) is not stream:
            return 0
        try:
            data = stream.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._end(stream)
            return 0
        stream.used_s, stream.asked = self._now_s, 0
        stream.brought += len(data)
        if not stream.proven and stream.brought > UNPROVEN_BYTES_MAX:
            self.refused += 1
            self._end(stream)
            return len(data)
        if stream.dialled:
            self._again.pop(stream.address, None)
        try:
            found = stream.unframer.feed(data)
        except Garbled:
            self.refused += 1
            self._end(stream)
            return len(data)
        if found and stream.owes_s == math.inf:
            stream.owes_s = self._now_s + ANSWER_S
            self._look_s = min(self._look_s, stream.owes_s)
        self.came.extend((stream.address, datagram) for datagram in found)
        return len(data)
