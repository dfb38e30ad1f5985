"""Whole drivers over lines in virtual time: the product's nodes, queues, pacing and datagrams, and no clock.

Each peer is an ``Engine`` without its thread, on a link that sends through an uplink and a downlink
(``line``). A driver looks at what has come, and at its timers, at ticks (``line.tick_after``), and takes no
time for it.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.core.types import Average, Bytes, Outcome
from ragtag.core.wire import DATAGRAM_BYTES, Identity, n_chunks
from ragtag.network.driver.engine import Engine
from ragtag.network.link.link import SLAB_ROWS, Failures, Received, TooLarge
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.loop import Loop

from .line import Line, datagrams, tick_after

HOST = "line"
CAPACITY = 4096
"""Datagrams that a peer's socket holds."""


class LineLink:
    """One peer's link: an uplink to all others, and a downlink from them.

    peers: all links, by peer; they reach each other once all are there.
    """

    due_s = math.inf
    routes = None
    sealed = True  # nothing is damaged on these lines
    capacity = CAPACITY

    def __init__(self, me: int, up: Line, down: Line, peers: dict[int, LineLink], seed: int) -> None:
        self.address: Address = (HOST, me)
        self.failures = Failures()
        self.came = False
        self._up, self._down, self._peers = up, down, peers
        self._draws = generator(seed, "line link", me)
        self._queue: deque[tuple[Address, Bytes | bytes, int]] = deque()
        self._slab = np.empty((SLAB_ROWS, DATAGRAM_BYTES), np.uint8)
        self._poll, self._other_end = socket.socketpair()  # an engine registers a descriptor; nothing comes
        self.wakes = lambda: None
        peers[me] = self

    def unusable(self, address: Address) -> str:
        """Nothing keeps a peer from another."""
        return ""

    def fileno(self) -> int:
        """A descriptor at which nothing comes."""
        return self._poll.fileno()

    def turn(self, now_s: float) -> None:
        """Lines have nothing to send of themselves."""

    def ready(self, address: Address) -> bool:
        """Always: nothing is encrypted."""
        return True

    def room(self, address: Address) -> bool:
        """Always: a full queue drops what is last."""
        return True

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        """A train leaves. Raises TooLarge: a datagram is to hold more than one packet."""
        if per > 1:
            raise TooLarge
        other, kept = self._peers[address[1]], rows.copy()
        self._up.send(len(rows), lambda came: other.through_down(self, kept, came))
        return len(rows)

    def through_down(self, source: LineLink, rows: Bytes, came: int) -> None:
        """A train comes to this peer's downlink."""
        rows = rows[:came]  # a full queue drops what is last
        if len(rows):
            self._down.send(len(rows), lambda came: self.take(source, self._some(rows, came)))

    def _some(self, rows: Bytes, came: int) -> Bytes:
        if came == len(rows):
            return rows
        return rows[np.sort(self._draws.choice(len(rows), came, replace=False))]

    def send_short(self, datagram: bytes, address: Address) -> None:
        """A header alone takes no room, and waits behind what does. Lost as all else is."""
        other, loop, up = self._peers[address[1]], self._up.loop, self._up

        def second() -> None:
            down = other._down
            if other._draws.random() >= down.loss(loop.now_s):
                wait_s = down.queued / down.rate(loop.now_s) + down.rtt_s / 2
                loop.at(loop.now_s + wait_s, lambda: other.take(self, datagram))

        loop.at(loop.now_s + up.queued / up.rate(loop.now_s) + up.rtt_s / 2, second)

    def take(self, source: LineLink, data: Bytes | bytes) -> None:
        """Something has come through."""
        if len(data):
            self._queue.append((source.address, data, round(1e9 * self._up.loop.now_s)))
            self.wakes()

    def receive(self) -> Received:
        """Take what has come."""
        rows, short, sources, short_sources = 0, list[bytes](), list[tuple[int, Address]](), list[Address]()
        came_ns, short_came_ns = list[int](), list[int]()
        while self._queue:
            source, data, at_ns = self._queue[0]
            if isinstance(data, bytes):
                short.append(data)
                short_sources.append(source)
                short_came_ns.append(at_ns)
            elif rows + len(data) > SLAB_ROWS:
                break
            else:
                self._slab[rows : rows + len(data)] = data
                rows += len(data)
                sources.append((rows, source))
                came_ns.append(at_ns)
            self._queue.popleft()
        return Received(
            self._slab[:rows], short, 0, not self._queue, sources, short_sources, came_ns, short_came_ns
        )

    def close(self) -> None:
        """Close the descriptor."""
        self._poll.close()
        self._other_end.close()


