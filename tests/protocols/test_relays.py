"""Ways between peers behind routers, in virtual time: directly, or through one member, and never round."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from ragtag.core.address import Address, by_stream
from ragtag.core.seed import generator
from ragtag.core.types import PeerId
from ragtag.protocols.relays import (
    AGAIN_S,
    DIRECT,
    FORWARD,
    FORWARD_BYTES,
    FORWARDED_PACKETS_PER_S,
    HELLO,
    LOOK_S,
    STREAM,
    Out,
    Routes,
)
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import card_of

ONE_WAY_S = 0.01
DATA = bytes([0x43]) + bytes(1151)
"""What stands for a sealed datagram of one packet; the last bytes of one that is sent say by whom."""


@dataclass
class Nat:
    """A router that draws a port for each destination, and lets nothing in unasked (RFC 4787)."""

    host: str
    ports: dict[tuple[PeerId, Address], int] = field(default_factory=dict)

    def out(self, peer: PeerId, to: Address) -> Address:
        return self.host, self.ports.setdefault((peer, to), 20_000 + len(self.ports))

    def inside(self, source: Address, port: int) -> PeerId | None:
        return next((who for (who, to), at in self.ports.items() if to == source and at == port), None)

    def forget(self) -> None:
        """Mappings end, as in a router that was restarted; the next ones have other ports."""
        self.ports = {(-1 - at, ("gone", at)): 0 for at in range(1 + len(self.ports))}


class Mates:
    def __init__(self, world: World, me: PeerId) -> None:
        self._world, self._me = world, me

    def at(self, address: Address) -> tuple[PeerId, bytes] | None:
        for peer in self.living():
            if self._world.cards[peer] == address:
                return peer, self._world.keys[peer]
        return None

    def there(self, peer: PeerId) -> tuple[Address, bytes] | None:
        if peer not in self._world.cards or peer in self._world.dead:
            return None
        return self._world.cards[peer], self._world.keys[peer]

    def living(self) -> Iterable[PeerId]:
        return [p for p in self._world.cards if p not in self._world.dead | {self._me}]


class World:
    """Peers with a ``Routes`` each, over a network where datagrams take ``ONE_WAY_S``.

    Every tenth of a second each peer sends a datagram to each other one for which ``talks`` holds.

    came: by sender and receiver, when datagrams came, and through whom (``DIRECT``).
    blocked: pairs of hosts between which nothing comes through.
    moved: peers whose router has given its card's address to somebody else long ago.
    """

    def __init__(self, n: int, behind: Iterable[PeerId] = (), loss: float = 0.0) -> None:
        draws = generator(3, "test relays", n)
        self.loss, self._losses = loss, generator(4, "test relays", n)
        self.nats = {peer: Nat(f"198.51.100.{peer + 1}") for peer in behind}
        self.cards: dict[PeerId, Address] = {
            peer: (f"198.51.100.{peer + 1}", 9_000) if peer in self.nats else (f"203.0.113.{peer + 1}", 4_747)
            for peer in range(n)
        }
        pairs = [KeyPair(draws.bytes(32)) for _ in range(n)]
        self.keys = {peer: card_of(1, pair) for peer, pair in enumerate(pairs)}
        self.dead: set[PeerId] = set()
        self.silent: set[PeerId] = set()
        self.blocked: set[tuple[str, str]] = set()
        self.heard: list[Counter[Address]] = [Counter() for _ in range(n)]
        self.routes = [
            Routes(peer, b"c" * 32, pairs[peer], Mates(self, peer), self.heard[peer].__getitem__, draws.bytes)
            for peer in range(n)
        ]
        self.came: dict[tuple[PeerId, PeerId], list[tuple[float, PeerId]]] = {}
        self.sent: list[tuple[PeerId, bytes, Address]] = []
        self.hops: Counter[bytes] = Counter()
        self.talks: Callable[[PeerId, PeerId], bool] = lambda a, b: True
        self.now_s = 0.0
        self._serial = self._pushed = 0
        self._flying: list[tuple[float, int, PeerId, Address, bytes]] = []

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s = round(self.now_s + 0.01, 6)
            while self._flying and self._flying[0][0] <= self.now_s:
                _, _, peer, source, data = heapq.heappop(self._flying)
                if peer not in self.silent:
                    self._take(peer, source, data)
            for peer, routes in enumerate(self.routes):
                if peer in self.silent:
                    continue
                if round(self.now_s * 100) % 10 == peer % 10:
                    for other in range(len(self.routes)):
                        if other != peer and other not in self.dead and self.talks(peer, other):
                            self.talk(peer, other)
                assert routes.due_s > -math.inf
                self._say(peer, routes.turn(self.now_s))

    def talk(self, peer: PeerId, other: PeerId, data: bytes = DATA) -> None:
        self._serial += 1
        hop, head = self.routes[peer].to(self.now_s, self.cards[other])
        self.send(peer, head + data[:-4] + self._serial.to_bytes(4, "little"), hop)

    def _say(self, peer: PeerId, messages: list[Out]) -> None:
        for data, address in messages:
            self.send(peer, data, address)

    def send(self, peer: PeerId, data: bytes, to: Address) -> None:
        self.sent.append((peer, data, to))
        source = self.nats[peer].out(peer, to) if peer in self.nats else self.cards[peer]
        if (source[0], to[0]) in self.blocked or self._losses.random() < self.loss:
            return
        receiver: PeerId | None = None
        for other in range(len(self.routes)):
            if other in self.nats and to[0] == self.nats[other].host:
                receiver = self.nats[other].inside(source, to[1])
            elif other not in self.nats and to == self.cards[other]:
                receiver = other
        if receiver is not None:
            self.push(receiver, source, data)

    def push(self, receiver: PeerId, source: Address, data: bytes) -> None:
        """Have a datagram come a little later, from where its receiver sees it come."""
        self._pushed += 1
        heapq.heappush(self._flying, (self.now_s + ONE_WAY_S, self._pushed, receiver, source, data))

    def _take(self, peer: PeerId, source: Address, data: bytes) -> None:
        routes, via, address = self.routes[peer], DIRECT, routes_source(self.routes[peer], source)
        if data[0] == FORWARD:
            head = data[:FORWARD_BYTES]
            if not routes.for_me(head):
                to = routes.forward(self.now_s, head, source, len(data))
                if to is not None:
                    self.hops[data] += 1
                    self.send(peer, data, to)
                return
            found = routes.delivered(head, source)
            if found is None:
                return
            (address, via), data = found, data[FORWARD_BYTES:]
        if len(data) == 64:
            self._say(peer, routes.hear(self.now_s, data, source, via))
            return
        whose = next((p for p, card in self.cards.items() if card == address), None)
        if whose is not None:
            self.heard[peer][address] += 1
            self.came.setdefault((whose, peer), []).append((self.now_s, via))

    def since(self, sender: PeerId, receiver: PeerId, from_s: float) -> list[PeerId]:
        return [via for at_s, via in self.came.get((sender, receiver), []) if at_s > from_s]


def routes_source(routes: Routes, source: Address) -> Address:
    return routes.source(source)


def test_peers_that_reach_each_other_are_asked_once_and_nobody_relays() -> None:
    world = World(3)
    world.run(20.0)
    assert all(len(world.since(a, b, 0.0)) >= 199 for a in range(3) for b in range(3) if a != b)
    hellos = [data for _, data, _ in world.sent if data[0] == HELLO]
    assert len(hellos) == 6  # one for each way
    assert not any(routes.forwarded or routes.refused or routes.news for routes in world.routes)


def test_two_behind_symmetric_routers_are_reached_and_reach_each_other_through_members() -> None:
    world = World(6, behind=(4, 5))
    world.run(10.0)
    for a in range(6):
        for b in range(6):
            if a != b:
                through = set(world.since(a, b, 2.0))
                assert len(through) == 1, (a, b, through)
                assert (through == {DIRECT}) == ({a, b} != {4, 5}), (a, b, through)
    # number a + b of the four that both reach, and the next one: the two directions burden two of them
    assert set(world.since(4, 5, 2.0)) == {(4 + 5) % 4} and set(world.since(5, 4, 2.0)) == {(2 * 5 + 4) % 4}
    assert [r.forwarded > 0 for r in world.routes] == [False, True, True, False, False, False]
    assert max(world.hops.values()) == 1
    told = [(n.peer, n.what, n.detail) for n in world.routes[4].news if n.what]
    assert told == [(5, "relayed", "what is sent to it goes through peer 1")]


def test_all_come_within_a_second_of_the_first_word_although_a_tenth_is_lost() -> None:
    world = World(6, behind=(4, 5), loss=0.1)
    world.run(12.0)
    for a in range(6):
        for b in range(6):
            if a != b:
                assert len(world.since(a, b, 2.0)) > 70, (a, b)
    assert set(world.since(0, 1, 0.0)) == {DIRECT}


@pytest.mark.parametrize("told", [True, False])
def test_another_one_relays_where_the_relay_dies(told: bool) -> None:
    """told: membership declares it dead; else it is silent only."""
    world = World(6, behind=(4, 5))
    world.run(5.0)
    assert world.routes[4].via(5) == 1
    world.silent.add(1)
    if told:
        world.dead.add(1)
    world.run(10.0)
    within_s = 0.3 if told else 2 * LOOK_S + 1.0
    through = world.since(4, 5, 5.0 + within_s)
    assert through and 1 not in through and len(set(through)) == 1
    assert len(through) >= 10 * (5.0 - within_s) - 2
    assert set(world.since(5, 4, 5.1)) == {2}  # whose relay lives


def test_a_pair_that_is_cut_apart_is_joined_through_a_third_and_directly_again_once_it_can() -> None:
    world = World(3)
    world.run(3.0)
    a, b = world.cards[0][0], world.cards[1][0]
    world.blocked |= {(a, b), (b, a)}
    world.run(9.0)
    assert set(world.since(0, 1, 6.0)) == set(world.since(1, 0, 6.0)) == {2}
    world.blocked.clear()
    world.run(9.0 + AGAIN_S + 4.0)
    assert world.since(0, 1, 9.0 + AGAIN_S + 2.0)
    assert set(world.since(0, 1, 9.0 + AGAIN_S + 2.0) + world.since(1, 0, 9.0 + AGAIN_S + 2.0)) == {DIRECT}
    assert [n.what for n in world.routes[0].news] == ["relayed", "reached"]


def test_a_cut_in_one_direction_is_found_although_the_other_one_brings_all() -> None:
    world = World(3)
    world.run(3.0)
    world.blocked.add((world.cards[0][0], world.cards[1][0]))
    world.run(12.0)
    assert set(world.since(0, 1, 8.0)) == {2} and len(world.since(0, 1, 8.0)) == 40
    assert len(world.since(1, 0, 8.0)) == 40


def test_a_router_that_forgets_gives_other_ports_and_the_ways_are_found_again() -> None:
    world = World(4, behind=(3,))
    world.run(5.0)
    world.nats[3].forget()
    world.run(12.0)
    for other in range(3):
        assert len(world.since(3, other, 9.0)) == len(world.since(other, 3, 9.0)) == 30, other


def test_an_address_that_a_router_has_given_up_is_nobodys() -> None:
    world = World(4, behind=(3,))
    world.run(5.0)
    before = world.routes[0].to(world.now_s, world.cards[3])[0]
    assert world.routes[0].source(before) == world.cards[3] != before
    world.nats[3].forget()
    world.run(12.0)
    now = world.routes[0].to(world.now_s, world.cards[3])[0]
    assert world.routes[0].source(now) == world.cards[3] and now != before
    assert world.routes[0].source(before) == before and not world.routes[0].knows(before)


def test_members_that_this_peer_never_spoke_to_are_asked_to_relay() -> None:
    world = World(6, behind=(4, 5))
    world.talks = lambda a, b: {a, b} == {4, 5}
    world.run(10.0)
    assert set(world.since(4, 5, 4.0)) == {(4 + 5) % 4} and set(world.since(5, 4, 4.0)) == {(2 * 5 + 4) % 4}


def test_a_member_that_is_itself_reached_through_another_is_not_asked_to_relay() -> None:
    """Peer 3 has reached all, and reaches peer 0 alone now: what goes to 1 cannot go through 2."""
    world = World(4)
    world.run(3.0)
    three = world.cards[3][0]
    world.blocked |= {
        pair for other in (1, 2) for pair in ((three, world.cards[other][0]), (world.cards[other][0], three))
    }
    world.run(10.0)
    routes = world.routes[3]
    assert [routes.via(peer) for peer in (0, 1, 2)] == [DIRECT, 0, 0]
    assert routes._candidates(world.now_s, routes._ways[1]) == [0]
    assert set(world.since(3, 1, 6.0)) == set(world.since(3, 2, 6.0)) == {0}


def proves(world: World, sender: PeerId, source: Address) -> None:
    """A peer's hellos to peer 0 come from an address, and it receives the answers there."""
    routes = world.routes[sender]
    for _ in range(2):
        hello = routes._hello(routes._ways[0], DIRECT, False)
        (here,) = world.routes[0].hear(world.now_s, hello.data, source)
        routes.hear(world.now_s, here.data, world.cards[0])


