"""Links: the one in memory keeps its bounds, and one more is a class and a name."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from ragtag.core.address import Address
from ragtag.core.seed import generator
from ragtag.core.types import Bytes
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES
from ragtag.network import link as links
from ragtag.network.link.link import SLAB_ROWS, Link, Received
from ragtag.network.link.memory import HOST, Hub, MemoryLink
from ragtag.network.link.udp import UdpLink
from ragtag.protocols.relays import FORWARD_BYTES
from tests.network import crew as crews
from tests.network.crew import Crew, mean_of

CLEAR_BYTES = 32
"""Of a header, which the link of the last test leaves as they are."""


def rows_of(k: int) -> Bytes:
    return generator(3, "rows", k).integers(0, 256, (k, DATAGRAM_BYTES), dtype=np.uint8)


@pytest.fixture
def pair() -> Iterator[tuple[MemoryLink, MemoryLink]]:
    hub = Hub()
    with closing(MemoryLink(hub=hub)) as source, closing(MemoryLink(hub=hub, capacity=100)) as dest:
        yield source, dest


def readable(link: Link) -> bool:
    return bool(select.select([link], [], [], 0)[0])


# -- In memory


def test_what_is_sent_comes_with_its_sources_address(pair: tuple[MemoryLink, MemoryLink]) -> None:
    source, dest = pair
    rows = rows_of(7)
    assert not readable(dest)
    assert source.send(rows, dest.address) == 7
    source.send_short(b"h" * HEADER_BYTES, dest.address)
    assert readable(dest)
    rows[:] = 0  # they are the caller's again
    got = dest.receive()
    assert np.array_equal(got.table, rows_of(7)) and got.sources == [(7, source.address)]
    assert (got.short, got.short_sources) == ([b"h" * HEADER_BYTES], [source.address])
    assert got.drained and not readable(dest)


def test_relayed_datagrams_for_a_link_that_is_full_are_lost_and_counted() -> None:
    hub = Hub(first_hop=2)
    with closing(MemoryLink(hub=hub)) as source, closing(MemoryLink(hub=hub, capacity=1)) as dest:
        size = DATAGRAM_BYTES + FORWARD_BYTES
        assert source.carry(bytes(3 * size), size, dest.address) == 3 * size
        assert dest.overflowed == 2


def test_one_pass_takes_no_more_than_its_slab() -> None:
    hub = Hub()
    with closing(MemoryLink(hub=hub)) as source, closing(MemoryLink(hub=hub)) as dest:
        source.send(rows_of(SLAB_ROWS + 5), dest.address)
        first = dest.receive()
        assert len(first.table) == SLAB_ROWS and not first.drained and readable(dest)
        rest = dest.receive()
        assert len(rest.table) == 5 and rest.drained and not readable(dest)


def test_what_there_is_no_room_for_is_lost_and_counted(pair: tuple[MemoryLink, MemoryLink]) -> None:
    source, dest = pair
    assert source.send(rows_of(130), dest.address) == 130, "a sender does not know"
    source.send_short(b"h" * HEADER_BYTES, dest.address)
    assert dest.overflowed == 31
    assert len(dest.receive().table) == dest.capacity == 100
    source.send(rows_of(130), dest.address)
    assert len(dest.receive().table) == 100, "there is room again"


def test_a_lossy_hub_loses_its_share_and_the_same_again_from_the_same_seed() -> None:
    got = []
    for _ in range(2):
        hub = Hub(loss=0.1, seed=4)
        with closing(MemoryLink(hub=hub)) as source, closing(MemoryLink(hub=hub)) as dest:
            source.send(rows_of(800), dest.address)
            for _ in range(200):
                source.send_short(b"h" * HEADER_BYTES, dest.address)
            one = dest.receive()
            got.append((one.table.tobytes(), len(one.short)))
            assert 670 < len(one.table) < 770 and 160 < len(one.short) < 196
    assert got[0] == got[1]


def test_what_is_sent_to_nobody_is_lost(pair: tuple[MemoryLink, MemoryLink]) -> None:
    source, dest = pair
    dest.close()
    assert dest.fileno() == -1
    assert source.send(rows_of(3), dest.address) == 3
    dest.put(source.address, rows_of(3))  # one that looked it up before it closed
    assert source.unusable(("10.0.0.1", 80)) and not source.unusable((HOST, 9))


def test_two_links_have_no_port_in_common() -> None:
    hub = Hub()
    with closing(MemoryLink((HOST, 1), hub=hub)), closing(MemoryLink(hub=hub)) as other:
        assert other.address == (HOST, 2)
        with pytest.raises(ValueError, match="port 1"):
            MemoryLink((HOST, 1), hub=hub)


# -- One more link


class Masked:
    """What a link that seals does: around another one, with a table of its own on the way out.

    Neither the check nor the chunks are to be read by anybody else.
    """

    sealed = True
    routes = None

    def __init__(self, address: Address | None = None, *, fd: int | None = None) -> None:
        self._under = UdpLink(address, fd=fd)
        self.failures, self.capacity = self._under.failures, self._under.capacity
        self.address, self.unusable = self._under.address, self._under.unusable
        self.fileno, self.close = self._under.fileno, self._under.close
        self.turn, self.ready, self.due_s = self._under.turn, self._under.ready, self._under.due_s
        self.room = self._under.room
        self.masked = 0

    def send(self, rows: Bytes, address: Address, per: int = 1) -> int:
        self.masked += len(rows)
        assert not rows[:, 16:CLEAR_BYTES].any(), "there is room for a tag"
        rows = rows.copy()
        rows[:, 16:CLEAR_BYTES] = 0xEE
        rows[:, CLEAR_BYTES:] ^= 0x5A
        return self._under.send(rows, address, per)

    def send_short(self, datagram: bytes, address: Address) -> None:
        self._under.send_short(bytes(byte ^ 0x5A for byte in datagram), address)

    def receive(self) -> Received:
        got = self._under.receive()
        assert (got.table[:, 16:CLEAR_BYTES] == 0xEE).all()
        got.table[:, 16:CLEAR_BYTES] = 0
        got.table[:, CLEAR_BYTES:] ^= 0x5A
        got.short = [bytes(byte ^ 0x5A for byte in datagram) for datagram in got.short]
        return got


def test_one_more_link_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINKS", {**links.LINKS, "masked": Masked})
    monkeypatch.setattr(crews, "LINK", "masked")
    with Crew(3, 300) as crew:
        crew.meet()
        for outcome in crew.average().values():
            assert (outcome.heard == 0b111).all() and not outcome.expired
            np.testing.assert_allclose(outcome.mean, mean_of(300, range(3)), rtol=1e-5, atol=1e-6)
        assert all(isinstance(link, Masked) and link.masked > 0 for link in crew.endpoints)
        assert sum(driver.traffic().refused for driver in crew.drivers.values()) == 0


def test_drivers_over_a_lossy_hub_average_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(loss=0.05, seed=2)
    lossy = {"memory": lambda address=None, fd=None: MemoryLink(address, fd=fd, hub=hub)}
    monkeypatch.setattr(links, "LINKS", lossy)
    monkeypatch.setattr(crews, "LINK", "memory")
    with Crew(3, 300) as crew:
        crew.meet()
        for round_ in range(3):
            for outcome in crew.average(round_=round_).values():
                share = np.bitwise_count(outcome.heard).mean() / 3
                assert 0.8 < share < 1.0 and not outcome.expired
        assert all(driver.traffic().datagrams_lost > 0 for driver in crew.drivers.values())
