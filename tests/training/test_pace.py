"""What peers post of their speed: bounded, believed only where it can be, and of the living only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.channels import topic_of
from ragtag.core.types import Noted, Posted
from ragtag.protocols.crew.board import Notices
from ragtag.training.optimizer.speeds import SHARE_MAX, Pace, Pacer, decode


@dataclass
class Board:
    """Peers as a pacer sees them; posting takes ``post_s`` of a clock that stands still else, but in pauses.

    slept: called after each pause; it may make something happen.
    """

    me: int = 0
    n: int = 4
    live: frozenset[int] = frozenset(range(4))
    silent: frozenset[int] = frozenset()
    post_s: float = 0.0
    at_s: float = 0.0
    slept: Callable[[], None] = lambda: None
    told: dict[int, bytes] = field(default_factory=dict)
    posted: list[tuple[float, int, Pace]] = field(default_factory=list)

    def now_s(self) -> float:
        return self.at_s

    def pause(self, for_s: float) -> None:
        assert for_s > 0
        self.at_s += for_s
        self.slept()

    def post_soon(self, topic: int, blob: bytes) -> None:
        pace = decode(blob)
        assert pace is not None
        self.posted.append((self.at_s, topic, pace))
        self.at_s += self.post_s

    def posts(self, topic: int) -> dict[int, bytes]:
        return dict(self.told)

    def notices(self, topic: int) -> Notices:
        posts: Mapping[int, Posted] = {p: Posted(p, topic, 1, blob) for p, blob in self.told.items()}
        return Notices(frozenset(range(1, self.n)), posts, {}, self.silent)

    def tell(self, peer: int, steps: int, step_s: float = 0.1, exchange_s: float = 0.01) -> None:
        self.told[peer] = Pace(steps, step_s, exchange_s).encode()


def pacer(board: Board, notes: list[Noted] | None = None) -> Pacer:
    return Pacer(board, "model", None if notes is None else notes.append)


def test_posting_takes_at_most_a_hundredth_of_the_time() -> None:
    board = Board(post_s=0.004)
    of = pacer(board)
    for step in range(1, 2001):
        board.at_s += 0.01
        of.stepped(step, 0.01)
    assert len(board.posted) > 20
    assert len(board.posted) * board.post_s <= 1.5 * SHARE_MAX * board.at_s
    assert {topic for _, topic, _ in board.posted} == {topic_of("model/pace")}


def test_nothing_new_is_not_posted_again() -> None:
    board = Board()
    of = pacer(board)
    of.stepped(1, 0.05)
    of.post()
    of.post()
    assert [pace for *_, pace in board.posted] == [Pace(1, 0.05, 0.0)]


def test_one_long_step_does_not_make_a_slow_peer() -> None:
    board = Board()
    of = pacer(board)
    for step, took_s in enumerate([0.1, 0.1, 5.0, 0.1, 0.1]):
        of.stepped(step + 1, took_s)
    assert of.read().step_s == {0: 0.1}


def test_what_is_read_of_the_others() -> None:
    board = Board()
    of = pacer(board)
    of.stepped(7, 0.1)
    board.tell(1, 5, 0.2)
    assert of.read().since_s[1] == 0.0
    board.at_s = 3.0
    paces = of.read()
    assert paces.steps == {0: 7, 1: 5}
    assert paces.step_s == {0: 0.1, 1: 0.2}
    assert paces.since_s == {0: 0.0, 1: 3.0}
    board.tell(1, 6, 0.2)
    assert of.read().since_s[1] == 0.0


def test_who_has_left_or_does_not_answer_has_no_clock() -> None:
    board = Board()
    of = pacer(board)
    of.stepped(7, 0.1)
    for peer in (1, 2, 3):
        board.tell(peer, 5)
    board.silent = frozenset({2, 3})
    paces = of.read()
    assert set(paces.steps) == {0, 1}
    assert paces.live == {0, 1}


def test_who_was_waited_for_in_vain_has_no_clock_until_it_steps() -> None:
    board = Board()
    of = pacer(board)
    of.stepped(7, 0.1)
    board.tell(1, 2)
    of.read()
    of.overdue(1)
    assert set(of.read().steps) == {0}
    board.tell(1, 3)
    assert of.read().steps == {0: 7, 1: 3}


def test_who_comes_back_is_as_far_behind_as_before_unless_it_took_over_what_it_missed() -> None:
    board = Board()
    of = pacer(board)
    of.stepped(7, 0.1)
    for peer in (1, 2, 3):
        board.tell(peer, 5)
    of.read()
    board.silent = frozenset({1, 2})
    of.read()
    of.stepped(100, 0.1)
    board.silent = frozenset()
    board.tell(2, 99)
    assert of.read().steps == {0: 100, 1: 98, 2: 100, 3: 5}
    of.stepped(101, 0.1)
    board.tell(1, 6)
    board.tell(2, 100)
    assert of.read().steps == {0: 101, 1: 99, 2: 101, 3: 5}
    board.silent = frozenset({3})
    of.read()
    of.stepped(50, 0.1)  # it has taken over an older state
    board.silent = frozenset()
    assert of.read().steps[3] == 5


def test_an_absurd_speed_is_not_believed_and_noted_once() -> None:
    board, notes = Board(), list[Noted]()
    of = pacer(board, notes)
    of.stepped(7, 0.1)
    board.tell(1, 5, 0.11)
    board.tell(2, 5, 1e9)
    for _ in range(3):
        assert of.read().step_s == {0: 0.1, 1: 0.11}
    assert [(note.what, note.peer) for note in notes] == [("speed not believed", 2)]
    board.tell(2, 6, 0.1)
    assert of.read().step_s[2] == 0.1
    board.tell(2, 7, 1e9)
    of.read()
    assert len(notes) == 2


@given(st.binary(max_size=64))
def test_whatever_is_posted_is_a_pace_or_nothing(blob: bytes) -> None:
    pace = decode(blob)
    if pace is not None:
        assert math.isfinite(pace.step_s)
        assert pace.step_s > 0
        assert decode(pace.encode()) == pace
    board = Board(told={1: blob})
    of = pacer(board, [])
    of.stepped(3, 0.1)
    assert of.read().steps[0] == 3


@pytest.mark.parametrize("s", [0.0, -1.0, math.inf, math.nan])
def test_a_speed_that_cannot_be_is_refused(s: float) -> None:
    assert decode(Pace(1, s, 0.0).encode()) is None


def test_each_name_has_a_topic_of_its_own() -> None:
    board = Board()
    for name in ("a", "b"):
        of = Pacer(board, name)
        of.stepped(1, 0.1)
        of.post()
    assert [topic for _, topic, _ in board.posted] == [topic_of("a/pace"), topic_of("b/pace")]
