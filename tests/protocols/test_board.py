"""Everybody comes to hold everybody's newest post, whatever the line does, and nothing is sent for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.types import (
    Arm,
    Arrived,
    Event,
    Expired,
    Joined,
    Left,
    Measured,
    MessageKey,
    Post,
    Posted,
    Run,
    Send,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.crew.board import (
    _HEAD,
    _NUMBER_MAX,
    BLOB_MAX,
    BOARD,
    EVEN,
    POST,
    SILENT_AFTER,
    TAKEN,
    TOPICS_MAX,
    Board,
    _check,
    _Path,
    _Slot,
)
from ragtag.protocols.crew.board import _run as run_to
from tests.protocols.hall import Hall


def test_in_a_large_crew_a_board_is_a_districts() -> None:
    """Posts go to those of the same 64 seats, whoever else there is, comes, or speaks."""
    board = Board(70, 200)
    assert board.notices(0).peers == frozenset(range(64, 128)) - {70}
    effects = board.step(0.0, Post(0, b"here"))
    assert {e.run.peer for e in effects if isinstance(e, Send)} == set(range(64, 128)) - {70}
    assert board.step(0.0, Joined(3)) == [] and 3 not in board.notices(0).peers
    late = Board(70, 71)
    assert late.notices(0).peers == frozenset(range(64, 70))
    late.step(0.0, Post(0, b"here"))
    assert any(isinstance(e, Send) and e.run.peer == 90 for e in late.step(0.0, Joined(90)))
    (post,) = [
        e.run for e in Board(3, 71).step(0.0, Post(0, b"there")) if isinstance(e, Send) and e.run.peer == 4
    ]
    assert board.step(0.0, Arrived((replace(post, peer=3),))) == []
    assert board.notices(0).posts.keys() == {70}


def newest(hall: Hall, topic: int = 0) -> list[dict[int, bytes]]:
    boards = [board for peer, board in enumerate(hall.boards) if peer not in hall.dead]
    return [{peer: posted.blob for peer, posted in b.notices(topic).posts.items()} for b in boards]


def sends(hall: Hall, peer: int, stage: int = POST) -> list[tuple[float, int, int]]:
    """(when, to whom, number) of what a peer has sent."""
    return [
        (now_s, effect.run.peer, effect.run.key.round)
        for now_s, who, _, effects in hall.log
        for effect in effects
        if who == peer and isinstance(effect, Send) and effect.run.key.stage == stage
    ]


@given(
    st.integers(2, 5),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 1 << 20),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0.0, 1.0)), max_size=40),
)
def test_in_the_end_everybody_holds_everybodys_newest(
    n: int, loss: float, jitter_s: float, seed: int, posts: list[tuple[int, int, float]]
) -> None:
    hall = Hall(n, seed=seed, loss=loss, jitter_s=jitter_s)
    last: dict[int, dict[int, bytes]] = {}
    for i, (peer, topic, at_s) in enumerate(sorted(posts, key=lambda post: post[2])):
        blob = b"%d" % i
        hall.push(at_s, peer % n, Post(topic, blob))
        last.setdefault(topic, {})[peer % n] = blob
    hall.run()  # to the end: nothing is repeated for ever between peers that answer
    for topic in range(3):
        assert newest(hall, topic) == [last.get(topic, {})] * n
    for now_s, who, event, effects in hall.log:
        for effect in effects:
            if isinstance(effect, Posted) and effect.peer == who and isinstance(event, Arrived):
                pytest.fail(f"peer {who} was told its own post at {now_s}")


@given(st.integers(0, 1 << 20), st.lists(st.tuples(st.booleans(), st.floats(0.0, 0.5)), max_size=30))
def test_who_is_acknowledged_knows_what_the_other_had_posted_or_it_was_posted_later(
    seed: int, posts: list[tuple[bool, float]]
) -> None:
    hall = Hall(2, seed=seed, loss=0.3, jitter_s=0.03)
    for who, at_s in posts:
        hall.push(at_s, int(who), Post(0, b"%f" % at_s))
    history: list[dict[int, Posted]] = [{}, {}]
    while hall._heap:
        hall.run(hall._heap[0][0])
        for me in (0, 1):
            for posted in hall.boards[me].notices(0).posts.values():
                if posted.peer == me:
                    history[me][posted.number] = posted
        for me, other in ((0, 1), (1, 0)):
            notices = hall.boards[me].notices(0)
            acked = notices.reached.get(other, 0)
            known = notices.posts[other].number if other in notices.posts else 0
            unknown = [number for number in history[other] if number > known]
            assert all(number > acked for number in unknown)


def test_a_post_is_there_after_one_latency_and_is_sent_once() -> None:
    hall = Hall(3)
    hall.post(0, 0, b"hello")
    hall.run(0.0101)
    assert newest(hall) == [{0: b"hello"}] * 3
    hall.run()
    assert sends(hall, 0) == [(0.0, 1, 1), (0.0, 2, 1)]
    assert hall.boards[0].notices(0).reached == {1: 1, 2: 1}
    assert hall.boards[0].notices(0).rto_s == pytest.approx(0.02 + 4 * 0.01)  # RFC 6298, 2.2


def test_an_answer_that_was_slept_through_does_not_make_the_timeout_seconds_long() -> None:
    """The timeout bounds how long a trainer waits for acknowledgements: a freeze must not lengthen it so."""
    board = Board(0, 2)

    def ask(now_s: float, took_s: float) -> float:
        sent = [e for e in board.step(now_s, Post(0, b"%f" % now_s)) if isinstance(e, Send)]
        peer = Board(1, 2)
        answers = [
            e for e in peer.step(now_s, Arrived([replace(sent[0].run, peer=0)])) if isinstance(e, Send)
        ]
        board.step(now_s + took_s, Arrived([replace(e.run, peer=1) for e in answers]))
        return board.notices(0).rto_s

    usual_s = [ask(float(at_s), 0.01) for at_s in range(20)][-1]
    assert usual_s < 0.03
    assert ask(20.0, 6.0) <= 3 * usual_s
    assert ask(30.0, 6.0) > ask(40.0, 0.01), "a line that has become slower is learned all the same"
    assert [ask(50.0 + 10 * i, 6.0) for i in range(20)][-1] > 6.0


def test_posts_in_a_hurry_are_coalesced_to_one_per_round_trip() -> None:
    hall = Hall(2)
    hall.post(0, 0, b"to measure")
    hall.run()
    began_s = hall.now_s
    for i in range(100):
        hall.push(began_s + i * 0.002, 0, Post(0, b"%d" % i))
    hall.run()
    spent_s = 100 * 0.002
    assert len(sends(hall, 0)) <= 2 + spent_s / (2 * hall.latency_s) + 1
    assert newest(hall)[1] == {0: b"99"}


def test_an_older_post_that_comes_late_is_ignored_and_acknowledged() -> None:
    board = Board(0, 2)
    other = Board(1, 2)
    effects = other.step(0.0, Post(0, b"old")) + other.step(5.0, Post(0, b"new"))
    first, last = (replace(e.run, peer=1) for e in effects if isinstance(e, Send))
    for run in (last, first):
        effects = board.step(1.0, Arrived((run,)))
        assert sum(isinstance(e, Send) and e.run.key.stage == TAKEN for e in effects) == 1
    assert board.notices(0).posts[1].blob == b"new"


def test_a_dead_peer_is_asked_less_and_less_often_and_counts_as_silent() -> None:
    hall = Hall(3)
    hall.post(0, 0, b"to measure")
    hall.run()
    hall.dead.add(2)
    began_s = hall.now_s
    hall.post(0, 0, b"news")
    hall.run(began_s + 60.0)
    times = sorted({at_s for at_s, to, _ in sends(hall, 0) if to == 2})[1:]  # some are of two copies
    assert SILENT_AFTER + 1 < len(times) < 50
    assert hall.boards[0].notices(0).silent == {2}
    assert times[SILENT_AFTER] - times[0] < 3.0  # of a path with a round trip of 20 ms
    copies = [sum(at_s == when_s for at_s, to, _ in sends(hall, 0) if to == 2) for when_s in times]
    assert copies == [1] + [2] * (EVEN - 1) + [1] * (len(times) - EVEN)
    pauses = np.diff(times)
    assert max(pauses[: EVEN - 1]) < 1.01 * min(pauses[: EVEN - 1])  # somebody may be waiting
    assert all(later >= 0.99 * sooner for sooner, later in pairwise(pauses))
    hall.dead.discard(2)
    hall.post(2, 1, b"back")
    hall.run(hall.now_s + 0.5)
    assert hall.boards[0].notices(0).silent == frozenset()
    assert newest(hall)[2] == {0: b"news"}


def test_a_newcomer_is_sent_the_newest_posts_and_a_new_process_starts_anew() -> None:
    hall = Hall(3)
    for i in range(5):
        for peer in range(3):
            hall.post(peer, 0, b"%d of %d" % (i, peer))
        hall.run()
    hall.dead.add(2)
    hall.post(0, 0, b"while it was away")
    hall.run(hall.now_s + 10.0)
    hall.restart(2)
    hall.run(hall.now_s + 0.2)
    assert newest(hall)[2] == {0: b"while it was away", 1: b"4 of 1"}
    assert 2 not in newest(hall)[0]
    hall.post(2, 0, b"anew")
    hall.run()
    assert newest(hall)[0][2] == b"anew"
    assert hall.boards[0].notices(0).reached[2] == hall.boards[0].notices(0).posts[0].number


def test_what_one_has_posted_that_was_taken_for_dead_is_there_when_it_is_back() -> None:
    """It does not post that again, as it was acknowledged, and answers nobody's posts on this topic."""
    hall = Hall(3)
    hall.post(2, 0, b"the plan")
    hall.run()
    hall.step(0, Left(2))
    hall.step(0, Joined(2, same=True))
    hall.run(hall.now_s + 10.0)
    assert newest(hall)[0] == {2: b"the plan"}
    hall.step(0, Joined(2))  # a new process, which has no plan yet
    assert newest(hall)[0] == {}


