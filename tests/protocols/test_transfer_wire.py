"""The transfer's bytes: who has the key is believed, and nothing else is, whatever comes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.transfer.frame import CONTROL_BYTES_MAX, HEAD_BYTES, Chunk, Frame, FrameSeal, Reader
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    PROOF_BYTES,
    VERDICT_BYTES,
    Gone,
    Here,
    Message,
    Offering,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
    examined,
    greeting,
    hash_of,
    judged,
    proof,
    verdict,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
MESSAGES: list[Message] = [
    Status(),
    Wanted(7),
    Want(1, 2),
    Here(-1, 0.0),
    Offering(1, 7, 70, (1 << 64) - 1, (1 << 64) - 1, 1000, 100),
    Gone(3),
]


def shaken(key: bytes = KEY, nonces: tuple[bytes, bytes] = (b"d" * 32, b"n" * 32)) -> tuple[bytes, bytes]:
    greeted = greeting(nonces[0])
    return greeted, proof(key, greeted, nonces[1])


def sessions() -> tuple[FrameSeal, FrameSeal]:
    greeted, proved = shaken()
    return FrameSeal(KEY, greeted, proved, donor=True), FrameSeal(KEY, greeted, proved, donor=False)


def frames_of(data: bytes, *, chunk_bytes_max: int = 0) -> list[Frame]:
    """All frames in a stream; each is copied out of the reader's buffer."""
    reader = Reader(1)
    reader.part(1, 0)
    reader.chunk_bytes_max = chunk_bytes_max
    frames = []
    while data:
        space = reader.space()
        assert len(space) > 0
        n = min(len(space), len(data))
        space[:n] = data[:n]
        data = data[n:]
        frame = reader.filled(n)
        if frame is not None:
            frames.append(frame._replace(body=memoryview(bytes(frame.body))))
    return frames


def test_the_handshake_has_the_sizes_of_its_table() -> None:
    greeted, proved = shaken()
    assert (len(greeted), len(proved)) == (GREETING_BYTES, PROOF_BYTES)
    assert len(verdict(KEY, greeted, proved, Verdict.WELCOME)) == VERDICT_BYTES


def test_both_ends_know_each_other_by_the_key() -> None:
    greeted, proved = shaken()
    for room, code in ((True, Verdict.WELCOME), (False, Verdict.BUSY)):
        assert examined(KEY, greeted, proved, room=room) is code
        assert judged(KEY, greeted, proved, verdict(KEY, greeted, proved, code)) is code


def test_a_newcomer_with_another_key_is_refused_and_learns_nothing() -> None:
    greeted, proved = shaken(OTHER_KEY)
    assert examined(KEY, greeted, proved) is Verdict.KEY
    answer = verdict(KEY, greeted, proved, Verdict.KEY)
    assert judged(OTHER_KEY, greeted, proved, answer) is Verdict.KEY
    assert answer[8:] == bytes(32)


def test_a_donor_with_another_key_is_not_believed() -> None:
    greeted, proved = shaken()
    forged = bytearray(verdict(KEY, greeted, proved, Verdict.WELCOME))
    forged[-1] ^= 1
    assert judged(KEY, greeted, proved, bytes(forged)) is Verdict.KEY


def test_a_recorded_proof_is_worth_nothing_with_another_nonce() -> None:
    _, proved = shaken()
    assert examined(KEY, greeting(b"e" * 32), proved) is Verdict.KEY


def test_other_programs_and_versions_are_named() -> None:
    with pytest.raises(WireError, match="no donor"):
        proof(KEY, b"SSH-2.0-OpenSSH_9.6 and some more bytes.", b"n" * 32)
    newer = bytearray(greeting(b"d" * 32))
    newer[4] = 9
    with pytest.raises(WireError, match="version 9"):
        proof(KEY, bytes(newer), b"n" * 32)


@given(st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES))
def test_no_random_proof_is_welcome(proved: bytes) -> None:
    assert examined(KEY, greeting(b"d" * 32), proved) is Verdict.KEY


