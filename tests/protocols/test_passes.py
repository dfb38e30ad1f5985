"""Passes, proofs and revocations: what is signed counts, in any order, and no bytes make it raise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.protocols.membership.passes import (
    DAY_S,
    NOTICE_BYTES,
    PASS_DAYS_MAX,
    PROOF_BYTES_MAX,
    REVOCATION_BYTES_MAX,
    REVOCATIONS_MAX,
    SKEW_S,
    Bar,
    Passes,
    Proof,
    Revocation,
    Took,
    encoded,
    is_name,
    is_notice,
    issued,
    notice,
    notice_answer,
    number_of,
    proof_of,
    public_of,
    read_notice,
    read_notice_answer,
    read_proof,
    read_revocation,
    revoked,
    said_of,
)
from tests.protocols.personal import SIGNING, UNIX_S, pass_for, seed

KEY, NONCE = bytes(range(32)), bytes(range(16))
SESSION = b"\1" + seed("session")
ALICE = pass_for("alice")
PROOF = proof_of(ALICE, seed("alice"), "otter", 7, SESSION)
VOID = revoked(SIGNING, "alice", ALICE.serial)


def passes() -> Passes:
    return Passes(public_of(SIGNING), pass_for("holder"))


def why(known: Passes, proof: bytes, now_s: float = UNIX_S) -> Bar | None:
    found = known.why_not("otter", 7, SESSION, proof, now_s)
    return None if found is None else found[0]


def test_a_proof_counts_for_its_process_its_key_and_its_time() -> None:
    known = passes()
    assert why(known, PROOF) is None
    assert known.look_unix_s == ALICE.ends_unix_s + SKEW_S
    for member, process, key in (
        ("badger", 7, SESSION),
        ("otter", 8, SESSION),
        ("otter", 7, b"\2" + SESSION[1:]),
    ):
        assert known.why_not(member, process, key, PROOF, UNIX_S) == (Bar.UNBOUND, "alice")
    assert known.why_not("otter", 7, b"", proof_of(ALICE, seed("alice"), "otter", 7, b""), UNIX_S) is not None
    assert why(known, PROOF, ALICE.ends_unix_s + SKEW_S) is None
    assert why(known, PROOF, ALICE.ends_unix_s + SKEW_S + 1) is Bar.ENDED
    assert why(known, PROOF, UNIX_S - SKEW_S) is None
    assert why(known, PROOF, UNIX_S - SKEW_S - 1) is Bar.EARLY
    assert why(Passes(public_of(seed("mallory")), ALICE), PROOF) is Bar.UNSIGNED
    assert why(known, b"") is Bar.NO_PASS


def test_a_pass_of_more_than_a_year_is_not_believed_though_it_is_signed() -> None:
    """Revocations are kept for a year."""
    with pytest.raises(ValueError, match="within 366 days"):
        pass_for(ends_s=UNIX_S + (PASS_DAYS_MAX + 1) * DAY_S)
    with pytest.raises(ValueError, match="ends after it begins"):
        pass_for(ends_s=UNIX_S)
    body = "ragtag pass 1", "alice", ALICE.serial, int(UNIX_S) + 400 * DAY_S, ALICE.key
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signature = Ed25519PrivateKey.from_private_bytes(SIGNING).sign(msgspec.msgpack.encode(body))
    long = msgspec.structs.replace(ALICE, ends_unix_s=body[3], signature=signature)
    assert why(passes(), proof_of(long, seed("alice"), "otter", 7, SESSION)) is Bar.UNSIGNED


def test_a_revocation_voids_a_persons_passes_up_to_its_serial() -> None:
    known = passes()
    later = pass_for("alice", at_s=UNIX_S + 1)
    bob = proof_of(pass_for("bob"), seed("bob"), "otter", 7, SESSION)
    assert known.revoke(VOID, UNIX_S) and not known.revoke(VOID, UNIX_S)
    assert why(known, PROOF) is Bar.REVOKED
    assert why(known, bob) is None
    assert why(known, proof_of(later, seed("alice"), "otter", 7, SESSION)) is None
    assert known.voids_number(number_of("alice", ALICE.serial))
    assert not known.voids_number(number_of("alice", later.serial))
    assert not known.voids_number(number_of("bob", ALICE.serial)) and not known.voids_number(b"")
    assert known.my_bar(UNIX_S) is None
    known.revoke(revoked(SIGNING, "holder", ALICE.serial), UNIX_S)
    assert known.my_bar(UNIX_S) is Bar.REVOKED


def test_forged_revocations_are_not_believed() -> None:
    known = passes()
    for forged in (
        revoked(seed("mallory"), "alice", ALICE.serial),
        msgspec.structs.replace(VOID, serial=VOID.serial + 1),
        msgspec.structs.replace(VOID, person="bob"),
        msgspec.structs.replace(VOID, signature=ALICE.signature),
    ):
        assert not known.revoke(forged, UNIX_S)
    assert known.void() == []


@given(st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_revocations_come_to_the_same_in_any_order(order: list[int]) -> None:
    each = [revoked(SIGNING, person, ALICE.serial + k) for person in ("alice", "bob") for k in range(3)]
    known = passes()
    for at in order:
        known.revoke(each[at], UNIX_S)
    assert [(v.person, v.serial) for v in known.void()] == [
        ("alice", ALICE.serial + 2),
        ("bob", ALICE.serial + 2),
    ]


def test_the_table_is_bounded_and_forgets_what_has_ended() -> None:
    known = passes()
    for k in range(REVOCATIONS_MAX + 5):
        assert known.revoke(revoked(SIGNING, f"p{k}", ALICE.serial + k), UNIX_S)
    assert len(known.void()) == len(known._names) == REVOCATIONS_MAX
    assert known.voids("p4") is None and known.voids("p5") is not None
    next_year_s = UNIX_S + PASS_DAYS_MAX * DAY_S + 2 * SKEW_S + 1
    assert not known.revoke(VOID, next_year_s), "no pass that it voids is valid any more"
    assert known.revoke(revoked(SIGNING, "bob", int(1e6 * next_year_s)), next_year_s)
    assert [void.person for void in known.void()] == ["bob"] and len(known._names) == 1


def test_a_revocation_is_kept_until_the_last_pass_that_it_voids_has_ended_on_all_clocks() -> None:
    end_s = VOID.serial / 1e6 + PASS_DAYS_MAX * DAY_S + 2 * SKEW_S
    assert passes().revoke(VOID, end_s - 1.0) and not passes().revoke(VOID, end_s + 1.0)


@pytest.mark.parametrize("name", ["", "a" * 33, "al ice", "álice", "-alice", "alice\n", "a/b", "\0"])
def test_what_is_no_name_is_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="is no name for a person: 1 to 32 letters"):
        issued(SIGNING, name, ALICE.key, UNIX_S, int(UNIX_S) + 1)
    with pytest.raises(ValueError, match="is no name"):
        revoked(SIGNING, name, 1)
    assert read_revocation(encoded(Revocation(name, 1, bytes(64)))) is None
    assert read_proof(encoded(Proof(msgspec.structs.replace(ALICE, person=name), bytes(64)))) is None


def test_each_bar_says_what_to_do() -> None:
    for bar in Bar:
        said = said_of(bar, "alice")
        assert "{" not in said and len(said) > 40


# -- Bytes


def test_proofs_and_revocations_have_room_for_the_longest_names() -> None:
    name = "n" * 32
    shown = issued(SIGNING, name, ALICE.key, UNIX_S, int(UNIX_S) + 1)
    proof = proof_of(shown, seed("alice"), "m" * 64, (1 << 32) - 1, SESSION)
    assert len(proof) <= PROOF_BYTES_MAX and read_proof(proof) is not None
    void = revoked(SIGNING, name, 1 << 61)
    assert len(encoded(void)) < REVOCATION_BYTES_MAX and read_revocation(encoded(void)) == void
    data = notice(KEY, void, NONCE)
    assert len(data) == NOTICE_BYTES and is_notice(data)
    assert read_notice(KEY, data) == (NONCE, void)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_reading_raise(data: bytes) -> None:
    known = passes()
    assert known.why_not("otter", 7, SESSION, data, UNIX_S) is not None
    read_revocation(data)
    assert read_notice_answer(KEY, NONCE, data) is None
    sized = data[:NOTICE_BYTES].ljust(NOTICE_BYTES, b"\0")
    assert read_notice(KEY, sized) is None and read_notice_answer(KEY, NONCE, sized) is None


@given(st.integers(0, len(PROOF) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_proof_in_which_a_byte_was_changed_is_worth_nothing(at: int, by: int) -> None:
    broken = bytearray(PROOF)
    broken[at] ^= by
    assert why(passes(), bytes(broken)) in (Bar.UNSIGNED, Bar.UNBOUND)


@given(st.integers(0, len(encoded(VOID)) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_revocation_in_which_a_byte_was_changed_is_worth_nothing(at: int, by: int) -> None:
    broken = bytearray(encoded(VOID))
    broken[at] ^= by
    read = read_revocation(bytes(broken))
    assert read is None or not passes().revoke(read, UNIX_S)


@given(st.integers(0, NOTICE_BYTES - 1), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_notice_in_which_a_byte_was_changed_is_nobodys(at: int, by: int) -> None:
    for data in (notice(KEY, VOID, NONCE), notice_answer(KEY, NONCE, Took.YES)):
        broken = bytearray(data)
        broken[at] ^= by
        assert not is_notice(bytes(broken)) or read_notice(KEY, bytes(broken)) is None
        assert read_notice_answer(KEY, NONCE, bytes(broken)) is None


def test_an_answer_is_of_its_notice_alone() -> None:
    for took in Took:
        data = notice_answer(KEY, NONCE, took)
        assert read_notice_answer(KEY, NONCE, data) is took
        assert read_notice_answer(KEY, bytes(16), data) is None
        assert read_notice_answer(bytes(32), NONCE, data) is None
    assert read_notice_answer(KEY, NONCE, notice(KEY, VOID, NONCE)) is None
