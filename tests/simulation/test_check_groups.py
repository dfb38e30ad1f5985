"""What the checker of groups finds wrong with outcomes and messages that no machine should make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ragtag.core.types import Average, Floats, MessageKey, Outcome, Run, nobodys
from ragtag.protocols.groups.group import BLOCK_BITS
from ragtag.protocols.rounds.base import GATHER, SCATTER
from ragtag.simulation.check.groups import GroupChecker

TAG, CHUNKS = 5, 2
VALUES = {peer: np.full((CHUNKS, 3), float(peer), np.float32) for peer in range(4)}
ASKS = {peer: Average(0, values, 1.0 + peer) for peer, values in VALUES.items()}


def sent(stage: int, number: int = 7, tag: int = TAG) -> Run:
    nothing = np.zeros((0, 4), np.uint8), np.zeros(0, np.float32), np.zeros(0, np.uint64)
    return Run(1, MessageKey(0, number, stage, tag << BLOCK_BITS), 0, 1, *nothing)


def group() -> GroupChecker:
    """Peers 2 and 3 have given their values to a group in round 7; peer 1 to another one."""
    checker = GroupChecker(1e-6)
    for peer, tag in ((2, TAG), (3, TAG), (1, TAG + 1)):
        assert checker.sends(peer, sent(SCATTER, tag=tag), ASKS[peer]) == ""
    return checker


def outcome(heard: int = 0b11, members: tuple[int, ...] = (2, 3), peer: int = 2) -> Outcome:
    """What peer 2 should have of a round with 3: weights 3 and 4."""
    named = [members[i] for i in range(len(members)) if heard >> i & 1]
    weight = sum(ASKS[p].weight for p in named)
    mean = sum((VALUES[p] * ASKS[p].weight for p in named), np.zeros((CHUNKS, 3), np.float32)) / weight
    none = nobodys(
        0,
        np.asarray(mean, np.float32),
        np.full(CHUNKS, weight, np.float32),
        np.full(CHUNKS, heard, np.uint64),
        None,
    )
    averaged = np.full(CHUNKS, heard != 1 << members.index(peer))
    return replace(none, round=7, averaged=averaged, members=members)


def test_what_is_right_is_counted() -> None:
    checker = group()
    assert checker.ends(2, ASKS[2], outcome()) == "" and checker.means == 1
    alone = outcome(heard=0b1, members=(0,), peer=0)
    assert checker.ends(0, ASKS[0], replace(alone, mean=VALUES[0])) == "" and checker.means == 1


def changed(mean: Floats) -> Floats:
    mean = mean.copy()
    mean[0, 0] += 1e-3
    return mean


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda o: replace(o, members=(1, 3)), "does not stand once"),
        (lambda o: replace(o, members=(2, 3, 2)), "does not stand once"),
        (lambda o: replace(o, heard=o.heard | np.uint64(0b100)), "no members of the group"),
        (lambda o: replace(o, mean=changed(o.mean)), "is not that of"),
        (lambda o: replace(o, weight=o.weight * 2), "another weight"),
        (lambda o: replace(o, averaged=np.array([True, False])), "not the peer's own"),
        (lambda o: outcome(members=(2, 1)), "not all of whom"),  # a member of another group
        (lambda o: outcome(members=(2, 0)), "not all of whom"),  # of none
    ],
)
def test_what_is_wrong_with_an_outcome_is_said(wrong: Callable[[Outcome], Outcome], said: str) -> None:
    assert said in group().ends(2, ASKS[2], wrong(outcome()))


def test_a_round_ends_once_and_none_before_it_after_that() -> None:
    checker = group()
    assert checker.ends(2, ASKS[2], outcome()) == ""
    for number in (7, 6):
        assert "has ended, or of one before" in checker.ends(2, ASKS[2], replace(outcome(), round=number))


def test_values_must_stay_as_they_are_while_they_are_averaged() -> None:
    checker, ask = GroupChecker(1e-6), Average(0, VALUES[2].copy(), 3.0)
    checker.sends(2, sent(SCATTER), ask)
    ask.values[0, 0] = 9.0
    assert "changed" in checker.ends(2, ask, outcome())


def test_a_peer_gives_its_values_to_one_group_in_a_round_and_only_while_it_is_in_it() -> None:
    checker = group()
    assert "two groups" in checker.sends(2, sent(GATHER, tag=TAG + 1), ASKS[2])
    assert "not in" in checker.sends(0, sent(SCATTER), None)  # it was not asked for an average
    assert checker.ends(2, ASKS[2], outcome()) == ""
    assert checker.sends(2, sent(SCATTER), None) == ""  # again, for one that lost it
    assert "not in" in checker.sends(2, sent(SCATTER, number=6), ASKS[2])  # a round before its last
    for stage in (2, 3, 4, 5, 6, 0x40, 0x44, 0x80):
        assert checker.sends(0, sent(stage), None) == ""  # no values in these


def test_what_is_kept_is_bounded() -> None:
    checker = GroupChecker(1e-6)
    for number in range(500):
        checker.sends(2, sent(SCATTER, number), ASKS[2])
    assert len(checker._rounds) <= 64
