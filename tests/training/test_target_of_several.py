"""Several optimizers towards one target batch, in virtual time: the crew makes their steps together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import Outcome
from ragtag.schedules.partial import Partial
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.central import Centre
from ragtag.training.optimizer.account import ENDED, Account, Accounting
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.optimizer.siblings import Siblings
from tests.training.fake_transport import FakeCrew
from tests.training.test_target import DIM, SPEEDS, Posts, samples_of

NAMES = ("first", "second")
TARGET = 48
TOWARDS: dict[str, Any] = {"average": "gradients", "target_batch": 8, "weight": 4}
Ids = list[tuple[int, int]]


@dataclass
class Peer:
    """What one peer has seen of two optimizers.

    order: whose average, of which round. weights, counted: by optimizer and round. longest_s: of its steps.
    """

    order: list[tuple[str, int]] = field(default_factory=list)
    weights: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    counted: dict[tuple[str, int], Ids] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    samples: dict[str, Account] = field(default_factory=dict)
    took_s: float = 0.0
    longest_s: float = 0.0


def made() -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    return {name: nn.Linear(DIM, 1) for name in NAMES}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)


def backward(models: dict[str, nn.Linear], ids: Ids) -> None:
    """Both models' outputs go into one loss: the gradient of each is by the weights of both."""
    x = torch.stack([samples_of(peer)[0][number] for peer, number in ids])
    y = torch.stack([samples_of(peer)[1][number] for peer, number in ids])
    out = sum(model(x).squeeze(1) for model in models.values())
    (out - y).square().mean().backward()  # type: ignore[union-attr]


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def train(
    transport: SimulatedTransport,
    rounds: int,
    critic: int = 0,
    order: tuple[str, ...] = NAMES,
    **options: Any,
) -> Peer:
    """Until both have averaged in so many rounds. critic: 0, one backward for both optimizers; else, so many
    batches of the first model for each of the second.
    """
    me, size, seen, siblings, models = transport.me, 4, Peer(), Siblings(), made()
    optimizers: dict[str, CrewOptimizer] = {}
    here: dict[str, Ids] = {name: [] for name in NAMES}
    last = dict.fromkeys(NAMES, -1)

    def over(name: str, outcome: Outcome) -> None:
        seen.order.append((name, outcome.round))
        seen.outcomes.append(outcome)
        last[name] = outcome.round
        now, before = optimizers[name].samples, seen.samples.get(name, Account(TARGET))
        assert now is not None
        if here[name] and now.counted - before.counted == len(here[name]):
            seen.counted[name, outcome.round] = list(here[name])
        seen.samples[name] = now
        seen.weights[name, outcome.round] = weights_of(models[name])
        here[name].clear()

    for name in order:
        optimizers[name] = CrewOptimizer(
            sgd(models[name]), transport, model=models[name], name=name, average="gradients",
            target_batch=TARGET, weight=size, method="allreduce", siblings=siblings,
            on_outcome=lambda outcome, name=name: over(name, outcome), **options,
        )  # fmt: skip
    computed = 0

    def batch(of: dict[str, nn.Linear]) -> None:
        nonlocal computed
        transport.compute(size)
        ids = [(me, computed + i) for i in range(size)]
        computed += size
        for name in of:
            optimizers[name].zero_grad()
            here[name] += ids
        backward(of, ids)

    began_s = transport.now_s()
    while min(last.values()) < rounds - 1:
        step_s = transport.now_s()
        if critic:
            for name in ["first"] * critic + ["second"]:
                batch({name: models[name]})
                optimizers[name].step()
        else:
            batch(models)
            for optimizer in optimizers.values():
                optimizer.step()
        seen.longest_s = max(seen.longest_s, transport.now_s() - step_s)
    seen.took_s = transport.now_s() - began_s
    for optimizer in optimizers.values():
        optimizer._averaged.settle()
    for name, optimizer in optimizers.items():
        of = seen.samples[name] = optimizer.samples or Account(TARGET)
        assert of.counted + sum(of.dropped.values()) == pytest.approx(of.computed) and of.pending == 0
    return seen


def peers_of(faults: Faults, rounds: int = 12, n: int = 4, seed: int = 2, **options: Any) -> list[Peer]:
    """Those that no fault has ended."""
    crew = SimulatedCrew(n, faults, seed=seed, cost=ComputeCost(0.01, SPEEDS, 0.3, seed=4), check=True)
    found = crew.run(lambda transport: train(transport, rounds, **options))
    return [peer for peer in found if peer is not None]


def alone(peer: Peer) -> int:
    """Averages that had nobody else's gradients."""
    return sum(float(outcome.weight.max()) < TARGET / 2 and outcome.round > 0 for outcome in peer.outcomes)


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_steps_of_two_optimizers_are_those_of_one_process(order: tuple[str, ...]) -> None:
    """One backward for both: the step of each is of a batch at which the other one stood where it did."""
    rounds = 8
    peers = peers_of(Faults(latency_s=0.005), rounds, order=order)
    models = made()
    plain = {name: sgd(model) for name, model in models.items()}
    for at in range(rounds):
        gathered = {name: [i for peer in peers for i in peer.counted.get((name, at), [])] for name in NAMES}
        assert gathered["first"] == gathered["second"], "they have the same samples in each step"
        assert len(gathered["first"]) >= TARGET
        for model in models.values():
            model.zero_grad()
        backward(models, gathered["first"])
        for optimizer in plain.values():
            optimizer.step()
        for name, model in models.items():
            torch.testing.assert_close(peers[0].weights[name, at], weights_of(model), rtol=1e-4, atol=1e-6)
    for peer in peers:
        assert peer.order == [(name, at) for at in range(rounds) for name in NAMES], "and the same order"
        assert not {why for of in peer.samples.values() for why in of.dropped} - {ENDED}


