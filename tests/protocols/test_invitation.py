"""Invitations: a member gives the crew's key to who holds one that it can make again, until its end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.membership.invitation import (
    ANSWER_BYTES,
    Said,
    answer,
    ask,
    invitation_key,
    is_ask,
    question_of,
    read_answer,
)

CREW = bytes(range(32))
NUMBER, NONCE = b"n" * 16, b"o" * 16
NOW_S = 2_000_000_000.0


def answered(data: bytes, now_unix_s: float = NOW_S) -> bytes:
    """What a member answers to this datagram."""
    return answer(CREW, question_of(CREW, data), now_unix_s)


def told(key: bytes, number: bytes, ends_unix_s: int, now_unix_s: float = NOW_S) -> tuple[Said, bytes] | None:
    """What a newcomer with this invitation learns of a member."""
    question = ask(key, number, ends_unix_s, NONCE)
    assert is_ask(question)
    said = answered(question, now_unix_s)
    assert len(said) == len(question) == ANSWER_BYTES and not is_ask(said)
    assert CREW not in said and key not in said + question
    return read_answer(key, NONCE, said)


@pytest.mark.parametrize("ends_unix_s", [0, int(NOW_S), int(NOW_S) + 60])
def test_who_has_an_invitation_is_given_the_crews_key(ends_unix_s: int) -> None:
    assert told(invitation_key(CREW, NUMBER, ends_unix_s), NUMBER, ends_unix_s) == (Said.WELCOME, CREW)


def test_a_member_goes_by_its_own_clock() -> None:
    key = invitation_key(CREW, NUMBER, int(NOW_S) - 1)
    assert told(key, NUMBER, int(NOW_S) - 1) == (Said.ENDED, b"")


@pytest.mark.parametrize("ends_unix_s", [0, int(NOW_S) + 1, int(NOW_S) + 10**6])
def test_an_end_that_was_changed_makes_it_nobodys(ends_unix_s: int) -> None:
    key = invitation_key(CREW, NUMBER, int(NOW_S) - 1)
    assert told(key, NUMBER, ends_unix_s) == (Said.UNKNOWN, b"")


def test_another_number_or_crew_makes_it_nobodys() -> None:
    assert told(invitation_key(CREW, NUMBER, 0), b"m" * 16, 0) == (Said.UNKNOWN, b"")
    assert told(invitation_key(bytes(32), NUMBER, 0), NUMBER, 0) == (Said.UNKNOWN, b"")


def test_an_answer_is_for_one_question_and_one_holder() -> None:
    key = invitation_key(CREW, NUMBER, 0)
    said = answered(ask(key, NUMBER, 0, NONCE))
    assert read_answer(key, b"p" * 16, said) is None
    assert read_answer(invitation_key(CREW, b"m" * 16, 0), NONCE, said) is None


@given(st.integers(0, ANSWER_BYTES - 1), st.integers(0, 7))
def test_one_bit_that_flips_on_the_way_gives_no_key(at: int, bit: int) -> None:
    key = invitation_key(CREW, NUMBER, 0)
    question = ask(key, NUMBER, 0, NONCE)
    for data, other in ((question, True), (answered(question), False)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        if other and not is_ask(bytes(flipped)):
            continue
        said = answered(bytes(flipped)) if other else bytes(flipped)
        found = read_answer(key, NONCE, said)
        padding = other and at >= len(question.rstrip(b"\0"))
        assert found is None or found[0] is Said.UNKNOWN or (padding and found == (Said.WELCOME, CREW))


def test_whatever_comes_nothing_is_raised_and_no_key_given() -> None:
    draw = random.Random(7)
    key = invitation_key(CREW, NUMBER, 0)
    head = ask(key, NUMBER, 0, NONCE)[:4]
    for _ in range(2_000):
        data = head + draw.randbytes(ANSWER_BYTES - 4)
        assert is_ask(data)
        said = answered(data)
        assert CREW not in said
        assert read_answer(key, NONCE, data) is None
        assert read_answer(key, NONCE, draw.randbytes(draw.randrange(200))) is None
