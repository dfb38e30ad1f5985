"""Membership's datagrams: a UDP socket, and TCP connections to and from where UDP does not get through.

Which of the two is found out by what comes. An address from which nothing came, while ``DOUBTED`` datagrams
were sent to it in ``LOOK_S`` or more, gets the next ones over a connection, too. Membership answers where a
datagram came from, so the other end follows. What goes to an address over TCP goes there by UDP, too, every
``AGAIN_S``; a datagram that comes twice is taken once, and UDP is mostly first, where it gets through again.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import OrderedDict

from ragtag.core.address import Address, by_stream, dials, is_stream, unusable, without_stream
from ragtag.network.link.streams import Streams
from ragtag.network.link.udp import family_of_socket
from ragtag.protocols.membership.wire import DATAGRAM_BYTES_MAX
from ragtag.protocols.relays import AGAIN_S, LOOK_S

DOUBTED = 3
"""A ping is repeated twice before a member is accused, so three in a row are not lost by chance."""
ADDRESSES_MAX = 4096
"""Addresses of which it is remembered what was sent there; beyond, those of the oldest use are forgotten."""


class _Sent:
    """What was sent to an address since anything came from it: how often, and since when."""

    def __init__(self) -> None:
        self.count, self.since_s, self.again_s = 0, 0.0, 0.0


class Datagrams:
    """A bound UDP socket, non-blocking from now on, with connections beside it.

    listens: whether others can connect, at the socket's own host and port.
    streams: the connections.
    """

    def __init__(self, sock: socket.socket, *, listens: bool = False) -> None:
        self.sock, self.family = sock, family_of_socket(sock)
        sock.setblocking(False)
        host, port = sock.getsockname()[:2]
        self.address: Address = (host, port)
        self.streams = Streams(self.family, DATAGRAM_BYTES_MAX, self.address if listens else None)
        self.streams.selector.register(sock, selectors.EVENT_READ)
        self._sent: OrderedDict[Address, _Sent] = OrderedDict()

    def fileno(self) -> int:
        """A file descriptor to poll: readable when something has come."""
        return self.streams.selector.fileno()

    def close(self, *, sock: bool = True) -> None:
        """Close the connections, and the socket (unless its caller keeps it)."""
        self.streams.close()
        if sock:
            self.sock.close()

    def sendto(self, data: bytes, address: Address) -> None:
        """Send a datagram by the ways that are worth it.

        Raises:
            BlockingIOError: the socket is full.
            OSError: there is no route.
        """
        now_s = time.monotonic()
        self.streams.turn(now_s)
        sent = self._sent.get(address) or self._sent.setdefault(address, _Sent())
        self._sent.move_to_end(address)
        if len(self._sent) > ADDRESSES_MAX:
            self._sent.popitem(last=False)
        if sent.count == 0:
            sent.since_s = now_s
        sent.count += 1
        if is_stream(address):
            self.streams.send(data, len(data), address)
            there = without_stream(address)
            if dials(address) and now_s >= sent.again_s and not unusable(there, self.family):
                sent.again_s = now_s + AGAIN_S
                with contextlib.suppress(OSError):  # by TCP it has gone
                    self.sock.sendto(data, there)
            return
        if sent.count > DOUBTED and now_s - sent.since_s >= LOOK_S:
            self.streams.send(data, len(data), by_stream(address))
        self.sock.sendto(data, address)

    def recvfrom(self, size: int) -> tuple[bytes, Address]:
        """The next datagram, of ``size`` bytes at most, and where it came from.

        Raises:
            BlockingIOError: nothing has come.
            OSError: an earlier datagram found nobody, or the socket is broken.
        """
        if not self.streams.came:
            self.streams.turn(time.monotonic())
            self.streams.take()
            self.streams.closed.clear()
        if self.streams.came:
            source, data = self.streams.came.popleft()
        else:
            data, (host, port, *_) = self.sock.recvfrom(size)
            source = host, port
        sent = self._sent.get(source)
        if sent is not None:
            sent.count = 0
        return data, source
