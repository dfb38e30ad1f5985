"""When to average."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ragtag.schedules.base import Average, Compute, Progress, Wait
from ragtag.schedules.every import EveryStep, LocalSteps, every


def after(steps: int) -> Progress:
    return Progress(step=100 + steps, since_average=steps, n=2, live=frozenset({0, 1}))


def test_every_step() -> None:
    assert EveryStep().decide(after(1)) == Average()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_local_steps(k: int) -> None:
    decisions = [LocalSteps(k).decide(after(steps)) for steps in range(1, k + 2)]
    assert decisions == [Compute()] * (k - 1) + [Average()] * 2


def test_local_steps_follow_others_that_have_begun() -> None:
    for least in (0, 3):
        came = []
        for steps in range(1, 6):
            progress = replace(after(steps), others_began=True)
            came.append(isinstance(LocalSteps(5, least).decide(progress), Average))
            assert isinstance(LocalSteps(5, least).decide(after(steps)), Average) == (steps == 5)
        assert came == [False, False, bool(least), bool(least), True]
    assert LocalSteps(5, 3).follows and not LocalSteps(5).follows


@pytest.mark.parametrize("least", [-1, 6, 2.0, True])
def test_a_least_number_of_steps_that_is_none_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match="after 1 to 5 steps, or not at all: 0"):
        LocalSteps(5, least)


def test_every_is_a_number_in_words() -> None:
    assert every(1) == EveryStep()
    assert every(4) == LocalSteps(4)


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"average every 1, 2, 3, \.\.\. steps"):
        every(k)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_wait_has_an_end(seconds: float) -> None:
    with pytest.raises(ValueError, match="a wait has an end"):
        Wait(for_s=0.1, at_most_s=seconds)
    with pytest.raises(ValueError, match="a wait has an end"):
        Wait(for_s=seconds, at_most_s=1.0)
