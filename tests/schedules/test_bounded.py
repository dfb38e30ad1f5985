import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.schedules.base import Average, Compute, Wait
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound, extra_steps
from tests.schedules.strategies import progress

clocks_of = st.dictionaries(st.integers(0, 9), st.integers(0, 60), min_size=1, max_size=10).map(
    lambda found: {0: 20, **found}
)
times = st.floats(1e-3, 1e3)


@given(clocks_of, st.integers(1, 30))
def test_nobody_shares_a_step_that_is_more_than_the_bound_ahead(clocks, bound) -> None:
    decision = BoundedStaleness(bound).decide(progress(clocks))
    others = [clock for peer, clock in clocks.items() if peer != 0]
    ahead = clocks[0] - min(others, default=clocks[0])
    assert isinstance(decision, Wait if ahead > bound else Average)


def test_a_wait_lasts_as_long_as_the_missing_steps_take_and_half_as_long_again() -> None:
    decision = BoundedStaleness(2).decide(progress({0: 9, 1: 4}, step_s={0: 1.0, 1: 10.0}))
    assert isinstance(decision, Wait)
    assert decision.at_most_s == pytest.approx(1.5 * 3 * 10.0) and decision.for_s < 10.0
    decision = BoundedStaleness(2).decide(progress({0: 9, 1: 4}, step_s={0: 1.0, 1: 10.0}, round_s=9.0))
    assert isinstance(decision, Wait)
    assert decision.at_most_s == pytest.approx(1.5 * 3 * 19.0)  # each of its steps ends with an average


def test_where_nothing_is_known_of_any_step_one_counts_as_a_second_or_as_the_last_average() -> None:
    decision = BoundedStaleness(2).decide(progress({0: 9, 1: 4}))
    assert isinstance(decision, Wait) and decision.at_most_s == pytest.approx(1.5 * 3 * 1.0)
    decision = BoundedStaleness(2).decide(progress({0: 9, 1: 4}, round_s=9.0))
    assert isinstance(decision, Wait) and decision.at_most_s == pytest.approx(1.5 * 3 * 9.0)


def test_what_is_gone_or_unknown_is_not_waited_for() -> None:
    rule = BoundedStaleness(2)
    assert isinstance(rule.decide(progress({0: 9, 1: 4, 2: 8}, live=frozenset({0, 2}))), Average)
    assert isinstance(rule.decide(progress({0: 9})), Average)
    assert isinstance(rule.decide(progress({0: 9, 1: 9}, since_average=0)), Compute)


@given(clocks_of, st.integers(1, 8), st.integers(1, 8), times, times, st.floats(0, 1e3))
def test_the_moving_bound_stays_within_its_range(clocks, low, more, mine, its, since) -> None:
    high = low + more
    seen = progress(
        clocks, step_s={p: its if p else mine for p in clocks}, since_s=dict.fromkeys(clocks, since)
    )
    moving = isinstance(DynamicBound(low, high).decide(seen), Average)
    if isinstance(BoundedStaleness(low).decide(seen), Average):
        assert moving
    if isinstance(BoundedStaleness(high).decide(seen), Wait):
        assert not moving


def test_the_moving_bound_stops_where_the_wait_is_shortest() -> None:
    # Mine end at 0, 3, 6, 9 s, its at 10, 20 s: after three more the wait is 1 s, and 10 s right now.
    assert extra_steps(3.0, 10.0, 0.0, 6) == 3
    assert extra_steps(3.0, 10.0, 10.0, 6) == 0  # it is due now
    assert isinstance(
        DynamicBound(1, 8).decide(progress({0: 3, 1: 1}, step_s={0: 3.0, 1: 10.0}, since_s={1: 0.0})), Average
    )
    assert isinstance(
        DynamicBound(1, 8).decide(progress({0: 3, 1: 1}, step_s={0: 3.0, 1: 10.0}, since_s={1: 9.9})), Wait
    )
    one_more = progress({0: 3, 1: 1}, step_s={0: 3.0, 1: 10.0}, since_s={1: 6.9})
    assert extra_steps(3.0, 10.0, 6.9, 7) == 1
    assert isinstance(DynamicBound(1, 8).decide(one_more), Average)
    averaging = progress({0: 3, 1: 1}, step_s={0: 2.0, 1: 9.0}, since_s={1: 9.9}, round_s=1.0)
    assert isinstance(DynamicBound(1, 8).decide(averaging), Wait)  # 3 s and 10 s with the average
    # two more would be best, and one more is all that is left
    assert (extra_steps(5.2, 10.0, 9.0, 2), extra_steps(5.2, 10.0, 9.0, 1)) == (2, 0)
    at_the_end = progress({0: 3, 1: 1}, step_s={0: 5.2, 1: 10.0}, since_s={1: 9.0})
    assert isinstance(DynamicBound(1, 2).decide(at_the_end), Wait)


@given(times, times, st.floats(0, 1e3), st.integers(0, 12))
def test_no_other_number_of_extra_steps_waits_less(mine, its, since, most) -> None:
    def wait_s(steps: int) -> float:
        at = next_s = max(0.0, its - since)
        if steps * mine > at:
            at = next_s + its * math.ceil((steps * mine - next_s) / its - 1e-9)
        return at - steps * mine

    chosen = extra_steps(mine, its, since, most)
    assert 0 <= chosen <= most
    assert wait_s(chosen) <= min(wait_s(k) for k in range(most + 1)) + 1e-6 * max(its, 1.0)


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, None])
def test_a_bound_below_one_is_refused(bound) -> None:
    with pytest.raises(ValueError, match=r"bounded staleness: the bound is .* 1 or more"):
        BoundedStaleness(bound)
    with pytest.raises(ValueError, match="moving bound: low"):
        DynamicBound(bound, 4)


def test_a_range_without_room_and_absurd_times_are_refused() -> None:
    with pytest.raises(ValueError, match="above low"):
        DynamicBound(3, 3)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a step; it must be above 0"):
            extra_steps(wrong, 1.0, 0.0, 3)
        with pytest.raises(ValueError, match="a step; it must be above 0"):
            extra_steps(1.0, wrong, 0.0, 3)
