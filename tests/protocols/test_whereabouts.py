"""A peer asks members where it is: only members do, and only members answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.address import Address
from ragtag.protocols.membership.whereabouts import (
    WHERE_BYTES,
    asks_where,
    where_am_i,
    where_i_am,
    you_are_at,
)

KEY, NONCE = b"k" * 32, b"n" * 16
SEEN: Address = ("203.0.113.9", 4747)


def told(key: bytes = KEY, nonce: bytes = NONCE, seen: Address = SEEN) -> bytes:
    said = you_are_at(key, where_am_i(key, nonce), seen)
    assert said is not None
    return said


@pytest.mark.parametrize("seen", [SEEN, ("2001:db8::1", 1), ("10.0.0.1", 65535)])
def test_a_peer_learns_from_which_address_it_comes(seen: Address) -> None:
    assert where_i_am(KEY, NONCE, told(seen=seen)) == seen


def test_a_question_is_as_long_as_its_answer_and_is_no_answer() -> None:
    question = where_am_i(KEY, NONCE)
    assert asks_where(question) and not asks_where(told())
    assert len(question) == len(told()) == WHERE_BYTES
    assert where_i_am(KEY, NONCE, question) is None


def test_a_stranger_neither_asks_nor_answers() -> None:
    assert you_are_at(KEY, where_am_i(bytes(32), NONCE), SEEN) is None
    assert where_i_am(KEY, NONCE, told(key=bytes(32))) is None
    assert where_i_am(KEY, b"m" * 16, told()) is None  # an answer to another question


def test_the_address_cannot_be_found_on_the_way() -> None:
    """Some routers rewrite addresses that they find in datagrams."""
    assert bytes([203, 0, 113, 9]) not in told()


@given(st.integers(0, WHERE_BYTES - 1), st.integers(1, 255))
def test_what_was_changed_on_its_way_is_no_answer_and_no_question(at: int, by: int) -> None:
    for data, of in ((told(), "answer"), (where_am_i(KEY, NONCE), "question")):
        changed = bytearray(data)
        changed[at] ^= by
        if of == "answer":
            assert where_i_am(KEY, NONCE, bytes(changed)) is None
        elif asks_where(bytes(changed)):
            assert you_are_at(KEY, bytes(changed), SEEN) is None


@given(st.binary(max_size=2 * WHERE_BYTES))
def test_any_bytes_are_taken_without_harm(data: bytes) -> None:
    assert where_i_am(KEY, NONCE, data) is None
    if asks_where(data):
        assert you_are_at(KEY, data, SEEN) is None


@pytest.mark.parametrize("seen", [("0.0.0.0", 4747), ("203.0.113.9", 0), ("224.0.0.1", 4747)])
def test_an_address_that_nothing_can_be_sent_to_is_not_believed(seen: Address) -> None:
    assert where_i_am(KEY, NONCE, told(seen=seen)) is None