@dataclass(frozen=True)
class Round:
    """An average of a crew. s: the slowest peer's; limit_s: what one uplink needs for it, without loss.

    averaged: the share of chunks that came as averages. heard: that of all peers' chunks in them.
    sent: numbered packets that left all peers, over the chunks that the averages need.
    """

    s: float
    limit_s: float
    averaged: float
    heard: float
    sent: float
    outcomes: tuple[Outcome, ...]


class Drivers:
    """Peers on lines of one rate up and down, a queue before each, and loss on the way down.

    probe_s: how long a round may take, as far as peers know in the beginning.
    """

    def __init__(
        self,
        averager: Averager,
        n: int = 4,
        *,
        mbit: float = 500.0,
        queue_ms: float = 20.0,
        rtt_s: float = 2e-4,
        loss: float = 0.0,
        mb: float = 16.0,
        seed: int = 0,
        probe_s: float = 5.0,
    ) -> None:
        self.loop = loop = Loop()
        rate = datagrams(mbit)
        room, self.n = int(rate * queue_ms / 1e3), n
        self.chunks = n_chunks(round(mb * 1e6 / 4), fp32.elements)
        self.limit_s = 2 * (n - 1) / n * self.chunks / rate
        self.links: dict[int, LineLink] = {}
        for i in range(n):
            up = Line(loop, lambda _: rate, room, rtt_s / 2, seed=seed + 2 * i)
            down = Line(loop, lambda _: rate, room, rtt_s / 2, lambda _: loss, seed=seed + 2 * i + 1)
            LineLink(i, up, down, self.links, seed)
        self._engines = [self._engine(i, averager, probe_s) for i in range(n)]
        self._wake_s = [math.inf] * n
        self._values = [
            generator(seed, "values", i).standard_normal((self.chunks, fp32.elements)).astype(np.float32)
            for i in range(n)
        ]
        for i in range(n):
            self.links[i].wakes = lambda i=i: self._plan(i, tick_after(loop.now_s))

    def _engine(self, me: int, averager: Averager, probe_s: float) -> Engine:
        addresses = {peer: (HOST, peer) for peer in range(self.n)}
        node, link = Node(me, self.n, seed=0), self.links[me]
        engine = Engine(
            node, link, Identity("line", me), addresses, Faults(), 0, None, None, None, 1, math.inf, None
        )
        engine.inbox.clock_ns = engine.outbox.clock_ns = lambda: round(1e9 * self.loop.now_s)
        engine.framer.open(0, 0)
        node.configure(0, Channel(averager, fp32, self.chunks, probe_s=probe_s, rtt_s=0.01, reuse=True))
        return engine

    def close(self) -> None:
        """Give back descriptors."""
        for link in self.links.values():
            link.close()

    # -- Turns

    def _plan(self, me: int, at_s: float) -> None:
        if at_s < self._wake_s[me]:
            self._wake_s[me] = at_s
            self.loop.at(at_s, lambda: self._turn(me, at_s))

    def _turn(self, me: int, at_s: float) -> None:
        """One turn of a driver's loop, as ``Engine`` has it, and when the next one is due."""
        if self._wake_s[me] != at_s:
            return  # it has turned meanwhile
        self._wake_s[me] = math.inf
        engine = self._engines[me]
        engine._receive(at_s)
        engine._expire(at_s)
        engine.outbox.flush(at_s)
        wait_s = engine._wait_s(at_s)
        self._plan(me, tick_after(at_s, at_s + wait_s))

    def average(self, gap_s: float = 0.02) -> Round:
        """One round, begun by all at once; then all compute for ``gap_s``."""
        loop, futures = self.loop, list[Future[Outcome]]()
        began_s, sent = loop.now_s, self._packets()
        for engine, values in zip(self._engines, self._values, strict=True):
            future: Future[Outcome] = Future()
            futures.append(future)
            engine.promises.outcome(0, future)
            for flow in engine.flows.values():
                if (measured := flow.measured) is not None:
                    engine.step(began_s, measured)
            engine.step(began_s, Average(0, values, 1.0))
        for me in range(self.n):
            self._plan(me, began_s)
        while not all(future.done() for future in futures):
            loop.next()
        took_s = loop.now_s - began_s
        outcomes = tuple(future.result() for future in futures)
        averaged = sum(float(one.averaged.mean()) for one in outcomes) / self.n
        heard = sum(float(np.bitwise_count(one.heard).mean()) for one in outcomes) / self.n**2
        loop.run(loop.now_s + gap_s)
        needed = 2 * (self.n - 1) * self.chunks
        return Round(took_s, self.limit_s, averaged, heard, (self._packets() - sent) / needed, outcomes)

    def _packets(self) -> int:
        return sum(flow.path.sent for engine in self._engines for flow in engine.flows.values())
