"""Membership's datagrams: what was sealed is opened by whom it is for; nothing else is, nothing raises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.protocols.membership.types import Member, Status
from ragtag.protocols.membership.wire import (
    DATAGRAM_BYTES_MAX,
    HEADER_BYTES,
    VERSION,
    Ack,
    Ask,
    Challenge,
    Gossip,
    Introduce,
    Message,
    Page,
    Ping,
    Pull,
    Record,
    Refused,
    Seal,
    crew_id,
    gossip_of,
    packed,
    record_of,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
ALIVE = Record("b", 9, 3, Status.ALIVE, "10.0.0.1", 4000, b"meta")
MESSAGES: list[Message] = [
    Ping("a", 1, [ALIVE]),
    Ack("a", 1, False, [ALIVE]),
    Ask("a", 1, "c", [ALIVE]),
    Introduce(ALIVE, b"cookie"),
    Challenge(b"cookie"),
    Page("a", True, [ALIVE]),
    Pull("a", "b", []),
    Refused("a", 7, "10.0.0.1", 4000, 1.5),
    Gossip("a", [ALIVE]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sealed_is_opened(message: Message) -> None:
    a, b = Seal(KEY, 5), Seal(KEY, 6)
    data = a.seal(message, 6)
    assert HEADER_BYTES < len(data) <= DATAGRAM_BYTES_MAX
    opened = b.open(data)
    assert opened is not None and opened == (5, 6, 1, message)
    assert not b.refused


def test_packed_records_are_written_as_they_are() -> None:
    member = Member("b", ("10.0.0.1", 4000), 9, 3, metadata=b"meta")
    assert record_of(member) == ALIVE
    opened = Seal(KEY, 6).open(Seal(KEY, 5).seal(Gossip("a", gossip_of([packed(ALIVE)])), 6))
    assert opened is not None and opened.message == Gossip("a", [ALIVE])


def test_only_the_living_have_an_address_and_only_the_accused_accusers() -> None:
    member = Member("b", ("10.0.0.1", 4000), 9, 3, Status.SUSPECT, b"meta")
    assert record_of(member, (1, 2)) == Record("b", 9, 3, Status.SUSPECT, accusers=(1, 2))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_nothing_of_a_message_can_be_read(message: Message) -> None:
    data = Seal(KEY, 5).seal(message, 6)[HEADER_BYTES:]
    plain = msgspec.msgpack.encode(message)
    assert len(data) == len(plain)
    assert not any(plain[at : at + 4] in data for at in range(len(plain) - 3))


def test_one_number_twice_tells_nothing_of_either_message() -> None:
    """Processes of one epoch, as copies of a machine are: a stream cipher's output would be the same."""
    said = [(Gossip("a", [ALIVE]), 6), (Gossip("b", [ALIVE]), 6), (Gossip("a", [ALIVE]), 7)]
    plain = [msgspec.msgpack.encode(message) for message, _ in said]
    data = [Seal(KEY, 5).seal(message, dest) for message, dest in said]
    for one, other in ((0, 1), (0, 2)):
        clear = mixed(plain[one], plain[other])
        for first in (HEADER_BYTES - 16, HEADER_BYTES):  # whether the tag is before the message or after it
            secret = mixed(data[one][first:], data[other][first:])
            same = sum(a == b for a, b in zip(clear, secret, strict=False))
            assert same < len(clear) / 4


def test_a_crew_has_one_number_in_all_versions() -> None:
    assert (crew_id(bytes(32)), crew_id(b"k" * 32)) == (129324546, 2146555050)


def mixed(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(Seal(KEY, 5).seal(MESSAGES[0], 6))
    data[at % len(data)] ^= change
    seal = Seal(KEY, 6)
    assert seal.open(bytes(data)) is None
    assert sum(seal.refused.values()) == 1


@pytest.mark.parametrize(
    ("key", "me", "dest", "why"),
    [
        (OTHER_KEY, 6, 6, "foreign"),
        (KEY, 7, 6, "misdirected"),
        (KEY, 6, 0, "misdirected"),
        (KEY, 5, 6, "misdirected"),
    ],  # sent back to its sender
)
def test_why_it_is_refused_is_counted(key: bytes, me: int, dest: int, why: str) -> None:
    opener = Seal(key, me)
    assert opener.open(Seal(KEY, 5).seal(MESSAGES[0], dest)) is None
    assert opener.refused == {why: 1}


def test_a_forger_who_knows_the_crews_hash_has_no_key() -> None:
    data = bytearray(Seal(OTHER_KEY, 5).seal(MESSAGES[0], 6))
    data[4:8] = Seal(KEY, 5).seal(MESSAGES[0], 6)[4:8]
    seal = Seal(KEY, 6)
    assert seal.open(bytes(data)) is None and seal.refused == {"forged": 1}


def test_another_version_is_told_apart() -> None:
    data = bytearray(Seal(KEY, 5).seal(MESSAGES[3], 0))
    data[2] = VERSION + 1
    seal = Seal(KEY, 6)
    assert seal.open(bytes(data)) is None and seal.refused == {"version": 1}
    assert seal.stray(bytes(data)) == 5


def test_only_who_asks_to_be_let_in_is_a_stray() -> None:
    other, seal = Seal(OTHER_KEY, 5), Seal(KEY, 6)
    assert seal.stray(other.seal(MESSAGES[3], 0)) == 5
    assert seal.stray(other.seal(MESSAGES[4], 6)) is None  # else two crews would answer each other for ever
    assert seal.stray(Seal(KEY, 5).seal(MESSAGES[3], 0)) is None


@given(st.binary(max_size=DATAGRAM_BYTES_MAX + 20))
def test_any_bytes_are_refused(data: bytes) -> None:
    seal = Seal(KEY, 6)
    assert seal.open(data) is None and sum(seal.refused.values()) == 1
    assert seal.stray(data) is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=40)
@given(st.integers(-1, 11), st.lists(JUNK, max_size=8))
def test_any_message_under_the_right_key_is_read_or_refused(tag: int, fields: list[object]) -> None:
    class Raw(Seal):
        def junk(self, body: bytes) -> bytes:
            header = self.seal(MESSAGES[0], 6)[: HEADER_BYTES - 16]
            return header + self._cipher.encrypt(body, [header])

    data = Raw(KEY, 5).junk(msgspec.msgpack.encode([tag, *fields]))
    seal = Seal(KEY, 6)
    opened = seal.open(data)
    assert (opened is None) == (seal.refused["malformed"] == 1)


def test_a_cookie_is_for_one_address_of_one_process_and_does_not_last() -> None:
    a, b = Seal(KEY, 5), Seal(KEY, 6)
    here, there = ("10.0.0.1", 4000), ("10.0.0.1", 4001)
    cookie = a.cookie(100.0, here)
    assert a.knows_cookie(cookie, 100.0, here) and a.knows_cookie(cookie, 125.0, here)
    assert not a.knows_cookie(cookie, 100.0, there)
    assert not b.knows_cookie(cookie, 100.0, here)
    assert not a.knows_cookie(cookie, 161.0, here)
    assert not a.knows_cookie(b"", 100.0, here)
