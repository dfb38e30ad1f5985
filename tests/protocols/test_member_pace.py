"""Round trips, allowances, replay windows and health, each against its rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.protocols.membership.pace import Allowance, Health, ReplayWindow, RoundTrip


def test_the_timeout_follows_rfc_6298() -> None:
    trip = RoundTrip()
    assert not trip.measured and trip.rto_s == 0.0
    trip.sample(0.1)  # section 2.2: SRTT = R, RTTVAR = R/2, RTO = SRTT + 4 RTTVAR
    assert trip.rto_s == pytest.approx(0.3)
    trip.sample(0.2)  # section 2.3: with alpha 1/8, beta 1/4
    assert trip.var_s == pytest.approx(0.75 * 0.05 + 0.25 * 0.1)
    assert trip.srtt_s == pytest.approx(0.875 * 0.1 + 0.125 * 0.2)
    assert trip.rto_s == pytest.approx(trip.srtt_s + 4 * trip.var_s)


def test_a_steady_path_still_has_head_room() -> None:
    trip = RoundTrip()
    for _ in range(200):
        trip.sample(0.1)
    assert trip.rto_s == pytest.approx(0.15, rel=1e-3)


def test_an_answer_that_was_slept_on_is_forgotten_soon() -> None:
    trip = RoundTrip()
    trip.sample(5.0)
    trip.sample(0.01)
    assert trip.rto_s <= 8 * 0.01
    for _ in range(8):
        trip.sample(1.0)  # and a path that did become slower is believed
    assert trip.rto_s >= 1.0


@given(st.lists(st.floats(0, 3), max_size=200), st.floats(0.5, 50))
def test_an_allowance_is_never_exceeded(gaps_s: list[float], rate_per_s: float) -> None:
    allowance, now_s, taken_s = Allowance(rate_per_s), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if allowance.take(now_s):
            taken_s.append(now_s)
    full = max(8.0, rate_per_s)
    for i, from_s in enumerate(taken_s):
        for j in range(i, len(taken_s)):
            assert j - i + 1 <= full + (taken_s[j] - from_s) * rate_per_s + 1e-6


def test_an_unused_allowance_comes_back() -> None:
    allowance = Allowance(2.0)
    assert sum(allowance.take(0.0) for _ in range(20)) == 8
    assert not allowance.take(0.4)
    assert allowance.take(0.6) and not allowance.take(0.6)


@given(st.lists(st.integers(-3, 9000), max_size=300))
def test_a_number_is_fresh_once(numbers: list[int]) -> None:
    window, seen, highest = ReplayWindow(), set[int](), 0
    for number in numbers:
        fresh = window.fresh(number)
        assert fresh == (number >= 1 and number not in seen and number > highest - 4096)
        if fresh:
            seen.add(number)
            highest = max(highest, number)
        assert window.seen < 1 << 4096


def test_health_has_limits() -> None:
    health = Health()
    health.better()
    assert health.factor == 1.0
    for _ in range(10):
        health.worse()
    assert health.factor == 5.0
    health.better()
    assert health.factor == 4.0
