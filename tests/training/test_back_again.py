"""A peer that comes back from a freeze costs the others no more than it did while it was away."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest
import torch
from torch import nn

from ragtag.core.arrival import others_in
from ragtag.core.faults import Faults, Freeze, Loss
from ragtag.core.types import Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.recipes.abreast import Keeps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.align.plan import Align
from ragtag.training.optimizer.optimizer import CrewOptimizer

G, M = "gradients", "models"
FROM = 20
"""Steps of the others before which the freeze itself, and its first rounds, are over."""


@pytest.mark.parametrize(
    ("n", "computes_s", "loss", "frozen_s", "averages", "every", "seed"),
    [
        pytest.param(4, 0.02, 0.0, 0.69, [G], [8], 7, id="gradients"),
        pytest.param(4, 0.1, 0.0, 2.4, [G], [8], 0, id="gradients, slowly"),
        pytest.param(5, 0.1, 0.02, 2.39, [G], [10], 37, id="gradients, a comparison that is long over"),
        pytest.param(5, 0.02, 0.02, 0.75, [M], [10], 29, id="models"),
        pytest.param(4, 0.1, 0.02, 2.32, [M], [4], 23, id="models, slowly"),
        pytest.param(4, 0.02, 0.02, 0.73, [M], [10], 103, id="models, with a message before a round"),
        pytest.param(3, 0.1, 0.05, 2.07, [G, M], [10, 2], 43, id="two"),
        pytest.param(4, 0.02, 0.02, 2.6, [G, M, G], [2, 4, 8], 103, id="three"),
        pytest.param(4, 0.02, 0.02, 2.6, [G, M, G], [2, 4, 8], 102, id="three, frozen in the second's round"),
        pytest.param(4, 0.02, 0.02, 2.6, [G, M, G], [2, 4, 8], 106, id="three, frozen in the second step"),
        pytest.param(4, 0.02, 0.02, 2.6, [G, M, G], [2, 4, 8], 107, id="three, and an old comparison"),
        pytest.param(4, 0.02, 0.02, 0.73, [M, G, G], [10, 2, 2], 45, id="three, models first"),
        pytest.param(
            4, 0.02, 0.02, 0.73, [M, G, G], [10, 2, 2], 109, id="three, models first, and lost words"
        ),
    ],
)
def test_one_that_was_frozen_makes_nobody_wait_as_it_comes_back(
    n: int, computes_s: float, loss: float, frozen_s: float, averages: list[str], every: list[int], seed: int
) -> None:
    """They waited for it while it got their state: up to 29 usual steps in one, and 15 s in all."""
    freeze = Freeze(1, 15.3 * computes_s + 0.3, frozen_s)
    faults = Faults(latency_s=0.002, rate_bytes_per_s=1e7, loss=Loss(loss), freezes=(freeze,))
    steps_s: dict[int, list[float]] = {}

    def train(peer: SimulatedTransport) -> None:
        torch.manual_seed(0)
        models = [nn.Linear(40, 40) for _ in averages]
        keeps = Keeps(peer, 3)
        optimizers = [
            CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), peer, model=model, name=f"m{i}",
                average=averages[i], method=AllReduce(),
                align=Align(every[i]) if averages[i] == G else False, **keeps.hooks,
            )
            for i, model in enumerate(models)
        ]  # fmt: skip
        draw = torch.Generator().manual_seed(peer.me)
        mine = steps_s.setdefault(peer.me, [])
        while optimizers[0].outcome is None or optimizers[0].outcome.round < 90:
            began_s = peer.now_s()
            peer.compute()
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(8, 40, generator=draw)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            mine.append(peer.now_s() - began_s)

    SimulatedCrew(n, faults, seed=seed, cost=ComputeCost(computes_s, sigma=0.05, seed=seed)).run(train)
    assert len(steps_s[1]) < 90, "it was away"
    usual = 1.8 if computes_s < 0.05 else 1.3  # where rounds take most of a step, they spread more
    for peer in set(range(n)) - {1}:
        assert max(steps_s[peer][FROM:]) < usual * median(steps_s[peer]), peer


def steps(
    peer: SimulatedTransport, width: int, method: Averager, until_s: float
) -> Iterator[tuple[float, Outcome]]:
    """A peer trains a layer: when each step began, and what its average came to."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model, method=method)
    while peer.now_s() < until_s:
        began_s = peer.now_s()
        peer.compute()
        optimizer.zero_grad()
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()
        assert optimizer.outcome is not None
        yield began_s, optimizer.outcome


