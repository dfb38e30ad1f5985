"""TCP connections that carry datagrams: framing, what is kept, what is lost, and strangers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.address import Address, by_stream, from_stream
from ragtag.core.seed import generator
from ragtag.network.link.streams import (
    ANSWER_S,
    IDLE_S,
    MAGIC,
    SILENT_S,
    STREAMS_MAX,
    UNPROVEN_MAX,
    UNSENT_BYTES,
    Garbled,
    Streams,
    Unframer,
    framed,
)
from tests.network.crew import until

LONGEST = 64_528

# -- Framing


@given(size=st.integers(1, 2400), count=st.integers(0, 5), rest=st.integers(0, 2399), cuts=st.data())
def test_datagrams_come_out_as_they_went_in_however_tcp_cuts(
    size: int, count: int, rest: int, cuts: st.DataObject
) -> None:
    data = generator(1, "test framing", size, count).bytes(size * count + rest % size)
    sent = MAGIC + framed(data, size).tobytes()
    unframer, came, at = Unframer(LONGEST, opens=True), list[bytes](), 0
    while at < len(sent):
        part = cuts.draw(st.integers(1, len(sent) - at))
        came += unframer.feed(sent[at : at + part])
        at += part
    assert came == [data[a : a + size] for a in range(0, len(data), size)]


def test_the_form_on_the_line_is_rfc_4571s() -> None:
    assert framed(b"abcdefg", 3).tobytes() == b"\0\3abc\0\3def\0\1g"
    assert framed(bytes(64_528), 64_528)[:2].tobytes() == bytes([0xFC, 0x10])


@given(data=st.binary(max_size=400), opens=st.booleans(), longest=st.integers(1, 300))
def test_whatever_comes_is_cut_or_refused_and_little_is_kept(data: bytes, opens: bool, longest: int) -> None:
    unframer, came = Unframer(longest, opens), list[bytes]()
    try:
        for at in range(0, len(data), 7):
            came += unframer.feed(data[at : at + 7])
            assert len(unframer._kept) <= longest + 2
    except Garbled:
        return
    if b"\0\0" in data:
        return  # null packets may stand anywhere
    rest = framed(b"", 1).tobytes() if not came else b"".join(framed(one, len(one)).tobytes() for one in came)
    assert (MAGIC if opens else b"").startswith(data[:4]) or data.startswith((MAGIC if opens else b"") + rest)


def test_null_packets_are_none() -> None:
    assert Unframer(LONGEST, opens=False).feed(b"\0\0\0\1a\0\0\0\0\0\2bc\0") == [b"a", b"bc"]


@pytest.mark.parametrize("data", [b"\xff\xff", b"GET / HTTP/1.1"])
def test_a_length_beyond_any_and_another_protocol_are_refused(data: bytes) -> None:
    with pytest.raises(Garbled):
        Unframer(LONGEST, opens=data[0] == ord("G")).feed(data)


# -- Connections


class Ends:
    """Two ends on loopback, of which each listens, and a clock."""

    def __init__(self, host: str, undo: ExitStack) -> None:
        self.now_s, self.host = 0.0, host
        family = 6 if ":" in host else 4
        self.ends = [Streams(family, LONGEST, (host, 0)) for _ in range(2)]
        self.at: list[Address] = []
        for end in self.ends:
            undo.callback(end.close)
            assert end._listener is not None
            self.at.append(end._listener.getsockname()[:2])
        self.came: list[list[tuple[Address, bytes]]] = [[], []]

    def go(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        for at, end in enumerate(self.ends):
            end.turn(self.now_s)
            end.take()
            self.came[at] += end.came
            end.came.clear()

    def until(self, ready: Callable[[], object], what: str) -> None:
        def look() -> bool:
            self.go()
            return bool(ready())

        until(look, what)

    def joined(self) -> tuple[Address, Address]:
        """0 has connected to 1; what each calls it."""
        there = by_stream(self.at[1])
        assert self.ends[0].send(b"hello", 5, there) == 5
        self.until(lambda: self.came[1], "a first datagram")
        return there, self.came[1][0][0]


@pytest.fixture(params=["127.0.0.1", "::1"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as undo:
        if request.param == "::1":
            try:
                socket.create_server(("::1", 0), family=socket.AF_INET6).close()
            except OSError:
                pytest.skip("this machine has no IPv6")
        yield Ends(request.param, undo)


def test_a_datagram_is_answered_over_the_connection_that_it_came_by(ends: Ends) -> None:
    there, back = ends.joined()
    assert back[0] == from_stream((ends.host, 0))[0] and back != there
    ends.ends[1].send(b"well", 4, back)
    ends.until(lambda: ends.came[0], "an answer")
    assert ends.came == [[(there, b"well")], [(back, b"hello")]]
    assert len(ends.ends[0]) == len(ends.ends[1]) == 1


def test_a_reader_that_stands_still_holds_up_little_and_what_went_out_comes_whole(ends: Ends) -> None:
    there, back = ends.joined()
    ends.ends[1].proven(back)
    ends.until(lambda: ends.ends[0].room(there), "room")
    draws, sent = generator(2, "test streams", 0), list[bytes]()
    while ends.ends[0].room(there):
        data = draws.bytes(56 * 1152)
        left = ends.ends[0].send(data, 1152, there)
        assert left > 0 and left % 1152 == 0
        sent += [data[at : at + 1152] for at in range(0, left, 1152)]
        ends.ends[0].take()
    stream = ends.ends[0]._streams[there]
    assert len(stream.waiting) <= 1154, "of what finds no room no more is kept than what was begun"
    assert ends.ends[0].send(bytes(1152 * 5), 1152, there) == 0
    for _ in range(200):
        ends.ends[0].send(bytes(64), 64, there)
    assert len(stream.waiting) <= 70_000
    ends.came[1] = []
    ends.until(lambda: ends.ends[0].room(there), "room again")
    ends.until(lambda: len(ends.came[1]) >= len(sent), "all that was taken")
    assert [data for _, data in ends.came[1] if len(data) == 1152] == sent
    assert len(sent) * 1152 > UNSENT_BYTES


def test_nobody_listens_and_the_next_attempts_become_rarer(ends: Ends) -> None:
    with closing(
        socket.create_server((ends.host, 0), family=socket.AF_INET6 if ":" in ends.host else 2)
    ) as s:
        gone = by_stream(s.getsockname()[:2])
    dialled = list[float]()
    for _ in range(400):
        before = len(ends.ends[0])
        ends.ends[0].send(b"x", 1, gone)
        if len(ends.ends[0]) > before:
            dialled.append(ends.now_s)
            ends.until(lambda: not len(ends.ends[0]), "a refusal")
        ends.go(0.1)
    assert ends.ends[0].closed == [gone] * len(dialled)
    pauses = np.diff(dialled)
    assert 5 <= len(dialled) <= 10 and (np.diff(pauses) > 0).sum() >= 3 and pauses[-1] >= 8.0


def test_a_place_that_a_connection_came_from_is_never_connected_to(ends: Ends) -> None:
    assert ends.ends[0].send(b"x", 1, from_stream(ends.at[1])) == 1
    assert ends.ends[0].send(b"x", 1, by_stream(("a name", 5))) == 1
    assert len(ends.ends[0]) == 0


def test_an_end_that_goes_away_is_told_and_connected_to_again(ends: Ends) -> None:
    there, back = ends.joined()
    ends.ends[1]._end(ends.ends[1]._streams[back])
    ends.until(lambda: ends.ends[0].closed, "the end of a connection")
    assert ends.ends[0].closed == [there] and ends.ends[1].closed == [back]
    ends.go(1.0)
    ends.came[1].clear()
    ends.joined()


def test_a_connection_that_answers_nothing_is_ended_and_so_is_one_of_no_use(ends: Ends) -> None:
    there, back = ends.joined()
    ends.ends[1].proven(back)
    for _ in range(3):
        ends.ends[0].send(b"x", 1, there)
    ends.go(SILENT_S - 0.1)
    assert len(ends.ends[0]) == 1
    ends.go(0.2)
    assert len(ends.ends[0]) == 0, "three datagrams, and nothing came back"
    ends.until(lambda: not len(ends.ends[1]), "the other end hears of it")
    ends.go(2.0)
    ends.came[1].clear()
    there, back = ends.joined()
    ends.ends[1].proven(back)
    ends.go(IDLE_S - 0.1)
    assert len(ends.ends[0]) == len(ends.ends[1]) == 1
    ends.go(0.2)
    assert len(ends.ends[0]) == len(ends.ends[1]) == 0


def test_a_connection_that_carries_datagrams_one_way_is_kept_and_no_chatter_follows(ends: Ends) -> None:
    there, back = ends.joined()
    ends.ends[1].proven(back)
    for _ in range(4 * round(SILENT_S)):
        ends.ends[0].send(b"x", 1, there)
        ends.go(1.0)
    ends.until(lambda: len(ends.came[1]) > 4 * SILENT_S, "all that was sent")
    assert len(ends.ends[0]) == len(ends.ends[1]) == 1
    assert ends.came[0] == [], "no datagram came back"
    ends.go(2 * ANSWER_S)
    brought = ends.ends[0]._streams[there].brought
    assert brought >= 2 * 4
    for _ in range(8):
        ends.go(ANSWER_S)
    assert ends.ends[0]._streams[there].brought - brought <= 2, "what is no datagram is not answered"
    assert ends.ends[1]._streams[back].brought == len(MAGIC) + 7 + 3 * (len(ends.came[1]) - 1)


def test_strangers_hold_few_connections_for_a_short_time_and_members_keep_theirs(ends: Ends) -> None:
    _, back = ends.joined()
    ends.ends[1].proven(back)
    assert not ends.ends[1].strange(back)
    with ExitStack() as undo:
        others = list[socket.socket]()
        for _ in range(UNPROVEN_MAX + 8):
            others.append(undo.enter_context(socket.create_connection(ends.at[1])))
            ends.go(0.01)
        ends.until(lambda: ends.ends[1].refused >= 8, "more connections than are kept")
        assert len(ends.ends[1]) == UNPROVEN_MAX + 1
        others[-1].sendall(MAGIC + b"\xff\xff" + bytes(5000))  # longer than any datagram
        others[-2].sendall(b"GET / HTTP/1.1\r\n\r\n")
        others[-3].sendall(MAGIC + b"\xf0\0" + bytes(5000))  # one that never comes whole
        ends.until(lambda: ends.ends[1].refused == 10, "what is no sequence of datagrams")
        for other in others[8:-2]:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):  # a stranger is told nothing
                other.recv(1)
        ends.go(SILENT_S + 0.1)
        assert len(ends.ends[1]) == 1 and back in ends.ends[1]._streams
    assert STREAMS_MAX > UNPROVEN_MAX


def test_a_stranger_brings_little_and_a_member_as_much_as_it_likes(ends: Ends) -> None:
    _, back = ends.joined()
    for _ in range(3):
        ends.ends[0].send(bytes(30_000), 30_000, by_stream(ends.at[1]))
        ends.until(lambda: ends.ends[0].room(by_stream(ends.at[1])) or ends.ends[0].closed, "room")
    ends.until(lambda: ends.ends[1].refused == 1, "the end of a connection that proves nothing")
    assert ends.ends[1].closed == [back]
    ends.until(lambda: ends.ends[0].closed, "the other end hears of it")
    ends.go(1.0)
    ends.came[1].clear()
    there, back = ends.joined()
    ends.ends[1].proven(back)
    for _ in range(9):
        ends.ends[0].send(bytes(30_000), 30_000, there)
        ends.until(lambda: ends.ends[0].room(there), "room")
    ends.until(lambda: sum(len(data) for _, data in ends.came[1]) >= 9 * 30_000, "all")


def test_garbage_over_a_connection_ends_it_and_nothing_else(ends: Ends) -> None:
    _, back = ends.joined()
    ends.ends[1].proven(back)
    draws = generator(3, "test streams garbage")
    for at in range(100):
        with socket.create_connection(ends.at[1]) as other:
            other.sendall((MAGIC if at % 2 else b"") + draws.bytes(int(draws.integers(1, 3000))))
            ends.until(lambda: len(ends.ends[1]) > 1 or ends.ends[1].refused, "a connection")
        ends.until(lambda: len(ends.ends[1]) == 1, "its end")
    ends.ends[1].send(b"well", 4, back)
    ends.until(lambda: ends.came[0], "the member's own connection")


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        closing(Streams(4, LONGEST, taken.getsockname())) as end,
    ):
        assert "in use" in end.unheard and end._listener is None
