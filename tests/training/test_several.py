"""Several optimizers in one crew: what one averages is never taken for another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.core.channels import channel_of
from ragtag.core.schema import SchemaMismatch
from ragtag.core.types import Outcome
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.training.align.plan import Align
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

N = 3
VALUES = {"a": 1.0, "b": 100.0}
ROUNDS, FIRST, EVERY = 45, 3, 7
"""Peer 2 leaves out its step of "b" after the first three, and then every seventh."""


def filled(value: float) -> nn.Linear:
    model = nn.Linear(10, 10)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def made(transport: FakeTransport, name: str, model: nn.Module, **options: object) -> CrewOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    return CrewOptimizer(sgd, transport, model=model, name=name, **options)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: CrewOptimizer, scale: float = 1.0) -> None:
    """Every value's gradient is ``scale``."""
    optimizer.zero_grad()
    (scale * model(torch.ones(1, 10)).sum()).backward()
    optimizer.step()


def contributors(outcome: Outcome) -> int:
    return int(np.bitwise_or.reduce(outcome.heard)).bit_count()


@pytest.mark.parametrize(
    "options",
    [
        {"method": RPS()},
        {"method": RPS(repair=True)},
        {"method": AllReduce()},
        {"average": "gradients", "align": Align(4, 1.0)},
        {"compress": TopK(0.1, resync=5)},
    ],
    ids=["rps", "repair", "all-reduce", "gradients", "sparse"],
)
@pytest.mark.parametrize("loss", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_models_never_mix_though_a_peer_skips_steps_of_one(options: dict[str, object], loss: float) -> None:
    """Equal in shapes and so in schemas, of two optimizers that peers make in different orders."""
    crew = FakeCrew(N, loss=loss)

    def train(transport: FakeTransport) -> dict[str, list[int]]:
        me = transport.me
        models = {name: filled(value) for name, value in VALUES.items()}
        order = sorted(models, reverse=me == 1)
        optimizers = {name: made(transport, name, models[name], **options) for name in order}
        heard: dict[str, list[int]] = {name: [] for name in models}
        for at in range(ROUNDS):
            for name in models:
                if me == 2 and name == "b" and at % EVERY == FIRST:
                    continue
                step(models[name], optimizers[name], VALUES[name])
                outcome = optimizers[name].outcome
                assert outcome is not None and outcome.channel == channel_of(name)
                heard[name].append(contributors(outcome))
                for other, value in VALUES.items():
                    for parameter in models[other].parameters():
                        assert torch.equal(parameter, torch.full_like(parameter, value)), (me, at, name)
                for parameter in models[name].parameters():  # 0: its owner told nobody its average
                    assert parameter.grad is not None
                    assert torch.isin(parameter.grad, torch.tensor([0.0, VALUES[name]])).all()
        return heard

    came = run_peers(crew, train)
    assert len(came[0]["b"]) == ROUNDS and len(came[2]["b"]) < 0.9 * ROUNDS
    for name in VALUES:
        before = [seen for heard in came for seen in heard[name][:FIRST]]
        assert sum(before) > 0.7 * N * len(before), "nobody has skipped yet"
        after = [seen for heard in came for seen in heard[name][FIRST:]]
        assert sum(seen > 1 for seen in after) > ROUNDS // 4, "they go on to average with each other"
    assert {channel_of("a"), channel_of("b")} <= set(crew.schemas)


def test_each_comes_to_its_own_mean() -> None:
    def train(transport: FakeTransport) -> dict[str, float]:
        models = {name: filled(value + transport.me) for name, value in VALUES.items()}
        order = sorted(models, reverse=transport.me == 1)
        optimizers = {name: made(transport, name, models[name]) for name in order}
        for name in models:
            step(models[name], optimizers[name])
        return {name: float(model.weight.detach().unique()) for name, model in models.items()}

    assert run_peers(FakeCrew(N), train) == [{"a": 2.0, "b": 101.0}] * N


def test_models_of_other_shapes_have_a_channel_each() -> None:
    """Made in whatever order: where a channel's number went by the order, these refused each other."""

    def train(transport: FakeTransport) -> None:
        models = {"a": nn.Linear(10, 10), "b": nn.Linear(4, 2)}
        for name in sorted(models, reverse=transport.me == 1):
            made(transport, name, models[name])

    run_peers(FakeCrew(N), train)

    def mistaken(transport: FakeTransport) -> None:
        made(transport, "a", nn.Linear(10, 10) if transport.me else nn.Linear(4, 2))

    with pytest.raises(SchemaMismatch, match="weight"):
        run_peers(FakeCrew(2), mistaken)
