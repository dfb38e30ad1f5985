"""When to average."""

from __future__ import annotations

import math

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