def test_who_has_left_is_sent_nothing_more() -> None:
    hall = Hall(3)
    hall.post(2, 0, b"last words")
    hall.run()
    hall.leave(2)
    hall.post(0, 0, b"news")
    hall.run()
    assert [to for _, to, _ in sends(hall, 0)] == [1]
    assert newest(hall)[0] == {2: b"last words", 0: b"news"}


def test_measured_round_trips_set_the_first_pause() -> None:
    board = Board(0, 2)
    board.step(0.0, Measured(1, 0.25))
    armed = [e.at_s for e in board.step(1.0, Post(0, b"")) if isinstance(e, Arm)]
    assert armed == [pytest.approx(1.25)]


def test_what_cannot_be_posted_is_refused() -> None:
    board = Board(0, 2)
    for topic in (-1, 1 << 32):
        with pytest.raises(ValueError, match=f"topic {topic}: topics are numbered from 0 to 4294967295"):
            board.step(0.0, Post(topic, b""))
    with pytest.raises(ValueError, match="at most 1064 can be"):
        board.step(0.0, Post(0, bytes(1065)))
    assert BLOB_MAX == 1064
    board.step(0.0, Post((1 << 32) - 1, bytes(1064)))


# -- Numbers that are made up


def numbered(peer: int, number: int, blob: bytes = b"far") -> Arrived:
    return Arrived((replace(run_to(0, POST, Posted(peer, 0, number, blob), number, 0), peer=peer),))


