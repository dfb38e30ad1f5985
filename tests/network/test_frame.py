"""Runs to datagrams and back; whose datagrams are refused, and that each refusal is counted.

All of it twice: in numpy, and by compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragtag.core import fast
from ragtag.core.channels import channel_of
from ragtag.core.seed import generator
from ragtag.core.types import WEIGHT_MAX, Bytes, MessageKey, Run
from ragtag.core.wire import (
    CHUNK_BYTES,
    DATAGRAM_BYTES,
    HEADER_BYTES,
    LONG_KINDS,
    NAMED_BYTE,
    Headers,
    Identity,
    Kind,
    headers_of,
    tags,
)
from ragtag.network.link.frame import Framer

ME, OTHER = 4, 3
EPOCH = 1000
U8, U16, U32 = (1 << 8) - 1, (1 << 16) - 1, (1 << 32) - 1

A, B = channel_of("a"), channel_of("b")
HASHES = {A: 0xA0000001, B: 0xB0000001}
"""Of two channels that go by name: their hashes are of the names, too, so of equal contents they differ."""

channels = st.integers(0, U8) | st.sampled_from([A, B])
keys = st.builds(MessageKey, channels, st.integers(0, U32), st.integers(0, U8), st.integers(0, U16))


@pytest.fixture(scope="module", autouse=True, params=["numpy", "compiled"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every framer made here is of this kind."""
    if request.param == "compiled" and not fast.available():
        pytest.skip("numba is not installed (ragtag[fast])")
    made = Framer.__init__

    def compiled(self: Framer, identity: Identity, epoch: int, sealed: bool = False) -> None:
        made(self, identity, epoch, sealed)
        self.compile()

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            patch.setattr(Framer, "__init__", compiled)
        yield


def framers(schema: int = 7, crew: str = "otters") -> tuple[Framer, Framer]:
    """A sender (peer 3) and a receiver (peer 4): all numbered channels have one schema; two have names."""
    source, dest = Framer(Identity(crew, OTHER), EPOCH), Framer(Identity(crew, ME), EPOCH + 5)
    for framer in (source, dest):
        framer.schemas = dict.fromkeys(range(256), schema)
    for channel in (A, B):
        source.open(channel, HASHES[channel])
    for channel in (B, A):
        dest.open(channel, HASHES[channel])
    return source, dest


def a_run(k: int, first: int = 0, total: int | None = None, key: MessageKey | None = None) -> Run:
    draws = generator(5, "run", k, first)
    return Run(
        ME,
        MessageKey(0, 1, 0, 2) if key is None else key,
        first,
        first + k if total is None else total,
        draws.integers(0, 256, (k, CHUNK_BYTES), dtype=np.uint8),
        np.abs(draws.standard_normal(k)).astype(np.float32),
        draws.integers(0, 1 << 63, k, dtype=np.uint64),
    )


def numbers(first: int, k: int) -> NDArray[np.uint64]:
    """Sequence numbers as they travel."""
    return (first + np.arange(k, dtype=np.uint64)) & np.uint64(U32)


def rows_of(framer: Framer, run: Run, seq: int = 1, last: bool = False) -> Bytes:
    """All chunks of a run, as datagrams of our own."""
    k = len(run.payload)
    return framer.data(run, run.first + np.arange(k), numbers(seq, k), last).copy()


def signed(framer: Framer, rows: Bytes) -> Bytes:
    """Rows with the tag that they should have."""
    headers_of(rows)["tag"] = tags(rows, framer.identity.key)
    return rows


def refusals(framer: Framer) -> tuple[int, int, int, int, int]:
    r = framer.refused
    assert r.total == r.malformed + r.foreign + r.corrupt + r.schema + r.version
    return r.malformed, r.foreign, r.corrupt, r.schema, r.version


# -- Round trips


