"""A crew of drivers in one process: real sockets on loopback or queues in memory, a thread for each peer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType, TracebackType

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.seed import generator
from ragtag.core.types import Average, Floats, Joined, Met, Noted, Outcome, Role
from ragtag.core.wire import Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.link import Link, open_link
from ragtag.network.link.sealed import SealedLink
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.rps import rps
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import Sessions, card_of

PATIENCE_S = 60.0
"""How long a test waits for what must come: far beyond what a busy machine takes."""
PROBE_S = 10.0
"""How long a round's stages may take: no deadline ends a round unless a test wants it to."""
NAME = "otters"
LINK = "udp"
"""By what crews reach one another, unless they say so: a test that holds over any link sets it. "sealed": by
queues in memory, and every process has keys of its own."""


def values_of(peer: int, n_chunks: int, round_: int = 0) -> Floats:
    """What a peer has to average: standard normal, another stream for each peer and round."""
    draws = generator(11, "values", peer, round_).standard_normal((n_chunks, fp32.elements))
    return draws.astype(np.float32)


class Crew:
    """``n`` peers that have met, with channel 0 open; use it as a context manager.

    probe_s: how long the first round may take, and any other at least. faults: for all peers, or by peer.
    absent: peers whose socket is there and whose driver is not, so that nothing ever answers.
    """

    def __init__(
        self,
        n: int,
        n_chunks: int = 30,
        *,
        method: Averager = rps,
        faults: Faults | Mapping[int, Faults] | None = None,
        seed: int = 1,
        probe_s: float = PROBE_S,
        plain: bool = False,
        record: bool = False,
        absent: Sequence[int] = (),
        crew: str = NAME,
        clients: Sequence[int] = (),
    ) -> None:
        self.clients = clients
        self.n, self.n_chunks, self.seed, self.name = n, n_chunks, seed, crew
        self._plain = plain
        self.channel = Channel(method, fp32, n_chunks, probe_s=probe_s, rtt_s=1e-3, floor_s=probe_s)
        self.endpoints = [self.link() for _ in range(n)]
        self.addresses = {peer: endpoint.address for peer, endpoint in enumerate(self.endpoints)}
        self.notes: list[list[tuple[float, Noted]]] = [[] for _ in range(n)]
        self.recordings = [Recording() if record else None for _ in range(n)]
        self._noted = threading.Condition()
        self._faults = faults
        self.present = [peer for peer in range(n) if peer not in absent]
        self.drivers: dict[int, Driver] = {}
        self.cards: dict[Address, tuple[int, bytes]] = {}
        for peer in self.present:
            self.start(peer, self.endpoints[peer])
        for future in [d.configure(0, self.channel, 7) for d in self.drivers.values()]:
            future.result(PATIENCE_S)

    def link(self, address: Address | None = None) -> Link:
        """A link as all peers of this crew have."""
        name = "memory" if LINK == "sealed" else LINK
        return UdpLink(address, plain=True) if self._plain else open_link(address, name=name)

    def _sealed(self, peer: int, endpoint: Link) -> Link:
        """A link around another one, with keys of its own that all others know."""
        keys = KeyPair(os.urandom(32))
        sessions = Sessions(b"c" * 32, keys, self.cards.get, os.urandom)
        self.cards[endpoint.address] = peer, card_of(1, keys)
        return SealedLink(endpoint, Identity(self.name, peer), sessions)

    def start(self, peer: int, endpoint: Link) -> Driver:
        """Start a peer's driver."""
        faults = self._faults if isinstance(self._faults, Faults | None) else self._faults.get(peer)
        node = Node(peer, self.n, self.seed, role=Role.CLIENT if peer in self.clients else Role.TRAINER)
        for client in self.clients:
            if client != peer:
                node.step(0.0, Joined(client, Role.CLIENT))
        driver = self.drivers[peer] = Driver(
            node,
            self._sealed(peer, endpoint) if LINK == "sealed" and not self._plain else endpoint,
            Identity(self.name, peer),
            self.addresses,
            faults=faults,
            seed=self.seed,
            on_note=self._on_note(peer),
            recording=self.recordings[peer],
        )
        driver.start()
        return driver

    def _on_note(self, peer: int) -> Callable[[float, Noted], None]:
        def on_note(now_s: float, note: Noted) -> None:
            with self._noted:
                self.notes[peer].append((now_s, note))
                self._noted.notify_all()

        return on_note

    def noted(self, peer: int, what: str, other: int) -> bool:
        """Wait until a peer has noted something about another; False: it did not in time."""

        def there() -> bool:
            return any(note.what == what and note.peer == other for _, note in self.notes[peer])

        with self._noted:
            return self._noted.wait_for(there, PATIENCE_S)

    def meet(self, number: int = 0, blob: bytes = b"hello", deadline_s: float = PATIENCE_S) -> dict[int, Met]:
        """All peers meet: each knows that every other hears it."""
        asked = {peer: d.meet(number, blob, deadline_s) for peer, d in self.drivers.items()}
        return {peer: future.result(2 * PATIENCE_S) for peer, future in asked.items()}

    def ask(
        self,
        peer: int,
        values: Floats,
        weight: float = 1.0,
        channel: int = 0,
        deadline_s: float | None = None,
    ) -> Future[Outcome]:
        """One peer begins a round."""
        return self.drivers[peer].average(Average(channel, values, weight, deadline_s))

    def average(
        self,
        values: Mapping[int, Floats] | None = None,
        round_: int = 0,
        weights: Mapping[int, float] = MappingProxyType({}),
        deadline_s: float | None = None,
    ) -> dict[int, Outcome]:
        """One round of all (or of those that ``values`` names)."""
        if values is None:
            values = {peer: values_of(peer, self.n_chunks, round_) for peer in self.drivers}
        asked = {
            peer: self.ask(peer, own, weights.get(peer, 1.0), deadline_s=deadline_s)
            for peer, own in values.items()
        }
        return {peer: future.result(PATIENCE_S) for peer, future in asked.items()}

    def close(self, deadline_s: float = 5.0) -> None:
        """Close all drivers at once, and the sockets of the absent."""
        with ThreadPoolExecutor(max(1, len(self.drivers))) as pool:
            list(pool.map(lambda driver: driver.close(deadline_s), self.drivers.values()))
        for peer in set(range(self.n)) - self.drivers.keys():
            self.endpoints[peer].close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(0.0)


def mean_of(n_chunks: int, peers: Sequence[int], round_: int = 0) -> Floats:
    """The mean that a loss-free round of these peers comes to, in double precision."""
    total = sum(values_of(peer, n_chunks, round_).astype(np.float64) for peer in peers)
    return np.asarray(total / len(peers), np.float32)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true that announces itself in no other way; fail after ``PATIENCE_S``."""
    tick = threading.Event()
    give_up_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up_s, f"not {what} within {PATIENCE_S} s"
        tick.wait(0.005)