@given(st.binary(min_size=VERDICT_BYTES, max_size=VERDICT_BYTES))
def test_no_random_verdict_is_a_welcome(answer: bytes) -> None:
    greeted, proved = shaken()
    with contextlib.suppress(WireError):
        assert judged(KEY, greeted, proved, answer) is not Verdict.WELCOME


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    donor, newcomer = sessions()
    for _ in range(2):
        (frame,) = frames_of(donor.seal(message))
        assert newcomer.open(frame) == message


def test_a_chunk_arrives_with_its_bytes_and_damage_is_seen() -> None:
    donor, newcomer = sessions()
    data = bytes(range(200))
    for sent, intact in ((data, True), (b"x" + data[1:], False)):
        head = donor.seal_chunk(3, 5, hash_of(data), len(data))
        (frame,) = frames_of(head + sent, chunk_bytes_max=200)
        chunk = newcomer.open(frame)
        assert isinstance(chunk, Chunk)
        assert (chunk.number, chunk.index, chunk.intact, bytes(chunk.data)) == (3, 5, intact, sent)


def test_nothing_can_be_replayed_reflected_reordered_or_moved() -> None:
    donor, newcomer = sessions()
    first, second = (frames_of(donor.seal(Gone(i)))[0] for i in range(2))
    with pytest.raises(WireError, match="forged"):  # reordered
        newcomer.open(second)
    newcomer.open(first)
    with pytest.raises(WireError, match="forged"):  # replayed
        newcomer.open(first)
    with pytest.raises(WireError, match="forged"):  # reflected
        donor.open(first)
    greeted, proved = shaken(nonces=(b"e" * 32, b"n" * 32))
    with pytest.raises(WireError, match="forged"):  # moved to another connection
        FrameSeal(KEY, greeted, proved, donor=False).open(first)


@given(st.integers(0, 8 * (HEAD_BYTES + 3) - 1), st.sampled_from(MESSAGES))
def test_no_changed_bit_goes_unnoticed(bit: int, message: Message) -> None:
    donor, newcomer = sessions()
    data = bytearray(donor.seal(message))
    if bit // 8 >= len(data):
        return
    data[bit // 8] ^= 1 << bit % 8
    try:
        for frame in frames_of(bytes(data)):
            newcomer.open(frame)
            raise AssertionError("taken")
    except WireError:
        pass


@given(st.lists(st.binary(max_size=300), max_size=8), st.sampled_from([0, 200]))
def test_garbage_is_refused_and_holds_no_more_than_a_frame(parts: list[bytes], chunk_bytes_max: int) -> None:
    reader = Reader(1)
    reader.part(1, 0)
    reader.chunk_bytes_max = chunk_bytes_max
    _, newcomer = sessions()
    data = b"".join(parts)
    try:
        while data:
            space = reader.space()
            assert 0 < len(space) <= max(CONTROL_BYTES_MAX, 40 + chunk_bytes_max)
            n = min(len(space), len(data))
            space[:n] = data[:n]
            data = data[n:]
            frame = reader.filled(n)
            if frame is not None:
                newcomer.open(frame)
                raise AssertionError("taken")
    except WireError:
        pass


@pytest.mark.parametrize(
    ("length", "kind", "error"),
    [
        (0, 1, "0 bytes"),
        (CONTROL_BYTES_MAX + 1, 1, "bytes where"),
        (1 << 31, 2, "bytes where"),
        (40, 2, "bytes where"),
        (50, 3, "kind 3"),
    ],
)
def test_frames_that_no_peer_sends_end_before_their_body(length: int, kind: int, error: str) -> None:
    with pytest.raises(WireError, match=error):
        frames_of(struct.pack("<IB3xQ", length, kind, 0) + bytes(16), chunk_bytes_max=1000)
    if kind == 2:
        with pytest.raises(WireError, match="not expected"):
            frames_of(struct.pack("<IB3xQ", length, kind, 0) + bytes(16))


def test_a_sealed_message_that_makes_no_sense_is_refused() -> None:
    donor, newcomer = sessions()
    (frame,) = frames_of(donor.seal(Want(0, 1 << 20)))
    with pytest.raises(WireError, match="makes no sense"):
        newcomer.open(frame)