@given(
    key=keys,
    first=st.integers(0, U32 - 200),
    length=st.integers(1, 80),
    beyond=st.integers(0, 100),
    lost=st.sets(st.integers(0, 79), max_size=40),
    seq=st.integers(0, U32),
    weights=st.lists(st.floats(0, WEIGHT_MAX, width=32), min_size=1, max_size=4),
    last=st.booleans(),
)
def test_what_arrives_is_what_was_sent(
    key: MessageKey,
    first: int,
    length: int,
    beyond: int,
    lost: set[int],
    seq: int,
    weights: list[float],
    last: bool,
) -> None:
    source, dest = framers()
    run = replace(
        a_run(length, first, first + length + beyond, key), weight=np.resize(np.float32(weights), length)
    )
    alive = np.array([i not in lost for i in range(length)])
    chunks = first + np.flatnonzero(alive)
    if len(chunks) == 0:
        return
    seqs = numbers(seq, len(chunks))
    rows = source.data(run, chunks, seqs, last).copy()
    kept, headers = dest.parse(rows)
    assert len(kept) == len(rows)
    assert refusals(dest) == (0, 0, 0, 0, 0)
    arrived = dest.runs(kept, headers)
    gaps = np.count_nonzero(np.diff(chunks) != 1)
    assert len(arrived) == gaps + 1
    assert headers["seq"].tolist() == seqs.tolist()
    come = [got.first + np.arange(len(got.payload)) for got, *_ in arrived]
    assert np.concatenate(come).tolist() == chunks.tolist()
    assert [got.ended for got, *_ in arrived] == [False] * gaps + [last]
    for got, a, b, epoch, _ in arrived:
        assert (got.peer, got.key, got.total, got.mask) == (OTHER, key, run.total, None)
        assert epoch == EPOCH
        at = slice(got.first - first, got.first - first + b - a)
        assert np.array_equal(got.payload, run.payload[at])
        assert got.weight.tobytes() == run.weight[at].tobytes()
        assert np.array_equal(got.heard, run.heard[at])


@given(
    kind=st.sampled_from([k for k in Kind if k not in LONG_KINDS]),
    key=keys,
    chunk=st.integers(0, U32),
    total=st.integers(0, U32),
    received=st.integers(0, 1 << 40),
    seq=st.integers(0, 1 << 40),
    highest=st.integers(0, 1 << 60),
)
def test_a_short_datagram_arrives_as_it_was_sent(
    kind: Kind, key: MessageKey, chunk: int, total: int, received: int, seq: int, highest: int
) -> None:
    source, dest = framers()
    data = source.short(
        kind, ME, key=key, chunk=chunk, total=total, received=received, seq=seq, highest=highest
    )
    assert len(data) == HEADER_BYTES
    got = dest.parse_short(data)
    assert got is not None
    assert (got.kind, got.sender, got.epoch) == (kind, OTHER, EPOCH)
    assert got.schema == HASHES.get(key.channel, 7)
    assert (got.chunk, got.total) == (chunk, total)
    assert (got.seq, got.highest) == (seq & U32, highest & U32)
    assert got.key[2:] == key[2:]
    if kind is Kind.ACK:
        assert got.received == received & U32
    else:
        assert got.key == key


def test_the_tables_rows_are_those_of_the_socket() -> None:
    """A run's payload is a view: nothing is copied between the socket's buffer and the sum."""
    source, dest = framers()
    rows = rows_of(source, a_run(6))
    kept, headers = dest.parse(rows)
    ((run, *_),) = dest.runs(kept, headers)
    assert np.shares_memory(run.payload, rows)


def test_the_same_slab_is_used_again_and_carries_nothing_over() -> None:
    source, dest = framers()
    rows_of(source, a_run(50, 9, 100, MessageKey(200, U32, 255, U16)))
    run = a_run(3, 1, 5)
    ((got, *_),) = dest.runs(*dest.parse(rows_of(source, run)))
    assert (got.key, got.first, got.total) == (run.key, 1, 5)
    assert np.array_equal(got.payload, run.payload)


# -- Where a run ends


def parts(dest: Framer, *tables: Bytes) -> list[tuple[int, MessageKey, int, int]]:
    """The runs in these tables, one after the other: sender, key, first chunk, length."""
    found = dest.runs(*dest.parse(np.concatenate(tables)))
    return [(run.peer, run.key, run.first, len(run.payload)) for run, *_ in found]


