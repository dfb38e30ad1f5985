"""Sealed links between peers whose UDP does not get through: over TCP, whatever the size of datagrams."""

from __future__ import annotations

import select
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from ragtag.core.address import Address, by_stream
from ragtag.core.seed import generator
from ragtag.core.types import PeerId
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES, Kind
from ragtag.network.link.relayed import RelayedLink
from ragtag.network.link.streamed import LONGEST_BYTES, StreamedLink
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.relays import FORWARD_BYTES, STREAM
from tests.network.crew import until
from tests.network.test_relayed import Crew, K


@contextmanager
def crew_of(listen: Collection[PeerId] = (0, 1, 2), plain: bool = False) -> Iterator[Crew]:
    with ExitStack() as undo:
        crew = Crew(lambda: UdpLink(plain=plain), listen)
        for link in crew.links:
            undo.callback(link.close)
        yield crew


class Full(UdpLink):
    """Its socket takes nothing now, and would say when it does."""

    def carry(self, data: memoryview | bytes, size: int, address: Address) -> int:
        return 0


def test_relayed_datagrams_that_found_no_room_wake_the_poll_once_there_is_some() -> None:
    with closing(StreamedLink(Full())) as link:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        assert link.carry(bytes(1168), 1168, ("127.0.0.1", 9)) == 0
        assert poll.poll(0), "UDP has room"


@pytest.mark.parametrize("listen", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("per", [1, 5, 56])
def test_what_goes_over_tcp_comes_as_it_was_sent(per: int, listen: Collection[PeerId]) -> None:
    with crew_of(listen) as crew:
        crew.meet(STREAM)
        rows = crew.rows(K)
        sent = rows.copy()
        assert crew.links[0].send(rows, crew.under[1].address, per) == K
        came = crew.brought(K)
        assert np.array_equal(came[:, 64:], sent[:, 64:]) and len(came) == K
        ends = [address for got in crew.got[1] for _, address in got.sources]
        assert set(ends) <= {link.address for link in crew.under}, "a peer has the address of its card"
        _, headers = crew.framers[1].parse(came)
        assert set(headers["sender"]) == {0} and len(headers) == K
        for peer, link in enumerate(crew.links[:2]):
            assert isinstance(link._link, RelayedLink) and link._link._streams is not None
            at = crew.routes[peer].to(crew.now_s, crew.under[1 - peer].address)[0]
            assert at in link._link._streams._streams and not link._link._streams.strange(at)
        assert not crew.links[1].sessions.refused and crew.routes[2].forwarded < K


def test_two_to_which_nobody_connects_reach_each_other_through_one_over_tcp() -> None:
    with crew_of((2,)) as crew:
        for a, b in ((0, 2), (2, 0), (1, 2), (2, 1)):
            crew.under[a].cut.add(crew.under[b].address)
        crew.meet(2)
        assert crew.routes[0].streamed(1) and crew.routes[2].via(0) == crew.routes[2].via(1) == STREAM
        rows = crew.rows(K)
        sent = rows.copy()
        crew.links[0].send(rows, crew.under[1].address, 5)
        assert np.array_equal(crew.brought(K)[:, 64:], sent[:, 64:])
        assert crew.routes[2].forwarded >= K


def test_a_reader_that_stands_still_holds_up_its_own_connection_alone() -> None:
    with crew_of() as crew:
        crew.meet(STREAM)
        link, there = crew.links[0], crew.under[1].address
        taken = 0
        while link.room(there):
            left = link.send(crew.rows(448), there, 56)
            assert left > 0
            taken += left
            crew.turn(0)
        assert link.send(crew.rows(56), there) == 0 and not link.room(there)
        assert link.room(crew.under[2].address), "another peer is not held up"
        before = len(crew.got[2])

        def heard() -> bool:
            if link.ready(crew.under[2].address):
                link.send_short(crew.framers[0].short(Kind.PING, 2, seq=9), crew.under[2].address)
            crew.turn(0, 2)
            return any(got.short for got in crew.got[2][before:])

        until(heard, "a ping to the other peer")
        came = len(crew.got[1])

        def all_there() -> bool:
            crew.turn()
            return sum(len(got.table) for got in crew.got[1][came:]) == taken and link.room(there)

        until(all_there, "all that was taken, and room again")


def test_the_descriptor_wakes_once_a_full_socket_has_room_again() -> None:
    with ExitStack() as undo:
        under = UdpLink()
        link = StreamedLink(under)
        undo.callback(link.close)
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        link._await_room(True)  # as after a send that found none
        assert poll.poll(1000)
        link.receive()
        assert poll.poll(0) == []


def test_trains_over_a_connection_are_as_they_are_by_udp_and_other_sizes_are_counted() -> None:
    with ExitStack() as undo:
        one, two = StreamedLink(UdpLink()), StreamedLink(UdpLink())
        undo.callback(one.close)
        undo.callback(two.close)
        there = by_stream(two.address)
        draws = generator(9, "test streamed")
        sizes = [1152] * 3 + [5 * 1152] * 2
        sizes += [1152, HEADER_BYTES, 1152, 1152 + FORWARD_BYTES, 100, LONGEST_BYTES]
        sent = [draws.bytes(size) for size in sizes]
        rows, per, ends, short = b"", list[int](), list[int](), list[bytes]()
        wrapped = malformed = 0

        def all_there() -> bool:
            nonlocal rows, wrapped, malformed
            one.receive()
            got = two.receive()
            before = len(rows) // DATAGRAM_BYTES
            rows += got.table.tobytes()
            per.extend(got.per)
            ends.extend(before + end for end, _ in got.sources)
            short.extend(got.short)
            wrapped += sum(len(train.data) for train in got.wrapped)
            malformed += got.malformed
            return wrapped == 1152 + FORWARD_BYTES + LONGEST_BYTES

        one.streams.send(b"hello", 5, there)

        def heard() -> bool:
            one.receive()
            return two.receive().malformed == 1

        until(heard, "a first datagram")
        for address in two.streams._streams:
            two.streams.proven(address)
        for data in sent:
            one.streams.send(data, len(data), there)

            def room() -> bool:
                one.receive()
                return one.room(there)

            until(room, "room")
        until(all_there, "eleven datagrams")
        assert rows == b"".join(data for data in sent if len(data) % 1152 == 0)
        assert short == [sent[6]] and malformed == 1
        assert ends[-1] == 15 and {1, 5} == set(per)
