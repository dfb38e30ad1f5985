"""A sealed link: what it carries is its receiver's alone, once, as it was sent, or nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.types import Bytes, MessageKey, Run
from ragtag.core.wire import CHUNK_BYTES, DATAGRAM_BYTES, HEADER_BYTES, Identity, Kind
from ragtag.network.link.frame import Framer
from ragtag.network.link.link import SLAB_ROWS, TRAIN, Received, TooLarge
from ragtag.network.link.memory import Hub, MemoryLink
from ragtag.network.link.sealed import SEALED, SealedLink
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.sealing.noise import KeyPair
from ragtag.protocols.sealing.sessions import CHACHA, Sessions, card_of
from tests.network.crew import until


class Tapped(MemoryLink):
    """Keeps what it has sent, as somebody on the line could."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub=hub)
        self.tape: list[Bytes | bytes] = []
        self.per: list[int] = []

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        self.tape.append(rows.copy())
        self.per.append(per)
        return super().send(rows, address, per)

    def send_short(self, datagram: bytes, address: Address) -> None:
        self.tape.append(datagram)
        super().send_short(datagram, address)


class Ends:
    """Peers 0, 1, ... of one crew, each with a sealed link and a framer."""

    def __init__(self, n: int = 2, suite: int = 1) -> None:
        self.hub = Hub(first_hop=TRAIN)
        self.under = [Tapped(self.hub) for _ in range(n)]
        self.cards: dict[Address, tuple[int, bytes]] = {}
        self.links, self.framers = [], []
        for peer, link in enumerate(self.under):
            draws = generator(5, "test sealed", peer)
            keys = KeyPair(draws.bytes(32))
            sessions = Sessions(b"c" * 32, keys, self.cards.get, draws.bytes, suite)
            self.cards[link.address] = peer, card_of(suite, keys)
            identity = Identity("otters", peer)
            self.links.append(SealedLink(link, identity, sessions))
            framer = Framer(identity, 77 + peer, sealed=True)
            framer.open(0, 7)
            self.framers.append(framer)

    def meet(self, source: int = 0, to: int = 1) -> None:
        """Keys in both directions."""
        self.links[source].ready(self.links[to].address)
        self.links[source].turn(0.0)
        self.links[to].receive()
        self.links[source].receive()
        assert self.links[source].ready(self.links[to].address)
        self.ping(source, to)
        assert self.links[to].ready(self.links[source].address)

    def ping(self, source: int = 0, to: int = 1) -> Received:
        self.links[source].send_short(
            self.framers[source].short(Kind.PING, to, seq=9), self.links[to].address
        )
        return self.links[to].receive()

    def rows(self, k: int, source: int = 0, to: int = 1) -> Bytes:
        draws = generator(6, "test sealed rows", k)
        run = Run(
            to, MessageKey(0, 3, 1, 2), 5, k + 9, draws.integers(0, 256, (k, CHUNK_BYTES), dtype=np.uint8),
            np.ones(k, np.float32), np.full(k, 5, np.uint64), None, False,
        )  # fmt: skip
        return self.framers[source].data(
            run, np.arange(5, 5 + k), np.arange(1, k + 1, dtype=np.uint64), ask=True
        )


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as undo:
        made = Ends(3)
        for link in made.links:
            undo.callback(link.close)
        yield made


def refused(ends: Ends, peer: int = 1) -> dict[str, int]:
    return dict(ends.links[peer].sessions.refused)


@pytest.mark.parametrize("suite", [1, CHACHA])
@pytest.mark.parametrize("k", [1, 55, 56, 57, SLAB_ROWS])
def test_rows_come_as_they_were_framed_and_stand_on_no_line(k: int, suite: int) -> None:
    ends = Ends(2, suite)
    ends.meet()
    rows = ends.rows(k)
    plain = rows.copy()
    assert ends.links[0].send(rows, ends.links[1].address) == k
    assert np.array_equal(rows[:, HEADER_BYTES:], plain[:, HEADER_BYTES:])
    got = ends.links[1].receive()
    parsed, headers = ends.framers[1].parse(got.table)
    ((run, a, b, epoch, asks),) = ends.framers[1].runs(parsed, headers)
    assert (run.peer, run.key, run.first, run.total, epoch, asks) == (
        0,
        MessageKey(0, 3, 1, 2),
        5,
        k + 9,
        77,
        True,
    )
    assert (a, b) == (0, k) and np.array_equal(run.payload, plain[:, HEADER_BYTES:])
    assert headers["seq"].tolist() == list(range(1, k + 1)) and (run.heard == 5).all()
    assert ends.framers[1].refused.total == 0 and refused(ends) == {}
    on_the_line = b"".join(bytes(rows) for rows in ends.under[0].tape)
    assert plain[0, HEADER_BYTES : HEADER_BYTES + 16].tobytes() not in on_the_line
    for link in ends.links:
        link.close()


