"""Who does K-FAC's work: fair, agreed, and of the bytes that the formula says, counted on what is sent."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragtag.optim.kfac import LayerSize, kaisa, sent_bytes
from ragtag.optim.kfac.layers import decomposed, preconditioned
from ragtag.optim.kfac.placement import SIDES, columns_of, cost_of, longest_first
from ragtag.optim.kfac.preconditioner import KFAC

sizes = st.builds(LayerSize, st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
models = st.dictionaries(st.text("abc", min_size=1, max_size=4), sizes, min_size=1, max_size=12)
crews = st.sets(st.integers(0, 60), min_size=1, max_size=16)
fractions = st.floats(0.01, 1.0)


@given(models, crews, fractions, st.booleans())
def test_each_layer_has_its_workers_and_all_others_a_giver(layers, crew, fraction, together) -> None:
    plans = kaisa(layers, crew, fraction=fraction, together=together)
    assert list(plans) == list(layers)
    size = max(1, round(len(crew) * fraction))
    columns = columns_of(sorted(crew), fraction)
    assert sorted(peer for column in columns for peer in column) == sorted(crew)
    assert max(map(len, columns)) - min(map(len, columns)) <= 1 and min(map(len, columns)) >= size
    for plan in plans.values():
        assert plan.workers in columns
        assert set(plan.computers) == set(SIDES) and set(plan.computers.values()) <= set(plan.workers)
        assert not together or plan.computers["A"] == plan.computers["G"]
        assert set(plan.givers) == crew - set(plan.workers)
        assert set(plan.givers.values()) <= set(plan.workers)
        given_to = Counter(plan.givers.values())
        if given_to and len(crew) % len(columns) == 0:
            assert set(given_to.values()) == {len(columns) - 1}  # a grid: each gives to its row


@given(models, crews, fractions, st.booleans())
def test_peers_that_know_the_same_agree(layers, crew, fraction, together) -> None:
    backwards = dict(reversed(layers.items()))
    ours = kaisa(layers, sorted(crew), fraction=fraction, together=together)
    theirs = kaisa(backwards, sorted(crew, reverse=True), fraction=fraction, together=together)
    assert ours == theirs


@given(models, crews, st.booleans())
def test_no_peer_has_more_than_a_third_above_what_is_best(layers, crew, together) -> None:
    plans = kaisa(layers, crew, together=together)
    loads, jobs = Counter(), []
    for name, layer in layers.items():
        costs = {side: layer.groups * cost_of(layer.side(side)) for side in SIDES}
        jobs += [sum(costs.values())] if together else costs.values()
        for side in SIDES:
            loads[plans[name].computers[side]] += costs[side]
    jobs.sort(reverse=True)
    least = max(sum(jobs) / len(crew), jobs[0])  # no schedule is shorter
    if len(jobs) > len(crew):
        least = max(least, jobs[len(crew) - 1] + jobs[len(crew)])
    assert max(loads.values()) <= least * (4 / 3 + 1e-9) or max(loads.values()) <= sum(jobs) / len(
        crew
    ) + jobs[len(crew)] * (1 - 1 / len(crew)) * (1 + 1e-9)


def test_the_placements_of_the_paper() -> None:
    """KAISA, figure 3: eight peers; all, two, or one of them are workers of a layer."""
    layers = {name: LayerSize(size, size) for name, size in zip("abcd", (9, 8, 7, 6), strict=True)}
    assert {plan.workers for plan in kaisa(layers, range(8)).values()} == {tuple(range(8))}
    assert [plan.computers["A"] for plan in kaisa(layers, range(8)).values()] == [0, 1, 2, 3]
    hybrid = kaisa(layers, range(8), fraction=0.25)
    assert [plan.workers for plan in hybrid.values()] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert hybrid["a"].givers == {1: 0, 2: 0, 3: 0, 5: 4, 6: 4, 7: 4}
    single = kaisa(layers, range(8), fraction=1 / 8)
    assert [plan.workers for plan in single.values()] == [(0,), (1,), (2,), (3,)]
    assert set(single["b"].givers.values()) == {1} and len(single["b"].givers) == 7


def test_costs_are_cubes_squares_or_measured() -> None:
    assert [cost_of(10), cost_of(10, "memory"), cost_of(10, {10: 0.25})] == [1000, 100, 0.25]
    for bad in ("time", {}, {10: 0.0}, {10: math.inf}):
        with pytest.raises(ValueError, match=r"cost model|were measured"):
            cost_of(10, bad)
    with pytest.raises(ValueError, match="rows"):
        cost_of(0)
    assert longest_first({"a": 5, "b": 4, "c": 3, "d": 3}, [1, 1]) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert longest_first({"a": 5, "b": 4, "c": 3}, [2, 1]) == {"a": 0, "b": 1, "c": 0}
    measured = kaisa(
        {"a": LayerSize(2, 2), "b": LayerSize(3, 3), "c": LayerSize(4, 4)}, range(2), cost={2: 9, 3: 5, 4: 4}
    )
    assert [plan.computers["A"] for plan in measured.values()] == [0, 1, 1]


@pytest.mark.parametrize(
    ("crew", "fraction"), [([], 1.0), ([1, 1], 1.0), ([0], 0.0), ([0], 1.1), ([0], math.nan)]
)
def test_crews_and_fractions_that_cannot_be_are_refused(crew, fraction) -> None:
    with pytest.raises(ValueError, match=r"peers|fraction"):
        kaisa({"a": LayerSize(2, 2)}, crew, fraction=fraction)


class Line:
    """Carries tensors between peers, and counts their bytes."""

    def __init__(self) -> None:
        self.sent = 0

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent += tensor.numel() * tensor.element_size()
        return tensor.clone()


def summed_in_blocks(line: Line, ours: list[torch.Tensor]) -> list[torch.Tensor]:
    """Peers' mean: each owns a block, takes the others' copies of it, and sends its mean to all."""
    n, length = len(ours), ours[0].numel()
    blocks = torch.arange(length).tensor_split(n)
    means = [torch.empty(length) for _ in ours]
    for owner, at in enumerate(blocks):
        copies = [ours[p].view(-1)[at] if p == owner else line.carry(ours[p].view(-1)[at]) for p in range(n)]
        mean = torch.stack(copies).mean(0)
        for peer in range(n):
            means[peer][at] = mean if peer == owner else line.carry(mean)
    return [mean.view(ours[0].shape) for mean in means]


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("n", "fraction"), [(1, 1.0), (4, 1.0), (4, 0.5), (4, 0.25), (5, 0.4), (7, 0.3)])
def test_each_placement_gives_the_same_gradients_for_the_bytes_of_the_formula(
    form, together, n, fraction
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 5),
    )
    kfac = KFAC(model, lr=0.1, kl_clip=None, form=form, damping=0.01)
    model(torch.randn(6, 2, 5, 5)).square().mean().backward()
    before = {name: layer.gradient().clone() for name, layer in kfac.layers.items()}
    kfac.step()
    layers = {name: layer.size for name, layer in kfac.layers.items()}
    plans = kaisa(layers, range(n), fraction=fraction, together=together)
    factors, bases, gradients = Line(), Line(), Line()
    for name, layer in kfac.layers.items():
        plan = plans[name]
        mean = {s: summed_in_blocks(factors, [layer.factors[s].clone() for _ in range(n)]) for s in SIDES}
        made = {s: decomposed(mean[s][plan.computers[s]], form, 0.01) for s in SIDES}
        has = {
            worker: {s: made[s] if plan.computers[s] == worker else bases.carry(made[s]) for s in SIDES}
            for worker in plan.workers
        }
        result = {w: preconditioned(before[name], has[w]["A"], has[w]["G"], form, 0.01) for w in plan.workers}
        result |= {peer: gradients.carry(result[giver]) for peer, giver in plan.givers.items()}
        assert sorted(result) == list(range(n))
        for peer in range(n):
            assert torch.allclose(result[peer], layer.gradient(), rtol=1e-5, atol=1e-7), (name, peer)
    said = sent_bytes(layers, plans, form)
    assert (said.factors, said.bases, said.gradients) == (factors.sent, bases.sent, gradients.sent)
    assert (said.bases == 0) == (min(len(p.workers) for p in plans.values()) == 1)
    assert (said.gradients == 0) == (fraction == 1)
