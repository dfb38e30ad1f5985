"""The shelf between trainer and donor: two snapshots at most, none that is read is replaced."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.transfer.snapshots import SNAPSHOTS_MAX, Shelf
from ragtag.protocols.transfer.types import CHUNK_BYTES_MIN
from ragtag.protocols.transfer.wire import chunk_hasher


def put(shelf: Shelf, round_: int, blob: bytes = b"state") -> bool:
    return shelf.put(round_, 0, 1, 1, blob)


def test_nothing_is_wanted_until_somebody_asks() -> None:
    shelf = Shelf(nullcontext())
    assert not shelf.wanted(3)
    assert shelf.round == 3
    assert shelf.ask("ann", 5) is None
    assert not shelf.wanted(4)
    assert shelf.wanted(5)
    assert put(shelf, 5)
    assert not shelf.wanted(6)
    given_ = shelf.given("ann")
    assert given_ is not None and given_.offer.round == 5


def test_a_snapshot_has_a_byte_at_least() -> None:
    shelf = Shelf(nullcontext())
    shelf.ask("ann", 5)
    assert put(shelf, 5, b"s")
    with pytest.raises(ValueError, match="the blob has 0 bytes; it must have 1 to"):
        put(shelf, 6, b"")


def test_what_nobody_wants_any_more_is_not_kept() -> None:
    shelf = Shelf(nullcontext())
    assert not put(shelf, 1)
    shelf.ask("ann", 2)
    shelf.leave("ann")
    assert not put(shelf, 2)
    assert shelf.n_snapshots == 0


def test_after_the_last_round_its_snapshot_is_for_all_whatever_they_asked_for() -> None:
    shelf = Shelf(nullcontext())
    shelf.ask("ann", 3)
    put(shelf, 3)
    shelf.wanted(7)
    shelf.ask("bob", 9)
    assert not shelf.wanted(7)
    shelf.ended = True
    assert shelf.wanted(7) and put(shelf, 7, b"last")
    bob, later = shelf.given("bob"), shelf.ask("cleo", 12)
    assert bob is later is not None and bob.offer.round == 7
    assert not shelf.wanted(7), "nobody waits any more"


def test_where_rounds_begin_anew_nobody_waits_for_a_round_of_before() -> None:
    """Nor is anybody given a snapshot of such a round: a newcomer would wait for the round after it."""
    shelf = Shelf(nullcontext())
    shelf.ask("ann", 36)
    assert shelf.wanted(36) and put(shelf, 36, b"before")
    shelf.ask("bob", 40)
    shelf.restart()
    assert shelf.round == -1
    assert shelf.ask("cleo", 0) is None
    ann = shelf.given("ann")
    assert ann is not None and bytes(ann.blob) == b"before"
    assert shelf.wanted(0) and put(shelf, 0)
    bob, cleo = shelf.given("bob"), shelf.given("cleo")
    assert bob is cleo is not None and bob.offer.round == 0


def test_the_trainer_asks_after_each_round_without_the_lock() -> None:
    """Else it would wait there while the donor's thread reads."""
    lock = threading.Lock()
    shelf = Shelf(lock)
    shelf.ask("ann", 7)
    with lock:
        assert not shelf.wanted(6)
        assert shelf.wanted(7)


def test_one_snapshot_serves_all_who_asked_for_its_round_or_an_earlier_one() -> None:
    shelf = Shelf(nullcontext())
    for reader, round_ in (("ann", 5), ("bob", 6), ("cleo", 9)):
        assert shelf.ask(reader, round_) is None
    put(shelf, 6)
    ann, bob = shelf.given("ann"), shelf.given("bob")
    assert ann is bob is not None
    assert shelf.given("cleo") is None
    assert shelf.wanted(9)
    assert shelf.ask("dan", 6) is ann


def test_a_peer_that_is_behind_itself_gives_nothing() -> None:
    shelf = Shelf(nullcontext())
    shelf.ask("ann", 1)
    put(shelf, 1)
    shelf.ask("bob", 2)
    wakes: list[None] = []
    shelf.serve(lambda: wakes.append(None), lambda: 0.0)
    shelf.gives(False)
    assert wakes and shelf.closed, "who waits is told"
    assert not shelf.wanted(2) and not put(shelf, 2)
    assert shelf.ask("cleo", 1) is None and shelf.ask("bob", 3) is None and not shelf.wanted(9)
    ann = shelf.given("ann")
    assert ann is not None and ann.offer.round == 1, "what is being read is read to its end"
    shelf.gives(True)
    assert shelf.ask("bob", 10) is None and shelf.wanted(10) and put(shelf, 10)


