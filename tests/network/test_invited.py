"""Newcomers with an invitation ask real members for the crew's key."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from ragtag.core.address import Address
from ragtag.network.link.udp import bound
from ragtag.network.membership.admission import ask_for_key, ask_where
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.membership.invitation import Said, invitation_key
from tests.network.agents import KEY, Agents
from tests.network.crew import PATIENCE_S

NUMBER = b"n" * 16


@pytest.fixture
def crew() -> Iterator[tuple[Address, ...]]:
    """The addresses of a membership of two that a thread turns."""
    with Agents(2) as agents:
        agents.until(agents.agree, "all found each other")
        over = threading.Event()

        def turn() -> None:
            while not over.is_set():
                agents.turn(0.02)

        thread = threading.Thread(target=turn)
        thread.start()
        try:
            yield tuple(agents.addresses.values())
        finally:
            over.set()
            thread.join(PATIENCE_S)


def asked(
    addresses: tuple[Address, ...], ends_unix_s: int, claimed_s: int, deadline_s: float = PATIENCE_S
) -> tuple[bytes | None, set[Said]]:
    key = invitation_key(KEY, NUMBER, ends_unix_s)
    found, refused = ask_for_key(addresses, key, NUMBER, claimed_s, deadline_s)
    return found, set(refused.values())


def test_members_give_the_key_until_the_invitations_end(crew: tuple[Address, ...]) -> None:
    now_s = int(time.time())
    assert asked(crew, 0, 0)[0] == KEY
    assert asked(crew, now_s + 600, now_s + 600)[0] == KEY
    assert asked(crew, now_s - 1, now_s - 1) == (None, {Said.ENDED})


def test_an_end_that_was_edited_is_refused(crew: tuple[Address, ...]) -> None:
    now_s = int(time.time())
    assert asked(crew, now_s - 1, now_s + 600) == (None, {Said.UNKNOWN})
    assert asked(crew, now_s - 1, 0) == (None, {Said.UNKNOWN})


def test_one_that_answers_is_enough(crew: tuple[Address, ...]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert asked((silent.getsockname(), crew[1]), 0, 0)[0] == KEY


def silent() -> tuple[socket.socket, Address]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock, sock.getsockname()


@pytest.mark.parametrize("listens", [True, False])
def test_nobody_answers_and_that_is_said_once(listens: bool) -> None:
    sock, address = silent()
    if not listens:
        sock.close()
    said: list[float] = []
    tell: Callable[[float], None] = said.append
    began_s = time.monotonic()
    found = ask_for_key((address,), invitation_key(KEY, NUMBER, 0), NUMBER, 0, 1.5, tell)
    took_s = time.monotonic() - began_s
    sock.close()
    assert found == (None, {})
    assert took_s >= 1.5
    assert len(said) == 1 and 0 < said[0] <= 0.5


def test_members_tell_a_peer_from_which_address_it_comes(crew: tuple[Address, ...]) -> None:
    with closing(Datagrams(bound(socket.SOCK_DGRAM, ("127.0.0.1", 0)))) as sock:
        own = sock.address
        assert set(ask_where(sock, crew, KEY, PATIENCE_S).values()) == {own}
        nobody = ("127.0.0.1", 9)
        asked_s = time.monotonic()
        assert ask_where(sock, (nobody, crew[0]), KEY, PATIENCE_S) == {
            crew[0]: own
        }  # it does not wait for all
        assert time.monotonic() - asked_s < PATIENCE_S, "it waits for no others once one has answered"
        began_s = time.monotonic()
        assert ask_where(sock, (nobody,), KEY, 0.2) == {}
        assert ask_where(sock, crew, bytes(32), 0.2) == {}  # of another crew
        assert time.monotonic() - began_s < PATIENCE_S
