"""A schedule at work: it waits with an end, not for the dead, and says where the time went."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragtag.core.channels import topic_of
from ragtag.core.types import Outcome
from ragtag.schedules import SSP, Average, Compute, Decision, EveryStep, Partial, Progress, Skip
from ragtag.training.optimizer.scheduling import Scheduling, Spent, unheard
from tests.training.test_pace import Board


class Peer:
    """One that takes a step in 0.1 s, and averages in 0.02 s."""

    def __init__(self, board: Board, schedule: SSP | EveryStep | Partial) -> None:
        self.board, self.steps = board, 0
        self.scheduling = Scheduling(schedule, board, "model")
        assert self.scheduling._pacer is None or self.scheduling._pacer._topic == topic_of("model/pace")

    def step(self) -> bool:
        self.board.at_s += 0.1
        self.steps += 1
        self.scheduling.worked(self.steps)
        if not self.scheduling.due(self.steps, 1):
            return False
        self.scheduling.begin()
        self.board.at_s += 0.02
        self.scheduling.averaged(replace(outcome(), round=self.steps))
        return True


def outcome(heard: int = 3, last: int = -1, missed: tuple[int, ...] = (), averaged: bool = True) -> Outcome:
    table, ones = np.zeros((2, 4), np.float32), np.ones(2, np.float32)
    bits, flags = np.full(2, heard, np.uint64), np.full(2, averaged)
    return Outcome(0, 0, table, ones, bits, flags, missed, (1,), 0.0, 0.01, 0.01, 0.02, False, last=last)


def test_who_is_too_far_ahead_waits_until_the_slowest_has_stepped() -> None:
    board = Board(n=2, live=frozenset({0, 1}))
    board.tell(1, 0, step_s=1.0)
    peer = Peer(board, SSP(bound=2))
    assert peer.step() and peer.step()
    assert peer.scheduling.spent.wait_s == 0.0
    began_s = board.at_s

    def stepped() -> None:
        if board.at_s - began_s > 0.6:
            board.tell(1, 1, step_s=1.0)

    board.slept = stepped
    assert peer.step()
    assert 0.5 <= peer.scheduling.spent.wait_s <= 0.8
    assert peer.scheduling.spent.for_peer_s[1] == pytest.approx(peer.scheduling.spent.wait_s)


def test_a_wait_for_a_peer_that_hangs_ends_and_is_not_repeated() -> None:
    board = Board(n=2, live=frozenset({0, 1}))
    board.tell(1, 0, step_s=1.0)
    peer = Peer(board, SSP(bound=1))
    peer.step()
    peer.step()
    waited_s = peer.scheduling.spent.wait_s
    assert waited_s == pytest.approx(1.5 * 1.02)  # the slowest's step and an average, and half as much again
    for _ in range(5):
        peer.step()
    assert peer.scheduling.spent.wait_s == waited_s
    board.tell(1, 1, step_s=1.0)  # it goes on, and counts again: one step behind, and not seven
    peer.step()
    assert peer.scheduling.spent.wait_s == waited_s
    peer.step()
    assert peer.scheduling.spent.wait_s > waited_s


def test_a_wait_is_as_long_as_the_clock_says_where_pauses_last_longer() -> None:
    board = Board(n=2, live=frozenset({0, 1}))
    board.tell(1, 0, step_s=0.1)
    peer = Peer(board, SSP(bound=1))
    peer.step()
    began_s = board.at_s + 0.1

    def oversleeps() -> None:
        board.at_s += 0.015  # as long again as was asked for

    board.slept = oversleeps
    peer.step()
    waited_s = peer.scheduling.spent.wait_s
    assert waited_s == pytest.approx(board.at_s - 0.02 - began_s)
    assert 1.5 * 0.12 <= waited_s <= 1.5 * 0.12 + 0.03


def test_a_peer_that_leaves_while_it_is_waited_for_ends_the_wait() -> None:
    board = Board(n=2, live=frozenset({0, 1}))
    board.tell(1, 0, step_s=100.0)
    peer = Peer(board, SSP(bound=1))
    peer.step()

    def leaves() -> None:
        board.silent = frozenset({1})

    board.slept = leaves
    peer.step()
    assert peer.scheduling.spent.wait_s == pytest.approx(100.02 / 8)


def test_a_step_that_others_may_wait_for_is_told_whatever_a_post_takes() -> None:
    board = Board(n=2, live=frozenset({0, 1}), post_s=0.004)  # a hundredth is a post in four steps
    peer = Peer(board, SSP(bound=3))
    for _ in range(12):
        assert peer.step()
    assert [pace.steps for _, _, pace in board.posted] == list(range(1, 13))


def test_a_slow_peer_is_set_aside_and_taken_back() -> None:
    board = Board()
    for other, step_s in ((1, 0.1), (2, 0.1), (3, 2.0)):
        board.tell(other, 1, step_s)
    peer = Peer(board, Partial())
    for _ in range(3):
        peer.step()
    assert peer.scheduling.aside == {3}
    board.tell(3, 9, 0.1)
    peer.step()
    assert peer.scheduling.aside == frozenset()


def test_who_is_waited_for_follows_from_all_steps_between_averages() -> None:
    board = Board(n=3, live=frozenset({0, 1, 2}))
    board.tell(1, 1, step_s=0.1, exchange_s=1.0)
    board.tell(2, 1, step_s=0.3, exchange_s=1.0)
    each = Peer(board, Partial())
    assert each.step()
    assert each.scheduling.aside == frozenset()  # 3 turns in 1.3 s, or 2 in 1.1 s
    every = Peer(board, Partial(every=10))
    for step in range(1, 11):
        board.at_s += 0.1
        every.scheduling.worked(step)
        assert every.scheduling.due(step, step) is (step == 10)
    every.scheduling.begin()
    assert every.scheduling.aside == {2}  # 3 turns in 4 s, or 2 in 2 s


def test_where_the_time_went() -> None:
    board = Board()
    peer = Peer(board, EveryStep())
    for _ in range(11):
        peer.step()
    spent = peer.scheduling.take_spent()
    assert spent.steps == spent.averages == 11
    assert spent.compute_s == pytest.approx(10 * 0.1)  # how long the first took nobody knows
    assert spent.average_s == pytest.approx(11 * 0.02)
    assert spent.stale == [10]  # what the first followed nobody knows
    assert board.posted == []
    assert peer.scheduling.take_spent() == Spent()


def test_staleness_in_classes() -> None:
    spent = Spent()
    for steps in (0, 0, 1, 2, 3, 4, 7, 8, 1 << 60):
        spent.count_stale(steps)
    assert spent.stale[:5] == [2, 1, 2, 2, 1]
    assert sum(spent.stale) == 9
    assert len(spent.stale) <= 64


@pytest.mark.parametrize(
    ("of", "share"),
    [
        (outcome(heard=0b11), 0.0),
        (outcome(heard=0b10), 1.0),
        (outcome(heard=0b10, averaged=False), 0.0),
    ],
)
def test_what_was_overwritten_without_being_in_it_is_lost(of: Outcome, share: float) -> None:
    assert unheard(of, 0).mean() == share


def test_waits_in_rounds_are_put_down_to_whom_they_were_for() -> None:
    board = Board()
    scheduling = Scheduling(EveryStep(), board, "model")
    scheduling.averaged(outcome(last=2))
    board.at_s += 0.01
    scheduling.averaged(outcome(missed=(1, 3), last=1))
    scheduling.averaged(outcome(missed=(1,)))  # a round that local steps did not wait for
    assert scheduling.spent.for_peer_s == pytest.approx({2: 0.01, 1: 0.01, 3: 0.01})


class Absent:
    """Averages every second step, but for some."""

    def __init__(self, away: frozenset[int]) -> None:
        self.away = away

    def decide(self, progress: Progress) -> Decision:
        if progress.step % 2:
            return Compute()
        return Skip() if progress.step in self.away else Average()


@pytest.mark.parametrize(
    ("away", "slow_s", "went_by"),
    [({6}, 0.0, 2), ({6, 8}, 0.0, 3), ({6, 8}, 0.3, 2), ({2}, 0.0, 0), ({2, 4}, 0.0, 1), (set(), 0.0, -1)],
    ids=str,
)
def test_a_peer_knows_which_averages_went_by_without_it(away: set[int], slow_s: float, went_by: int) -> None:
    """It averages after steps 2 and 4. slow_s: how much longer the crew took between rounds."""
    board = Board(n=2, live=frozenset({0, 1}))
    scheduling = Scheduling(Absent(frozenset(away)), board, "model")
    rounds = 0
    for step in range(1, 20):
        board.at_s += 0.1
        scheduling.worked(step)
        if scheduling.due(step, 1):
            if step > max(away, default=0) or (rounds == 2 and not away):
                break
            board.at_s += slow_s
            scheduling.averaged(replace(outcome(), round=rounds))
            rounds += 1
    assert scheduling.went_by == went_by
    scheduling.averaged(replace(outcome(), round=9))
    assert scheduling.went_by == -1
