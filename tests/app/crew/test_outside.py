"""Where others see a newcomer's sockets, by what members tell it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from ragtag.app.crew import membership
from ragtag.app.crew.membership import Outside, outside
from ragtag.app.invitation.token import Token
from ragtag.core.address import Address

A, B = ("198.51.100.1", 4747), ("198.51.100.2", 4747)
OWN, SEEN, SEEN_DATA = ("192.168.1.2", 5000), ("203.0.113.9", 5000), ("203.0.113.9", 5001)


def found(
    monkeypatch: pytest.MonkeyPatch, *told: dict[Address, Address], entries: Sequence[Address] = (A, B)
) -> Outside | None:
    left = list(told)

    def answers(*_: object) -> dict[Address, Address]:
        return left.pop(0)

    monkeypatch.setattr(membership, "ask_where", answers)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        token = Token(tuple(entries) or (A,), "otters", b"k" * 32)
        place = outside(token, (sock, OWN, list(entries)), sock, 1.0)
    assert not left
    return place


def test_behind_a_router_it_is_where_all_members_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = found(monkeypatch, {A: SEEN, B: SEEN}, {A: SEEN_DATA, B: SEEN_DATA})
    assert seen == Outside(SEEN, SEEN_DATA)


def test_a_peer_that_is_seen_where_it_is_or_that_nobody_answers_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(monkeypatch, {A: OWN, B: SEEN}) is None
    assert found(monkeypatch, {}) is None
    assert found(monkeypatch, entries=()) is None  # it begins the crew
    assert found(monkeypatch, entries=(("127.0.0.1", 4747),)) is None  # all are on this machine
    assert found(monkeypatch, entries=((OWN[0], 4747),)) is None


def test_a_router_with_another_port_for_each_peer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = found(monkeypatch, {A: SEEN, B: SEEN_DATA}, {A: SEEN_DATA, B: SEEN_DATA})
    assert seen == Outside(SEEN, SEEN_DATA, each=True)
    seen = found(monkeypatch, {A: SEEN, B: SEEN}, {A: SEEN_DATA, B: SEEN})
    assert seen == Outside(SEEN, SEEN_DATA, each=True)