def test_an_address_that_another_peer_has_now_is_no_longer_the_first_ones() -> None:
    """The first one is where its card says again; by TCP it is where it was."""
    world = settled()
    routes, shared = world.routes[0], ("192.0.2.7", 7_000)
    by_tcp = by_stream(("192.0.2.7", 7_001))
    proves(world, 2, by_tcp)
    proves(world, 2, shared)
    assert routes.source(shared) == routes.source(by_tcp) == world.cards[2]
    proves(world, 3, shared)
    assert routes.source(shared) == world.cards[3] and routes.source(by_tcp) == world.cards[2]
    doors = routes._ways[2].doors
    assert doors[DIRECT].at == world.cards[2] and doors[STREAM].at == by_tcp


def test_nobody_that_both_reach_is_said_once_with_what_to_do() -> None:
    world = World(2, behind=(0, 1))
    world.run(30.0)
    for routes in world.routes:
        (told,) = routes.news
        assert told.what == "out of reach" and "no other member can relay" in told.detail
        assert "let UDP in" in told.detail
    asked = [data for _, data, _ in world.sent if data[0] == HELLO]
    assert len(asked) < 2 * 20  # in growing pauses
    world.talks = lambda a, b: False  # it gives up, and begins anew
    world.run(60.0)
    world.talks = lambda a, b: True
    world.run(75.0)
    assert len([data for _, data, _ in world.sent if data[0] == HELLO]) > len(asked) + 2 * 5
    assert all(len(routes.news) == 1 for routes in world.routes)