@pytest.mark.parametrize("suite", [1, CHACHA])
@pytest.mark.parametrize("per", [2, 7, TRAIN])
@pytest.mark.parametrize("k", [1, 2, 8, 55, 57, 300])
def test_datagrams_of_several_packets_are_sealed_at_once_and_come_as_they_were(
    k: int, per: int, suite: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(2, suite)
    ends.meet()
    rows = ends.rows(k)
    plain = rows.copy()
    session = ends.links[0].sessions.to(0.0, ends.links[1].address)
    assert session is not None
    began = session.sent
    assert ends.links[0].send(rows, ends.links[1].address, per) == k
    sent = -(-k // per)
    if TRAIN % per:  # a train ends with a whole datagram
        sent = sum(-(-min(TRAIN - TRAIN % per, k - at) // per) for at in range(0, k, TRAIN - TRAIN % per))
    assert session.sent - began == sent, "one number for each datagram"
    assert set(ends.under[0].per[-1:]) == {per}
    got = ends.links[1].receive()
    parsed, headers = ends.framers[1].parse(got.table)
    ((run, a, b, epoch, asks),) = ends.framers[1].runs(parsed, headers)
    assert (run.peer, run.key, run.first, run.total, epoch, asks, a, b) == (
        0, MessageKey(0, 3, 1, 2), 5, k + 9, 77, True, 0, k,
    )  # fmt: skip
    assert np.array_equal(run.payload, plain[:, HEADER_BYTES:])
    assert headers["seq"].tolist() == list(range(1, k + 1)) and (run.heard == 5).all()
    assert ends.framers[1].refused.total == 0 and refused(ends) == {}
    on_the_line = b"".join(bytes(rows) for rows in ends.under[0].tape)
    for row in range(k):
        assert plain[row, HEADER_BYTES : HEADER_BYTES + 16].tobytes() not in on_the_line
    for rows in ends.under[0].tape[-2:]:  # once more
        if len(rows) and not isinstance(rows, bytes):
            ends.under[0].send(rows, ends.links[1].address, per)
    assert len(ends.links[1].receive().table) == 0 and set(refused(ends)) <= {"replayed", "clear"}
    for link in ends.links:
        link.close()


def test_no_packet_speaks_for_another_peer_wherever_in_a_datagram_it_stands(ends: Ends) -> None:
    """A member has keys, and may write into headers what it likes."""
    ends.meet()
    rows = ends.rows(14)
    rows.view("<u2")[:, 2] = 2  # peer 2's
    rows.view("<u2")[:, 1] = 9  # of another crew
    rows[:, 0] = 99  # in another version
    ends.links[0].send(rows, ends.links[1].address, 7)
    _, headers = ends.framers[1].parse(ends.links[1].receive().table)
    assert headers["sender"].tolist() == [0] * 14 and ends.framers[1].refused.total == 0


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_bit_that_is_changed_costs_its_datagram_and_no_other(data: st.DataObject) -> None:
    ends = Ends(2)
    ends.meet()
    per, k = data.draw(st.integers(2, 9)), 20
    ends.links[0].send(ends.rows(k), ends.links[1].address, per)
    ends.under[1]._queue.clear()
    ends.under[1]._waiting = 0
    rows = np.array(ends.under[0].tape[-1])
    which = data.draw(st.integers(0, k - 1))
    first = which - which % per
    low = 1 if which == first else 0  # the first byte says what a datagram is
    rows[which, data.draw(st.integers(low, DATAGRAM_BYTES - 1))] ^= data.draw(st.integers(1, 255))
    ends.under[0].send(rows, ends.links[1].address, per)
    got = ends.links[1].receive()
    gone = set(range(first, min(first + per, k)))
    _, headers = ends.framers[1].parse(got.table)
    assert headers["seq"].tolist() == [at + 1 for at in range(k) if at not in gone]
    assert got.sources == [(k - len(gone), ends.links[0].address)]
    assert sum(refused(ends).values()) == 1
    for link in ends.links:
        link.close()


def test_datagrams_that_are_put_together_otherwise_are_refused(ends: Ends) -> None:
    """Two in one, one in two: what the line makes of them does not pass for what was sealed."""
    ends.meet()
    ends.links[0].send(ends.rows(8), ends.links[1].address, 4)
    ends.links[1].receive()
    ends.links[0].send(ends.rows(8), ends.links[1].address, 4)
    ends.under[1]._queue.clear()
    ends.under[1]._waiting = 0
    rows = np.array(ends.under[0].tape[-1])
    for per, gone in ((8, 1), (2, 4), (1, 8)):
        before = sum(refused(ends).values())
        ends.under[0].send(rows, ends.links[1].address, per)
        assert len(ends.links[1].receive().table) == 0
        assert sum(refused(ends).values()) - before == gone
    ends.under[0].send(rows, ends.links[1].address, 4)
    assert len(ends.links[1].receive().table) == 8


def test_a_pass_may_mix_sizes_senders_and_rubbish(ends: Ends) -> None:
    ends.meet(0, 1)
    ends.meet(2, 1)
    to = ends.links[1].address
    for source, k, per in ((0, 7, 3), (2, 5, 1), (0, 9, TRAIN), (2, 4, 2)):
        ends.links[source].send(ends.rows(k, source), to, per)
        ends.under[source].send(np.full((3, DATAGRAM_BYTES), SEALED, np.uint8), to, 3)
    got = ends.links[1].receive()
    _, headers = ends.framers[1].parse(got.table)
    assert headers["sender"].tolist() == [0] * 7 + [2] * 5 + [0] * 9 + [2] * 4
    assert [end for end, _ in got.sources] == [7, 7, 12, 12, 21, 21, 25, 25]
    assert refused(ends) == {"stranger": 4}


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=8, max_size=8 + 4 * DATAGRAM_BYTES), st.integers(1, 5), st.booleans())
def test_any_bytes_may_come_several_packets_to_a_datagram(noise: bytes, per: int, known: bool) -> None:
    ends = Ends(2)
    ends.meet()
    index = struct.pack("<H", next(iter(ends.links[1].sessions._by_index)))
    data = (bytes([SEALED, 0]) + index + noise[4:] if known else noise).ljust(5 * DATAGRAM_BYTES, b"\1")
    table = np.frombuffer(data, np.uint8)[: 5 * DATAGRAM_BYTES].reshape(-1, DATAGRAM_BYTES)
    ends.under[0].send(table, ends.links[1].address, per)
    got = ends.links[1].receive()
    assert len(got.table) == 0 and sum(refused(ends).values()) == -(-5 // per)
    assert len(ends.ping().short) == 1, "the session goes on"
    for link in ends.links:
        link.close()


def test_what_the_first_hop_refuses_uses_up_its_numbers(ends: Ends) -> None:
    ends.meet()
    to, rows = ends.links[1].address, ends.rows(9)
    ends.hub.first_hop = 4
    with pytest.raises(TooLarge) as refusal:
        ends.links[0].send(rows, to, 5)
    assert refusal.value.left == 0
    assert ends.links[0].send(rows, to, 4) == 9
    assert len(ends.links[1].receive().table) == 9 and refused(ends) == {}
    session = ends.links[0].sessions.to(0.0, to)
    assert session is not None and session.sent == 1 + 2 + 3, "no number is used twice"


def test_header_only_datagrams_come_as_they_were_framed(ends: Ends) -> None:
    ends.meet()
    data = ends.framers[0].short(Kind.ACK, 1, received=7, highest=8, chunk=64, seq=3, waited_s=0.25)
    ends.links[0].send_short(data, ends.links[1].address)
    got = ends.links[1].receive()
    short = ends.framers[1].parse_short(got.short[0])
    assert short == ends.framers[1].parse_short(data) and short is not None and short.waited_s == 0.25
    assert got.short_sources == [ends.links[0].address] and len(got.short_came_ns) == 1
    assert len(ends.under[0].tape[-1]) == HEADER_BYTES


def test_without_keys_nothing_leaves_but_a_handshake(ends: Ends) -> None:
    to = ends.links[1].address
    assert not ends.links[0].ready(to)
    assert ends.links[0].send(ends.rows(5), to) == 5
    ends.links[0].send_short(ends.framers[0].short(Kind.PING, 1), to)
    assert ends.under[0].tape == []
    ends.links[0].turn(0.0)
    assert len(ends.under[0].tape) == 1


def test_rows_are_enough_to_show_that_the_other_end_has_the_keys(ends: Ends) -> None:
    zero, one = ends.links[0], ends.links[1]
    zero.ready(one.address)
    zero.turn(0.0)
    one.receive()
    zero.receive()
    assert not one.ready(zero.address)
    zero.send(ends.rows(2), one.address)
    assert len(one.receive().table) == 2 and one.ready(zero.address)


def test_a_replayed_datagram_is_not_taken_again(ends: Ends) -> None:
    ends.meet()
    ends.links[0].send(ends.rows(60), ends.links[1].address)
    assert len(ends.links[1].receive().table) == 60
    for rows in ends.under[0].tape[-2:]:
        assert not isinstance(rows, bytes)
        ends.under[0].send(rows, ends.links[1].address)
    got = ends.links[1].receive()
    assert len(got.table) == 0 and [end for end, _ in got.sources] == [0, 0]
    assert refused(ends) == {"replayed": 60}
    ends.ping()
    ends.under[0].send_short(bytes(ends.under[0].tape[-1]), ends.links[1].address)
    assert ends.links[1].receive().short == [] and refused(ends) == {"replayed": 61}


def test_a_datagram_that_is_reflected_or_sent_on_is_not_taken(ends: Ends) -> None:
    ends.meet(0, 1)
    ends.meet(0, 2)
    ends.links[0].send(ends.rows(4), ends.links[1].address)
    rows = ends.under[0].tape[-1]
    assert not isinstance(rows, bytes)
    ends.under[1].send(rows, ends.links[0].address)
    ends.under[0].send(rows, ends.links[2].address)
    assert len(ends.links[0].receive().table) == len(ends.links[2].receive().table) == 0
    assert sum(refused(ends, 0).values()) == sum(refused(ends, 2).values()) == 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_bit_can_be_changed_and_the_rest_of_the_pass_comes(data: st.DataObject) -> None:
    ends = Ends(2)
    ends.meet()
    ends.links[0].send(ends.rows(7), ends.links[1].address)
    ends.links[1].receive()
    good = ends.links[0].send(ends.rows(7), ends.links[1].address)
    rows = ends.under[0].tape[-1]
    assert good == 7 and not isinstance(rows, bytes)
    ends.links[1].receive()
    rows = rows.copy()
    # numbers that have not come yet, so that only the tag can refuse them
    ends.links[0].send(ends.rows(7), ends.links[1].address)
    ends.under[1]._queue.clear()
    ends.under[1]._waiting = 0
    rows = np.array(ends.under[0].tape[-1])
    which = data.draw(st.integers(0, 6))
    rows[which, data.draw(st.integers(1, DATAGRAM_BYTES - 1))] ^= data.draw(st.integers(1, 255))
    ends.under[0].send(rows, ends.links[1].address)
    got = ends.links[1].receive()
    assert len(got.table) == 6 and got.sources == [(6, ends.links[0].address)]
    _, headers = ends.framers[1].parse(got.table)
    assert headers["seq"].tolist() == [seq for seq in range(1, 8) if seq != which + 1]
    assert sum(refused(ends).values()) == 1
    for link in ends.links:
        link.close()


def test_what_is_not_sealed_is_refused(ends: Ends) -> None:
    ends.meet()
    clear = Framer(Identity("otters", 0), 77)
    ends.under[0].send(ends.rows(3), ends.links[1].address)
    ends.under[0].send_short(clear.short(Kind.BYE, 1), ends.links[1].address)
    got = ends.links[1].receive()
    assert len(got.table) == len(got.short) == 0 and refused(ends) == {"clear": 4}


def test_a_pass_may_mix_senders_handshakes_and_rubbish(ends: Ends) -> None:
    ends.meet(0, 1)
    to = ends.links[1].address
    ends.links[0].send(ends.rows(3), to)
    ends.links[2].ready(to)
    ends.links[2].turn(0.0)
    ends.under[2].send(np.full((2, DATAGRAM_BYTES), SEALED, np.uint8), to)
    ends.links[0].send(ends.rows(4), to)
    got = ends.links[1].receive()
    assert len(got.table) == 7
    assert got.sources == [
        (3, ends.links[0].address), (3, ends.links[2].address), (3, ends.links[2].address),
        (7, ends.links[0].address),
    ]  # fmt: skip
    assert refused(ends) == {"stranger": 2}
    ends.links[2].receive()
    assert ends.links[2].ready(to)


def test_one_session_s_rows_in_any_order_come_once(ends: Ends) -> None:
    ends.meet()
    ends.links[0].send(ends.rows(50), ends.links[1].address)
    ends.links[1].receive()
    ends.links[0].send(ends.rows(50), ends.links[1].address)
    ends.under[1]._queue.clear()
    ends.under[1]._waiting = 0
    rows = np.array(ends.under[0].tape[-1])
    order = generator(7, "test order").integers(0, 50, 200)
    ends.under[0].send(rows[order], ends.links[1].address)
    _, headers = ends.framers[1].parse(ends.links[1].receive().table)
    once = list(dict.fromkeys(order.tolist()))
    assert headers["seq"].tolist() == [at + 1 for at in once]
    assert refused(ends) == {"replayed": 200 - len(once)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(min_size=DATAGRAM_BYTES, max_size=DATAGRAM_BYTES), max_size=3),
    st.lists(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), max_size=3),
    st.booleans(),
)
def test_any_bytes_may_come(rows: list[bytes], shorts: list[bytes], first: bool) -> None:
    ends = Ends(2)
    ends.meet()
    index = struct.pack("<H", next(iter(ends.links[1].sessions._by_index)))
    for data in rows + shorts:
        form = bytes([SEALED, 0]) + index + data[4:] if first else data
        if len(data) == HEADER_BYTES:
            ends.under[0].send_short(form, ends.links[1].address)
        else:
            ends.under[0].send(np.frombuffer(form, np.uint8).reshape(1, -1), ends.links[1].address)
    got = ends.links[1].receive()
    assert len(got.table) == len(got.short) == 0
    assert sum(refused(ends).values()) == len(rows) + len(shorts)
    assert len(ends.ping().short) == 1, "the session goes on"
    for link in ends.links:
        link.close()


def test_numbers_are_used_once_also_where_the_socket_had_no_room(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Tapped, rows: Bytes, address: Address, per: int = 1) -> int:
        self.tape.append(rows.copy())
        return 2

    ends.meet()
    to = ends.links[1].address
    monkeypatch.setattr(Tapped, "send", full)
    rows = ends.rows(60)
    assert ends.links[0].send(rows, to) == 2
    assert ends.links[0].send(rows, to) == 2
    one, two = (np.array(rows)[:, :8] for rows in ends.under[0].tape[-2:])
    assert len(np.unique(np.concatenate((one, two)), axis=0)) == 2 * 56
    assert ends.links[0].send(rows, to, 7) == ends.links[0].send(rows, to, 7) == 2
    heads = [np.array(rows)[::7, :8] for rows in ends.under[0].tape[-2:]]
    assert len(np.unique(np.concatenate((one, two, *heads)), axis=0)) == 2 * 56 + 2 * 8


def test_over_sockets() -> None:
    under = [UdpLink(("127.0.0.1", 0)) for _ in range(2)]
    cards: dict[Address, tuple[int, bytes]] = {}
    links = []
    for peer, link in enumerate(under):
        draws = generator(8, "test sealed", peer)
        keys = KeyPair(draws.bytes(32))
        sessions = Sessions(b"c" * 32, keys, cards.get, draws.bytes)
        cards[link.address] = peer, card_of(1, keys)
        links.append(SealedLink(link, Identity("otters", peer), sessions))
    now_s = 0.0

    def met() -> bool:
        nonlocal now_s
        now_s += 0.01
        for link in links:
            link.turn(now_s)
            link.receive()
        return links[0].ready(links[1].address)

    until(met, "keys")
    came: list[Bytes] = []
    rows = Ends(2).rows(200)
    assert links[0].send(rows, links[1].address) == 200

    def all_came() -> bool:
        came.append(links[1].receive().table.copy())
        return sum(map(len, came)) == 200

    until(all_came, "all rows")
    assert np.array_equal(np.concatenate(came)[:, HEADER_BYTES:], rows[:, HEADER_BYTES:])
    for link in links:
        link.close()
