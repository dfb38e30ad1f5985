"""Bounded collections hold what they were given, or near enough."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragtag.app.report.series import Bins, Dots, Sample


def test_a_sample_is_exact_until_it_is_full_and_close_beyond() -> None:
    values = np.random.Generator(np.random.Philox(1)).exponential(size=50_000)
    exact, thin = Sample(), Sample(values_max=4096)
    for value in values:
        exact.add(float(value))
        thin.add(float(value))
    assert exact.quantile(0.95) == pytest.approx(np.quantile(values, 0.95), rel=1e-12)
    assert thin.stride > 1
    # Standard error of a quantile from k values: sqrt(q (1-q) / k) / density; 4 of them.
    k = 50_000 / thin.stride
    assert thin.quantile(0.95) == pytest.approx(
        np.quantile(values, 0.95), abs=4 * math.sqrt(0.0475 / k) / 0.05
    )
    assert thin.largest == values.max() and thin.mean() == pytest.approx(values.mean())


def test_bins_hold_means_and_times() -> None:
    bins = Bins([3], 10, 0.0, 100.0)
    for t, value in ((1.0, 2.0), (3.0, 4.0), (55.0, 7.0), (100.0, 9.0), (-5.0, 6.0)):
        bins.add(3, t, value)
    bins.add(99, 50.0, 1e9)  # a peer that is not drawn
    t, value = bins.points(3)
    assert t.tolist() == [pytest.approx(-1 / 3), 55.0, 100.0]
    assert value.tolist() == [4.0, 7.0, 9.0]


def test_dots_stand_within_one_percent_of_their_values() -> None:
    dots = Dots(100, 0.0, 10.0)
    values = np.geomspace(1e-4, 10, 400)
    for value in values:
        dots.add(5.0, float(value))
    drawn = np.array([value for _, value, _ in dots.points()])
    assert sum(n for _, _, n in dots.points()) == 400
    assert max(np.abs(drawn / v - 1).min() for v in values) < 0.0102