# -- What a stranger, or a member that does wrong, can do


def settled() -> World:
    world = World(4, behind=(2, 3))
    world.run(5.0)
    world.talks = lambda a, b: False
    world.run(8.0)
    world.sent.clear()
    return world


def head_of(sender: PeerId, receiver: PeerId, ticket: int) -> bytes:
    return bytes([FORWARD, 0, sender, 0, receiver, 0, 0, 0]) + ticket.to_bytes(8, "little")


def test_nothing_is_passed_on_without_the_ticket_or_from_elsewhere() -> None:
    world = settled()
    relay = world.routes[2].via(3)
    routes = world.routes[relay]
    hop, head = world.routes[2].to(world.now_s, world.cards[3])
    source = world.nats[2].out(2, hop)
    assert routes.forward(world.now_s, head, source, 1168) is not None
    before = routes.refused["stranger"]
    assert routes.forward(world.now_s, head, ("192.0.2.9", 5), 1168) is None  # its ticket, seen on the line
    assert routes.forward(world.now_s, head, ("192.0.2.9", source[1]), 1168) is None
    assert routes.forward(world.now_s, head_of(2, 3, 0), source, 1168) is None
    assert routes.forward(world.now_s, head_of(9, 3, 1), source, 1168) is None  # of no member
    assert routes.refused["stranger"] == before + 4
    ticket = int.from_bytes(head[8:], "little")
    assert routes.forward(world.now_s, head_of(2, 2, ticket), source, 1168) is None  # back to its sender
    assert routes.forward(world.now_s, head_of(2, 9, ticket), source, 1168) is None  # to no member
    assert routes.refused["no way on"] == 2


