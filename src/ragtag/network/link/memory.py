"""A link between drivers of one process: bounded queues in memory, and no network."""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from itertools import count
from threading import Lock

import numpy as np

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES
from ragtag.network.link.link import SLAB_ROWS, Failures, Received, TooLarge, Wrapped

HOST = "memory"
CAPACITY = 4096
"""Datagrams that may wait at one link: 5 MB. Beyond, they are lost, as in a socket's full buffer."""


class Hub:
    """Links of one process that reach one another by their ports.

    loss: the share of datagrams that is lost from link to link. Each sender draws from a stream of its own.
    first_hop: packets that a datagram may hold; links refuse others.
    mtu: packets that a datagram may hold on its way; others are lost.
    """

    def __init__(self, loss: float = 0.0, seed: int = 0, first_hop: int = 1) -> None:
        self.loss, self.seed = loss, seed
        self.first_hop = self.mtu = first_hop
        self._links: dict[Address, MemoryLink] = {}
        self._ports = count(1)
        self._lock = Lock()

    def add(self, link: MemoryLink, port: int) -> Address:
        """Give a link its address, at a port (0: any). Raises ValueError: another link has the port."""
        with self._lock:
            while port == 0 or (HOST, port) in self._links:
                if port:
                    raise ValueError(f"port {port} of this hub is another link's")
                port = next(p for p in self._ports if (HOST, p) not in self._links)
            self._links[HOST, port] = link
            return HOST, port

    def at(self, address: Address) -> MemoryLink | None:
        """The link at an address; ``None``: there is none."""
        return self._links.get(address)

    def remove(self, address: Address) -> None:
        """Forget the link at an address: nothing reaches it any more."""
        with self._lock:
            self._links.pop(address, None)


HUB = Hub()
"""The hub of links that are given none."""


class MemoryLink:
    """One link of a hub. Other links' threads put datagrams into its queue, and its own takes them out.

    A byte waits at ``fileno`` exactly while the queue is not empty.

    capacity: datagrams that may wait in the queue.
    overflowed: datagrams that were lost as the queue was full.

    Raises ValueError: ``fd`` is given, or another link of the hub has the port.
    """

    due_s = math.inf
    routes = None
    sealed = True  # in one process nothing is damaged, and there are no strangers

    def __init__(
        self,
        address: Address | None = None,
        *,
        fd: int | None = None,
        hub: Hub = HUB,
        capacity: int = CAPACITY,
    ) -> None:
        if fd is not None:
            raise ValueError("a link in memory takes no socket from a launcher")
        self.failures, self.capacity, self._hub = Failures(), capacity, hub
        self.overflowed = 0
        self._queue: deque[tuple[Address, Bytes | bytes, int, int]] = deque()
        self._waiting = 0
        self._lock = Lock()
        self._wake_in, self._wake_out = socket.socketpair()
        self._slab = np.empty((SLAB_ROWS, DATAGRAM_BYTES), np.uint8)
        self.address = hub.add(self, 0 if address is None else address[1])
        self._draws = generator(hub.seed, "memory", self.address[1])

    def unusable(self, address: Address) -> str:
        """Why nothing can be sent to an address; empty: it can."""
        return "" if address[0] == HOST else f"{address[0]!r} is outside this process"

    def fileno(self) -> int:
        """Readable while datagrams wait; -1: closed."""
        return self._wake_in.fileno()

    def close(self) -> None:
        """Leave the hub, and drop what waits in the queue."""
        self._hub.remove(self.address)
        with self._lock:
            self._queue.clear()
            self._waiting = 0
            self._wake_in.close()
            self._wake_out.close()

    # -- Out

    def turn(self, now_s: float) -> None:
        """Queues have nothing to send of themselves."""

    def ready(self, address: Address) -> bool:
        """Always: nothing is encrypted."""
        return True

    def room(self, address: Address) -> bool:
        """Always: a full queue loses what comes."""
        return True

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """Send uint8 ``[k, 1152]``. All rows leave; those that find no room at the other end are lost.

        Raises TooLarge: the hub's first hop does not take so many rows in a datagram.
        """
        if per > self._hub.first_hop:
            raise TooLarge
        loss, tail = self._hub.loss, len(rows) % per
        kept = rows.copy()
        if loss:
            alive = np.repeat(self._draws.random(-(-len(rows) // per)) >= loss, per)[: len(rows)]
            kept, tail = rows[alive], tail if alive[-1] else 0
        if per > self._hub.mtu:
            kept = kept[len(kept) - tail :] if 0 < tail <= self._hub.mtu else kept[:0]
        other = self._hub.at(address)
        step = SLAB_ROWS - SLAB_ROWS % per
        for at in range(0, len(kept), step):
            if other is not None:
                other.put(self.address, kept[at : at + step], per)
        return len(rows)

    def send_short(self, datagram: bytes, address: Address) -> None:
        """Send one header-only datagram."""
        if self._hub.loss and self._draws.random() < self._hub.loss:
            return
        other = self._hub.at(address)
        if other is not None:
            other.put(self.address, datagram)

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        """Send datagrams of ``size`` bytes each; all leave. As ``Carrier``."""
        packets = size // DATAGRAM_BYTES
        if packets > self._hub.first_hop:
            raise TooLarge
        other = self._hub.at(address)
        for at in range(0, len(data), size):
            lost = self._hub.loss and self._draws.random() < self._hub.loss
            if other is not None and not lost and packets <= self._hub.mtu:
                other.put(self.address, bytes(data[at : at + size]), 0)
        return len(data)

    def put(self, source: Address, data: Bytes | bytes, per: int = 1) -> None:
        """Queue datagrams from another link's thread. It must not change them any more.

        per: packets in each of them, but for the last; 0: it is one that is relayed.
        """
        with self._lock:
            if self.fileno() < 0:
                return
            room = self.capacity - self._waiting
            size = 1 if isinstance(data, bytes) else len(data)
            taken = size if size <= room else room - room % max(1, per)
            self.overflowed += size - taken
            if taken == 0:
                return
            if not self._queue:
                self._wake_out.send(b"x")
            kept = data if isinstance(data, bytes) else data[:taken]
            self._queue.append((source, kept, time.time_ns(), per))
            self._waiting += taken

    # -- In

    def receive(self) -> Received:
        """Take what has come, at most ``SLAB_ROWS`` packets with chunks."""
        rows, short, each = 0, list[bytes](), list[int]()
        sources, short_sources = list[tuple[int, Address]](), list[Address]()
        came_ns, short_came_ns = list[int](), list[int]()
        wrapped = list[Wrapped]()
        with self._lock:
            woken = bool(self._queue)
            while self._queue:
                source, data, came, per = self._queue[0]
                if isinstance(data, bytes) and per == 0:
                    wrapped.append(Wrapped(data, len(data), source, came))
                    self._waiting -= 1
                elif isinstance(data, bytes):
                    short.append(data)
                    short_sources.append(source)
                    short_came_ns.append(came)
                    self._waiting -= 1
                else:
                    if rows + len(data) > SLAB_ROWS:
                        break
                    self._slab[rows : rows + len(data)] = data
                    rows += len(data)
                    sources.append((rows, source))
                    came_ns.append(came)
                    each.append(per)
                    self._waiting -= len(data)
                self._queue.popleft()
            drained = not self._queue
            if woken and drained:
                self._wake_in.recv(1)
        return Received(
            self._slab[:rows],
            short,
            0,
            drained,
            sources,
            short_sources,
            came_ns,
            short_came_ns,
            each,
            wrapped,
        )
