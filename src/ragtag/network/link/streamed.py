"""A UDP link with TCP connections beside it: to the link above these are more addresses.

What is sent to such an address (``core.address.by_stream``) goes over a connection, and what comes over one
is told apart by its size, as in ``udp``. Which of the two a peer is reached by is decided above
(``protocols.relays``).
"""

from __future__ import annotations

import selectors
import time

import numpy as np

from ragtag.core.address import Address, family_of, is_stream
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network.link.link import TRAIN, Carrier, Failures, Received, Wrapped, is_wrapped
from ragtag.network.link.streams import Streams
from ragtag.protocols.relays import FORWARD_BYTES

LONGEST_BYTES = TRAIN * DATAGRAM_BYTES + FORWARD_BYTES


class StreamedLink:
    """``link``, and connections that others make to its host and port, and it makes to theirs.

    listens: whether others can connect.
    """

    routes = None

    def __init__(self, link: Carrier, *, listens: bool = True) -> None:
        self._link = link
        at = link.address
        self.streams = Streams(family_of(at[0]), LONGEST_BYTES, at if listens else None)
        self.streams.selector.register(link.fileno(), selectors.EVENT_READ)
        self._blocked = False

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
        """When a connection is to be looked at."""
        return min(self.streams.due_s, self._link.due_s)

    @property
    def address(self) -> Address:
        """The address of both sockets."""
        return self._link.address

    @property
    def capacity(self) -> int:
        """How many datagrams the link surely keeps until they are read."""
        return self._link.capacity

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent from here to an address; empty: it can."""
        return self._link.unusable(address)

    def fileno(self) -> int:
        """A file descriptor to poll: readable when something has come, or there is room again."""
        return self.streams.selector.fileno()

    def close(self) -> None:
        """End the link and all connections."""
        self.streams.close()
        self._link.close()

    def turn(self, now_s: float) -> None:
        """Close connections that are of no use any more."""
        self.streams.turn(now_s)
        self._link.turn(now_s)

    def ready(self, address: Address) -> bool:
        """Always: all that is sent is in clear."""
        return True

    def room(self, address: Address) -> bool:
        """Whether a connection takes more now."""
        return not is_stream(address) or self.streams.room(address)

    # -- Out

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``, C-contiguous; how many rows left. As ``Link``."""
        if is_stream(address):
            left = self.streams.send(rows.reshape(-1).data, per * DATAGRAM_BYTES, address)
            return left // DATAGRAM_BYTES
        left = self._link.send(rows, address, per)
        self._await_room(left < len(rows))
        return left

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram."""
        if is_stream(address):
            self.streams.send(datagram, len(datagram), address)
        else:
            self._link.send_short(datagram, address)

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        """Send datagrams of ``size`` bytes each; how many bytes left. As ``Carrier``."""
        if is_stream(address):
            return self.streams.send(data, size, address)
        left = self._link.carry(data, size, address)
        self._await_room(left < len(data))
        return left

    def _await_room(self, blocked: bool) -> None:
        """Have the descriptor wake when the socket below has room again: no poll can ask ours for that."""
        if blocked != self._blocked:
            self._blocked = blocked
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
            self.streams.selector.modify(self._link.fileno(), wanted)

    # -- In

    def receive(self) -> Received:
        """Take what has come, by either way."""
        self._await_room(False)  # else it would wake again and again; who is still blocked says so
        drained = self.streams.take()
        got = self._link.receive()
        got.drained = got.drained and drained
        if self.streams.came:
            self._add(got)
        return got

    def _add(self, got: Received) -> None:
        """Put what has come over connections behind what has come by UDP."""
        now_ns = time.time_ns()
        parts: list[Bytes] = [got.table]
        rows, last, open_per = len(got.table), ("", 0), 0
        got.per = got.per or [1] * len(got.sources)
        got.came_ns = got.came_ns or [0] * len(got.sources)
        got.short_came_ns = got.short_came_ns or [0] * len(got.short)
        while self.streams.came:
            address, data = self.streams.came.popleft()
            size = len(data)
            if size % DATAGRAM_BYTES == 0:
                per = size // DATAGRAM_BYTES
                parts.append(np.frombuffer(data, np.uint8).reshape(per, DATAGRAM_BYTES))
                rows += per
                if address == last and per <= open_per:
                    got.sources[-1] = rows, address
                    open_per = per if per == open_per else 0  # a smaller one is the last of its train
                    continue
                got.sources.append((rows, address))
                got.per.append(per)
                got.came_ns.append(now_ns)
                last, open_per = address, per
            elif size == HEADER_BYTES:
                got.short.append(data)
                got.short_sources.append(address)
                got.short_came_ns.append(now_ns)
            elif is_wrapped(size):
                got.wrapped.append(Wrapped(data, size, address, now_ns))
            else:
                got.malformed += 1
        if len(parts) > 1:
            got.table = np.concatenate(parts)
