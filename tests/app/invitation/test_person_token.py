"""The tokens of a crew that takes persons: the holder's, a person's, and what processes get."""

from __future__ import annotations

import base64
import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.app.invitation.token import Token, TokenError, _check, decode, encode, new_key
from ragtag.protocols.membership.invitation import invitation_key
from ragtag.protocols.membership.passes import DAY_S, Passes, public_of

NOW_S = 1_800_000_000.0
HOLDER = Token((("127.0.0.1", 4321),), "otters", new_key(), begins=True, signing=bytes(range(32)))
ALICE = HOLDER.for_person("alice", int(NOW_S) + DAY_S, NOW_S)


def body_of(text: str) -> bytes:
    """What a token holds, without its check."""
    letters = text.partition("-")[2].upper()
    return base64.b32decode(letters + "=" * (-len(letters) % 8))[:-4]


def test_they_come_back_as_they_were_written() -> None:
    for token in (HOLDER, ALICE, HOLDER.for_processes(NOW_S)):
        assert decode(encode(token), NOW_S) == token
        assert len(encode(token)) < 1_000
    assert ALICE.for_processes(NOW_S) is ALICE


def test_no_other_token_has_the_signing_key_and_a_persons_has_not_the_crews_key() -> None:
    for token in (ALICE, HOLDER.for_processes(NOW_S)):
        raw = body_of(encode(token))
        assert HOLDER.signing not in raw and not token.signing
    assert ALICE.key == invitation_key(HOLDER.key, ALICE.number, ALICE.ends_unix_s) != HOLDER.key
    assert ALICE.credential is not None and ALICE.credential.signer == public_of(HOLDER.signing)
    assert not ALICE.begins
    shown = repr(ALICE) + repr(HOLDER)
    for secret in (ALICE.credential.secret, HOLDER.signing, HOLDER.key):
        assert repr(secret)[2:-1] not in shown
    assert "person='alice'" in shown


def test_only_the_holders_token_makes_others() -> None:
    crew = Token(HOLDER.addresses, "otters", new_key(), begins=True)
    for token in (ALICE, crew, HOLDER.for_processes(NOW_S)):
        with pytest.raises(
            TokenError, match="cannot let persons in: only the one that `ragtag invite --persons`"
        ):
            token.for_person("bob", int(NOW_S) + 9, NOW_S)
        with pytest.raises(TokenError, match="cannot put persons out"):
            token.revocation("bob", 1)
    for token in (ALICE, HOLDER):
        with pytest.raises(
            TokenError, match="crew 'otters' takes persons only: whoever has its holder's token"
        ):
            token.invitation()


def test_what_the_holder_cannot_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="'holder' is what the holder's own peers are called"):
        HOLDER.for_person("holder", int(NOW_S) + 9, NOW_S)
    with pytest.raises(ValueError, match="cannot be put out; begin another crew"):
        HOLDER.revocation("holder", 1)
    with pytest.raises(ValueError, match="is no name for a person"):
        HOLDER.for_person("al ice", int(NOW_S) + 9, NOW_S)
    for days in (0, -1, 367):
        with pytest.raises(ValueError, match="ends after it begins, and within 366 days"):
            HOLDER.for_person("bob", int(NOW_S) + days * DAY_S, NOW_S)


def test_one_that_has_ended_says_whom_to_ask() -> None:
    with pytest.raises(
        TokenError, match=r"'otters' ended 10 minutes ago; alice's token has ended; ask whoever"
    ):
        decode(encode(ALICE), ALICE.ends_unix_s + 600.0)


def forged(**of: object) -> str:
    """Alice's token with other fields, and a check that fits."""
    credential = ALICE.credential
    assert credential is not None
    content = {
        "addresses": ["127.0.0.1:4321"], "crew": "otters", "key": ALICE.key, "ends": ALICE.ends_unix_s,
        "number": ALICE.number, "begins": False, "signing": b"",
        "person": [credential.shown, credential.signer, credential.secret],
    }  # fmt: skip
    body = msgspec.msgpack.encode([*(content | of).values()])
    return "ragtag2-" + base64.b32encode(body + _check(2, body)).decode().rstrip("=").lower()


def test_one_whose_parts_do_not_fit_is_no_persons() -> None:
    of = ALICE.credential
    assert of is not None and decode(forged()) == ALICE
    mallory = Token(HOLDER.addresses, "otters", HOLDER.key, signing=bytes(32)).for_person(
        "alice", ALICE.ends_unix_s, NOW_S
    )
    assert mallory.credential is not None
    renamed = msgspec.structs.replace(of.shown, person="bob")
    for person in (
        [renamed, of.signer, of.secret],
        [of.shown, of.signer, bytes(32)],
        [of.shown, mallory.credential.signer, of.secret],
        [mallory.credential.shown, of.signer, mallory.credential.secret],
    ):
        number = ALICE.number if person[0] is of.shown else b""
        with pytest.raises(
            TokenError, match=r"not signed by the key of its crew, or is not its person's|of no kind"
        ):
            decode(forged(person=person, number=number, ends=ALICE.ends_unix_s if number else 0))
    for kind in (
        {"begins": True},
        {"number": bytes(16)},
        {"ends": 5},
        {"signing": bytes(32)},
        {"signing": b"x"},
    ):
        with pytest.raises(TokenError, match="of no kind"):
            decode(forged(**kind))


def test_what_is_of_no_kind_is_not_written() -> None:
    for token in (replace(ALICE, signing=bytes(32)), replace(HOLDER, signing=b"short")):
        with pytest.raises(TokenError, match="a signing key has 32 bytes"):
            encode(token)


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_a_byte_that_was_changed_under_a_check_that_fits_gives_no_other_person(at: int, by: int) -> None:
    """The check is against slips alone. What was changed on purpose is refused here or by all members."""
    body = bytearray(body_of(forged()))
    body[at % len(body)] ^= by
    text = "ragtag2-" + base64.b32encode(body + _check(2, bytes(body))).decode().rstrip("=").lower()
    try:
        token = decode(text)
    except TokenError:
        return
    of, mine = token.credential, ALICE.credential
    assert mine is not None
    if of is not None:
        assert (
            of.shown == mine.shown
            and of.signer == mine.signer
            and Passes(of.signer, of.shown).fits(of.secret)
        )


def test_a_person_token_is_issued_now() -> None:
    now_s = time.time()
    shown = HOLDER.for_person("bob", int(now_s) + 60, now_s).credential
    assert shown is not None and abs(shown.shown.serial / 1e6 - now_s) < 1e-3
