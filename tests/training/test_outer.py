"""Outer momentum live is the outer optimizer of the paper, on every peer the same."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.schema import SchemaMismatch, TensorSpec
from ragtag.core.types import Outcome
from ragtag.optim.outer import Nesterov
from ragtag.schedules import Partial
from ragtag.training.exchange.outer import OuterSteps
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import Snapshot, capture, restore
from tests.training.simulated import SimulatedTransport, TappedCrew, run_peers
from tests.training.test_optimizer import flat, loss_of, net, sgd, steps


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_are_those_of_torch(nesterov: bool) -> None:
    """Three peers, three steps a round; beside them the same with torch's SGD as outer optimizer."""
    models, rounds, every = [net() for _ in range(3)], 5, 3
    for model in models:
        model[1] = nn.Identity()

    def train(transport: SimulatedTransport) -> None:
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
    run_peers(TappedCrew(3), train)
    assert anchor is not None
    for model in models:
        torch.testing.assert_close(flat(model), anchor.detach(), rtol=1e-4, atol=1e-5)


def test_buffers_take_the_average_as_it_is() -> None:
    """Momentum on a running variance would make it negative."""
    models = [net(), net()]

    def train(transport: SimulatedTransport) -> None:
        model = models[transport.me]
        optimizer = CrewOptimizer(sgd(model), transport, every=1, outer=ragtag.Outer(), model=model)
        steps(model, optimizer, transport.me, 4)

    plain = [net(), net()]

    def train_plain(transport: SimulatedTransport) -> None:
        model = plain[transport.me]
        steps(model, CrewOptimizer(sgd(model), transport, model=model), transport.me, 1)

    run_peers(TappedCrew(2), train)
    run_peers(TappedCrew(2), train_plain)
    a, b = (m[1].running_mean for m in models)
    assert torch.equal(a, b)
    outer = OuterSteps(Nesterov(), [TensorSpec("a", (16,), "float32")], (1, 32))
    outer(outcome([[1.0] * 16 + [5.0] * 16]))
    went_on = outer(outcome([[2.0] * 16 + [6.0] * 15 + [7.0]]))
    assert went_on[0, 16:].tolist() == [6.0] * 15 + [7.0]
    assert went_on[0, 0] != 2.0


def steps_of(n_chunks: int, elements: int) -> OuterSteps:
    """For one parameter that fills a table."""
    return OuterSteps(Nesterov(), [TensorSpec("a", (n_chunks * elements,), "float32")], (n_chunks, elements))


def outcome(table: list[list[float]], averaged: list[bool] | None = None) -> Outcome:
    mean = np.array(table, np.float32)
    n = len(mean)
    came = np.ones(n, np.bool_) if averaged is None else np.array(averaged)
    ones, heard = np.ones(n, np.float32), np.full(n, 3, np.uint64)
    return Outcome(0, 0, mean, ones, heard, came, (), (), 0.0, 0.0, 0.0, 0.0, False)


def test_where_no_average_came_everything_stays() -> None:
    outer, whole = steps_of(2, 2), steps_of(2, 2)
    for of in (outer, whole):
        of(outcome([[0.0, 0.0], [0.0, 0.0]]))
    first = outer(outcome([[1.0, 1.0], [9.0, 9.0]], [True, False]))
    assert first[1].tolist() == [9.0, 9.0]
    again = outer(outcome([[2.0, 2.0], [2.0, 2.0]]))
    assert np.array_equal(again[1], whole(outcome([[2.0, 2.0], [2.0, 2.0]]))[1])


def test_where_an_average_came_in_part_that_part_takes_the_outer_step() -> None:
    """With .7 and .9: from 0 to the average 1 momentum is -1, and the step 1.9 of .7."""
    outer, whole = steps_of(2, 2), steps_of(2, 2)
    for of in (outer, whole):
        of(outcome([[0.0, 0.0], [0.0, 0.0]]))
    first = outer(outcome([[1.0, 1.0], [9.0, 9.0]], [True, False]))
    assert first[0] == pytest.approx([0.7 * 1.9] * 2)
    assert np.array_equal(first[0], whole(outcome([[1.0, 1.0], [1.0, 1.0]]))[0])
    second = [of(outcome([[2.0, 2.0], [2.0, 2.0]]))[0] for of in (outer, whole)]  # with that step's momentum
    assert np.array_equal(*second)
    buffered = OuterSteps(Nesterov(), [TensorSpec("a", (48,), "float32")], (2, 32))
    buffered(outcome([[0.0] * 32, [0.0] * 16 + [5.0] * 16]))
    went_on = buffered(outcome([[9.0] * 32, [1.0] * 16 + [6.0] * 16], [False, True]))
    assert went_on[1] == pytest.approx([0.7 * 1.9] * 16 + [6.0] * 16)


def test_peers_that_differ_come_together() -> None:
    """One misses an average on all chunks; some averages later both have the same model again."""
    one, other = steps_of(1, 1), steps_of(1, 1)
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


def test_a_state_without_it_begins_anew() -> None:
    outer = steps_of(1, 1)
    outer(outcome([[0.0]]))
    outer(outcome([[1.0]]))
    outer.load_state_dict({})
    assert outer.state_dict() == {}
    assert outer(outcome([[5.0]])).tolist() == [[5.0]]


