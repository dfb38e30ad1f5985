import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.schedules.grouping import (
    ProgressiveGrouping,
    barrier_s,
    best_groups,
    carried,
    efficiency,
    equal_groups,
    plausible,
    predicted,
    scale,
    share,
)

speeds = st.dictionaries(st.integers(0, 30), st.floats(0.1, 10.0), min_size=1, max_size=16)
RULE = ProgressiveGrouping()


def flat(groups) -> list[int]:
    return sorted(peer for group in groups for peer in group)


def crew(n: int, **slow: float) -> dict[int, float]:
    return {i: slow.get(f"p{i}", 1.0) for i in range(n)}


@given(speeds, st.integers(1, 8))
def test_every_peer_is_in_one_group_and_none_is_empty(step_s, most) -> None:
    found = ProgressiveGrouping(groups_max=most).groups(step_s)
    assert flat(found) == sorted(step_s) and all(found) and len(found) <= most


@given(speeds)
def test_groups_are_of_like_speed(step_s) -> None:
    for g in range(1, min(4, len(step_s)) + 1):
        found = best_groups(step_s, g)
        for fast, slow in itertools.pairwise(found):
            assert max(step_s[p] for p in fast) <= min(step_s[p] for p in slow)


@given(st.dictionaries(st.integers(0, 7), st.floats(0.1, 10.0), min_size=1, max_size=6), st.integers(1, 3))
def test_no_other_partition_of_the_ranks_does_more(step_s, g) -> None:
    g = min(g, len(step_s))
    ranked = sorted(step_s, key=lambda p: step_s[p])
    tried = []
    for inner in itertools.combinations(range(1, len(ranked)), g - 1):
        edges = (0, *inner, len(ranked))
        tried.append(efficiency(tuple(tuple(ranked[a:b]) for a, b in itertools.pairwise(edges)), step_s))
    assert efficiency(best_groups(step_s, g), step_s) == pytest.approx(max(tried))


@given(speeds, speeds)
def test_a_grouping_just_made_stays(step_s, before) -> None:
    first = RULE.groups(step_s, RULE.groups(before))
    assert RULE.groups(step_s, first) == first
    if len(first) < RULE.groups_max:
        assert efficiency(first, step_s) >= RULE.split_below


@given(speeds, st.data())
def test_a_small_change_of_speed_does_nothing(step_s, data) -> None:
    found = RULE.groups(step_s)
    if len(found) == RULE.groups_max or efficiency(found, step_s) < RULE.merge_above:
        return
    wobble = st.floats(0.98, 1.02)
    assert len(RULE.groups({p: s * data.draw(wobble) for p, s in step_s.items()}, found)) >= len(found) - 1
    # Efficiency changes by at most 4 % when no time changes by more than 2 %: from .97 it stays above .93.
    again = {p: s * data.draw(wobble) for p, s in step_s.items()}
    assert efficiency(found, again) >= RULE.split_below - 1e-9


def test_it_splits_and_merges_with_a_straggler() -> None:
    groups = RULE.groups(crew(16))
    assert len(groups) == 1
    for delay, count in ((0.03, 1), (0.06, 1), (0.2, 2), (5.0, 2), (0.2, 2), (0.06, 2), (0.0, 1)):
        groups = RULE.groups(crew(16, p3=1 + delay), groups)
        assert len(groups) == count, delay
        assert count == 1 or groups[1] == (3,)


def test_peers_that_go_and_come_are_regrouped() -> None:
    groups = RULE.groups(crew(8, p3=4.0))
    left = {p: s for p, s in crew(8, p3=4.0).items() if p != 3}
    assert RULE.groups(left, groups) == (tuple(sorted(left)),)
    assert carried(groups, left) == ((0, 1, 2, 4, 5, 6, 7),)
    more = crew(10, p3=4.0, p9=4.2)
    assert carried(groups, more) == ((0, 1, 2, 4, 5, 6, 7, 8), (3, 9))
    assert carried(((7, 8),), crew(3)) == ((0, 1, 2),)


@given(st.integers(1, 40), st.data())
def test_equal_groups_differ_by_one_at_most(n, data) -> None:
    found = equal_groups(range(n), data.draw(st.integers(1, n)))
    assert flat(found) == list(range(n)) and max(map(len, found)) - min(map(len, found)) <= 1


@given(st.floats(0.01, 1.0), st.integers(0, 100))
def test_an_update_is_no_more_than_its_share_nor_than_one_over_its_staleness(share, tau) -> None:
    assert scale(share, tau) == min(share, 1 / max(1, tau))


@given(st.dictionaries(st.integers(0, 30), st.floats(1e-9, 1e9), min_size=1), st.data())
def test_shares_are_of_samples_per_second_and_add_up_to_one(rate, data) -> None:
    groups = best_groups(dict.fromkeys(rate, 1.0), data.draw(st.integers(1, len(rate))))
    assert sum(share(group, rate) for group in groups) == pytest.approx(1)
    assert share([0, 1, 2], {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.05}) == pytest.approx(3 / 3.05)


def test_a_barrier_ends_by_measurement() -> None:
    assert barrier_s([1.0, 1.2]) == pytest.approx(1.8)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, 1e-6, 1e6])
def test_absurd_speeds_are_named_and_can_be_left_out(wrong) -> None:
    step_s = crew(5, p2=wrong)
    with pytest.raises(ValueError, match="peer 2 reports"):
        RULE.groups(step_s)
    good, doubted = plausible(step_s)
    assert set(doubted) == {2} and flat(RULE.groups(good)) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: best_groups(crew(3), 4), "4 groups of 3 peers"),
        (lambda: equal_groups(range(3), 4), "4 groups of 3 peers"),
        (lambda: best_groups(crew(3), 0), "g is 0"),
        (lambda: RULE.groups({}), "no peer"),
        (lambda: ProgressiveGrouping(0.9, 0.9), "split_below < merge_above"),
        (lambda: ProgressiveGrouping(split_below="a"), "split_below is 'a' .* must be numbers"),
        (lambda: ProgressiveGrouping(merge_above=None), "merge_above is None; they must be numbers"),
        (lambda: ProgressiveGrouping(groups_max=0), "groups_max is 0"),
        (lambda: barrier_s([]), "none is known"),
        (lambda: scale(0.0, 1), "share"),
        (lambda: predicted(2, 3, 1.0), "3 slow groups of 2"),
    ],
)
def test_bad_input_says_what_to_do(make, says) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_equal_groups_of_which_some_are_slow_take_as_long_as_the_formula_says() -> None:
    assert predicted(4, 1, 1.0) == pytest.approx(4 / 3.5)
    assert predicted(4, 0, 1.0) == 1.0 and predicted(1, 1, 2.0) == pytest.approx(3.0)
