"""The transfer's bytes: who has the key is believed and reads, and nobody else does, whatever comes."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.protocols.membership.passes import (
    PROOF_BYTES_MAX,
    SKEW_S,
    Pass,
    Passes,
    proof_of,
    public_of,
    revoked,
)
from ragtag.protocols.sealing.noise import Handshake, KeyPair
from ragtag.protocols.sealing.sessions import AES, CHACHA
from ragtag.protocols.transfer.frame import (
    CONTROL_BYTES_MAX,
    FRAME_BYTES_MAX,
    PIECE_BYTES,
    Chunk,
    Frame,
    FrameSeal,
    Reader,
)
from ragtag.protocols.transfer.types import CHUNK_BYTES_MAX, Offer
from ragtag.protocols.transfer.wire import (
    GREETING_BYTES,
    HELLO_BYTES,
    VERDICT_BYTES,
    FrameKeys,
    Gone,
    Here,
    Message,
    NewcomerEnd,
    Offering,
    Status,
    Verdict,
    Want,
    Wanted,
    WireError,
    answered,
    chunk_hasher,
    greeting,
    hello_bytes,
)
from tests.protocols.personal import DAY_S, SIGNING, UNIX_S, pass_for, seed

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
GREETED = greeting(b"d" * 32)
DONORS, NEWCOMERS = KeyPair(b"D" * 32), KeyPair(b"N" * 32)
MESSAGES: list[Message] = [
    Status(),
    Wanted(7),
    Want(1, 2),
    Here(-1, 0.0),
    Offering(1, 7, 70, (1 << 64) - 1, (1 << 64) - 1, 1000, 100, (1 << 32) - 1),
    Gone(3),
]


def shaken(
    key: bytes = KEY, suite: int = AES, *, room: bool = True
) -> tuple[NewcomerEnd, bytes, FrameKeys | Verdict]:
    """A newcomer's hello, and a donor's answer and keys."""
    hello = NewcomerEnd(key, GREETED, suite, NEWCOMERS)
    return hello, *answered(KEY, GREETED, hello.data, DONORS, room=room)


def sessions(suite: int = AES) -> tuple[FrameSeal, FrameSeal]:
    """Both ends of a connection: the donor's, and the newcomer's."""
    hello, answer, donors = shaken(suite=suite)
    keys = hello.judged(answer)
    assert isinstance(keys, FrameKeys) and isinstance(donors, FrameKeys)
    return FrameSeal(donors), FrameSeal(keys)


def chunk_of(donor: FrameSeal, data: bytes, hashed: bytes | None = None) -> bytes:
    """A chunk as it stands on the line."""
    hasher = chunk_hasher()
    hasher.update(data if hashed is None else hashed)
    out = donor.seal_chunk(3, 5, hasher.digest(), len(data))
    memory = memoryview(bytearray(FRAME_BYTES_MAX))
    for at in range(0, len(data), PIECE_BYTES):
        out += bytes(donor.seal_piece(memoryview(data)[at : at + PIECE_BYTES], memory))
    return out


def frames_of(data: bytes, *, takes_chunks: bool = False, at_once: int = FRAME_BYTES_MAX) -> list[Frame]:
    """All frames in a stream that brings so many bytes at once; each is copied out of the reader's buffer."""
    reader = Reader(1)
    reader.part(1, 0)
    reader.takes_chunks = takes_chunks
    frames = []
    while data:
        space = reader.space()
        assert len(space) > 0
        n = min(len(space), len(data), at_once)
        space[:n] = data[:n]
        data = data[n:]
        frame = reader.filled(n)
        if frame is not None:
            frames.append(frame._replace(body=memoryview(bytes(frame.body))))
    return frames


@pytest.mark.parametrize("suite", [AES, CHACHA])
def test_both_ends_come_to_the_same_keys_by_messages_of_their_table_s_sizes(suite: int) -> None:
    hello, answer, donors = shaken(suite=suite)
    assert (len(GREETED), len(hello.data), len(answer)) == (GREETING_BYTES, HELLO_BYTES, VERDICT_BYTES)
    keys = hello.judged(answer)
    assert isinstance(keys, FrameKeys) and isinstance(donors, FrameKeys)
    assert (keys.suite, keys.ours, keys.theirs) == (donors.suite, donors.theirs, donors.ours)
    assert keys.ours != keys.theirs


