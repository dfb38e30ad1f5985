"""Who does K-FAC's work: fair, agreed, and of the bytes that the formula says, counted on what is sent."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragtag.optim.kfac import LayerSize, kaisa, sent_bytes
from ragtag.optim.kfac.layers import decomposed, preconditioned
from ragtag.optim.kfac.placement import SIDES, MeasuredCosts, columns_of, cost_of, largest_load, longest_first
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.protocols.publish.assignment import assigned

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
        result = {
            w: preconditioned(before[name], [has[w]["A"]], [has[w]["G"]], form, 0.01) for w in plan.workers
        }
        result |= {peer: gradients.carry(result[giver]) for peer, giver in plan.givers.items()}
        assert sorted(result) == list(range(n))
        for peer in range(n):
            assert torch.allclose(result[peer], layer.gradient(), rtol=1e-5, atol=1e-7), (name, peer)
    said = sent_bytes(layers, plans, form)
    assert (said.factors, said.bases, said.gradients) == (factors.sent, bases.sent, gradients.sent)
    assert (said.bases == 0) == (min(len(p.workers) for p in plans.values()) == 1)
    assert (said.gradients == 0) == (fraction == 1)


def resnet50() -> dict[str, LayerSize]:
    """He et al., CVPR 2016, table 1: 53 convolutions without biases, and a layer of 1,000 classes."""
    layers, into = {"conv1": LayerSize(3 * 7 * 7, 64)}, 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for block in range(blocks):
            name = f"conv{stage}_{block + 1}"
            layers[f"{name}.1"] = LayerSize(into, width)
            layers[f"{name}.2"] = LayerSize(9 * width, width)
            layers[f"{name}.3"] = LayerSize(width, 4 * width)
            if block == 0:
                layers[f"{name}.around"] = LayerSize(into, 4 * width)
            into = 4 * width
    return layers | {"fc": LayerSize(2049, 1000)}


@pytest.mark.parametrize(("peers", "largest"), [(4, 1.1), (16, 3.46)])
def test_resnet_50s_loads_are_even_as_far_as_whole_factors_allow(peers: int, largest: float) -> None:
    """On 16 peers the mean load is less than a third of one of its three factors of 4,608 rows."""
    costs = {f"{name}.{side}": cost_of(one.side(side)) for name, one in resnet50().items() for side in SIDES}
    assert len(costs) == 108
    mean = math.fsum(costs.values()) / peers
    owners = assigned(costs, range(peers), seats=peers, founded=peers, seed=1)
    loads = Counter[int]()
    for name, owner in owners.items():
        loads[owner.first] += costs[name]
    assert max(loads.values()) <= largest * mean
    assert max(loads.values()) <= 1.1 * max(mean, *costs.values()), "no placement of whole factors is better"


def test_in_blocks_resnet_50s_loads_are_even_on_16_peers() -> None:
    """The three of 4,608 rows in thirds, and those of 2,304 and of 2,049 in halves."""
    layers = {name: replace(one, block_rows=2048) for name, one in resnet50().items()}
    costs = {
        f"{name}.{side}.{at}": cost_of(rows)
        for name, one in layers.items()
        for side in SIDES
        for at, rows in enumerate(one.blocks(side))
    }
    assert len(costs) == 108 + 2 * 3 + 3 + 4
    owners = assigned(costs, range(16), seats=16, founded=16, seed=1)
    loads = largest_load(costs, {name: pair.first for name, pair in owners.items()})
    assert loads <= 1.1 * math.fsum(costs.values()) / 16


@given(rows=st.integers(1, 5000), most=st.integers(1, 5000))
def test_blocks_are_few_and_even_and_make_up_the_factor(rows: int, most: int) -> None:
    blocks = LayerSize(rows, 3, block_rows=most).blocks("A")
    assert sum(blocks) == rows and len(blocks) == math.ceil(rows / most)
    assert max(blocks) <= most and max(blocks) - min(blocks) <= 1
    assert LayerSize(rows, 3).blocks("A") == (rows,)


INVERSE_S = {
    64: 0.00049, 128: 0.00014, 147: 0.00032, 256: 0.00072, 512: 0.0037, 576: 0.0070, 1000: 0.029, 1024: 0.039,
    1152: 0.041, 2048: 0.233, 2049: 0.227, 2304: 0.303, 4608: 1.99,
}  # fmt: skip
"""Processor time of ``decomposed(..., "inverse", ...)`` on one x86 core: ResNet-50's sizes."""


