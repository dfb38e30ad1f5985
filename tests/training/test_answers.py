"""Nobody is waited for longer than some measured timeouts, and who stood still has not waited."""

from __future__ import annotations

import pytest

from ragtag.protocols.crew.board import Notices
from ragtag.training.samples.answers import PATIENCE, PATIENCE_MAX, Answers

RTO_S = 0.05


def look(
    answers: Answers, reached: dict[int, int], times: int = 1, silent: frozenset[int] = frozenset()
) -> None:
    for _ in range(times):
        answers.look(Notices(frozenset(range(1, 5)), {}, reached, silent, RTO_S), range(5), RTO_S / 10)


@pytest.mark.parametrize(("acked", "timeouts"), [(4, 0.0), (3, PATIENCE), (2, PATIENCE), (1, PATIENCE_MAX)])
def test_how_long_is_waited_follows_from_how_many_know(acked: int, timeouts: float) -> None:
    answers = Answers(0)
    reached = {peer: 7 if peer <= acked else 6 for peer in range(1, 5)}
    looks = 0
    while looks < 200:
        look(answers, reached)
        if answers.enough_know(7):
            break
        looks += 1
    assert looks / 10 == pytest.approx(timeouts, abs=0.2)
    assert answers.all_know(7) == (acked == 4)
    assert answers.behind(7) == set(range(acked + 1, 5))
    answers.moved_on()
    assert not answers.enough_know(8), "of what comes next, those who answered may know soon"


def test_the_silent_and_those_who_take_no_part_are_not_awaited() -> None:
    answers = Answers(0)
    look(answers, {1: 7, 2: 7}, silent=frozenset({3, 4}))
    assert answers.present == {0, 1, 2}
    assert answers.enough_know(7)
    answers.look(Notices(frozenset({1, 2}), {}, {1: 7}, frozenset(), RTO_S), [0, 1], 0.0)
    assert answers.enough_know(7)


def test_who_was_waited_for_in_vain_is_not_waited_for_again_until_it_answers() -> None:
    answers, froze = Answers(0), {1: 7, 2: 7, 3: 7, 4: 6}
    look(answers, froze, times=int(10 * PATIENCE) + 1)
    assert answers.enough_know(7)
    answers.moved_on()
    later = {1: 8, 2: 8, 3: 8, 4: 6}
    look(answers, later)
    assert answers.enough_know(8) and not answers.all_know(8), "it still has not said anything"
    look(answers, {**later, 3: 7})
    assert not answers.enough_know(8), "another one is late"
    look(answers, {1: 9, 2: 9, 3: 9, 4: 8})
    assert not answers.enough_know(9), "it is back, and what it does matters"


def test_a_process_that_stood_still_has_not_waited() -> None:
    answers = Answers(0)
    answers.look(Notices(frozenset({1, 2, 3}), {}, {1: 1, 2: 1}, frozenset(), RTO_S), range(4), 60.0)
    assert answers.waited_s == RTO_S
    assert not answers.enough_know(1)


def test_of_two_one_is_not_most() -> None:
    answers = Answers(0)
    notices = Notices(frozenset({1}), {}, {}, frozenset(), RTO_S)
    for _ in range(round(10 * PATIENCE) + 5):
        answers.look(notices, [0, 1], RTO_S / 10)
    assert not answers.enough_know(1)