def test_runs_end_at_other_rounds_blocks_stages_channels_and_totals() -> None:
    source, dest = framers()
    key = MessageKey(1, 10, 0, 3)
    for other in (
        key._replace(channel=2),
        key._replace(round=11),
        key._replace(stage=1),
        key._replace(block=4),
    ):
        here, there = a_run(3, 0, 6, key), a_run(3, 3, 6, other)
        assert parts(dest, rows_of(source, here), rows_of(source, there)) == [
            (OTHER, key, 0, 3),
            (OTHER, other, 3, 3),
        ]
    again = parts(dest, rows_of(source, a_run(3, 0, 6, key)), rows_of(source, a_run(3, 3, 6, key)))
    assert again == [(OTHER, key, 0, 6)]
    totals = parts(dest, rows_of(source, a_run(3, 0, 6, key)), rows_of(source, a_run(3, 3, 7, key)))
    assert totals == [(OTHER, key, 0, 3), (OTHER, key, 3, 3)]


def test_runs_end_at_other_senders_and_schemas() -> None:
    source, dest = framers()
    other = Framer(Identity("otters", 9), EPOCH)
    other.schemas = source.schemas
    key = MessageKey(0, 1, 0, 0)
    a, b = a_run(2, 0, 4, key), a_run(2, 2, 4, key)
    assert parts(dest, rows_of(source, a), rows_of(other, b)) == [(OTHER, key, 0, 2), (9, key, 2, 2)]
    strange, _ = framers(schema=8)
    assert parts(dest, rows_of(source, a), rows_of(strange, b)) == [(OTHER, key, 0, 2)]
    assert dest.refused.schema == 2


def test_runs_end_where_another_process_of_the_same_peer_begins() -> None:
    """Rows of an older epoch must not slip in behind those of a newer one."""
    source, dest = framers()
    before = Framer(Identity("otters", OTHER), EPOCH - 1)
    before.schemas = source.schemas
    tables = [rows_of(source, a_run(2, 0, 4)), rows_of(before, a_run(2, 2, 4))]
    found = dest.runs(*dest.parse(np.concatenate(tables)))
    assert [(run.first, len(run.payload), epoch) for run, _, _, epoch, _ in found] == [
        (0, 2, EPOCH),
        (2, 2, EPOCH - 1),
    ]


def test_runs_end_where_a_message_does() -> None:
    source, dest = framers()
    marked, rest = rows_of(source, a_run(3, 0, 6), last=True), rows_of(source, a_run(3, 3, 6))
    found = dest.runs(*dest.parse(np.concatenate([marked, rest])))
    assert [(run.first, len(run.payload), run.ended) for run, *_ in found] == [(0, 3, True), (3, 3, False)]
    again = rows_of(source, a_run(3))  # the mark does not stay in the slab
    assert not any(run.ended for run, *_ in dest.runs(*dest.parse(again)))


def test_runs_end_at_a_repeated_or_an_earlier_chunk() -> None:
    source, dest = framers()
    rows = rows_of(source, a_run(6))
    found = parts(dest, rows[:3], rows[2:3], rows[2:6], rows[:1])
    assert [(first, k) for _, _, first, k in found] == [(0, 3), (2, 1), (2, 4), (0, 1)]


def test_a_chunk_number_does_not_carry_into_the_total() -> None:
    """After chunk 2^32-1 comes chunk 0, as 32-bit numbers; machines refuse such a run."""
    source, dest = framers()
    rows = [
        rows_of(source, a_run(1, U32, 5)),
        rows_of(source, a_run(1, 0, 5)),
        rows_of(source, a_run(1, 1, 6)),
    ]
    found = [run for run, *_ in dest.runs(*dest.parse(np.concatenate(rows)))]
    assert [(run.first, run.total) for run in found] == [(U32, 5), (1, 6)]
    assert found[0].first + len(found[0].payload) > found[0].total


