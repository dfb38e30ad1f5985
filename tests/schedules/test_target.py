"""When a crew with a target batch averages, and what is believed of others' samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.schedules.base import Average, Compute, Decision, Progress, Wait
from ragtag.schedules.target import Doing, Tally, TargetBatch, is_over

ME = 0


def decide(target: float, *tallies: Tally, waited_s: float = 0.0) -> Decision:
    """What peer 0, whose tally is the first, does."""
    known = dict(enumerate(tallies))
    n = len(tallies)
    return TargetBatch(target).decide(
        Progress(step=1, since_average=1, n=n, live=frozenset(known), me=ME, waited_s=waited_s, tallies=known)
    )


def tally(samples: float, age_s: float = 0.0, doing: Doing = Doing.COMPUTES, step: int = 5) -> Tally:
    """One of a peer whose batch of 8 takes a second."""
    return Tally(step, samples, 8.0, 1.0, doing, age_s)


def test_all_average_once_they_have_so_many_together() -> None:
    assert decide(32, tally(16), tally(16)) == Average()
    assert decide(33, tally(16), tally(16, 0.4)) != Average()


def test_others_are_carried_on_by_whole_batches_of_their_pace() -> None:
    assert decide(40, tally(16), tally(16, 0.99)) != Average()
    assert decide(40, tally(16), tally(16, 1.0)) == Average()


def test_what_is_carried_on_is_at_most_what_was_told() -> None:
    assert tally(16, age_s=3600.0).towards(5) == 32
    absurd = Tally(5, 8.0, 1e12, 1e-9, age_s=10.0)
    assert absurd.towards(5) == 16
    assert decide(1000, tally(8), absurd) != Average()
    assert tally(0.0, age_s=3600.0).towards(5) == 0.0


def test_what_is_foreseen_is_at_most_twice_what_was_told_of_this_step_or_of_the_one_before() -> None:
    assert Tally(5, 8.0, 8.0, 1.0, before=40.0).towards(5, in_s=3600.0) == 80
    assert Tally(5, 50.0, 8.0, 1.0, before=40.0).towards(5, in_s=3600.0) == 100
    assert Tally(5, 8.0, 8.0, 1.0, age_s=3600.0, before=40.0).towards(5) == 16, "not foreseen: there now"


@given(
    samples=st.floats(0, 1e9),
    batch=st.floats(0, 1e300),
    batch_s=st.floats(1e-300, 1e300),
    age_s=st.floats(0, 1e300),
    before=st.floats(0, 1e9),
    in_s=st.floats(0, 1e300),
)
def test_whatever_is_told_counts_within_its_bounds(
    samples: float, batch: float, batch_s: float, age_s: float, before: float, in_s: float
) -> None:
    told = Tally(5, samples, batch, batch_s, Doing.COMPUTES, age_s, before)
    assert samples <= told.towards(5) <= 2 * samples
    assert told.towards(5, in_s) <= 2 * max(samples, before)
    assert told.towards(6) == told.towards(4) == 0
    decision = decide(1e12, tally(8), told)
    assert not isinstance(decision, Wait) or decision.at_most_s <= 2.0


def test_a_peer_that_stands_by_or_averages_is_not_carried_on() -> None:
    for doing in (Doing.STANDS_BY, Doing.AVERAGES):
        assert tally(16, 3.0, doing).towards(5) == 16


def test_words_of_another_step_count_for_nothing() -> None:
    assert decide(32, tally(16), tally(100, step=4)) != Average()
    assert decide(32, tally(16), tally(100, 9.0, Doing.AVERAGES, step=4)) != Average(), "foreseen only"


def test_a_peer_that_begins_to_average_takes_the_others_along() -> None:
    assert decide(1000, tally(16), tally(16, doing=Doing.AVERAGES), tally(8)) == Average()


def test_a_step_is_over_when_most_of_the_others_have_made_it() -> None:
    assert decide(1000, tally(16), tally(8, step=6)) == Average()
    assert decide(1000, tally(16), tally(8, step=6), tally(8), tally(8)) == Compute(), "one went ahead alone"
    assert decide(1000, tally(16), tally(8, step=6), tally(8, step=7), tally(8)) == Average()
    assert not is_over([], 5)


def test_it_stands_by_where_its_batch_would_hold_the_others_up_for_more_than_it_brings() -> None:
    others = [tally(8, 0.9) for _ in range(8)]  # in 0.1 s these have 64 more
    decision = decide(8 + 2 * 64, tally(8), *others)
    assert isinstance(decision, Wait)
    assert decide(8 + 2 * 64, tally(8), *others, waited_s=1.0) == Compute(), (
        "for no longer than a batch takes"
    )


def test_it_computes_on_where_it_is_hardly_late() -> None:
    others = [tally(8, 0.05) for _ in range(8)]  # it is late by .05 s, in which these compute 3.2
    assert decide(8 + 2 * 64, tally(8), *others) == Compute()


def test_it_computes_on_where_the_target_is_far() -> None:
    assert decide(1000, tally(8), *(tally(8, 0.5) for _ in range(8))) == Compute()


def test_a_slow_peer_keeps_in_step_and_begins_no_batch() -> None:
    fast = [Tally(4, 64.0, 8.0, 0.05, Doing.AVERAGES, 0.0) for _ in range(4)]
    slow = Tally(5, 0.0, 8.0, 1.0)
    assert isinstance(decide(256, slow, *fast), Wait)
    assert decide(256, slow, *(Tally(4, 64.0, 8.0, 1.0, Doing.AVERAGES, 0.0) for _ in range(4))) == Compute()


@pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf")])
def test_a_target_is_above_0(target: float) -> None:
    with pytest.raises(ValueError, match=r"target_batch is .*above 0"):
        TargetBatch(target)


@pytest.mark.parametrize("target", ["4096", True, None])
def test_a_target_is_a_number(target: object) -> None:
    with pytest.raises(TypeError, match="target_batch=4096"):
        TargetBatch(target)  # type: ignore[arg-type]
