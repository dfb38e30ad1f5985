"""The figures of failure detection, on fewer peer-minutes and deaths than the benchmark's."""

from __future__ import annotations

import pytest

from benchmarks.membership import (
    DECLARED_GOAL,
    FALSE_DEATHS_GOAL,
    SUSPECTED_GOAL,
    deaths,
    quantile,
    quiet,
    storms,
)


@pytest.mark.parametrize(("n", "loss"), [(3, 0.0), (8, 0.2)])
def test_a_few_deaths(n: int, loss: float) -> None:
    result = deaths(n, loss, 4, 0)
    assert result["suspected_periods"]["max"] <= SUSPECTED_GOAL
    assert result["declared_by_all_periods"]["max"] <= DECLARED_GOAL
    assert result["suspected_periods"]["median"] < result["declared_periods"]["median"]


def test_a_few_quiet_minutes() -> None:
    result = quiet(4, 4.0, 0)
    assert result["peer_minutes"] == 4.0 and result["false_deaths"] == 0
    assert result["suspicions_per_peer_minute"] > 0  # it is not the loss that is missing


def test_what_the_benchmark_says_of_storms() -> None:
    result = storms(2, 0)
    assert result["seeds"] == 2 and not result["failed"] and result["processes"] >= 6


def test_quantiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.99), quantile(values, 0.5), quantile([7.0], 0.99)) == (99.0, 50.0, 7.0)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4, 16])
def test_hardly_anybody_is_declared_dead_for_lost_datagrams(n: int) -> None:
    result = quiet(n, 100.0, 100 + n)
    assert result["false_deaths"] <= FALSE_DEATHS_GOAL * result["peer_minutes"] / 1000


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_real_deaths_are_suspected_and_declared_in_time(n: int, loss: float) -> None:
    result = deaths(n, loss, 40, 500)
    assert result["suspected_periods"]["p99"] <= SUSPECTED_GOAL
    assert result["declared_periods"]["p99"] <= result["declared_by_all_periods"]["p99"] <= DECLARED_GOAL