def test_no_rows_are_no_runs() -> None:
    _, dest = framers()
    kept, headers = dest.parse(np.empty((0, DATAGRAM_BYTES), np.uint8))
    assert dest.runs(kept, headers) == []


# -- Who is refused, and under which heading


def test_every_single_bit_flip_of_a_full_datagram_is_refused() -> None:
    source, dest = framers()
    row = rows_of(source, a_run(1))[0]
    n = 8 * len(row)
    for at in range(0, n, 1024):  # in parts, to keep the tables small
        k = min(1024, n - at)
        flipped = np.repeat(row[None], k, axis=0)
        bits = at + np.arange(k)
        flipped[np.arange(k), bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)
        assert len(dest.parse(flipped)[0]) == 0
    assert dest.refused.total == n
    malformed, foreign, corrupt, schema, version = refusals(dest)
    assert (schema, version) == (0, 8)
    assert foreign == 8 * (2 + 2)  # crew, dest
    assert malformed + corrupt == n - foreign - version
    assert malformed <= 8, "only a flip in the kind makes a datagram malformed"


def test_every_single_bit_flip_of_a_short_datagram_is_refused() -> None:
    source, dest = framers()
    data = source.short(Kind.END, ME, key=MessageKey(1, 2, 3, 4), chunk=5, total=6, seq=7, highest=8)
    for at in range(8 * HEADER_BYTES):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        assert dest.parse_short(bytes(flipped)) is None, f"bit {at}"
    assert dest.refused.total == 8 * HEADER_BYTES


def test_over_a_link_that_seals_the_tags_bytes_are_the_links() -> None:
    source, dest = (Framer(Identity("otters", me), EPOCH, sealed=True) for me in (OTHER, ME))
    source.schemas = dest.schemas = {0: 7}
    source.compile()
    rows = rows_of(source, a_run(6))
    rows = np.concatenate([rows, rows_of(source, a_run(6))])  # once more: its chunks are in the table already
    short = source.short(Kind.PING, ME, seq=5)
    assert not rows[:, 16:32].any() and not any(short[16:32])
    rows[:, 16:32] = 0xEE  # its own
    assert [len(run.payload) for run, *_ in dest.runs(*dest.parse(rows))] == [6, 6]
    read = dest.parse_short(short[:16] + bytes([0xEE]) * 16 + short[32:])
    assert read is not None and read.seq == 5
    assert dest.refused.total == 0


def test_swapped_values_are_refused_or_harmless() -> None:
    """The tag sums the chunk's words: exchanged words are not found, exchanged headers are."""
    source, dest = framers()
    rows = rows_of(source, a_run(2))
    rows[[0, 1], :HEADER_BYTES] = rows[[1, 0], :HEADER_BYTES]
    assert len(dest.parse(rows)[0]) == 0
    assert refusals(dest) == (0, 0, 2, 0, 0)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", 1, "version"),
        ("version", 0, "version"),
        ("kind", 77, "malformed"),
        ("crew", 12345, "foreign"),
        ("dest", 5, "foreign"),
        ("tag", 12345, "corrupt"),
        ("seal", 1, "corrupt"),
        ("round", 12345, "corrupt"),
        ("sender", 12345, "corrupt"),
    ],
)
def test_refusals_are_counted_by_reason(field: str, value: int, reason: str) -> None:
    source, dest = framers()
    rows = rows_of(source, a_run(3))
    short = np.frombuffer(source.short(Kind.PING, ME), np.uint8).copy()[None]
    headers_of(rows)[field][1:] = headers_of(short)[field] = value
    if reason != "corrupt":  # the tag is right: the field alone must decide
        rows[1:], short = signed(source, rows[1:]), signed(source, short)
    assert len(dest.parse(rows)[0]) == 1
    assert (getattr(dest.refused, reason), dest.refused.total) == (2, 2)
    assert dest.parse_short(short.tobytes()) is None
    assert (getattr(dest.refused, reason), dest.refused.total) == (3, 3)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_weighs_nothing_known_is_refused(weight: float) -> None:
    """One NaN from a member would make the whole block of the mean NaN, on every peer."""
    source, dest = framers()
    run = a_run(3)
    run.weight[1] = weight
    _, headers = dest.parse(rows_of(source, run))
    assert headers["chunk"].tolist() == [0, 2]
    assert refusals(dest) == (1, 0, 0, 0, 0)