@pytest.mark.parametrize("seed", [0, 3])
def test_one_that_was_frozen_is_in_the_first_average_that_others_wait_for_it_in(seed: int) -> None:
    """They had heard what it sent before it stood still, and gave it a block; it gave that to another."""
    freeze = Freeze(1, 1.5 + 0.003 * seed, 4.0)
    faults = Faults(latency_s=2e-4, rate_bytes_per_s=5e7, freezes=(freeze,))
    missed: dict[int, tuple[int, ...]] = {0: (), 2: ()}

    def train(peer: SimulatedTransport) -> None:
        for _, outcome in steps(peer, 300, AllReduce(), until_s=6.5):
            if peer.me != 1 and peer.now_s() > freeze.at_s + freeze.for_s:
                missed[peer.me] += outcome.missed

    SimulatedCrew(3, faults, seed=seed, cost=ComputeCost(0.05, sigma=0.05, seed=seed)).run(train)
    assert missed == {0: (), 2: ()}


@pytest.mark.parametrize("for_s", [5.0, 300.0])
@pytest.mark.parametrize("apart_s", [0.002, 0.05])
@pytest.mark.parametrize("method", [RPS(), AllReduce()], ids=lambda method: method.name)
def test_peers_that_slept_together_soon_average_with_everybody_again(
    method: Averager, apart_s: float, for_s: float
) -> None:
    """As where the machine that holds them all was suspended; they wake so far apart, amid an average."""
    freezes = tuple(Freeze(peer, 1.53 + apart_s * peer, for_s) for peer in range(4))
    awake_s = freezes[-1].at_s + for_s
    faults = Faults(latency_s=2e-3, rate_bytes_per_s=1e7, freezes=freezes)
    steps_s: list[float] = []
    pauses_s: list[float] = []
    met: dict[int, list[int]] = {peer: [] for peer in range(4)}

    def train(peer: SimulatedTransport) -> None:
        for began_s, outcome in steps(peer, 60, method, until_s=awake_s + 2.0):
            if peer.now_s() < 1.53:
                steps_s.append(peer.now_s() - began_s)
            if peer.now_s() > awake_s:
                met[peer.me].append(len(others_in(outcome, peer.me)))
                pauses_s.append(peer.now_s() - max(began_s, awake_s))

    SimulatedCrew(4, faults, seed=1, cost=ComputeCost(0.05, sigma=0.05, seed=1)).run(train)
    for mine in met.values():
        assert len(mine) > 25
        assert set(mine[3:]) == {3}, "everybody is in each average"
    assert max(pauses_s) < 3.0 * median(steps_s)


def test_one_that_was_frozen_averages_on_where_the_optimizer_that_brings_the_state_is_stepped_no_more() -> (
    None
):
    freeze, first_until_s = Freeze(1, 0.6, 0.7), 0.9
    faults = Faults(latency_s=0.002, rate_bytes_per_s=1e7, freezes=(freeze,))
    met: dict[int, int] = {}

    def train(peer: SimulatedTransport) -> None:
        torch.manual_seed(0)
        models, keeps = [nn.Linear(40, 40) for _ in range(2)], Keeps(peer, 3)
        optimizers = [
            CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model, name=f"m{i}", **keeps.hooks
            )
            for i, model in enumerate(models)
        ]
        while peer.now_s() < 2.0:
            peer.compute()
            for model, optimizer in zip(models, optimizers, strict=True):
                if optimizer is optimizers[1] or peer.now_s() < first_until_s:
                    optimizer.zero_grad()
                    model(torch.randn(8, 40)).square().mean().backward()
                    optimizer.step()
        outcome = optimizers[1].outcome
        assert outcome is not None
        met[peer.me] = len(others_in(outcome, peer.me))

    SimulatedCrew(3, faults, seed=3, cost=ComputeCost(0.02, sigma=0.05, seed=3)).run(train)
    assert met == {0: 2, 1: 2, 2: 2}