def test_by_measured_costs_loads_are_as_even_as_they_can_be() -> None:
    """Times from four peers, each of which has made its own factors; one is five times as slow."""
    costs = {f"{name}.{side}": cost_of(one.side(side)) for name, one in resnet50().items() for side in SIDES}
    matrices = {f"{name}.{side}": (one.side(side), 1) for name, one in resnet50().items() for side in SIDES}
    peers = [MeasuredCosts(matrices) for _ in range(4)]
    true = {name: INVERSE_S[rows] for name, (rows, _) in matrices.items()}

    def spread(costs: dict[str, float]) -> float:
        owners = {n: pair.first for n, pair in assigned(costs, range(4), seats=4, founded=4, seed=1).items()}
        return largest_load(true, owners) * 4 / math.fsum(true.values())

    owners = assigned(costs, range(4), seats=4, founded=4, seed=1)
    for _ in range(3):
        for me, peer in enumerate(peers):
            own = [name for name, pair in owners.items() if pair.first == me]
            peer.took({name: true[name] * (5 if me == 2 else 1) for name in own})
        told = np.array([peer.told() for peer in peers]).mean(0)
        for peer in peers:
            peer.hear(*told.tolist())
    measured = [peer.costs(peer.seconds()) for peer in peers]
    assert all(one == measured[0] for one in measured)
    assert spread(costs) > 1.1 and spread(measured[0]) <= 1.05
    assert spread(measured[0]) < spread(
        {name: cost_of(rows, "memory") for name, (rows, _) in matrices.items()}
    )


def test_what_is_measured_is_a_middle_time_and_the_next_sizes_where_there_is_none() -> None:
    costs = MeasuredCosts({"a": (4, 1), "b": (8, 2), "c": (32, 1)})
    assert costs.told() == ([0, 0, 0], [0, 0, 0]) and costs.seconds() == [0, 0, 0]
    for seconds in (9.0, 0.25, 0.25, 0.25, 1e9):
        costs.took({"a": seconds})
    costs.took({"b": 1.0})
    logs, counts = costs.told()
    assert logs == [-2, -1, 0] and counts == [1, 1, 0], "two matrices of 8 rows in a second"
    costs.hear([-2 * 0.5, -1 * 0.5, 0], [0.5, 0.5, 0])
    assert costs.seconds() == [-2, -1, -1 + 3 * 2], "by cubes from 8 to 32 rows"
    assert costs.costs(costs.seconds()) == {"a": 0.25, "b": 1.0, "c": 32.0}
    costs.hear([math.nan, math.inf, -400.0], [1, 1, 1])
    costs.hear([1.0, 1.0, 1.0], [-1, math.nan, 0])
    assert costs.seconds() == [-2, -1, 5], "what cannot be a time is none"
    costs.took(dict.fromkeys("abc", 0.0))
    assert all(math.isfinite(log) for log in costs.told()[0])


@given(st.lists(st.floats(0.5, 20.0), min_size=2, max_size=4), st.integers(0, 1000))
def test_peers_speeds_do_not_count_where_their_sizes_meet(speeds: list[float], seed: int) -> None:
    """Each peer makes two sizes in a row, so that any two peers' times can be compared by way of others'."""
    rng = np.random.default_rng(seed)
    n = len(speeds) + 1
    true = rng.uniform(0.01, 1.0, n)
    peers = [MeasuredCosts({f"{at}": (at + 1, 1) for at in range(n)}) for _ in speeds]
    for _ in range(200):
        for me, (peer, speed) in enumerate(zip(peers, speeds, strict=True)):
            peer.took({f"{at}": speed * true[at] for at in (me, me + 1)})
        told = np.array([peer.told() for peer in peers]).mean(0)
        for peer in peers:
            peer.hear(*told.tolist())
    found = np.array(list(peers[0].costs(peers[0].seconds()).values()))
    assert np.allclose(found / found[0], true / true[0], rtol=0.02)


def least_load(costs: list[float], peers: int) -> float:
    """The largest load of the best placement, by an integer program."""
    optimize = pytest.importorskip("scipy.optimize", reason="ragtag[roles] is not installed")
    n = len(costs)
    once = np.hstack([np.kron(np.eye(n), np.ones(peers)), np.zeros((n, 1))])
    loads = np.hstack([np.kron(np.array(costs), np.eye(peers)), -np.ones((peers, 1))])
    found = optimize.milp(
        np.r_[np.zeros(n * peers), 1.0],
        constraints=[
            optimize.LinearConstraint(once, 1, 1),
            optimize.LinearConstraint(loads, -np.inf, 0),
        ],
        integrality=np.r_[np.ones(n * peers), 0],
        bounds=optimize.Bounds(0, np.r_[np.ones(n * peers), np.inf]),
    )
    assert found.success
    return float(found.fun)


def test_small_nets_are_placed_nearly_as_well_as_by_an_integer_program() -> None:
    """Of factors whose costs are cubes; longest first alone is up to 6 % above in these draws."""
    rng, over = np.random.default_rng(5), []
    for _ in range(60):
        peers = int(rng.integers(2, 5))
        sizes = rng.integers(8, 40, int(rng.integers(4, 10)))
        costs = {f"{at}": cost_of(int(size)) / 40**3 for at, size in enumerate(sizes)}
        owners = assigned(costs, range(peers), seats=peers, founded=peers, seed=1)
        loads = Counter[int]()
        for name, owner in owners.items():
            loads[owner.first] += costs[name]
        over.append(max(loads.values()) / least_load(list(costs.values()), peers))
    assert min(over) > 1 - 1e-6
    assert max(over) <= 1.05