def test_another_crew_is_refused_even_if_its_hash_were_the_same() -> None:
    """The tag is keyed by the crew's name, 64 bits of it; the header has 16 of its hash."""
    _, otter = framers(crew="otters")
    badger, badger_too = framers(crew="badgers")
    rows = rows_of(badger, a_run(4))
    assert len(otter.parse(rows)[0]) == 0
    assert refusals(otter) == (0, 4, 0, 0, 0)
    headers_of(rows)["crew"] = otter.identity.crew_id
    assert len(otter.parse(rows)[0]) == 0
    assert refusals(otter) == (0, 4, 4, 0, 0)
    assert len(badger_too.parse(rows)[0]) == 0, "nor do they reach their own crew now"


def test_another_schema_is_refused_and_its_sender_named() -> None:
    strange, _ = framers(schema=8)
    _, dest = framers(schema=7)
    rows = rows_of(strange, a_run(3))
    kept, headers = dest.parse(rows)
    assert dest.runs(kept, headers) == []
    assert refusals(dest) == (0, 0, 0, 3, 0)
    assert dest.refused.schemas == {OTHER: 8}


def test_a_channel_has_no_schema_until_it_is_opened() -> None:
    source, dest = framers()
    dest.schemas = {}
    assert parts(dest, rows_of(source, a_run(2))) == []
    assert dest.refused.schema == 2
    source.schemas = {}
    assert len(parts(dest, rows_of(source, a_run(2)))) == 1  # exchanges come before any schema


# -- Channels that go by name


def pair(here: dict[int, int], there: dict[int, int]) -> tuple[Framer, Framer]:
    """A sender and a receiver that open these channels, with these hashes, in these orders."""
    source, dest = Framer(Identity("otters", OTHER), EPOCH), Framer(Identity("otters", ME), EPOCH + 5)
    for framer, opened in ((source, here), (dest, there)):
        for channel, schema in opened.items():
            framer.open(channel, schema)
    return source, dest


@pytest.mark.parametrize("here", [(A, B), (B, A)])
@pytest.mark.parametrize("there", [(A, B), (B, A)])
def test_named_channels_of_equal_contents_are_told_apart_in_whichever_order_they_are_opened(
    here: tuple[int, ...], there: tuple[int, ...]
) -> None:
    source, dest = pair({c: HASHES[c] for c in here}, {c: HASHES[c] for c in there})
    of_a, of_b = MessageKey(A, 1, 0, 2), MessageKey(B, 1, 0, 2)
    tables = [
        rows_of(source, a_run(3, 0, 6, of_a)),
        rows_of(source, a_run(3, 3, 6, of_b)),
        rows_of(source, a_run(3, 3, 6, of_a)),
    ]
    for table, channel in zip(tables, (A, B, A), strict=True):
        assert set(headers_of(table)["channel"].tolist()) == {NAMED_BYTE}
        assert set(headers_of(table)["schema"].tolist()) == {HASHES[channel]}
    assert parts(dest, *tables) == [(OTHER, of_a, 0, 3), (OTHER, of_b, 3, 3), (OTHER, of_a, 3, 3)]
    for key in (of_a, of_b):
        short = dest.parse_short(source.short(Kind.END, ME, key=key, chunk=5, total=6))
        assert short is not None and (short.key, short.schema) == (key, HASHES[key.channel])
    assert refusals(dest) == (0, 0, 0, 0, 0)


def test_a_named_channel_that_is_not_open_here_is_no_other() -> None:
    """Not even one of the same contents, and none that has a number."""
    source, dest = pair(HASHES, {0: 7, A: HASHES[A]})
    key = MessageKey(B, 1, 0, 2)
    assert parts(dest, rows_of(source, a_run(2, 0, 2, key))) == []
    assert dest.refused.schemas == {OTHER: HASHES[B]} and dest.refused.schema == 2
    assert [stray[:3] for stray in dest.strays] == [(OTHER, 0, 2)], "they have come, all the same"
    short = dest.parse_short(source.short(Kind.END, ME, key=key))
    assert short is not None and short.key.channel not in (*dest.schemas, B)
    dest.open(B, HASHES[B])
    assert parts(dest, rows_of(source, a_run(2, 0, 2, key))) == [(OTHER, key, 0, 2)]