def test_what_is_read_is_not_replaced_and_who_comes_then_reads_the_newest() -> None:
    shelf = Shelf(nullcontext())
    for reader, round_ in (("ann", 1), ("bob", 2)):
        shelf.ask(reader, round_)
        put(shelf, round_)
    newest = shelf.ask("cleo", 3)
    assert newest is not None and newest.offer.round == 2
    assert not shelf.wanted(3)
    assert not put(shelf, 3)
    shelf.leave("ann")
    assert shelf.ask("dan", 3) is None
    assert shelf.wanted(3) and put(shelf, 3)
    dan = shelf.given("dan")
    assert dan is not None and dan.offer.round == 3
    assert shelf.n_snapshots == 2


def test_two_that_read_without_end_keep_nobody_from_newer_states() -> None:
    """After four times as long as chunks took lately, and no sooner. Where nobody waits they read on."""
    shelf = Shelf(nullcontext())
    now_s = [0.0]
    shelf.serve(lambda: None, lambda: now_s[0], 10.0)
    state = bytes(3 * CHUNK_BYTES_MIN)
    for reader, round_ in (("ann", 1), ("bob", 2)):
        shelf.ask(reader, round_)
        put(shelf, round_, state)
    for took_s in (1.0, 50.0, 1.0):
        shelf.took(took_s)
    now_s[0] = 11.9
    newest = shelf.ask("cleo", 3)
    assert newest is not None and newest.offer.round == 2
    shelf.leave("cleo")
    now_s[0] = 12.0
    shelf.sweep(0.0)
    assert shelf.given("ann") is not None
    assert shelf.ask("cleo", 3) is None and shelf.wanted(3) and put(shelf, 3, state)
    cleo = shelf.given("cleo")
    assert cleo is not None and cleo.offer.round == 3
    assert shelf.given("ann") is None and shelf.given("bob") is not None
    assert shelf.n_snapshots == 2


def test_what_nobody_reads_is_forgotten() -> None:
    shelf = Shelf(nullcontext())
    now_s = [0.0]
    shelf.serve(lambda: None, lambda: now_s[0])
    shelf.ask("ann", 1)
    put(shelf, 1)
    now_s[0] = 100.0
    shelf.sweep(30.0)
    assert shelf.n_snapshots == 1  # she reads it
    shelf.leave("ann")
    now_s[0] = 129.0
    shelf.sweep(30.0)
    assert shelf.n_snapshots == 1
    now_s[0] = 130.0
    shelf.sweep(30.0)
    assert shelf.n_snapshots == 0


def test_a_chunk_is_hashed_once_and_piece_by_piece_when_it_is_first_read() -> None:
    shelf = Shelf(nullcontext())
    shelf.ask("ann", 0)
    put(shelf, 0, b"a" * CHUNK_BYTES_MIN + b"b")
    snapshot = shelf.given("ann")
    assert snapshot is not None
    hasher = chunk_hasher()
    hasher.update(b"a" * CHUNK_BYTES_MIN)
    half = CHUNK_BYTES_MIN // 2
    assert snapshot.hash(0, half) is None and snapshot.hash(1, half) is not None
    assert set(snapshot.hashes) == {1}
    assert snapshot.hash(0, half) == hasher.digest() == snapshot.hash(0, 1)
    assert not snapshot.hashing


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "put", "leave", "sweep"]), st.integers(0, 5), st.integers(0, 9)),
        max_size=60,
    )
)
def test_whatever_is_asked_it_keeps_two_at_most_and_those_that_are_read(
    calls: list[tuple[str, int, int]],
) -> None:
    shelf = Shelf(nullcontext())
    now_s = [0.0]
    shelf.serve(lambda: None, lambda: now_s[0])
    for what, reader, number in calls:
        now_s[0] += 1.0
        before = {r: shelf.given(r) for r in range(6)}
        if what == "ask":
            shelf.ask(reader, number)
        elif what == "put":
            put(shelf, number)
        elif what == "leave":
            shelf.leave(reader)
        else:
            shelf.sweep(float(number))
        assert shelf.n_snapshots <= SNAPSHOTS_MAX
        for r in range(6):
            if r != reader or what not in ("ask", "leave"):
                assert before[r] is None or shelf.given(r) is before[r]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1, 0, 0, 0, b"x"), "round is -1"),
        ((0, -1, 0, 0, b"x"), "step is -1"),
        ((0, 0, 1 << 64, 0, b"x"), "schema"),
        ((0, 0, 0, -1, b"x"), "layout_hash"),
        ((0, 0, 0, 0, b"x", 1 << 32), "replica"),
        ((0, 0, 0, 0, b""), "0 bytes"),
    ],
)
def test_a_snapshot_that_nobody_could_read_is_refused(arguments: tuple[Any, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Shelf(nullcontext()).put(*arguments)