def test_a_donor_without_room_says_so_only_to_a_member() -> None:
    hello, answer, verdict = shaken(room=False)
    assert verdict is hello.judged(answer) is Verdict.BUSY
    assert shaken(OTHER_KEY, room=False)[2] is Verdict.KEY


def test_a_newcomer_with_another_key_is_refused_and_learns_nothing() -> None:
    hello, answer, verdict = shaken(OTHER_KEY)
    assert verdict is hello.judged(answer) is Verdict.KEY
    assert answer[8:] == bytes(VERDICT_BYTES - 8)


def test_neither_a_stranger_nor_a_recorded_hello_costs_a_donor_a_shared_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hellos = [NewcomerEnd(key, GREETED, AES, NEWCOMERS).data for key in (OTHER_KEY, KEY)]
    computed: list[bytes] = []
    monkeypatch.setattr(KeyPair, "shared", lambda pair, public: computed.append(public))
    for hello in hellos:
        assert answered(KEY, greeting(b"e" * 32), hello, DONORS)[1] is Verdict.KEY
    assert not computed


def test_a_donor_with_another_key_is_not_believed() -> None:
    """Neither one that has a key of its own, nor one that says welcome to what it cannot read."""
    hello = NewcomerEnd(KEY, GREETED, AES, NEWCOMERS)
    theirs = NewcomerEnd(OTHER_KEY, GREETED, AES, NEWCOMERS)
    welcome, _ = answered(OTHER_KEY, GREETED, theirs.data, DONORS)
    assert welcome[4] == Verdict.WELCOME and hello.judged(welcome) is Verdict.KEY


def test_a_recorded_hello_is_worth_nothing_in_another_connection() -> None:
    recorded = NewcomerEnd(KEY, GREETED, AES, NEWCOMERS).data
    assert answered(KEY, greeting(b"e" * 32), recorded, DONORS)[1] is Verdict.KEY


def test_other_programs_and_versions_are_named() -> None:
    with pytest.raises(WireError, match="no donor"):
        NewcomerEnd(KEY, b"SSH-2.0-OpenSSH_9.6 and some more bytes.", AES, NEWCOMERS)
    for version in (1, 9):
        other = struct.pack("<4sB3x32s", b"RagX", version, b"d" * 32)  # as every version has it
        assert len(other) == len(GREETED) and other[:4] == GREETED[:4] and GREETED[4] == 3
        with pytest.raises(WireError, match=f"speaks version {version} of the transfer, and this peer 3"):
            NewcomerEnd(KEY, other, AES, NEWCOMERS)


def test_a_member_of_another_version_is_told_so_and_a_stranger_is_not() -> None:
    for key, verdict in ((KEY, Verdict.VERSION), (OTHER_KEY, Verdict.KEY)):
        head = struct.pack("<4sBB2x", b"RagX", 4, AES)
        handshake = Handshake(
            "NNpsk0", "AESGCM", initiator=True, psk=key, prologue=b"ragtag transfer" + GREETED + head,
            ephemeral=NEWCOMERS,
        )  # fmt: skip
        answer, told = answered(KEY, GREETED, head + handshake.write(), DONORS)
        assert told is verdict and answer == struct.pack("<4sB", b"RagX", verdict).ljust(VERDICT_BYTES, b"\0")
        assert NewcomerEnd(KEY, GREETED, AES, NEWCOMERS).judged(answer) is verdict


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_no_random_hello_is_welcome(hello: bytes) -> None:
    assert answered(KEY, GREETED, hello, DONORS)[1] is Verdict.KEY


@given(st.binary(min_size=VERDICT_BYTES, max_size=VERDICT_BYTES), st.booleans())
def test_no_random_verdict_is_a_welcome(answer: bytes, like: bool) -> None:
    with contextlib.suppress(WireError):
        judged = NewcomerEnd(KEY, GREETED, AES, NEWCOMERS).judged(b"RagX\0" * like + answer[5 * like :])
        assert isinstance(judged, Verdict) and judged is not Verdict.WELCOME