FAULTS = {
    "calm": Faults(latency_s=0.005),
    "loss": Faults(latency_s=0.005, loss=Loss(0.1)),
    "death": Faults(latency_s=0.005, loss=Loss(0.02), crashes=(Crash(1, 1.1),)),
    "freeze": Faults(latency_s=0.005, freezes=(Freeze(2, 0.8, 1.5),)),
}
QUICK = {("loss", 0), ("death", 3), ("freeze", 1)}


@cache
def calm_s(rounds: int, critic: int) -> float:
    """How long the crew takes where nothing fails."""
    return max(peer.took_s for peer in peers_of(FAULTS["calm"], rounds, critic=critic))


@pytest.mark.parametrize(
    ("world", "critic"),
    [
        pytest.param(world, critic, marks=() if (world, critic) in QUICK else pytest.mark.slow)
        for world in FAULTS
        for critic in (0, 1, 3)
    ],
)
def test_peers_never_wait_for_each_other_crosswise(world: str, critic: int) -> None:
    """Where each decided for itself, half of all averages had one peer, and each took a deadline."""
    rounds, frozen_s = 24, sum(freeze.for_s for freeze in FAULTS[world].freezes)
    for peer in peers_of(FAULTS[world], rounds, critic=critic):
        assert peer.took_s <= 1.5 * calm_s(rounds, critic) + frozen_s
        assert peer.longest_s <= 0.6 * (critic + 1) + frozen_s
        if critic <= 1:
            assert alone(peer) <= 0.1 * len(peer.outcomes)
        steps = [at for name, at in peer.order if name == "first"]
        both = [at for at in steps if ("second", at) in peer.weights]
        assert len(both) >= len(steps) - 4, "they have steps of one number"


def test_what_a_script_has_in_its_gradients_stays_there_in_another_ones_step() -> None:
    """The first model's average comes in the second one's step: its gradient is still what a batch gave."""
    siblings, transport, models = Siblings(), FakeCrew(1).transport(0), made()
    first, second = (
        CrewOptimizer(sgd(models[name]), transport, model=models[name], name=name, average="gradients",
                      target_batch=8, weight=4, siblings=siblings)
        for name in NAMES
    )  # fmt: skip
    before = weights_of(models["first"])
    for number in (1.0, 3.0):
        for model in models.values():
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, number)
        first.step()
        first.zero_grad()
        assert torch.equal(weights_of(models["first"]), before), "it does not lead"
        second.step()
    assert torch.allclose(weights_of(models["first"]), before - 0.02 * 2.0), "by the mean of both batches"
    assert all(parameter.grad is None for parameter in models["first"].parameters())


def test_the_last_one_of_a_pass_leads_and_one_that_is_stepped_seldom_follows() -> None:
    def leaders(steps: str, of: int) -> str:
        gathering = Gathering(64, Posts(n=4))
        for _ in range(of):
            gathering.joined()
        accounts = {name: Accounting(gathering) for name in sorted(set(steps))}
        return "".join(name for name in steps if accounts[name].stepped(10.0))

    assert leaders("aaa", 1) == "aaa"
    assert leaders("ababab", 2) == "bbb"
    assert leaders("abcabc", 3) == "cc"
    assert leaders("aaabaaab", 2) == "aaaaa", "decided from its second step on, when all is known"
    assert leaders("aaaababababab", 2) == "aaaabbb", "and anew where the script goes on otherwise"
    assert leaders("ababaaaa", 2) == "bbaaa"
    assert leaders("aaaa", 2) == "aaa", "the other is made, and never stepped"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            TOWARDS,
            {**TOWARDS, "target_batch": 9},
            "has 8",
        ),
        (
            TOWARDS,
            {"every": 10},
            "target_batch=8, and this one",
        ),
        (
            {"every": 10},
            TOWARDS,
            "and another optimizer of this crew",
        ),
    ],
)
def test_what_would_wait_crosswise_is_refused(
    first: dict[str, Any], second: dict[str, Any], says: str
) -> None:
    transport, models, siblings = FakeCrew(1).transport(0), made(), Siblings()

    def optimizer(name: str, **options: Any) -> CrewOptimizer:
        model = models["first"]
        return CrewOptimizer(sgd(model), transport, model=model, name=name, siblings=siblings, **options)

    def step(one: CrewOptimizer) -> None:
        backward({"first": models["first"]}, [(0, 0)])
        one.step()

    held = [optimizer("first", **first), optimizer("second", **second)]
    with pytest.raises(ValueError, match="another optimizer of this crew"):
        step(held[0])
    with pytest.raises(ValueError, match=says):
        step(held[1])
    held.pop(0)  # as by a notebook's cell that runs again, once the new one is made
    step(held[0])
    held[0] = optimizer("third", **first)
    step(held[0])


@pytest.mark.parametrize("options", [{"schedule": Partial(10)}, {"method": Centre()}])
def test_one_that_waits_for_nobody_may_be_beside_a_target(options: dict[str, Any]) -> None:
    models = made()
    orders: list[Callable[[Any, Any], tuple[Any, Any]]] = [lambda a, b: (a, b), lambda a, b: (b, a)]
    for order in orders:
        transport, siblings = FakeCrew(1).transport(0), Siblings()
        held = [
            CrewOptimizer(
                sgd(models[name]), transport, model=models[name], name=name, siblings=siblings, **asked
            )
            for name, asked in zip(NAMES, order(TOWARDS, options), strict=True)
        ]
        for optimizer, model in zip(held, models.values(), strict=True):
            backward({"one": model}, [(0, 0)])
            optimizer.step()