def conv(seed: int = 0) -> nn.Module:
    """A model with parameters in other orders of memory, of other dtypes, and buffers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3))
        model[3] = model[3].to(torch.bfloat16)
        return model.to(memory_format=torch.channels_last)


def shake(model: nn.Module, round_: int) -> None:
    """A round's local steps."""
    draw = torch.Generator().manual_seed(round_)
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):  # type: ignore[index]
            tensor.add_(torch.randn(tensor.shape, generator=draw))


def outer_sgd(model: nn.Module, codec: str = "fp32", given: bool = True) -> CrewOptimizer:
    transport = TappedCrew(1).transport(0)
    codec_ = {"codec": codec}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return CrewOptimizer(
        inner, transport, every=1, outer=ragtag.Outer(), model=model if given else None, **codec_
    )


@pytest.mark.parametrize("way", ["snapshot", "state_dict", "state_dict before the first step", "bf16"])
def test_who_resumes_goes_on_with_anchor_and_momentum(way: str) -> None:
    """Beside one that was never stopped, to the bit; the table's chunks may be others (another codec)."""
    model, again = conv(), conv(1)
    optimizer = outer_sgd(model)
    for round_ in range(3):
        shake(model, round_)
        optimizer.average()
    assert any(t.abs().max() > 0 for t in optimizer._averaged.outer_state["momentum"].values())
    later = outer_sgd(again, "bf16" if way == "bf16" else "fp32", way != "state_dict before the first step")
    if way.startswith("state_dict"):
        again.load_state_dict(model.state_dict())
        later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if not later._averaged.modules_known:  # the state waits until averaging begins
            later._averaged._configure([again])
    else:
        restore(Snapshot.from_bytes(capture(optimizer._averaged).to_bytes()), later._averaged)
    for part in ("anchor", "momentum"):
        for name, tensor in optimizer._averaged.outer_state[part].items():
            assert torch.equal(later._averaged.outer_state[part][name], tensor), (part, name)
    if way == "bf16":
        return
    for round_ in range(3, 6):
        for one, of in ((model, optimizer), (again, later)):
            shake(one, round_)
            of.average()
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_newcomer_steps_as_the_others_do() -> None:
    """Given a snapshot as after a round, its next outer step is theirs; without the momentum it is not."""

    def run(begin: int, until: int, state: Snapshot | None) -> list[CrewOptimizer]:
        models = [net(0), net(1)]

        def train(transport: SimulatedTransport) -> CrewOptimizer:
            model = models[transport.me]
            optimizer = CrewOptimizer(sgd(model), transport, every=1, outer=ragtag.Outer(), model=model)
            if state is not None:
                restore(state, optimizer._averaged)
            steps(model, optimizer, transport.me, until, begin)
            return optimizer

        return run_peers(TappedCrew(2), train)

    whole, state = run(0, 6, None)[0], capture(run(0, 5, None)[0]._averaged)
    with_it, without = run(5, 6, state)[1], run(5, 6, replace(state, outer={}))[1]
    aim, one, other = (flat(optimizer._averaged.modules[0]) for optimizer in (whole, with_it, without))
    torch.testing.assert_close(one, aim, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(other, aim, rtol=1e-3)


def test_a_state_of_other_parameters_changes_nothing() -> None:
    model = net()
    optimizer = CrewOptimizer(
        sgd(model), TappedCrew(1).transport(0), every=1, outer=ragtag.Outer(), model=model
    )
    optimizer.average()
    before = optimizer.state_dict()
    state = copy.deepcopy(optimizer._averaged.outer_state)
    state["momentum"]["0.weight"] = torch.zeros(2)
    listed = {**optimizer._averaged.outer_state, "anchor": [torch.zeros(2)]}
    snapshot = replace(capture(optimizer._averaged), outer=state, step=77)
    for load in (
        lambda: restore(snapshot, optimizer._averaged),
        lambda: setattr(optimizer._averaged, "outer_state", state),
        lambda: setattr(optimizer._averaged, "outer_state", {"anchor": {}}),
        lambda: setattr(optimizer._averaged, "outer_state", listed),
    ):
        with pytest.raises(ValueError, match="outer momentum"):
            load()
    after = optimizer.state_dict()
    assert after["ragtag"]["step"] == before["ragtag"]["step"]
    assert torch.equal(
        after["ragtag"]["outer"]["momentum"]["0.weight"], before["ragtag"]["outer"]["momentum"]["0.weight"]
    )
    plain = CrewOptimizer(sgd(model), TappedCrew(1).transport(0), model=model)
    restore(capture(optimizer._averaged), plain._averaged)  # who does not use it passes it over
    assert plain._averaged.outer_state == {}


def test_peers_must_agree_on_it() -> None:
    crew = TappedCrew(2)
    CrewOptimizer(sgd(one := net()), crew.transport(0), every=1, outer=ragtag.Outer(), model=one)
    with pytest.raises(SchemaMismatch):
        CrewOptimizer(sgd(two := net()), crew.transport(1), model=two)


def test_what_cannot_be_is_refused() -> None:
    transport = TappedCrew(1).transport(0)
    with pytest.raises(ValueError, match='use average="models"'):
        CrewOptimizer(sgd(net()), transport, average="gradients", outer=ragtag.Outer())
    with pytest.raises(ValueError, match="Matched"):
        CrewOptimizer(sgd(net()), transport, schedule=Partial(), outer=ragtag.Outer())
    with pytest.raises(ValueError, match="momentum 1"):
        ragtag.Outer(momentum=1.0)
    assert loss_of(net(), 0, 0).isfinite()