def test_what_takes_two_hops_is_not_passed_on() -> None:
    """A relay whose own way to the receiver goes through another one would make it go round."""
    world = World(4)
    world.blocked |= {(world.cards[a][0], world.cards[3][0]) for a in (0, 1)}
    world.blocked |= {(world.cards[3][0], world.cards[a][0]) for a in (0, 1)}
    world.run(8.0)
    assert world.routes[0].via(3) == world.routes[1].via(3) == 2
    ticket = world.routes[0]._ways[1].door.ticket
    assert ticket
    routes = world.routes[1]
    assert routes.forward(world.now_s, head_of(0, 3, ticket), world.cards[0], 1168) is None
    assert routes.refused["no way on"] >= 1
    assert max(world.hops.values()) == 1


def test_one_member_has_no_more_passed_on_than_its_share() -> None:
    world = settled()
    relay = world.routes[2].via(3)
    routes = world.routes[relay]
    hop, head = world.routes[2].to(world.now_s, world.cards[3])
    source = world.nats[2].out(2, hop)
    train = 56 * 1168
    passed = sum(routes.forward(world.now_s, head, source, train) is not None for _ in range(3000))
    assert 56 * passed <= FORWARDED_PACKETS_PER_S < 56 * (passed + 2)
    assert routes.refused["too much to relay"] > 0
    other = world.nats[3].out(3, world.cards[relay])
    back = head_of(3, 2, world.routes[3]._ways[relay].door.ticket)
    assert routes.forward(world.now_s, back, other, train) is not None  # others have their own