@given(st.booleans(), st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_handshake_leaves_both_without_keys(
    answers: bool, at: int, change: int
) -> None:
    hello, answer, _ = shaken()
    data = bytearray(answer if answers else hello.data)
    data[at] ^= change
    if not answers:
        assert isinstance(answered(KEY, GREETED, bytes(data), DONORS)[1], Verdict)
    elif not 5 <= at < 8:  # nothing stands there
        with contextlib.suppress(WireError):
            assert isinstance(hello.judged(bytes(data)), Verdict)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    donor, newcomer = sessions()
    for _ in range(2):
        (frame,) = frames_of(donor.seal(message))
        assert newcomer.open(frame) == message


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_a_stream_may_bring_a_frame_in_many_parts(at_once: int) -> None:
    donor, newcomer = sessions()
    sent = [Wanted(7), Want(1, 2)]
    frames = frames_of(b"".join(donor.seal(message) for message in sent), at_once=at_once)
    assert [newcomer.open(frame) for frame in frames] == sent
    donor, newcomer = sessions()
    frames = frames_of(chunk_of(donor, b"fish"), takes_chunks=True, at_once=at_once)
    chunk = [newcomer.open(frame) for frame in frames][-1]
    assert isinstance(chunk, Chunk) and chunk.intact and bytes(chunk.data) == b"fish"


@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_a_stream_may_bring_a_part_of_the_handshake_in_many(at_once: int) -> None:
    reader, parts, data = Reader(5), [], b"helloanswer"
    while data:
        space = reader.space()
        n = min(len(space), len(data), at_once)
        space[:n], data = data[:n], data[n:]
        parts += [part for part in [reader.part(n, 6)] if part is not None]
    assert parts == [b"hello", b"answer"]


def test_a_snapshot_is_offered_with_all_that_is_known_of_it() -> None:
    offer = Offer(7, 70, 5, 6, 1000, 100, 9)
    told = Offering.of(3, offer)
    assert told.number == 3 and told.offer() == offer


@pytest.mark.parametrize("suite", [AES, CHACHA])
@pytest.mark.parametrize("size", [1, 200, PIECE_BYTES, 2 * PIECE_BYTES + 3])
def test_a_chunk_arrives_with_its_bytes_and_damage_is_seen(suite: int, size: int) -> None:
    donor, newcomer = sessions(suite)
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    for sent, intact in ((data, True), (b"x" + data[1:], False), (data, True)):
        *parts, last = frames_of(chunk_of(donor, sent, data), takes_chunks=True)
        assert all(len(frame.body) <= PIECE_BYTES + 16 for frame in (*parts, last))
        assert [newcomer.open(frame) for frame in parts] == [None] * len(parts)
        chunk = newcomer.open(last)
        assert isinstance(chunk, Chunk)
        assert (chunk.number, chunk.index, chunk.intact, bytes(chunk.data)) == (3, 5, intact, sent)


def test_messages_may_come_between_the_pieces_of_a_chunk() -> None:
    donor, newcomer = sessions()
    head = donor.seal_chunk(3, 5, bytes(32), 2)
    memory = memoryview(bytearray(FRAME_BYTES_MAX))
    first = bytes(donor.seal_piece(memoryview(b"a"), memory))
    between = donor.seal(Gone(1))
    last = bytes(donor.seal_piece(memoryview(b"b"), memory))
    *others, chunk = map(newcomer.open, frames_of(head + first + between + last, takes_chunks=True))
    assert others == [None, None, Gone(1)]
    assert isinstance(chunk, Chunk) and bytes(chunk.data) == b"ab" and not chunk.intact


def test_a_chunk_s_bytes_are_no_more_than_it_says_and_than_any_has() -> None:
    memory = memoryview(bytearray(FRAME_BYTES_MAX))
    for pieces, error in ((["ab"], "more of a chunk"), (["a", "b"], "more of a chunk"), ([], "before all")):
        donor, newcomer = sessions()
        data = donor.seal_chunk(3, 5, bytes(32), 1)
        data += b"".join(bytes(donor.seal_piece(memoryview(p.encode()), memory)) for p in pieces)
        data += b"" if pieces else donor.seal_chunk(3, 6, bytes(32), 1)
        with pytest.raises(WireError, match=error):
            for frame in frames_of(data, takes_chunks=True):
                newcomer.open(frame)
    for n_bytes in (0, CHUNK_BYTES_MAX + 1):
        donor, newcomer = sessions()
        (frame,) = frames_of(donor.seal_chunk(3, 5, bytes(32), n_bytes), takes_chunks=True)
        with pytest.raises(WireError, match=f"a chunk of {n_bytes} bytes"):
            newcomer.open(frame)


def test_nothing_that_is_sent_can_be_read() -> None:
    donor, _ = sessions()
    text = b"what a state is made of; " * 50
    line = chunk_of(donor, text) + donor.seal(MESSAGES[4])
    plain = [text, msgspec.msgpack.encode(MESSAGES[4]), struct.pack("<III", 3, 5, len(text))]
    assert not any(part[at : at + 8] in line for part in plain for at in range(len(part) - 7))


def test_nothing_can_be_replayed_reflected_reordered_or_moved() -> None:
    donor, newcomer = sessions()
    first, second = (frames_of(donor.seal(Gone(7)))[0] for _ in range(2))
    assert first.body != second.body  # the same message: only its number differs
    with pytest.raises(WireError, match="forged"):  # reordered
        newcomer.open(second)
    newcomer.open(first)
    with pytest.raises(WireError, match="forged"):  # replayed
        newcomer.open(first)
    with pytest.raises(WireError, match="forged"):  # reflected
        donor.open(first)
    hello = NewcomerEnd(KEY, GREETED, AES, NEWCOMERS)
    elsewhere = hello.judged(answered(KEY, GREETED, hello.data, KeyPair(b"E" * 32))[0])
    assert isinstance(elsewhere, FrameKeys)
    with pytest.raises(WireError, match="forged"):  # moved to another connection
        FrameSeal(elsewhere).open(first)


def test_a_piece_cannot_be_replayed_or_left_out() -> None:
    def frames() -> tuple[FrameSeal, list[Frame]]:
        donor, newcomer = sessions()
        return newcomer, frames_of(chunk_of(donor, bytes(3 * PIECE_BYTES)), takes_chunks=True)

    for order in ([0, 1, 1], [0, 2], [0, 1, 3], [1]):
        newcomer, sent = frames()
        for at in order[:-1]:
            newcomer.open(sent[at])
        with pytest.raises(WireError):
            newcomer.open(sent[order[-1]])


@pytest.mark.parametrize("message", [*MESSAGES, None], ids=lambda message: type(message).__name__)
def test_no_changed_byte_goes_unnoticed(message: Message | None) -> None:
    """None: a chunk. Its bytes are refused as a message's are, before its hash is looked at."""
    for at in range(132):
        donor, newcomer = sessions()
        data = bytearray(chunk_of(donor, b"chunk" * 8) if message is None else donor.seal(message))
        if at >= len(data):
            break
        data[at] ^= 1 << at % 8
        taken = None
        with contextlib.suppress(WireError):
            for frame in frames_of(bytes(data), takes_chunks=message is None):
                taken = newcomer.open(frame)
        assert taken is None, f"byte {at}"


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_garbage_is_refused_and_holds_no_more_than_a_frame(parts: list[bytes], takes_chunks: bool) -> None:
    reader = Reader(1)
    reader.part(1, 0)
    reader.takes_chunks = takes_chunks
    _, newcomer = sessions()
    data = b"".join(parts)
    try:
        while data:
            space = reader.space()
            assert 0 < len(space) <= (PIECE_BYTES if takes_chunks else CONTROL_BYTES_MAX) + 16
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
        (16, 1, "16 bytes"),
        (CONTROL_BYTES_MAX + 17, 1, "bytes where"),
        (1 << 31, 2, "bytes where"),
        (59, 2, "bytes where"),
        (16, 3, "bytes where"),
        (PIECE_BYTES + 17, 3, "bytes where"),
        (50, 4, "kind 4"),
    ],
)
def test_frames_that_no_peer_sends_end_before_their_body(length: int, kind: int, error: str) -> None:
    with pytest.raises(WireError, match=error):
        frames_of(struct.pack("<IB3x", length, kind), takes_chunks=True)
    if kind in (2, 3):
        with pytest.raises(WireError, match="not expected"):
            frames_of(struct.pack("<IB3x", length, kind))


