"""Membership's datagrams: by UDP where it gets through, and over TCP where nothing comes back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ragtag.core.address import Address, by_stream, is_stream, without_stream
from ragtag.network.link.udp import bound
from ragtag.network.membership import datagrams
from ragtag.network.membership.admission import ask_where
from ragtag.network.membership.datagrams import DOUBTED, Datagrams
from ragtag.protocols.membership.whereabouts import you_are_at
from ragtag.protocols.relays import AGAIN_S, LOOK_S
from tests.network.crew import PATIENCE_S, until


class Cut(socket.socket):
    """A UDP socket that loses all that it sends, while it is told to."""

    cut = False

    def sendto(self, data: bytes, address: Address) -> int:  # type: ignore[override]
        return len(data) if self.cut else super().sendto(data, address)


class Clock:
    """In place of ``time`` in the module: goes on as it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(datagrams, "time", made)
    return made


@pytest.fixture
def two(clock: Clock) -> Iterator[tuple[Datagrams, Datagrams]]:
    with ExitStack() as undo:
        made = []
        for _ in range(2):
            sock = Cut(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind(("127.0.0.1", 0))
            made.append(Datagrams(sock, listens=True))
            undo.callback(made[-1].close)
        yield made[0], made[1]


def received(sock: Datagrams) -> list[tuple[bytes, Address]]:
    found = []
    while True:
        try:
            found.append(sock.recvfrom(1153))
        except BlockingIOError:
            return found


def came(one: Datagrams, other: Datagrams, data: bytes) -> Address:
    """Where ``data`` came from at ``other``, once it has."""
    found: list[Address] = []

    def look() -> bool:
        received(one)
        found.extend(source for got, source in received(other) if got == data)
        return bool(found)

    until(look, f"{data!r}")
    return found[0]


def test_where_something_comes_back_no_connection_is_made(
    two: tuple[Datagrams, Datagrams], clock: Clock
) -> None:
    one, other = two
    for at in range(20):
        one.sendto(b"%d" % at, other.address)
        assert came(one, other, b"%d" % at) == one.address
        other.sendto(b"back", one.address)
        assert came(other, one, b"back") == other.address
        clock.now_s += 10.0
    assert len(one.streams) == len(other.streams) == 0


def test_where_nothing_comes_back_it_goes_over_tcp_and_comes_back_so(
    two: tuple[Datagrams, Datagrams], clock: Clock
) -> None:
    one, other = two
    assert isinstance(one.sock, Cut) and isinstance(other.sock, Cut)
    one.sock.cut = other.sock.cut = True
    for at in range(DOUBTED):
        one.sendto(b"lost", other.address)
        clock.now_s += LOOK_S / 2
        assert len(one.streams) == 0, at
    one.sendto(b"here", other.address)
    source = came(one, other, b"here")
    assert is_stream(source) and without_stream(source)[0] == "127.0.0.1"
    other.sendto(b"there", source)
    assert came(other, one, b"there") == by_stream(other.address)
    one.sendto(b"again", by_stream(other.address))
    assert came(one, other, b"again") == source
    one.sock.cut = False
    clock.now_s += AGAIN_S
    one.sendto(b"both", by_stream(other.address))
    assert came(one, other, b"both") in (one.address, source)
    until(lambda: len(received(one)) == 0 and len(received(other)) >= 0, "nothing more")
    one.sendto(b"now", other.address)
    assert came(one, other, b"now") == one.address, "UDP is there again"


def test_a_few_that_find_nobody_in_a_moment_are_no_reason(
    two: tuple[Datagrams, Datagrams], clock: Clock
) -> None:
    one, other = two
    assert isinstance(one.sock, Cut)
    one.sock.cut = True
    for _ in range(50):
        one.sendto(b"lost", other.address)
        clock.now_s += 0.9 * LOOK_S / 50
    assert len(one.streams) == 0
    one.sock.cut = False


def test_an_answer_over_tcp_tells_no_address_and_nobody_waits_for_udp_any_longer() -> None:
    with ExitStack() as undo:
        sock, other = (
            Cut(socket.AF_INET, socket.SOCK_DGRAM),
            Datagrams(bound(socket.SOCK_DGRAM, ("127.0.0.1", 0)), listens=True),
        )
        sock.bind(("127.0.0.1", 0))
        sock.cut = True
        one = Datagrams(sock)
        undo.callback(one.close)
        undo.callback(other.close)
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                for data, source in received(other):
                    told = you_are_at(bytes(32), data, without_stream(source))
                    assert told is not None
                    other.sendto(told, source)
                stop.wait(0.01)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        began_s = time.monotonic()
        assert ask_where(one, [other.address], bytes(32), 2 * PATIENCE_S) == {}
        assert time.monotonic() - began_s < PATIENCE_S
        stop.set()
        thread.join(PATIENCE_S)
