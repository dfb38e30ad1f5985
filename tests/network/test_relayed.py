"""A link whose datagrams may go through another member, who reads none of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, MessageKey, PeerId, Run
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES, Identity, Kind
from ragtag.network.link.frame import Framer
from ragtag.network.link.link import Carrier, Received, TooLarge, Wrapped
from ragtag.network.link.memory import Hub, MemoryLink
from ragtag.network.link.relayed import RelayedLink
from ragtag.network.link.sealed import SealedLink
from ragtag.network.link.streamed import StreamedLink
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.relays import FORWARD_BYTES, Routes
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import Sessions, card_of
from tests.network.crew import until

K = 120
"""Chunks of one message: several trains."""


class Apart:
    """A link to which some addresses are cut off, both ways, and which keeps what it takes in."""

    sealed, routes = False, None

    def __init__(self, link: Carrier) -> None:
        self._link, self.cut = link, set[Address]()
        self.address, self.failures, self.capacity = link.address, link.failures, link.capacity
        self.fileno, self.close, self.turn = link.fileno, link.close, link.turn
        self.unusable, self.ready, self.due_s = link.unusable, link.ready, link.due_s
        self.room = link.room
        self.seen: list[bytes] = []
        self.left_bytes = 1 << 30

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        return len(rows) if address in self.cut else self._link.send(rows, address, per)

    def send_short(self, datagram: bytes, address: Address) -> None:
        if address not in self.cut:
            self._link.send_short(datagram, address)

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        if address in self.cut:
            return len(data)
        part = bytes(data[: self.left_bytes - self.left_bytes % size])
        return self._link.carry(part, size, address) if part else 0

    def receive(self) -> Received:
        got = self._link.receive()
        self.seen += [train.data for train in got.wrapped]
        return got


class Crew:
    """Three peers, of which 0 and 1 do not reach each other by UDP.

    listen: peers that listen for TCP; ``None``: there is none at all.
    """

    def __init__(self, make: Callable[[], Carrier], listen: Collection[PeerId] | None = None) -> None:
        self.under = [Apart(make()) for _ in range(3)]
        self.cards: dict[PeerId, tuple[Address, bytes]] = {}
        self.links, self.framers, self.routes = list[SealedLink](), list[Framer](), list[Routes]()
        for peer, link in enumerate(self.under):
            draws = generator(5, "test relayed", peer)
            keys = KeyPair(draws.bytes(32))
            self.cards[peer] = link.address, card_of(1, keys)
            sessions = Sessions(b"c" * 32, keys, self.at, draws.bytes)
            over = None if listen is None else StreamedLink(link, listens=peer in listen)
            streams = None if over is None else over.streams
            assert streams is None or not streams.unheard
            routes = Routes(
                peer, b"c" * 32, keys, self, sessions.heard, draws.bytes, streams=streams is not None
            )
            identity = Identity("otters", peer)
            self.routes.append(routes)
            self.links.append(SealedLink(RelayedLink(over or link, routes, streams), identity, sessions))
            framer = Framer(identity, 77 + peer, sealed=True)
            framer.open(0, 7)
            self.framers.append(framer)
        for a, b in ((0, 1), (1, 0)):
            self.under[a].cut.add(self.under[b].address)
        self.now_s = 0.0
        self.got: list[list[Received]] = [[], [], []]

    # what the routes ask: who is where

    def at(self, address: Address) -> tuple[PeerId, bytes] | None:
        return next(((p, key) for p, (where, key) in self.cards.items() if where == address), None)

    def there(self, peer: PeerId) -> tuple[Address, bytes] | None:
        return self.cards.get(peer)

    def living(self) -> list[PeerId]:
        return list(self.cards)

    def turn(self, *peers: PeerId) -> None:
        """All take what has come and send what is due; a tenth of a second goes by."""
        self.now_s += 0.1
        for peer in peers or range(3):
            self.links[peer].turn(self.now_s)
            got = self.links[peer].receive()
            for at in range(len(got.short)):
                self.framers[peer].parse_short(got.short[at])
            got.table = got.table.copy()
            self.got[peer].append(got)

    def meet(self, via: PeerId = 2) -> None:
        """0 and 1 have keys for each other, by way of 2."""
        a, b = self.under[0].address, self.under[1].address

        def met() -> bool:
            self.turn()
            there = self.links[0].ready(b), self.links[1].ready(a)
            self.links[0].send_short(self.framers[0].short(Kind.PING, 1, seq=1), b)
            return all(there) and self.routes[0].via(1) == self.routes[1].via(0) == via

        until(met, "keys of two that do not reach each other by UDP")
        assert self.routes[0].via(1) == self.routes[1].via(0) == via

    def rows(self, k: int) -> Bytes:
        draws = generator(6, "test relayed rows", k)
        values = draws.integers(0, 256, (k, CHUNK_BYTES), dtype=np.uint8)
        run = Run(
            1, MessageKey(0, 3, 1, 2), 5, k + 9, values, np.ones(k, np.float32), np.full(k, 5, np.uint64),
            None, False,
        )  # fmt: skip
        return self.framers[0].data(run, np.arange(5, 5 + k), np.arange(1, k + 1, dtype=np.uint64), ask=True)

    def brought(self, k: int) -> Bytes:
        """The rows that have come to 1 since, once there are ``k``."""
        before = len(self.got[1])

        def there() -> bool:
            self.turn(2, 1)
            return sum(len(got.table) for got in self.got[1][before:]) >= k

        until(there, f"{k} rows by way of a third")
        return np.concatenate([got.table for got in self.got[1][before:]])


@pytest.fixture(params=["memory", "udp", "udp, plain"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    hub = Hub(first_hop=56)
    hub.mtu = 56
    makes: dict[str, Callable[[], Carrier]] = {
        "memory": lambda: MemoryLink(hub=hub),
        "udp": UdpLink,
        "udp, plain": lambda: UdpLink(plain=True),
    }
    with ExitStack() as undo:
        made = Crew(makes[request.param])
        for link in made.links:
            undo.callback(link.close)
        yield made


@pytest.mark.parametrize("per", [1, 5, 56])
def test_what_goes_through_a_third_comes_as_it_was_sent(crew: Crew, per: int) -> None:
    crew.meet()
    rows = crew.rows(K)
    sent = rows.copy()
    assert crew.links[0].send(rows, crew.under[1].address, per) == K
    came = crew.brought(K)
    assert np.array_equal(came[:, 64:], sent[:, 64:]) and len(came) == K
    ends = [address for got in crew.got[1] for _, address in got.sources]
    assert ends and set(ends[-3:]) == {crew.under[0].address}  # not that of the relay
    _, headers = crew.framers[1].parse(came)
    assert set(headers["sender"]) == {0} and len(headers) == K
    assert crew.routes[2].forwarded >= K
    assert not crew.links[1].sessions.refused


def test_who_relays_sees_nothing_and_what_it_changes_is_refused(crew: Crew) -> None:
    crew.meet()
    crew.under[2].seen.clear()
    rows = crew.rows(3)
    chunks = [bytes(row[64:]) for row in rows]
    crew.links[0].send(rows, crew.under[1].address)
    crew.brought(3)
    seen = b"".join(crew.under[2].seen)
    assert len(seen) >= 3 * DATAGRAM_BYTES and not any(chunk[:16] in seen for chunk in chunks)
    true = next(data for data in crew.under[2].seen if len(data) >= DATAGRAM_BYTES)
    true = true[: DATAGRAM_BYTES + FORWARD_BYTES]
    changed = bytearray(true)
    changed[FORWARD_BYTES + 500] ^= 1
    before = crew.links[1].sessions.refused.copy()
    crew.under[2].carry(bytes(changed), DATAGRAM_BYTES + FORWARD_BYTES, crew.under[1].address)
    crew.under[2].carry(true, DATAGRAM_BYTES + FORWARD_BYTES, crew.under[1].address)

    def refused() -> bool:
        crew.turn(1)
        return crew.links[1].sessions.refused != before

    until(refused, "a changed and a repeated datagram")
    assert set(crew.links[1].sessions.refused - before) <= {"forged", "replayed"}


def test_a_relay_without_room_loses_and_counts_and_one_that_takes_less_is_found_out(crew: Crew) -> None:
    crew.meet()
    crew.under[2].left_bytes = 0
    crew.links[0].send(crew.rows(5), crew.under[1].address)

    def counted() -> bool:
        crew.turn(2)
        return crew.routes[2].refused["no room to relay"] > 0

    until(counted, "a full socket at the relay")
    crew.under[0].left_bytes = 3 * (DATAGRAM_BYTES + FORWARD_BYTES)
    assert crew.links[0].send(crew.rows(5), crew.under[1].address) == 3  # no more room here: the rest stays
    crew.under[0].left_bytes = 0
    assert crew.links[0].send(crew.rows(5), crew.under[1].address) == 0


def test_a_first_hop_that_takes_less_is_told_to_the_search_for_the_mtu() -> None:
    hub = Hub(first_hop=4)
    hub.mtu = 4
    with ExitStack() as undo:
        crew = Crew(lambda: MemoryLink(hub=hub))
        for link in crew.links:
            undo.callback(link.close)
        crew.meet()
        with pytest.raises(TooLarge):
            crew.links[0].send(crew.rows(8), crew.under[1].address, 8)
        assert crew.links[0].send(crew.rows(8), crew.under[1].address, 4) == 8
        assert len(crew.brought(8)) == 8


def test_garbage_in_the_place_of_relayed_datagrams_is_counted_and_changes_nothing(crew: Crew) -> None:
    crew.meet()
    draws = generator(7, "test relayed garbage")
    for _ in range(20):  # pings on the way
        crew.turn(2, 1)
    before, strange = [len(got) for got in crew.got], crew.routes[2].refused["stranger"]
    for size in (80, 1168, 2320):
        for first in (0x48, 0x00):
            data = bytes([first]) + draws.bytes(3 * size - 1)
            crew.under[0].carry(data, size, crew.under[2].address)
            crew.under[2].carry(data, size, crew.under[1].address)
    for _ in range(20):
        crew.turn(2, 1)
    for peer in (1, 2):
        came = crew.got[peer][before[peer] :]
        assert sum(len(got.table) + len(got.short) for got in came) == 0
        assert sum(got.malformed for got in came) >= 3
    assert crew.routes[2].refused["stranger"] > strange
    assert crew.links[0].ready(crew.under[1].address)
    assert crew.routes[1].refused["stranger"] + crew.links[1].sessions.refused["clear"] > 0


def test_a_socket_parts_relayed_datagrams_from_others_that_the_kernel_has_joined() -> None:
    """Whatever mixture one sender's train is: sizes alone tell."""
    with ExitStack() as undo:
        one, other = UdpLink(plain=True), UdpLink()
        undo.callback(one.close)
        undo.callback(other.close)
        draws = generator(8, "test relayed trains")
        wrapped, plain, short = draws.bytes(1168), draws.bytes(DATAGRAM_BYTES), draws.bytes(64)
        small = draws.bytes(80)
        for data in (wrapped, wrapped, plain, wrapped, short, plain, small, wrapped, small):
            one.sock.sendto(data, other.address)
        came, rows, shorts = list[Wrapped](), list[bytes](), list[bytes]()

        def all_there() -> bool:
            got = other.receive()
            assert got.malformed == 0
            came.extend(got.wrapped)
            rows.extend(bytes(row) for row in got.table)
            shorts.extend(got.short)
            return (
                sum(len(train.data) for train in came) >= 4 * 1168 + 2 * 80
                and len(shorts) == 1
                and len(rows) == 2
            )

        until(all_there, "nine datagrams of four sizes")
        assert rows == [plain, plain] and shorts == [short]
        parts = [t.data[at : at + t.size] for t in came for at in range(0, len(t.data), t.size)]
        assert parts == [wrapped, wrapped, wrapped, small, wrapped, small]
