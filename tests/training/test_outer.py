"""Outer momentum live is the outer optimizer of the paper, on every peer the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.schema import SchemaMismatch
from ragtag.core.types import Outcome
from ragtag.optim.outer import Nesterov
from ragtag.schedules import Partial
from ragtag.training.optimizer import CrewOptimizer
from ragtag.training.outer import OuterSteps
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers
from tests.training.test_optimizer import flat, loss_of, net, sgd, steps


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_are_those_of_torch(nesterov: bool) -> None:
    """Three peers, three steps a round; beside them the same with torch's SGD as outer optimizer."""
    models, rounds, every = [net() for _ in range(3)], 5, 3
    for model in models:
        model[1] = nn.Identity()

    def train(transport: FakeTransport) -> None:
        outer = ragtag.Outer(lr=0.7, momentum=0.9, nesterov=nesterov)
        model = models[transport.me]
        optimizer = CrewOptimizer(sgd(model, 0.9), transport, every=every, outer=outer, model=model)
        steps(model, optimizer, transport.me, rounds * every)

    locals_ = [net() for _ in range(3)]
    for model in locals_:
        model[1] = nn.Identity()
    inner = [sgd(model, 0.9) for model in locals_]
    anchor: torch.nn.Parameter | None = None
    for round_ in range(rounds):
        for peer, model in enumerate(locals_):
            steps(model, inner[peer], peer, (round_ + 1) * every, round_ * every)
        mean = torch.stack([flat(model) for model in locals_]).mean(0)
        if anchor is None:  # the first average is the anchor
            anchor = nn.Parameter(mean.clone())
            sgd_outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=nesterov)
        else:
            anchor.grad = anchor.detach() - mean
            sgd_outer.step()
        for model in locals_:
            torch.nn.utils.vector_to_parameters(anchor.detach().clone(), model.parameters())
    run_peers(FakeCrew(3), train)
    assert anchor is not None
    for model in models:
        torch.testing.assert_close(flat(model), anchor.detach(), rtol=1e-4, atol=1e-5)


def test_buffers_take_the_average_as_it_is() -> None:
    """Momentum on a running variance would make it negative."""
    models = [net(), net()]

    def train(transport: FakeTransport) -> None:
        model = models[transport.me]
        optimizer = CrewOptimizer(sgd(model), transport, every=1, outer=ragtag.Outer(), model=model)
        steps(model, optimizer, transport.me, 4)

    plain = [net(), net()]

    def train_plain(transport: FakeTransport) -> None:
        model = plain[transport.me]
        steps(model, CrewOptimizer(sgd(model), transport, model=model), transport.me, 1)

    run_peers(FakeCrew(2), train)
    run_peers(FakeCrew(2), train_plain)
    a, b = (m[1].running_mean for m in models)
    assert torch.equal(a, b)
    outer = OuterSteps(Nesterov(), 2)
    outer(outcome([[1.0, 1.0, 5.0, 5.0]]))
    assert outer(outcome([[2.0, 2.0, 6.0, 7.0]]))[0, 2:].tolist() == [6.0, 7.0]


def outcome(table: list[list[float]], averaged: list[bool] | None = None) -> Outcome:
    mean = np.array(table, np.float32)
    n = len(mean)
    came = np.ones(n, np.bool_) if averaged is None else np.array(averaged)
    ones, heard = np.ones(n, np.float32), np.full(n, 3, np.uint64)
    return Outcome(0, 0, mean, ones, heard, came, (), (), 0.0, 0.0, 0.0, 0.0, False)


def test_where_no_average_came_everything_stays() -> None:
    outer, whole = OuterSteps(Nesterov(), 4), OuterSteps(Nesterov(), 4)
    for of in (outer, whole):
        of(outcome([[0.0, 0.0], [0.0, 0.0]]))
    first = outer(outcome([[1.0, 1.0], [9.0, 9.0]], [True, False]))
    assert first[1].tolist() == [9.0, 9.0]
    again = outer(outcome([[2.0, 2.0], [2.0, 2.0]]))
    assert np.array_equal(again[1], whole(outcome([[2.0, 2.0], [2.0, 2.0]]))[1])


def test_peers_that_differ_come_together() -> None:
    """One misses an average on all chunks; some averages later both have the same model again."""
    one, other = OuterSteps(Nesterov(), 1), OuterSteps(Nesterov(), 1)
    models = [one(outcome([[0.0]])), other(outcome([[0.0]]))]
    apart = []
    for round_ in range(1, 16):
        own = [float(model[0, 0]) + 1.0 for model in models]
        mean = sum(own) / 2
        missed = round_ == 3
        models = [one(outcome([[mean]])), other(outcome([[own[1] if missed else mean]], [not missed]))]
        apart.append(abs(float(models[0][0, 0] - models[1][0, 0])))
    assert apart[2] > 0.1
    assert apart[-1] < 0.01 * apart[2]


def test_a_restored_state_begins_anew() -> None:
    outer = OuterSteps(Nesterov(), 1)
    outer(outcome([[0.0]]))
    outer(outcome([[1.0]]))
    outer.forget()
    assert outer(outcome([[5.0]])).tolist() == [[5.0]]


def test_peers_must_agree_on_it() -> None:
    crew = FakeCrew(2)
    CrewOptimizer(sgd(one := net()), crew.transport(0), outer=ragtag.Outer(), model=one)
    with pytest.raises(SchemaMismatch):
        CrewOptimizer(sgd(two := net()), crew.transport(1), model=two)


def test_what_cannot_be_is_refused() -> None:
    transport = FakeCrew(1).transport(0)
    with pytest.raises(ValueError, match='use average="models"'):
        CrewOptimizer(sgd(net()), transport, average="gradients", outer=ragtag.Outer())
    with pytest.raises(ValueError, match="Matched"):
        CrewOptimizer(sgd(net()), transport, schedule=Partial(), outer=ragtag.Outer())
    with pytest.raises(ValueError, match="momentum 1"):
        ragtag.Outer(momentum=1.0)
    assert loss_of(net(), 0, 0).isfinite()