def test_a_hello_that_was_recorded_moves_nothing_and_earns_no_more_than_it_is() -> None:
    world = World(4, behind=(2, 3))
    world.run(5.0)
    hellos = [(who, data, to) for who, data, to in world.sent if data[0] == HELLO]
    elsewhere = ("192.0.2.66", 6)
    for who, data, to in hellos:
        receiver = next((p for p in (0, 1) if world.cards[p] == to), None)
        if receiver is None:
            continue
        routes, card = world.routes[receiver], world.cards[who]
        before = routes.to(world.now_s, card), routes.due_s
        (answer,) = routes.hear(world.now_s, data, elsewhere)
        assert len(answer.data) == len(data) and answer.address == elsewhere
        assert (routes.to(world.now_s, card), routes.due_s) == before
        for at in range(0, 64, 7):  # nor does one that was changed
            forged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            assert routes.hear(world.now_s, forged, elsewhere) == []
        assert routes.refused["forged"] and not routes.refused["replayed"]


def test_another_member_cannot_say_hello_in_the_name_of_one() -> None:
    world = settled()
    # peer 1 knows the crew's key, and makes what peer 2 would send to peer 0, with its own key pair
    draws = generator(3, "test relays", 4)
    pairs = [KeyPair(draws.bytes(32)) for _ in range(4)]
    liar = Routes(2, b"c" * 32, pairs[1], Mates(world, 2), lambda address: 0, draws.bytes)
    liar.to(world.now_s, world.cards[0])
    (hello,) = liar.turn(world.now_s)
    assert hello.data[0] == HELLO
    assert world.routes[0].hear(world.now_s, hello.data, world.cards[1]) == []
    assert world.routes[0].refused["forged"] == 1


def test_an_answer_is_taken_once_and_only_to_a_question() -> None:
    world = World(2)
    world.routes[0].to(0.0, world.cards[1])
    (hello,) = world.routes[0].turn(0.0)
    (here,) = world.routes[1].hear(0.0, hello.data, world.cards[0])
    world.routes[0].hear(0.0, here.data, world.cards[1])
    assert not world.routes[0].refused
    world.routes[0].hear(0.0, here.data, world.cards[1])
    assert world.routes[0].refused["replayed"] == 1
    assert world.routes[1].hear(0.0, here.data, world.cards[0]) == []  # reflected
    assert world.routes[1].refused["stranger"] == 1


def test_a_process_that_comes_in_anothers_place_begins_anew() -> None:
    world = World(3)
    world.run(3.0)
    before = world.routes[0]._ways[1]
    pair = KeyPair(b"9" * 32)
    world.keys[1] = card_of(1, pair)
    world.routes[1] = Routes(
        1, b"c" * 32, pair, Mates(world, 1), world.heard[1].__getitem__, lambda n: b"s" * n
    )
    world.run(8.0)
    assert world.routes[0]._ways[1] is not before
    assert len(world.since(0, 1, 5.0)) == 30
