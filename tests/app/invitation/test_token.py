"""Invitations: what was put in comes out; whatever else is given is refused, and said why."""

from __future__ import annotations

import base64
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.invitation.token import Token, TokenError, _check, decode, encode, new_key

TOKEN = Token((("10.0.0.7", 4711), ("::1", 4712)), "lab crew", bytes(range(32)), 2_000_000_000, bytes(16))
HOSTS = st.sampled_from(["node-1.example.org", "10.0.0.7", "::1", "fe80::1%eth0"])
TOKENS = st.builds(
    Token,
    st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=8).map(tuple),
    st.text(min_size=1, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 1 << 40),
    st.binary(min_size=16, max_size=16),
)


@given(TOKENS)
def test_what_goes_in_comes_out(token: Token) -> None:
    text = encode(token)
    assert decode(text) == token
    assert text.isascii() and all(c.isalnum() or c == "-" for c in text)


def test_copying_may_break_lines_and_change_case() -> None:
    text = encode(TOKEN)
    broken = "  " + text[:30].upper() + "\n   " + text[30:] + "\r\n"
    assert decode(broken) == TOKEN


@given(TOKENS, st.data())
def test_a_single_slip_is_noticed(token: Token, data: st.DataObject) -> None:
    text = encode(token)
    at = data.draw(st.integers(text.index("-") + 1, len(text) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567".replace(text[at], "")))
    try:
        read = decode(text[:at] + other + text[at + 1 :])
    except TokenError as error:
        assert "mistyped" in str(error)
    else:  # the last letter's spare bits mean nothing
        assert read == token and at == len(text) - 1


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 40])
def test_a_cut_token_is_noticed(cut: int) -> None:
    with pytest.raises(TokenError, match="incomplete or mistyped"):
        decode(encode(TOKEN)[:-cut])


@given(st.text(max_size=80))
def test_any_text_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(TokenError, match=r"no token|mistyped|format"):
        decode(text)


@given(st.binary(max_size=60))
def test_any_content_under_a_right_check_is_refused_or_read(body: bytes) -> None:
    text = "ragtag2-" + base64.b32encode(body + _check(2, body)).decode().rstrip("=").lower()
    with pytest.raises(TokenError, match=r"not made by|address"):
        decode(text)


def test_an_address_that_is_none_is_refused() -> None:
    body = msgspec.msgpack.encode([["nowhere"], "crew", bytes(32), 0])
    text = "ragtag2-" + base64.b32encode(body + _check(2, body)).decode().rstrip("=").lower()
    with pytest.raises(TokenError, match="write host:port"):
        decode(text)


def test_another_version_says_on_which_side_to_update() -> None:
    text = encode(TOKEN)
    with pytest.raises(TokenError, match=r"format 3.*here it is older"):
        decode(text.replace("ragtag2-", "ragtag3-"))
    with pytest.raises(TokenError, match=r"format 1.*there it is older"):
        decode(text.replace("ragtag2-", "ragtag1-"))


def test_an_invitation_ends() -> None:
    text = encode(TOKEN)
    assert decode(text, now_unix_s=2_000_000_000) == TOKEN
    with pytest.raises(TokenError, match=r"'lab crew' ended 10 minutes ago; run `ragtag invite`"):
        decode(text, now_unix_s=2_000_000_600)
    for_ever = Token(TOKEN.addresses, TOKEN.crew, TOKEN.key)
    assert decode(encode(for_ever), now_unix_s=1e12) == for_ever


def test_another_crews_token_is_named() -> None:
    TOKEN.require_crew("lab crew", TOKEN.key)
    with pytest.raises(TokenError, match="for crew 'lab crew', not for 'other'"):
        TOKEN.require_crew("other")
    with pytest.raises(TokenError, match="an earlier crew called 'lab crew'"):
        TOKEN.require_crew("lab crew", new_key())


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (Token((), "crew", bytes(32)), "1 to 8 addresses"),
        (Token((("a", 1),) * 9, "crew", bytes(32)), "1 to 8 addresses"),
        (Token((("a", 1),), "crew", bytes(31)), "31 bytes"),
        (Token((("a", 1),), "", bytes(32)), "1 to 64 bytes"),
        (Token((("a", 1),), "é" * 33, bytes(32)), "1 to 64 bytes"),
        (Token((("a", 0),), "crew", bytes(32)), "port"),
        (Token((("a", 1),), "crew", bytes(32), -1), "0 or a time"),
    ],
)
def test_nothing_unreadable_is_written(token: Token, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        encode(token)


def test_the_key_is_not_shown() -> None:
    key = new_key()
    assert len(key) == 32 and key != new_key()
    shown = repr(Token((("a", 1),), "crew", key))
    assert repr(key) not in shown and key.hex() not in shown and "<secret>" in shown


@pytest.mark.parametrize(
    ("ends_unix_s", "number", "begins"),
    [(5, b"", False), (5, b"", True), (0, b"short", False), (0, bytes(16), True), (5, bytes(16), True)],
)
def test_a_token_of_no_kind_is_neither_written_nor_read(
    ends_unix_s: int, number: bytes, begins: bool
) -> None:
    with pytest.raises(TokenError):
        encode(Token((("a", 1),), "crew", bytes(32), ends_unix_s, number, begins))
    body = msgspec.msgpack.encode([["a:1"], "crew", bytes(32), ends_unix_s, number, begins])
    text = "ragtag2-" + base64.b32encode(body + _check(2, body)).decode().rstrip("=").lower()
    with pytest.raises(TokenError, match="of no kind"):
        decode(text)


def test_an_invitation_does_not_hold_the_crews_key_and_makes_no_other() -> None:
    crew = Token((("10.0.0.7", 4711),), "otters", new_key())
    invitation = crew.invitation(2_000_000_000)
    assert invitation.key != crew.key and len(invitation.number) == 16
    assert invitation.key != crew.invitation(2_000_000_000).key
    assert decode(encode(invitation)) == invitation
    with pytest.raises(TokenError, match="an invitation, of which no other can be made"):
        invitation.invitation()


def test_what_was_changed_at_random_is_refused_or_the_same() -> None:
    draw = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz234567-018 "
    text = encode(TOKEN)
    for _ in range(2_000):
        spoiled = list(text)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(spoiled))
            spoiled[at : at + draw.randrange(2)] = draw.choice(letters) * draw.randrange(3)
        try:
            read = decode("".join(spoiled))
        except TokenError:
            continue
        assert read == TOKEN