def test_no_peer_uses_up_the_numbers_of_the_others_nor_splits_them() -> None:
    """Peer 2 tells peer 0 alone numbers that are as high as can be: peer 1 hears it all the same."""
    boards = [Board(0, 3), Board(1, 3)]
    for number in [*(k << 24 for k in range(1, 300)), _NUMBER_MAX]:
        assert any(isinstance(e, Posted) for e in boards[0].step(0.0, numbered(2, number)))
    for now_s, blob in ((1.0, b"one"), (2.0, b"two")):
        ways = [(me, effect) for me in (0, 1) for effect in boards[me].step(now_s, Post(0, blob))]
        while ways:
            source, effect = ways.pop(0)
            if isinstance(effect, Send) and effect.run.peer < 2:
                to, came = effect.run.peer, Arrived((replace(effect.run, peer=source),))
                ways += [(to, further) for further in boards[to].step(now_s, came)]
        assert [boards[me].notices(0).posts[1 - me].blob for me in (0, 1)] == [blob, blob]
        assert not boards[0].notices(0).silent


def test_a_newcomer_hears_those_that_have_posted_for_months() -> None:
    board = Board(0, 3)
    for number in range(1 << 40, (1 << 40) + 3):
        assert any(isinstance(e, Posted) for e in board.step(0.0, numbered(1, number)))