def test_a_named_channel_that_is_opened_anew_has_its_new_hash_only() -> None:
    source, dest = pair(HASHES, HASHES)
    before = rows_of(source, a_run(2, 0, 2, MessageKey(A, 1, 0, 2)))
    for framer in (source, dest):
        framer.open(A, 99)
    assert parts(dest, before) == []
    assert refusals(dest) == (0, 0, 0, 2, 0)
    for channel in (A, B):
        key = MessageKey(channel, 1, 0, 2)
        assert parts(dest, rows_of(source, a_run(2, 0, 2, key))) == [(OTHER, key, 0, 2)]
    dest.open(B, HASHES[A])  # which is free now
    assert parts(dest, before) == [(OTHER, MessageKey(B, 1, 0, 2), 0, 2)]


def test_two_named_channels_of_one_hash_are_refused() -> None:
    framer = Framer(Identity("otters", ME), EPOCH)
    framer.open(A, 7)
    with pytest.raises(ValueError, match=r"cannot be told apart .*: give one of them another name"):
        framer.open(B, 7)
    framer.open(A, 7)  # it may be opened again
    framer.open(0, 7)  # and one with a number has that to be told by
    source, dest = pair({A: 7, 0: 7}, {0: 7, A: 7})
    for channel in (A, 0):
        key = MessageKey(channel, 1, 0, 2)
        assert parts(dest, rows_of(source, a_run(2, 0, 2, key))) == [(OTHER, key, 0, 2)]


def test_a_numbered_channel_that_is_opened_anew_takes_nothing_from_a_named_one() -> None:
    source, dest = pair({A: 7, 0: 7}, {A: 7, 0: 7})
    dest.open(0, 8)
    key = MessageKey(A, 1, 0, 2)
    assert parts(dest, rows_of(source, a_run(2, 0, 2, key))) == [(OTHER, key, 0, 2)]


def test_names_of_refused_senders_are_bounded() -> None:
    _, dest = framers()
    for sender in range(1200):
        strange = Framer(Identity("otters", sender), EPOCH)
        strange.schemas = {0: sender + 8}
        dest.runs(*dest.parse(rows_of(strange, a_run(1))))
    assert dest.refused.schema == 1200
    assert len(dest.refused.schemas) <= 1024


@pytest.mark.parametrize("kind", Kind)
def test_data_comes_with_a_chunk_and_answers_without(kind: Kind) -> None:
    source, dest = framers()
    is_long, is_data = kind in LONG_KINDS, kind in (Kind.DATA, Kind.LAST, Kind.ASK)
    assert (dest.parse_short(source.short(kind, ME)) is None) == is_long
    assert dest.refused.malformed == is_long
    rows = rows_of(source, a_run(3))
    headers_of(rows)["kind"][1] = kind
    kept, headers = dest.parse(signed(source, rows))
    assert headers["chunk"].tolist() == ([0, 1, 2] if is_data else [0, 2])
    assert len(kept) == 2 + is_data
    assert dest.refused.malformed == dest.refused.total == 1  # a probe's packet is taken, and is no data


@settings(max_examples=200)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_nobodys(data: bytes) -> None:
    _, dest = framers()
    assert dest.parse_short(data) is None
    assert dest.refused.total == 1


# -- Compiled or not


def _pair() -> tuple[Framer, Framer]:
    """Two receivers: one with whatever loops are looked at, one with numpy's."""
    one, two = framers()[1], framers()[1]
    two._kernels = None
    return one, two


def taken(framer: Framer, table: Bytes) -> tuple[Bytes, Headers]:
    """What a peer takes of a train that came from the other's address."""
    headers = framer.whole(table, [len(table)], [OTHER])
    return framer.parse(table) if headers is None else (table, headers)


