"""A peer that is behind leaves out whole steps: no channel of a step waits for the round of another one."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from ragtag.core.faults import Faults, Freeze, Loss
from ragtag.protocols.channel.presence import StepOrder
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

A, B, C = 7, 8, 9


def after(*begun: int) -> StepOrder:
    steps = StepOrder()
    for channel in begun:
        steps.begins(channel)
    return steps


def test_where_a_step_has_one_channel_nothing_follows() -> None:
    for rounds in range(1, 5):
        steps = after(*[A] * rounds)
        steps.left()
        assert not steps.follows(A) or rounds > 1
        steps.begins(A)
        assert not steps.follows(A)


def test_where_the_first_of_a_step_is_left_out_the_others_follow_in_that_step() -> None:
    steps = after(A, B, C, A, B, C, A)
    steps.left()
    for other in (B, C):
        steps.begins(other)
        assert steps.follows(other)
    for other in (A, B, C):
        steps.begins(other)
        assert not steps.follows(other), "the next step is whole"


def test_the_first_does_not_follow_a_later_one() -> None:
    steps = after(A, B, A, B)
    steps.left()
    steps.begins(A)
    assert not steps.follows(A)


def test_a_channel_that_is_not_in_each_step_does_not_follow() -> None:
    steps = after(A, B, A, B, A)
    steps.left()
    steps.begins(C)
    assert not steps.follows(C), "its next round is many steps away"
    steps.begins(B)
    assert steps.follows(B)


@pytest.mark.parametrize("optimizers", [1, 2, 3])
@pytest.mark.parametrize("average", ["models", "gradients"])
def test_steps_with_several_averages_are_short_again_after_a_freeze(optimizers: int, average: str) -> None:
    """Two that train on, and one that stands still for twenty steps: a GAN's, say."""
    step_s = 0.1
    lines = Faults(
        loss=Loss(0.1), latency_s=0.001, rate_bytes_per_s=1e8, freezes=(Freeze(2, 10.3 * step_s, 2.05),)
    )

    def train(peer: SimulatedTransport) -> list[float]:
        torch.manual_seed(0)
        models = [nn.Linear(20, 20) for _ in range(optimizers)]
        options: dict[str, Any] = {"average": average}
        made = [
            CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), peer, model=model, name=f"m{k}", **options
            )
            for k, model in enumerate(models)
        ]
        took_s = []
        for _ in range(70):
            began_s = peer.now_s()
            peer.compute()
            for model, optimizer in zip(models, made, strict=True):
                optimizer.zero_grad()
                model(torch.ones(1, 20)).sum().backward()
                optimizer.step()
            took_s.append(peer.now_s() - began_s)
        return took_s

    crew = SimulatedCrew(3, lines, seed=3, cost=ComputeCost(step_s), check=True)
    made = crew.run(train)
    for peer in (0, 1):
        took_s = made[peer]
        assert took_s is not None
        assert max(took_s[35:65]) < 1.5 * median(took_s)
