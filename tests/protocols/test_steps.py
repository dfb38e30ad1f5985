"""A peer that leaves out rounds leaves out whole steps: no channel of one waits for the round of another."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Freeze, Loss
from ragtag.core.types import Average, Done, Left
from ragtag.protocols.channel.presence import StepOrder
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

A, B, C = 7, 8, 9


def begun(*rounds: tuple[int, int]) -> StepOrder:
    """After these rounds, each as a channel alone would number it."""
    steps = StepOrder()
    for channel, number in rounds:
        steps.begins(channel, steps.number(channel, number))
    return steps


def test_where_a_step_has_one_channel_it_numbers_its_rounds_itself() -> None:
    steps = begun((A, 0), (A, 1), (A, 7), (A, 9))
    assert steps.number(A, 10) == 10


def test_where_a_round_is_a_later_one_those_that_follow_it_are_too() -> None:
    steps = begun((A, 0), (B, 0), (C, 0), (A, 20))
    for channel in (B, C):
        assert steps.number(channel, 1) == 20
        steps.begins(channel, 20)
    assert steps.number(A, 21) == 21, "the next step is whole"


def test_so_are_those_of_the_next_step_where_it_was_not_the_first_of_one() -> None:
    steps = begun((A, 0), (B, 0), (A, 1), (B, 20))
    assert steps.number(A, 2) == 21
    steps.begins(A, 21)
    assert steps.number(B, 21) == 21


def test_what_a_channel_has_heard_of_counts_more() -> None:
    steps = begun((A, 0), (B, 0), (A, 20))
    assert steps.number(B, 23) == 23
    steps.begins(B, 23)
    assert steps.number(A, 21) == 24


def test_a_channel_that_is_not_in_each_step_has_numbers_of_its_own() -> None:
    steps = begun((A, 0), (A, 1), (B, 0), (A, 2), (A, 3), (B, 1), (A, 30))
    assert steps.number(B, 2) == 2
    steps = begun((A, 0), (B, 0), (A, 1), (B, 1), (A, 2), (A, 3))
    assert steps.number(B, 2) == 2, "a round was left out by the script"


def test_a_channel_is_of_the_steps_once_it_has_their_number() -> None:
    steps = begun((A, 0), (A, 1), (B, 0), (A, 2), (B, 2), (A, 30))
    assert steps.number(B, 3) == 30


def test_rounds_that_are_followed_tell_the_number_alone() -> None:
    """One that followed rounds of one channel had numbers in others that were one behind ever after."""
    steps = begun((A, 0), (B, 0), (A, 1), (B, 1))
    for number in (9, 10, 11):
        steps.begins(A, number, gives=False)
    assert steps.number(B, 10) == 11
    steps.begins(B, 11)
    steps.begins(A, 12)
    assert steps.number(B, 11) == 12


def test_one_that_followed_rounds_of_a_later_channel_is_in_step_with_those_before_it() -> None:
    """They were all in one step of its script: it was half a step out of phase with the others ever after."""
    steps = begun((B, 0), (A, 0), (B, 1))
    for number in (20, 21, 22):
        steps.begins(A, steps.number(A, number), gives=False)
    for step in (23, 24):
        for channel in (B, A):
            assert steps.number(channel, step) == step
            steps.begins(channel, step)


def test_a_step_that_was_broken_off_as_this_peer_was_away_had_the_channels_of_the_one_before_it() -> None:
    """It left out B in that step: from then on its rounds of B were one behind, and all waited in each."""
    whole = ((A, 0), (B, 0), (C, 0), (A, 1), (B, 1), (C, 1))
    steps = begun(*whole, (A, 2), (A, 20))
    assert [steps.number(channel, 19) for channel in (B, C)] == [20, 20]
    steps = begun(*whole, (A, 2), (B, 2))
    for number in (20, 21):
        steps.begins(A, number, gives=False)
    assert [steps.number(channel, 19) for channel in (B, C)] == [21, 21]


def test_a_probe_is_no_part_of_a_step() -> None:
    """It had two rounds: a peer that froze before its third step had no order of its channels ever after."""
    node = Node(0, 2, seed=0)
    node.configure(A, Channel(rps, fp32, 2, probe_s=0.1, rtt_s=0.01, passing=True))
    node.configure(B, Channel(rps, fp32, 2, probe_s=0.1, rtt_s=0.01))
    for channel in (A, B):
        node.step(0.0, Average(channel, np.ones((2, fp32.elements), np.float32), 1.0))
    assert node.crew.steps.has(B) and not node.crew.steps.has(A)


def test_steps_to_which_a_peer_gives_nothing_are_steps() -> None:
    steps = begun((A, 0), (B, 0))
    for step in (1, 2, 3):
        for channel in (A, B):
            assert steps.number(channel, step) == step
            steps.begins(channel, step, gives=False)


def test_a_channel_that_is_opened_anew_is_counted_from_the_first() -> None:
    steps = begun((A, 0), (B, 0), (A, 20), (B, 1))
    for channel in (A, B):
        steps.opened(channel)
    for channel in (A, B):
        assert steps.number(channel, 0) == 0
        steps.begins(channel, 0)
    assert steps.number(A, 1) == 1
    steps.begins(A, 30)
    assert steps.number(B, 1) == 30


def test_channels_that_a_node_opens_anew_are_counted_from_the_first() -> None:
    node = Node(0, 2, seed=0)
    node.step(0.0, Left(1))
    rounds = []
    for at_s in (0.0, 10.0):
        for channel in (A, B):
            node.configure(channel, Channel(rps, fp32, 2, probe_s=0.1, rtt_s=0.01), at_s)
        for k in range(3):
            for channel in (A, B):
                values = np.ones((2, fp32.elements), np.float32)
                effects = node.step(at_s + k, Average(channel, values, 1.0))
                rounds += [effect.outcome.round for effect in effects if isinstance(effect, Done)]
    assert rounds == 2 * [0, 0, 1, 1, 2, 2]


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