@given(
    length=st.integers(1, 40),
    harm=st.lists(
        st.tuples(st.integers(0, 39), st.integers(0, DATAGRAM_BYTES - 1), st.integers(1, 255)), max_size=4
    ),
    fields=st.lists(
        st.tuples(
            st.integers(0, 39),
            st.sampled_from(["version", "kind", "crew", "sender", "dest", "schema", "epoch"]),
            st.integers(0, U8),
        ),
        max_size=3,
    ),
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_is_taken_or_refused_alike(length, harm, fields) -> None:
    source, _ = framers()
    one, two = _pair()
    table = rows_of(source, a_run(length), last=True)
    for row, field, value in fields:
        headers_of(table)[field][row % length] = value
    signed(source, table)
    for row, at, flip in harm:
        table[row % length, at] ^= flip
    (a, a_headers), (b, b_headers) = taken(one, table.copy()), taken(two, table.copy())
    assert np.array_equal(a, b) and a_headers.tobytes() == b_headers.tobytes()
    assert refusals(one) == refusals(two)


def test_trains_are_whole_only_where_all_rows_are_of_the_peer_that_sent_them() -> None:
    source, dest = framers()
    table = rows_of(source, a_run(5))
    if dest._kernels is None:
        assert dest.whole(table, [5], [OTHER]) is None  # numpy looks row by row
        return
    for ends, senders in (([5], [OTHER]), ([2, 2, 5], [OTHER, ME, OTHER])):  # a train of no rows is nobody's
        headers = dest.whole(table, ends, senders)
        assert headers is not None and headers.tobytes() == dest.parse(table)[1].tobytes()
    for ends, senders in (([5], [ME]), ([1, 5], [ME, OTHER]), ([4, 5], [OTHER, 1 << 16])):
        assert dest.whole(table, ends, senders) is None
    table[3, -1] ^= 1
    assert dest.whole(table, [5], [OTHER]) is None
    assert not any(refusals(dest))


@pytest.mark.parametrize("weight", [0.0, -0.0, 1e-45, WEIGHT_MAX, 2 * WEIGHT_MAX, np.inf, np.nan, -1.0])
def test_weights_are_judged_alike(weight: float) -> None:
    source, _ = framers()
    one, two = _pair()
    table = rows_of(source, replace(a_run(3), weight=np.array([1.0, weight, 2.0], np.float32)))
    assert len(taken(one, table.copy())[0]) == len(taken(two, table.copy())[0])


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_chunks_anywhere_in_memory_make_the_same_datagrams(offset: int) -> None:
    """Values need not begin where eight bytes do, nor may they all be written to."""
    source, _ = framers()
    plain, _ = framers()
    plain._kernels = None
    memory = np.empty(7 * CHUNK_BYTES + 8, np.uint8)
    run = a_run(7)
    payload = memory[offset : offset + 7 * CHUNK_BYTES].reshape(7, CHUNK_BYTES)
    payload[...] = run.payload
    for chunks in (np.arange(7), np.arange(2, 6), np.array([0, 3, 4])):
        for moved in (replace(run, payload=payload), replace(run, payload=_constant(payload))):
            made = [
                framer.data(moved, chunks, numbers(9, len(chunks)), last=True).copy()
                for framer in (source, source, plain)
            ]
            assert np.array_equal(made[0], made[2]) and np.array_equal(made[1], made[2])


def _constant(values: Bytes) -> Bytes:
    values = values.copy()
    values.flags.writeable = False
    return values


@pytest.mark.skipif(not fast.available(), reason="numba is not installed (ragtag[fast])")
def test_compiled_loops_compile_nothing_while_a_round_goes_on() -> None:
    from ragtag.network.link import kernels

    kernels.warm()
    rows = np.zeros((1, DATAGRAM_BYTES // 8), np.int64)
    with pytest.raises(TypeError, match="No matching definition"):
        kernels.check(rows, rows[:, :8].copy(), np.uint64(0), np.uint64(0))
