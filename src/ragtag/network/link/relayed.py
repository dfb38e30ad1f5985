"""A link whose datagrams may go over TCP, or through other members: it stands on one that has sockets, below
what seals.

``protocols.relays`` decides; here is what moves. To the link above a peer has one address, that of its card,
whatever way its datagrams go or come. What is to be relayed bears a head of 16 bytes. Who relays sends trains
on as they came, without a copy for each datagram; where its socket has no room they are lost, as in any full
queue on the way.
"""

from __future__ import annotations

import numpy as np

from ragtag.core.address import Address
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network.link.link import TRAIN, Carrier, Failures, Received, TooLarge, Wrapped
from ragtag.network.link.streams import Streams
from ragtag.protocols.relays import FORWARD, FORWARD_BYTES, HELLO, HERE, Out, Routes

_MESSAGES = (HELLO, HERE)


class RelayedLink:
    """``link``, by the ways that ``routes`` knows. What is sent over it must be sealed already.

    streams: the connections of ``link`` (``None``: it has none).
    """

    def __init__(self, link: Carrier, routes: Routes, streams: Streams | None = None) -> None:
        self._link, self.routes, self._streams = link, routes, streams
        self._now_s = 0.0
        self._out = np.zeros(TRAIN * (DATAGRAM_BYTES + FORWARD_BYTES), np.uint8)

    @property
    def sealed(self) -> bool:
        """As the link below."""
        return self._link.sealed

    @property
    def failures(self) -> Failures:
        """What could not be sent."""
        return self._link.failures

    @property
    def due_s(self) -> float:
        """When a hello is to be sent."""
        return min(self.routes.due_s, self._link.due_s)

    @property
    def address(self) -> Address:
        """The address of the socket below."""
        return self._link.address

    @property
    def capacity(self) -> int:
        """How many datagrams the link surely keeps until they are read."""
        return self._link.capacity

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent from here to an address; empty: it can."""
        return self._link.unusable(address)

    def fileno(self) -> int:
        """A file descriptor to poll."""
        return self._link.fileno()

    def close(self) -> None:
        """End the link."""
        self._link.close()

    def turn(self, now_s: float) -> None:
        """Say hello where that is due."""
        self._now_s = now_s
        self._link.turn(now_s)
        if self._streams is not None:
            for address in self._streams.closed:
                self.routes.closed(now_s, address)
            self._streams.closed.clear()
        self._say(self.routes.turn(now_s))

    def ready(self, address: Address) -> bool:
        """Always: what finds no way is lost."""
        return True

    def room(self, address: Address) -> bool:
        """Whether the connection that what is sent to an address goes over takes more now."""
        return self._streams is None or self._link.room(self.routes.to(self._now_s, address)[0])

    # -- Out

    def _say(self, messages: list[Out]) -> None:
        for data, address in messages:
            if len(data) == HEADER_BYTES:
                self._link.send_short(data, address)
            else:
                self._link.carry(data, len(data), address)

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``, C-contiguous, directly or with heads; returns how many rows left.

        Raises TooLarge: the first hop takes no such datagrams.
        """
        hop, head = self.routes.to(self._now_s, address)
        if not head:
            return self._link.send(rows, hop, per)
        size, train, sent = per * DATAGRAM_BYTES + FORWARD_BYTES, TRAIN - TRAIN % per, 0
        while sent < len(rows):
            part = rows[sent : sent + train]
            data = self._wrapped(part, per, head)
            try:
                left = self._link.carry(data, size, hop)
            except TooLarge as error:
                raise TooLarge(sent + error.left // size * per) from None
            if left < len(data):
                return sent + left // size * per
            sent += len(part)
        return sent

    def _wrapped(self, rows: Bytes, per: int, head: bytes) -> memoryview:
        """Datagrams of ``per`` rows each, with heads; the last may have fewer rows."""
        whole, size = len(rows) // per, per * DATAGRAM_BYTES + FORWARD_BYTES
        first, mark = rows[: whole * per].reshape(whole, per * DATAGRAM_BYTES), np.frombuffer(head, np.uint8)
        table = self._out[: whole * size].reshape(whole, size)
        table[:, :FORWARD_BYTES], table[:, FORWARD_BYTES:] = mark, first
        until, rest = whole * size, rows[whole * per :].reshape(-1)
        if len(rest):
            self._out[until : until + FORWARD_BYTES] = mark
            self._out[until + FORWARD_BYTES : until + FORWARD_BYTES + len(rest)] = rest
            until += FORWARD_BYTES + len(rest)
        return self._out[:until].data

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram, directly or with a head."""
        hop, head = self.routes.to(self._now_s, address)
        if head:
            self._link.carry(head + datagram, len(head) + len(datagram), hop)
        else:
            self._link.send_short(datagram, hop)

    # -- In

    def receive(self) -> Received:
        """Take what has come for this peer, and pass on what has come for others."""
        got = self._link.receive()
        if any(data[0] in _MESSAGES for data in got.short):
            self._hear(got)
        source = self.routes.source
        got.sources = [(end, source(address)) for end, address in got.sources]
        got.short_sources = [source(address) for address in got.short_sources]
        if got.wrapped:
            self._unwrap(got)
        return got

    def _hear(self, got: Received) -> None:
        """Answer hellos among the header-only datagrams, and take them out."""
        stamps = got.short_came_ns or [0] * len(got.short)
        kept = []
        for data, source, came_ns in zip(got.short, got.short_sources, stamps, strict=True):
            if data[0] in _MESSAGES:
                self._say(self.routes.hear(self._now_s, data, source))
                if self._streams is not None and self.routes.knows(source):
                    self._streams.proven(source)
            else:
                kept.append((data, source, came_ns))
        got.short = [data for data, _, _ in kept]
        got.short_sources = [source for _, source, _ in kept]
        got.short_came_ns = [came_ns for _, _, came_ns in kept]

    def _unwrap(self, got: Received) -> None:
        tables: list[Bytes] = [got.table]
        rows = len(got.table)
        came_ns = got.came_ns or [0] * len(got.sources)
        per = got.per or [1] * len(got.sources)
        short_came_ns = got.short_came_ns or [0] * len(got.short)
        for train in _of_one_head(got.wrapped):
            head = train.data[:FORWARD_BYTES]
            if head[0] != FORWARD:
                got.malformed += 1
                continue
            if not self.routes.for_me(head):
                self._pass_on(train, head)
                continue
            found = self.routes.delivered(head, train.source)
            if found is None:
                continue
            address, relay = found
            if train.size == FORWARD_BYTES + HEADER_BYTES:
                for at in range(FORWARD_BYTES, len(train.data), train.size):
                    data = train.data[at : at + HEADER_BYTES]
                    if data[0] in _MESSAGES:
                        self._say(self.routes.hear(self._now_s, data, train.source, relay))
                    else:
                        got.short.append(data)
                        got.short_sources.append(address)
                        short_came_ns.append(train.came_ns)
                continue
            inside = _rows_of(train)
            tables.append(inside)
            rows += len(inside)
            got.sources.append((rows, address))
            came_ns.append(train.came_ns)
            per.append(train.size // DATAGRAM_BYTES)
        if len(tables) > 1:
            got.table = np.concatenate(tables)
        got.came_ns, got.per, got.short_came_ns = came_ns, per, short_came_ns
        got.wrapped = []

    def _pass_on(self, train: Wrapped, head: bytes) -> None:
        to = self.routes.forward(self._now_s, head, train.source, len(train.data))
        if to is None:
            return
        try:
            left = self._link.carry(train.data, train.size, to)
        except TooLarge as error:
            left = error.left
        if left < len(train.data):
            self.routes.refused["no room to relay"] += 1


def _of_one_head(trains: list[Wrapped]) -> list[Wrapped]:
    """Trains of datagrams of which all have one head; mostly they do already."""
    found = []
    for train in trains:
        data, size = train.data, train.size
        head = data[:FORWARD_BYTES]
        parts = range(0, len(data), size)
        tail = len(data) % size
        short_tail = tail == FORWARD_BYTES + HEADER_BYTES != size
        if not short_tail and all(data[at : at + FORWARD_BYTES] == head for at in parts):
            found.append(train)
        else:
            found += [
                Wrapped(part, len(part), train.source, train.came_ns)
                for part in (data[at : at + size] for at in parts)
            ]
    return found


def _rows_of(train: Wrapped) -> Bytes:
    """The packets of a train, uint8 ``[k, 1152]``, without heads."""
    data = np.frombuffer(train.data, np.uint8)
    whole = len(data) // train.size
    first = data[: whole * train.size].reshape(whole, train.size)[:, FORWARD_BYTES:]
    rows = first.reshape(-1, DATAGRAM_BYTES)
    rest = data[whole * train.size + FORWARD_BYTES :]
    return np.concatenate([rows, rest.reshape(-1, DATAGRAM_BYTES)]) if len(rest) else rows
