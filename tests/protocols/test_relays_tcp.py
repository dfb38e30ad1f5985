"""Ways over TCP between peers whose UDP does not get through, in virtual time: chosen by what is answered."""

from __future__ import annotations

import pytest

from ragtag.core.address import Address, by_stream, dials, from_stream, is_stream, without_stream
from ragtag.core.types import PeerId
from ragtag.protocols.relays import AGAIN_S, DIRECT, HELLO, LOOK_S, STREAM
from tests.protocols.test_relays import World


class Wired(World):
    """The same peers, which listen for TCP at the addresses of their cards.

    shut: peers to and from which no UDP comes. closed: peers to which no connection can be made.
    made: connections by the place they were made from: who made them, and to whom.
    """

    def __init__(self, n: int, shut: tuple[PeerId, ...] = (), closed: tuple[PeerId, ...] = ()) -> None:
        super().__init__(n)
        self.shut, self.closed = set(shut), set(closed)
        self.made: dict[Address, tuple[PeerId, PeerId]] = {}
        self.dialled = 0
        self.streamed: dict[tuple[PeerId, PeerId], list[float]] = {}
        for routes in self.routes:
            routes._streams = True

    def send(self, peer: PeerId, data: bytes, to: Address) -> None:
        if not is_stream(to):
            other = next((p for p, card in self.cards.items() if card == to), None)
            if peer not in self.shut and other not in self.shut:
                super().send(peer, data, to)
            return
        self.sent.append((peer, data, to))
        if dials(to):
            other = next(p for p, card in self.cards.items() if card == without_stream(to))
            if other in self.closed:
                return
            place = from_stream((self.cards[peer][0], 50_000 + other))
            if place not in self.made:
                self.dialled += 1
                self.made[place] = peer, other
            self.fly(other, place, data)
        elif to in self.made:
            maker, made_to = self.made[to]
            assert made_to == peer, "a connection is used by its two ends only"
            self.fly(maker, by_stream(self.cards[peer]), data)

    def fly(self, receiver: PeerId, source: Address, data: bytes) -> None:
        if len(data) != 64:
            sender = next(p for p, card in self.cards.items() if card[0] == without_stream(source)[0])
            self.streamed.setdefault((sender, receiver), []).append(self.now_s)
        self.push(receiver, source, data)

    def hang_up(self) -> None:
        """All connections end, and both ends hear of it."""
        for place, (maker, other) in self.made.items():
            self.routes[maker].closed(self.now_s, by_stream(self.cards[other]))
            self.routes[other].closed(self.now_s, place)
        self.made.clear()

    def over_tcp(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.cards if other != peer and self.routes[peer].streamed(other)]


def test_peers_that_udp_reaches_make_no_connection() -> None:
    world = Wired(4)
    world.run(3 * AGAIN_S)
    assert world.dialled == 0 and not any(is_stream(to) for _, _, to in world.sent)


@pytest.mark.parametrize("closed", [(), (3,)])
def test_a_peer_without_udp_is_reached_over_tcp_within_a_second_and_by_nobody_else(
    closed: tuple[PeerId, ...],
) -> None:
    world = Wired(4, shut=(3,), closed=closed)
    world.run(8.0)
    assert [world.over_tcp(peer) for peer in range(4)] == [[3], [3], [3], [0, 1, 2]]
    for other in range(3):
        assert world.routes[3].via(other) == world.routes[other].via(3) == STREAM
        assert len(world.streamed[3, other]) >= 10 * (8.0 - 1.2) and world.streamed[3, other][0] < 1.2
        assert len(world.since(3, other, 4.0)) == len(world.since(other, 3, 4.0)) == 40
    told = [(n.what, n.peer) for n in world.routes[3].news if n.what]
    assert sorted(told) == [("by TCP", 0), ("by TCP", 1), ("by TCP", 2)]
    assert all("UDP" in n.detail for n in world.routes[3].news if n.what)


def test_two_that_only_get_out_by_tcp_reach_each_other_through_one_that_both_reach() -> None:
    world = Wired(4, shut=(2, 3), closed=(2, 3))
    world.run(10.0)
    assert {world.routes[2].via(3), world.routes[3].via(2)} <= {0, 1}
    assert world.over_tcp(2) == [0, 1, 3] and world.over_tcp(0) == [2, 3]
    assert len(world.since(2, 3, 6.0)) == len(world.since(3, 2, 6.0)) == 40
    assert max(world.hops.values()) == 1


def test_tcp_to_the_peer_itself_is_better_than_another_member_and_udp_is_better_than_tcp() -> None:
    world = Wired(3)
    world.run(3.0)
    a, b = world.cards[0][0], world.cards[1][0]
    world.blocked |= {(a, b), (b, a)}
    world.closed |= {0, 1}
    world.run(8.0)
    assert world.routes[0].via(1) == world.routes[1].via(0) == 2
    world.closed.clear()
    world.run(8.0 + AGAIN_S + 4.0)
    assert world.routes[0].via(1) == world.routes[1].via(0) == STREAM
    world.blocked.clear()
    world.run(8.0 + 2 * AGAIN_S + 8.0)
    assert world.routes[0].via(1) == world.routes[1].via(0) == DIRECT
    assert [n.what for n in world.routes[0].news if n.what] == ["relayed", "by TCP", "reached"]


def test_udp_that_is_shut_off_is_replaced_and_taken_up_again() -> None:
    world = Wired(3)
    world.run(3.0)
    world.shut.add(2)
    world.run(8.0)
    assert world.over_tcp(2) == [0, 1]
    assert len(world.since(2, 0, 3.0 + LOOK_S + 1.5)) >= 10 * (8.0 - 3.0 - LOOK_S - 1.5) - 1, "within 2.5 s"
    world.shut.clear()
    world.run(8.0 + AGAIN_S + 4.0)
    assert [world.over_tcp(peer) for peer in range(3)] == [[], [], []]
    assert len(world.since(0, 2, 20.0)) == round(10 * (world.now_s - 20.0)), "nothing is lost on the way back"


def test_a_connection_that_ends_is_made_again_at_once() -> None:
    world = Wired(3, shut=(2,), closed=(2,))
    world.run(5.0)
    world.hang_up()
    world.run(6.0)
    assert world.over_tcp(2) == [0, 1] == [p for p in (0, 1) if world.routes[p].via(2) == STREAM]
    assert len(world.since(0, 2, 5.5)) == len(world.since(2, 0, 5.5)) == 5
    assert world.dialled == 4


def test_a_place_that_was_seen_on_the_line_is_worth_nothing_to_a_stranger() -> None:
    """A recorded hello over a connection of the stranger's own moves nobody, and earns no more than it is."""
    world = Wired(3, shut=(2,))
    world.run(5.0)
    said = [data for peer, data, to in world.sent if peer == 2 and data[0] == HELLO and is_stream(to)]
    assert said
    hello = said[-1]
    strange = from_stream(("192.0.2.66", 40_000))
    for routes in world.routes[:2]:
        out = routes.hear(world.now_s, hello, strange)
        assert sum(len(each.data) for each in out) <= 64
        assert not routes.knows(strange)
    assert world.routes[0].to(world.now_s, world.cards[2])[0] != strange
