"""Whom a round waits for by speed, and how many local steps match."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragtag
from ragtag.schedules.base import Average, Compute, Progress
from ragtag.schedules.matched import Matched
from ragtag.schedules.partial import GAIN, Partial, set_aside

SPEEDS = st.dictionaries(st.integers(0, 63), st.floats(1e-6, 1e6), min_size=1, max_size=16)


def progress(
    since: int, step_s: dict[int, float], computed_s: float | None = None, **more: object
) -> Progress:
    live = frozenset(step_s) | {0}
    return Progress(since, since, 4, live, me=0, step_s=step_s, computed_s=computed_s, **more)  # type: ignore[arg-type]


def test_a_peer_twenty_times_slower_is_not_waited_for() -> None:
    assert set_aside({0: 0.05, 1: 0.05, 2: 0.052, 3: 1.05}) == {3}


def test_peers_of_like_speed_all_wait() -> None:
    assert set_aside({0: 1.0, 1: 1.2, 2: 0.9, 3: 1.1}) == frozenset()


def test_where_exchanging_takes_longer_than_computing_a_slow_step_is_worth_the_wait() -> None:
    speeds = {0: 0.001, 1: 0.001, 2: 0.001, 3: 0.004}
    assert set_aside(speeds) == {3}
    assert set_aside(speeds, round_s=0.05) == frozenset()


def test_a_change_that_gains_little_is_not_made() -> None:
    edge = 4 / 3  # three of four take as many steps a second without the fourth as with it
    speeds = {0: 1.0, 1: 1.0, 2: 1.0, 3: edge * 1.05}
    assert set_aside(speeds) == frozenset()
    assert set_aside(speeds, frozenset({3})) == {3}
    assert set_aside({**speeds, 3: edge * GAIN * 1.01}) == {3}


def test_who_becomes_fast_again_is_waited_for_again() -> None:
    assert set_aside({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, frozenset({3})) == frozenset()


def test_nobody_known_nobody_aside() -> None:
    assert set_aside({}) == frozenset()


@given(SPEEDS, st.floats(0, 10), st.data())
def test_the_fastest_is_never_set_aside_and_the_choice_is_near_the_best(
    speeds: dict[int, float], round_s: float, data: st.DataObject
) -> None:
    now = frozenset(data.draw(st.sets(st.sampled_from(sorted(speeds)))))
    aside = set_aside(speeds, now, round_s)
    kept = speeds.keys() - aside
    assert kept
    assert aside <= speeds.keys()

    def rate(peers: set[int]) -> float:
        return len(peers) / (max(speeds[peer] for peer in peers) + round_s)

    ranked = sorted(speeds, key=lambda peer: (speeds[peer], peer))
    best = max(rate(set(ranked[:k])) for k in range(1, len(ranked) + 1))
    assert rate(set(kept)) >= best / GAIN * (1 - 1e-9)
    assert set_aside(speeds, aside, round_s) == aside


@pytest.mark.parametrize("s", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused(s: float) -> None:
    with pytest.raises(ValueError, match="peer 1 takes"):
        set_aside({0: 1.0, 1: s})


def test_partial_averages_every_so_often() -> None:
    assert Partial(3).decide(progress(2, {})) == Compute()
    assert Partial(3).decide(progress(3, {})) == Average()
    with pytest.raises(ValueError, match="every is 0"):
        Partial(0)


# -- Matched


def taken(schedule: Matched, mine_s: float, others_s: dict[int, float]) -> int:
    """Local steps until it averages."""
    for since in range(1, 4_002):
        decision = schedule.decide(progress(since, {0: mine_s, **others_s}, since * mine_s))
        if isinstance(decision, Average):
            return since
    raise AssertionError("it never averages")


@pytest.mark.parametrize(("mine_s", "steps"), [(1.0, 1), (0.5, 2), (0.1, 10), (0.05, 20), (0.7, 1), (0.6, 2)])
def test_local_steps_end_when_the_slowest_has_taken_its_own(mine_s: float, steps: int) -> None:
    assert taken(Matched(), mine_s, {1: 1.0, 2: 0.3}) == steps


@given(st.dictionaries(st.integers(0, 7), st.floats(0.01, 10), min_size=2, max_size=8), st.integers(1, 4))
def test_all_come_to_the_average_at_about_the_same_time(speeds: dict[int, float], k: int) -> None:
    slowest_s = max(speeds.values())
    for mine_s in speeds.values():
        others = {peer + 1: s for peer, s in speeds.items()}
        steps = taken(Matched(k), mine_s, others)
        assert steps >= k
        assert abs(steps * mine_s - k * slowest_s) <= mine_s / 2 + 1e-6 or steps == k


def test_the_slowest_takes_its_count_of_steps_however_long_they_take_this_time() -> None:
    assert Matched(3).decide(progress(2, {0: 1.0, 1: 0.5}, 2.6)) == Compute()
    assert Matched(3).decide(progress(3, {0: 1.0, 1: 0.5}, 2.6)) == Average()
    assert Matched(3).decide(progress(2, {0: 0.9, 1: 1.0}, 2.6)) == Average(), "another goes by the time"


def test_the_bound_on_local_steps_holds() -> None:
    assert taken(Matched(most=8), 0.01, {1: 1.0}) == 8


def test_a_period_in_seconds() -> None:
    assert taken(Matched(period_s=0.5), 0.1, {1: 1.0}) == 5
    assert taken(Matched(period_s=0.5), 3.0, {1: 1.0}) == 1


def test_a_peer_that_is_gone_is_not_matched() -> None:
    gone = Progress(1, 1, 4, frozenset({0, 1}), me=0, step_s={0: 0.1, 1: 0.1, 2: 9.0}, computed_s=0.1)
    assert Matched().decide(gone) == Average()


def test_without_measurements_the_count_holds() -> None:
    assert Matched(2).decide(progress(1, {})) == Compute()
    assert Matched(2).decide(progress(2, {})) == Average()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 4, "most": 3}, "most is 3"),
        ({"period_s": 0.0}, "period_s is 0.0"),
        ({"period_s": "1"}, "period_s is '1'; it must be a number of seconds above 0"),
        ({"period_s": True}, "period_s is True"),
    ],
)
def test_matched_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matched(**options)


def test_the_namespace_has_the_usual_names() -> None:
    assert ragtag.schedules.SSP(bound=4) == ragtag.schedules.BoundedStaleness(4)
    assert ragtag.schedules.DSSP(1, 2) == ragtag.schedules.DynamicBound(1, 2)
    for name in ragtag.schedules.__all__:
        assert hasattr(ragtag.schedules, name)
    with pytest.raises(ValueError, match="bound is 0"):
        ragtag.schedules.SSP(bound=0)
