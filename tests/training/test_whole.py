"""Whose model counts where peers hold different ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ragtag.core.types import Outcome, nobodys
from ragtag.training.state.whole import (
    Finished,
    Stand,
    alike,
    digest_of,
    is_current,
    joined_digest,
    kept_up,
    reached,
    source_of,
)


def outcome(round_: int, heard: int) -> Outcome:
    nothing = nobodys(
        0, np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.array([heard], np.uint64), None
    )
    return replace(nothing, round=round_)


def test_what_one_peer_adds_alone_when_all_others_have_ended_is_not_newer_than_theirs() -> None:
    alone = Stand("alone", current=333, round=333)
    for ended in (90, 91):
        stands = {0: alone, 1: Stand("crew", current=90, round=90), 2: Stand("crew", ended, round=ended)}
        assert source_of(stands) in (1, 2)
        assert all(is_current(stand, stands) for stand in stands.values()), "each has a voice in a mean"
    frozen = {0: alone, 1: Stand("old", current=90, round=333), 2: Stand("old", current=90, round=333)}
    assert source_of(frozen) == 0, "who fell behind, and knows it, has no voice, however many these are"
    assert not is_current(frozen[1], frozen)
    two = {0: Stand("ended", current=90, round=90), 1: alone}
    assert source_of(two) == 1


def test_who_went_on_alone_has_kept_up_unless_it_skipped_rounds() -> None:
    me, alone, both = 1, 0b10, 0b11
    assert kept_up(-1, outcome(0, alone), me) == 0
    assert kept_up(10, outcome(11, alone), me) == 11
    assert kept_up(10, outcome(19, alone), me) == 19  # 8 skipped
    assert kept_up(10, outcome(20, alone), me) == 10
    assert kept_up(10, outcome(21, alone), me) == 10  # and it stays there
    assert kept_up(10, outcome(40, both), me) == 40
    grouped = replace(outcome(40, 0b11), members=(7, 1))
    assert kept_up(10, grouped, me) == 40
    assert kept_up(10, replace(grouped, heard=np.array([0b10], np.uint64)), me) == 10


def test_digests_tell_values_types_and_shapes_apart() -> None:
    one = torch.arange(6.0)
    assert digest_of([one]) == digest_of([one.clone()])
    others = [one + 1e-6, one.double(), one.view(2, 3), one.bfloat16(), one[:5], -one * 0]
    assert len({digest_of([other]) for other in (one, *others)}) == 1 + len(others)
    assert digest_of([one, one]) != digest_of([one])
    strided = torch.arange(12.0)[::2]
    assert digest_of([strided]) == digest_of([strided.contiguous()])


def test_the_newest_that_most_hold_is_taken() -> None:
    stands = {
        0: Stand("a", current=90),
        1: Stand("b", current=90),
        2: Stand("b", current=90),
        3: Stand("c", current=50),
    }
    assert source_of(stands) == 1
    assert not alike(stands)
    del stands[2]
    assert source_of(stands) == 0  # as many hold either: the lowest peer's


def test_peers_that_never_trained_do_not_undo_the_training_of_one_that_did() -> None:
    """As where there are fewer batches than peers. They hold what all began with, and most hold that."""
    idle = Stand("first")
    for busy in (Stand("learned", current=0, round=0), Stand("learned", current=20, since=3, round=20)):
        stands = {0: idle, 1: busy, 2: idle}
        assert reached(stands) == busy.round
        assert source_of(stands) == 1
        assert [is_current(stand, stands) for stand in stands.values()] == [False, True, False]
    steps = {0: idle, 1: Stand("learned", since=3), 2: Stand("learned too", since=3)}
    assert [is_current(stand, steps) for stand in steps.values()] == [False, True, True]
    nobody = {0: Stand("other"), 1: idle, 2: idle}
    assert source_of(nobody) == 1, "where none has trained most count"
    assert all(is_current(stand, nobody) for stand in nobody.values())


def test_rounds_alone_make_no_model_newer() -> None:
    stands = {0: Stand("a", current=90, round=90), 1: Stand("b", current=50, since=3, round=100)}
    assert source_of(stands) == 0
    assert is_current(stands[0], stands)
    assert not is_current(stands[1], stands)


@pytest.mark.parametrize(("late", "counts"), [(0, True), (8, True), (9, False)])
def test_who_gives_is_who_would_in_rounds(late: int, counts: bool) -> None:
    stands = {0: Stand("a", current=90), 1: Stand("b", current=90 - late)}
    assert is_current(stands[1], stands) is counts


def test_one_digest_for_several_models() -> None:
    assert joined_digest([]) == ""
    assert joined_digest(["ab"]) == "ab"
    assert joined_digest(["ab", "cd"]) != joined_digest(["cd", "ab"])


def test_it_says_who_was_behind() -> None:
    found = Finished("0123456789abcdef", True, (0, 1, 2), {2: 30}, 0.0)
    assert str(found) == "3 peers end with the same model 0123456789ab; peer 2 was 30 rounds behind"
    assert "different models" in str(Finished("01", False, (0, 1)))
    assert str(Finished()) == "no model was averaged"