def test_a_sealed_message_that_makes_no_sense_is_refused() -> None:
    donor, newcomer = sessions()
    (frame,) = frames_of(donor.seal(Want(0, 1 << 20)))
    with pytest.raises(WireError, match="makes no sense"):
        newcomer.open(frame)


# -- In a crew that takes persons


class Persons:
    """One end's. shown: its own pass."""

    def __init__(self, shown: Pass, secret: bytes | None = None, now_s: float = UNIX_S) -> None:
        self.shown, self.secret, self.now_s = shown, secret or seed(shown.person), now_s
        self.passes = Passes(public_of(SIGNING), shown)

    def prove(self, what: bytes) -> bytes:
        return proof_of(self.shown, self.secret, "", 0, what)

    def proven(self, what: bytes, proof: bytes) -> bool:
        return self.passes.proven("", 0, what, proof, self.now_s)


def judged_of(newcomer: Persons, donor: Persons, greeted: bytes = GREETED) -> FrameKeys | Verdict:
    hello = NewcomerEnd(KEY, greeted, AES, NEWCOMERS, newcomer)
    assert len(hello.data) == hello_bytes(newcomer)
    data, keys = answered(KEY, GREETED, hello.data, DONORS, persons=donor)
    assert isinstance(keys, Verdict) == isinstance(hello.judged(data), Verdict)
    return keys


