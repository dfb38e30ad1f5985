"""What computing costs: speed, jitter, and what slows a peer down."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragtag.core.faults import Crash, Faults, Freeze, Slow, Window
from ragtag.simulation.cost import ComputeCost

COST = ComputeCost(0.01)


def test_a_step_costs_its_samples() -> None:
    assert COST.ends_s(0, 0, 32, now_s=1.0) == pytest.approx(1.32)


def test_a_faster_peer_is_done_earlier() -> None:
    cost = ComputeCost(0.01, speed=(1.0, 4.0))
    assert cost.ends_s(1, 0, 32, 0.0) == pytest.approx(cost.ends_s(0, 0, 32, 0.0) / 4)


def test_jitter_is_lognormal_with_mean_one_and_named_by_peer_and_step() -> None:
    cost = ComputeCost(1.0, sigma=0.5, seed=3)
    drawn = np.array([cost.work_s(peer, step, 1) for peer in range(4) for step in range(2500)])
    logs = np.log(drawn)
    assert abs(drawn.mean() - 1.0) < 5 * math.sqrt(math.exp(0.25) - 1) / 100
    assert abs(logs.mean() + 0.125) < 5 * 0.5 / 100
    assert abs(logs.std() - 0.5) < 5 * 0.5 / math.sqrt(20_000)
    assert len(set(drawn.tolist())) == 10_000
    assert cost.work_s(2, 7, 1) == ComputeCost(1.0, sigma=0.5, seed=3).work_s(2, 7, 1)
    assert cost.work_s(2, 7, 1) != ComputeCost(1.0, sigma=0.5, seed=4).work_s(2, 7, 1)


@pytest.mark.parametrize(
    ("now_s", "ends_s"),
    [
        (0.0, 1.0),  # before
        (1.5, 1.5 + 0.5 + 3 * 0.5),  # half of the work at full speed, half of it slowly
        (2.0, 5.0),  # all of it within the window
        (4.0, 4.0 + 1.0 + 2 / 3),  # a third of it slowly, the rest after the window
        (5.0, 6.0),
    ],
)
def test_a_slow_peer_is_slow_while_the_window_is_open(now_s: float, ends_s: float) -> None:
    faults = Faults(slow=(Slow(0, 3.0, Window(2.0, 5.0)),))
    assert COST.ends_s(0, 0, 100, now_s, faults) == pytest.approx(ends_s)
    assert COST.ends_s(1, 0, 100, now_s, faults) == pytest.approx(now_s + 1.0)


def test_a_frozen_peer_computes_nothing() -> None:
    faults = Faults(freezes=(Freeze(0, 1.0, 2.0), Freeze(0, 2.5, 1.0)))
    assert COST.ends_s(0, 0, 100, 0.25, faults) == pytest.approx(1.25 + 2.5)
    assert COST.ends_s(0, 0, 100, 1.5, faults) == pytest.approx(3.5 + 1.0)


def test_a_crashed_peer_is_never_done() -> None:
    faults = Faults(crashes=(Crash(0, 1.0),))
    assert COST.ends_s(0, 0, 50, 0.0, faults) == pytest.approx(0.5)
    assert COST.ends_s(0, 0, 150, 0.0, faults) == math.inf


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ComputeCost(-1.0), "neither may be below 0"),
        (lambda: ComputeCost(1.0, sigma=-0.1), "neither may be below 0"),
        (lambda: ComputeCost(math.nan), "neither may be below 0"),
        (lambda: ComputeCost(1.0, speed=(1.0, 0.0)), "each must be above 0"),
    ],
)
def test_bad_costs_are_refused(make: object, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()  # type: ignore[operator]
