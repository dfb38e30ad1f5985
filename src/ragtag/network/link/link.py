"""What Inbox and Outbox stand on: trains of datagrams out, trains of datagrams in.

A link knows no message and no peer. It moves packets of one size (``core.wire``), which are the rows of
tables, between addresses. A datagram holds one of them, or as many as the caller says. A link loses what
it must, and says so. A link that seals, paces or uses another protocol is a file beside ``udp`` and
``memory``, and a line of ``LINKS``. It may stand on another link.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Protocol

from ragtag.core.address import Address
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network.control.mtu import PACKETS_MAX
from ragtag.protocols.relays import FORWARD_BYTES, Routes

TRAIN = PACKETS_MAX
"""Packets in one system call, in one datagram or in several: 56 of 1,152 bytes stay below the 65,507 of one
UDP payload and below the 64 segments that older kernels allow (UDP_MAX_SEGMENTS)."""
SLAB_TRAINS = 32
"""Trains in one pass. They share the fixed cost of a pass, and their two megabytes still fit in a cache."""
SLAB_ROWS = TRAIN * SLAB_TRAINS
BROKEN = {errno.EBADF, errno.ENOTSOCK, errno.EFAULT}
"""Errors that no path and no other machine can cause: the file descriptor is no socket any more."""
CARRIED_BYTES_MAX = DATAGRAM_BYTES + FORWARD_BYTES
"""A relayed datagram of one packet. Larger ones hold several, and are never cut."""
FAILING_MAX = 4096
"""Pairs of address and error that are remembered; beyond, all are forgotten."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A train of datagrams that a member has relayed, or is to relay (``protocols.relays``).

    data: the datagrams, one after the other, each with its ``FORWARD_BYTES``.
    size: of each, in bytes; the last may be smaller.
    came_ns: as ``Received.came_ns``; 0: not known.
    """

    data: bytes
    size: int
    source: Address
    came_ns: int = 0


@dataclass(slots=True)
class Received:
    """What one pass over a link brought.

    table: uint8 ``[k, 1152]``, packets with chunks, in order of arrival. It is a view of the link's own
        buffer, valid until the next pass.
    short: header-only datagrams.
    malformed: how many datagrams of any other size came.
    drained: whether nothing was left to read.
    sources: for each train, the row after its last one, and the address that it came from.
    per: for each train, how many rows came in one datagram; the last may have fewer. Empty: one in each.
    short_sources: for each of ``short``, the address that it came from.
    came_ns, short_came_ns: when each of ``sources`` and ``short`` reached this machine, by ``time.time_ns``.
        The driver may have been busy since. Empty: not known.
    wrapped: trains with another member's datagrams.
    """

    table: Bytes
    short: list[bytes]
    malformed: int
    drained: bool
    sources: list[tuple[int, Address]] = field(default_factory=list)
    short_sources: list[Address] = field(default_factory=list)
    came_ns: list[int] = field(default_factory=list)
    short_came_ns: list[int] = field(default_factory=list)
    per: list[int] = field(default_factory=list)
    wrapped: list[Wrapped] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """How many datagrams are malformed, and relayed ones that no link below has taken."""
        return self.malformed + sum(-(-len(train.data) // train.size) for train in self.wrapped)


def is_wrapped(size: int) -> bool:
    """Whether a datagram of so many bytes is relayed: only these have such a size."""
    return size % DATAGRAM_BYTES == FORWARD_BYTES < size or size == HEADER_BYTES + FORWARD_BYTES


class TooLarge(Exception):
    """The first hop takes no datagrams of this size. The caller sends smaller ones.

    left: how many rows have left before.
    """

    def __init__(self, left: int = 0) -> None:
        super().__init__(f"the first hop takes no such large datagrams; {left} rows have left")
        self.left = left


class Failures:
    """Errors of sends, counted, and told once per address and kind. What was sent is lost.

    An error lasts until a send to that address goes through. Of an error that comes and goes, the first time
    is told, the second, the fourth, and so on.

    count: how many sends have failed.
    news: addresses, and what is to be told of each. The caller that tells it clears it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.news: list[tuple[Address, str]] = []
        self._lasting: dict[Address, int] = {}
        self._times: dict[tuple[Address, int], int] = {}

    def failed(self, address: Address, error: OSError) -> None:
        """A send to an address has failed. Raises ``error`` where the socket itself is broken."""
        if error.errno in BROKEN:
            raise error
        self.count += 1
        number = error.errno or 0
        if self._lasting.get(address) == number:
            return
        if len(self._times) >= FAILING_MAX:
            self._times.clear()
            self._lasting.clear()
        self._lasting[address] = number
        times = self._times[address, number] = self._times.get((address, number), 0) + 1
        if times & (times - 1) == 0:
            often = "" if times == 1 else f", for the {times}th time"
            why = os.strerror(number) if number > 0 else str(error)
            self.news.append((address, f"{why}{often}: what is sent to {address[0]}:{address[1]} is lost"))

    @property
    def lasting(self) -> bool:
        """Whether any error lasts. Only then must ``went`` be called."""
        return bool(self._lasting)

    def went(self, address: Address) -> None:
        """A send to an address has gone through: its error lasts no more."""
        self._lasting.pop(address, None)


class Link(Protocol):
    """Moves trains of datagrams between addresses; used by one thread at a time, and never waits."""

    @property
    def sealed(self) -> bool:
        """Whether the link never hands over what was damaged or made up on the way.

        Then a header's check is left out, and the link may use the 16 bytes of its tag.
        """

    @property
    def routes(self) -> Routes | None:
        """Who relays what is sent to whom; ``None``: nobody does."""

    @property
    def failures(self) -> Failures:
        """What could not be sent; the driver notes it."""

    @property
    def due_s(self) -> float:
        """When to call ``turn`` although nothing has come."""

    @property
    def address(self) -> Address:
        """The address at which others reach this link."""

    @property
    def capacity(self) -> int:
        """How many datagrams the link surely keeps until they are read."""

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent from here to an address; empty: it can."""

    def fileno(self) -> int:
        """A file descriptor to poll: readable when something has come, writable when ``send`` has room."""

    def turn(self, now_s: float) -> None:
        """Send what the link itself has to send, such as handshakes. now_s: the driver's clock."""

    def ready(self, address: Address) -> bool:
        """Whether what is sent to an address can be read there. If not, the link sees to it."""

    def room(self, address: Address) -> bool:
        """Whether what goes to an address need not wait for what went there before. Only a connection fills
        up; what finds none in a socket for datagrams is told by ``send``."""

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``, C-contiguous; returns how many rows left (fewer: there is no room now).

        Their chunks stay as they are, as the caller may send them to the next peer. A link may write to the
        16 bytes of a header's tag, and one that encrypts has a table of its own.

        per: how many rows each datagram holds, but for the last. Datagrams of several rows are never cut on
            the way: a path that does not take them loses them.

        Raises TooLarge: the first hop does not take them.
        """

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram. Where there is no room it is lost, as in a full queue on the way."""

    def receive(self) -> Received:
        """Take what has come, at most about ``SLAB_ROWS`` packets, without waiting."""

    def close(self) -> None:
        """End the link: nothing is sent or received any more."""


class Carrier(Link, Protocol):
    """A link that moves datagrams of other sizes, too: those that are relayed."""

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        """Send datagrams of ``size`` bytes each, the last perhaps smaller; how many of all bytes left.

        Those of more than one packet are never cut on the way, as in ``send``.

        Raises TooLarge: the first hop does not take them.
        """
