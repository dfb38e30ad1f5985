"""Coherence is the paper's, as far as sketches tell it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ragtag
from ragtag.recipes.staleness.model import Coherence as Paper
from ragtag.training.coherence import WIDTH, Coherence, CoherenceMeter
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.simulated import TappedCrew


def parameters(sizes: list[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def give(into: list[nn.Parameter], vector: torch.Tensor) -> None:
    at = 0
    for parameter in into:
        parameter.grad = vector[at : at + parameter.numel()].clone()
        at += parameter.numel()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 99))
def test_small_gradients_are_compared_exactly(sizes: list[int], back: int, seed: int) -> None:
    own, paper = parameters(sizes), Paper(back)
    meter = CoherenceMeter(Coherence(every=1, back=back), own)
    draw = torch.Generator().manual_seed(seed)
    for step in range(1, 8):
        vector = torch.randn(sum(sizes), generator=draw) + 0.3
        give(own, vector)
        found, want = meter.stepped(step), paper.add(vector)
        if step == 1 or not sum(sizes):
            assert found is None
        else:
            assert found == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_large_gradients_are_compared_to_within_the_sketchs_noise() -> None:
    """Of 40 rows and in several tensors; 30 pairs of given products: their errors have the spread said."""
    sizes = [5, WIDTH * 17 + 3, WIDTH - 8, 3 * WIDTH, 19 * WIDTH]
    errors = []
    for pair in range(30):
        own = parameters(sizes)
        meter = CoherenceMeter(Coherence(every=1), own)
        draw = torch.Generator().manual_seed(pair)
        first, noise = (torch.randn(sum(sizes), generator=draw) for _ in range(2))
        now = 0.5 * first + noise
        give(own, first)
        assert meter.stepped(1) is None
        give(own, now)
        found = meter.stepped(2)
        assert found is not None
        want = float(now.double() @ first.double() / (first.double() @ first.double()))
        errors.append((found - want) / (float(now.norm() / first.norm()) / math.sqrt(WIDTH)))
    assert 0.5 < np.std(errors) < 2.0
    assert abs(np.mean(errors)) < 4 * 2.0 / math.sqrt(len(errors))


def test_places_without_a_gradient_count_as_zeros_and_stay_places() -> None:
    own = parameters([3, WIDTH, 4])
    meter = CoherenceMeter(Coherence(every=1), own)
    own[0].grad, own[1].grad, own[2].grad = torch.ones(3), torch.ones(WIDTH), torch.ones(4)
    assert meter.stepped(1) is None
    own[1].grad = None
    assert meter.stepped(2) == pytest.approx(7 / (WIDTH + 7), rel=0.5, abs=0.1)
    meter.forget()
    own[0].grad = torch.full((3,), math.inf)
    assert meter.stepped(3) is None
    own[0].grad = torch.ones(3)
    assert meter.stepped(4) is None  # the infinite one is not kept


def test_gradients_of_several_steps_are_added_up() -> None:
    own = parameters([4])
    meter, found = CoherenceMeter(Coherence(every=3, over=2), own), []
    for step in range(1, 10):
        give(own, torch.full((4,), float(step)))
        found.append(meter.stepped(step))
    # 2 + 3, 5 + 6, 8 + 9: against all earlier ones
    assert found[:5] == [None] * 5
    assert found[5] == pytest.approx(11 / 5)
    assert found[6:8] == [None, None]
    assert found[8] == pytest.approx(17 / 11)


def test_an_optimizer_measures_where_it_is_asked_to() -> None:
    model = nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    asked = ragtag.Coherence(every=2)
    optimizer = CrewOptimizer(inner, TappedCrew(1).transport(0), model=model, coherence=asked)
    x = torch.randn(5, 4)
    for step in range(6):
        optimizer.zero_grad()
        (model(x).square().mean() * (1 if step < 4 else -1)).backward()
        optimizer.step()
    assert [step for step, _ in optimizer._averaged.scheduling.spent.coherence] == [4, 6]
    assert [mu for _, mu in optimizer._averaged.scheduling.spent.coherence] == pytest.approx(
        [1.0, -1.0], rel=1e-4
    )
    optimizer._averaged.resume_at(6, 0)
    for _ in range(2):
        optimizer.step()
    assert len(optimizer._averaged.scheduling.spent.coherence) == 2  # it has nothing to compare with
    plain = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), TappedCrew(1).transport(0), model=model
    )
    plain.step()
    assert not plain._averaged.scheduling.spent.coherence


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"every": 0}, {"over": 0}, {"back": 0}, {"every": 2, "over": 3}):
        with pytest.raises(ValueError, match="coherence"):
            Coherence(**wrong)