def test_a_state_is_given_to_those_alone_whose_person_may_be_in() -> None:
    """All of these have the crew's key."""
    alice, holder = pass_for("alice"), Persons(pass_for("holder"))
    assert isinstance(judged_of(Persons(alice), holder), FrameKeys)
    for bad in (
        Persons(alice, secret=seed("mallory")),
        Persons(pass_for("alice", signing=seed("mallory"))),
        Persons(pass_for("alice", at_s=UNIX_S - 9 * DAY_S, ends_s=UNIX_S - SKEW_S - 1)),
        Persons(pass_for("alice", at_s=UNIX_S + SKEW_S + 1)),
    ):
        assert judged_of(bad, holder) is Verdict.PERSON
    holder.passes.revoke(revoked(SIGNING, "alice", alice.serial), UNIX_S)
    assert judged_of(Persons(alice), holder) is Verdict.PERSON
    assert holder.passes._known == {}, "strangers fill no table"


def test_what_proves_a_person_is_of_one_connection_and_one_key() -> None:
    """So one that was put out, and has the crew's key, cannot use what another has said."""
    holder, recorded = Persons(pass_for("holder")), []

    class Recorded(Persons):
        def prove(self, what: bytes) -> bytes:
            recorded.append(super().prove(what))
            return recorded[0]

    alice = Recorded(pass_for("alice"))
    assert isinstance(judged_of(alice, holder), FrameKeys)
    assert judged_of(alice, holder, greeting(b"e" * 32)) is Verdict.KEY  # the nonce is in the prologue, too
    for greeted, key in ((greeting(b"e" * 32), NEWCOMERS), (GREETED, KeyPair(bytes([5]) * 32))):
        hello = NewcomerEnd(KEY, greeted, AES, key, alice)
        assert answered(KEY, greeted, hello.data, DONORS, persons=holder)[1] is Verdict.PERSON


@given(st.binary(min_size=242, max_size=242))
@settings(max_examples=50, deadline=None)
def test_noise_for_a_proof_is_no_persons(noise: bytes) -> None:
    class Noise(Persons):
        def prove(self, what: bytes) -> bytes:
            return noise[:PROOF_BYTES_MAX]

    assert judged_of(Noise(pass_for("alice")), Persons(pass_for("holder"))) is Verdict.PERSON