# -- Many topics


def posts_of(peer: int, topics: Iterable[int]) -> list[Run]:
    """What ``peer`` sends to peer 0 of a post on each of these topics."""
    board = Board(peer, 3)
    effects = [effect for topic in topics for effect in board.step(0.0, Post(topic, b"%d" % topic))]
    return [replace(e.run, peer=peer) for e in effects if isinstance(e, Send) and e.run.peer == 0]


def test_topics_that_are_alike_in_16_bits_do_not_mix() -> None:
    """Of a topic's number the header has the low half, the payload all."""
    hall = Hall(3, loss=0.2)
    topics = (7, 0x10007, 0xFFFF0007)
    for peer in range(3):
        for topic in topics:
            hall.post(peer, topic, b"%d on %d" % (peer, topic))
    hall.run()
    for topic in topics:
        assert newest(hall, topic) == [{peer: b"%d on %d" % (peer, topic) for peer in range(3)}] * 3
        assert hall.boards[0].notices(topic).reached.keys() == {1, 2}


def test_a_damaged_post_is_not_taken() -> None:
    board = Board(0, 2)
    run = run_to(0, POST, Posted(1, 7, 1, b"fish"), 1, 0)
    for at, byte in ((_HEAD.size, b"d"), (_HEAD.size + 3, b"t")):
        payload = run.payload.copy()
        payload[0, at] = byte[0]
        assert board.step(0.0, Arrived((replace(run, peer=1, payload=payload),))) == []
    assert board.notices(7).posts == {}
    assert board.step(0.0, Arrived((replace(run, peer=1),))) != []
    assert board.notices(7).posts[1].blob == b"fish"


def test_only_sends_without_an_answer_teach_what_a_path_loses() -> None:
    path = _Path(slots={1: _Slot(tries=0), 2: _Slot(tries=1), 3: _Slot(tries=3)})
    path.heard()
    expected = 0.1
    for lost in (0.0, 1.0, 1.0, 0.0):  # of the last of several sends the answer may have come
        expected += (lost - expected) / 32
    assert path.lost == pytest.approx(expected, rel=1e-9)
    assert {slot.tries for slot in path.slots.values()} == {0}


def test_a_peers_posts_on_a_topic_too_many_are_not_taken_and_keep_out_nobody_elses() -> None:
    board = Board(0, 3)
    for run in posts_of(1, range(TOPICS_MAX)):
        assert any(isinstance(e, Posted) for e in board.step(0.0, Arrived((run,))))
    (further,) = posts_of(1, [TOPICS_MAX])
    assert board.step(0.0, Arrived((further,))) == []
    assert board.notices(TOPICS_MAX).posts == {}
    (own,) = posts_of(2, [TOPICS_MAX])
    assert any(isinstance(e, Posted) for e in board.step(0.0, Arrived((own,))))
    assert board.notices(TOPICS_MAX).posts.keys() == {2}
    (further,) = posts_of(1, [TOPICS_MAX])
    assert board.step(0.0, Arrived((further,))) == [], "also on a topic that others post on"


def test_ones_own_posts_have_room_whatever_others_post() -> None:
    board = Board(0, 3)
    for run in posts_of(1, range(TOPICS_MAX)):
        board.step(0.0, Arrived((run,)))
    mine = [5, *range(1000, 1000 + TOPICS_MAX - 1)]
    for topic in mine:
        effects = board.step(0.0, Post(topic, b"mine"))
        assert {e.run.peer for e in effects if isinstance(e, Send)} == {1, 2}
    assert board.notices(5).posts.keys() == {0, 1}
    assert all(board.notices(topic).posts[0].blob == b"mine" for topic in mine)
    with pytest.raises(ValueError, match=f"topic 3: this peer posts on {TOPICS_MAX} topics already"):
        board.step(0.0, Post(3, b"one too many"))
    board.step(0.0, Post(5, b"newer"))
    assert board.notices(5).posts[0].blob == b"newer"


@given(
    st.integers(-1, 70),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 255),
    st.integers(0, 0xFFFF),
    st.none() | st.tuples(st.integers(0, 3) | st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1)),
    st.integers(0, 3),
    st.integers(0, 3),
    st.binary(max_size=64),
    st.sampled_from([CHUNK_BYTES, 8, 0]),
    st.booleans(),
)
def test_no_datagram_harms(
    peer: int,
    number: int,
    stage: int,
    block: int,
    head: tuple[int, int] | None,
    first: int,
    total: int,
    data: bytes,
    width: int,
    whole: bool,
) -> None:
    board = Board(0, 3)
    board.step(0.0, Post(0, b"mine"))
    if head is not None:  # one that can be read: of this number and topic
        data = _HEAD.pack(len(data), _check(data), *head, number) + data
    payload = np.frombuffer((data + bytes(width))[:width], np.uint8).reshape(1, width)
    key = MessageKey(BOARD, number, stage, block)
    mask = None if whole else np.zeros(1, np.bool_)
    run = Run(peer, key, first, total, payload, np.zeros(1, np.float32), np.zeros(1, np.uint64), mask)
    board.step(0.1, Arrived((run,)))
    assert 1 <= len(board._posts) <= 2
    for topic in board._posts:
        for posted in board.notices(topic).posts.values():
            assert posted.peer != 0 or posted.blob == b"mine"
            assert len(posted.blob) <= BLOB_MAX
    board.step(0.2, Post(0, b"mine"))


# -- A transcript


def _what(event: Event | None) -> str:
    if isinstance(event, Post):
        return f"asked to post {event.blob.decode()!r}"
    if isinstance(event, Expired):
        return "its timer runs out"
    assert isinstance(event, Arrived)
    return " and ".join(f"from {run.peer}: {_run(run)}" for run in event.runs)


def _run(run: Run) -> str:
    data = run.payload.tobytes()
    size = int.from_bytes(data[:2], "little")
    blob = data[_HEAD.size : _HEAD.size + size].decode()
    if run.key.stage == POST:
        return f"post {run.key.round} {blob!r}"
    own = int.from_bytes(data[4:8], "little")
    return f"{run.key.round} taken, own newest is " + (f"{own} {blob!r}" if own else "none")


def test_transcript(golden: Callable[[str, str], None]) -> None:
    hall = Hall(3)
    lost = iter([False, True, False, False])  # peer 0's second datagram, of four

    hall.cut = lambda source, dest: source == 0 and next(lost, False)
    hall.post(0, 0, b"one")
    hall.push(0.004, 2, Post(0, b"from two"))
    hall.push(0.012, 0, Post(0, b"two"))
    hall.push(0.014, 0, Post(0, b"three"))
    hall.run()
    lines = [
        "A notice board: 3 peers, 10 ms one way. Peer 0 tells.",
        "Its first datagram to peer 2 is lost. What it posts while one is on its way waits, the newest only;",
        "an acknowledgement carries its sender's newest post.",
        "",
    ]
    for now_s, peer, event, effects in hall.log:
        if peer != 0:
            continue
        lines.append(f"{now_s * 1e3:7.1f} ms  {_what(event)}")
        for effect in effects:
            if isinstance(effect, Send):
                lines.append(f"{'':12}-> to {effect.run.peer}: {_run(effect.run)}")
            elif isinstance(effect, Posted):
                lines.append(f"{'':12}-> newest of {effect.peer} is {effect.number} {effect.blob.decode()!r}")
            elif isinstance(effect, Arm):
                lines.append(f"{'':12}-> timer at {effect.at_s * 1e3:.1f} ms")
    assert newest(hall) == [{0: b"three", 2: b"from two"}] * 3
    golden("board/a_post_is_lost", "\n".join(lines) + "\n")
