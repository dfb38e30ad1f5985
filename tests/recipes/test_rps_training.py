from dataclasses import replace

import numpy as np
import pytest
import torch

from ragtag.core.channels import channel_of
from ragtag.core.types import Floats, Outcome
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.grouping.training import Values
from ragtag.recipes.lockstep import run_rounds
from ragtag.recipes.rps.theory import line
from ragtag.recipes.rps.training import Setup, _Crew, train
from ragtag.recipes.tasks.images import Batches, digits, shards
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

BASE = Setup("models", "all-reduce", 1.0, by_label=True, seed=1, steps=4, n=4)


def test_all_reduce_of_models_or_gradients_is_sgd_on_the_peers_mean_gradient() -> None:
    """Against plain torch: one model, the mean loss over all peers' batches."""
    task = digits()
    parts = shards(task, 4, 1, True)
    batches = [Batches(part, task.batch, 1, peer) for peer, part in enumerate(parts)]
    w = [p.initial(1, i).requires_grad_() for i, p in enumerate(task.parameters)]
    for _ in range(BASE.steps):
        index = torch.from_numpy(np.concatenate([b.next() for b in batches]))
        loss = torch.nn.functional.cross_entropy(task.forward(w, task.train_x[index]), task.train_y[index])
        grads = torch.autograd.grad(loss, w)
        w = [(x - task.learning_rate * g).detach().requires_grad_() for x, g in zip(w, grads, strict=True)]
    sample = _Crew(BASE, task)._sample
    out = task.forward(w, task.train_x[sample])
    end = torch.nn.functional.cross_entropy(out, task.train_y[sample])
    expected = float(end.detach())
    for what in ("models", "gradients"):
        last = train(replace(BASE, what=what), None, points=1).end
        assert last.loss == pytest.approx(expected, rel=1e-5)
        assert last.spread < 1e-9 and last.lowest == pytest.approx(last.accuracy)


def test_gradient_averaging_drifts_and_rps_does_not() -> None:
    lossy = replace(BASE, method="RPS", arrival=0.9, steps=12)
    models, gradients = train(lossy, None, points=1), train(replace(lossy, what="gradients"), None, points=1)
    assert gradients.end.spread > 3 * models.end.spread > 0
    assert models.kept == gradients.kept > 0  # the same channel lost the same messages


def test_the_unit_of_loss_is_the_block_or_the_datagram() -> None:
    task = digits()
    block, datagram = _Crew(BASE, task), _Crew(replace(BASE, unit="datagram"), task)
    assert [len(block.offer()[0]), block.codec.elements] == [4, 9572]
    assert [len(datagram.offer()[0]), datagram.codec.elements] == [141, 272]


def test_dividing_by_n_shrinks_what_lost_contributions_left() -> None:
    setup = replace(BASE, what="gradients", method="RPS", arrival=0.5, steps=1)
    start = _Crew(setup, digits())._models
    ends = {}
    for divide in ("arrived", "n"):
        crew = _Crew(replace(setup, divide=divide), digits())
        offered = crew.offer()
        outcomes = [_outcome(mean, weight=2.0) for mean in offered]
        crew.apply(outcomes)
        ends[divide] = (crew._models - start).norm()
    assert float(ends["n"]) == pytest.approx(float(ends["arrived"]) / 2, rel=1e-4)


def test_averaged_momentum_travels_with_the_model() -> None:
    setup = replace(BASE, momentum=0.9, momentum_is="averaged", steps=2)
    crew = _Crew(setup, digits())
    first = crew.offer()
    assert first[0].size >= 2 * digits().size
    mean = np.mean(first, 0)
    crew.apply([_outcome(mean, 4.0) for _ in range(4)])
    assert torch.equal(crew._momentum[0], crew._momentum[3]) and crew._momentum.abs().sum() > 0
    local = train(replace(setup, momentum_is="local"), None, points=1)
    both = train(setup, None, points=1)
    assert np.isfinite([local.end.loss, both.end.loss]).all()


def test_stacked_replicas_are_a_crew_of_users_optimizers() -> None:
    """Each peer runs a user's loop over lines that lose the same messages: the models are the same."""
    setup = replace(BASE, method="RPS", arrival=0.8)
    task = digits()
    stacked = _Crew(setup, task)
    models: list[torch.Tensor] = []

    def then(done: int, outcomes: list[Outcome]) -> list[Floats] | None:
        stacked.apply(outcomes)
        models.append(stacked._models.clone())
        return stacked.offer() if done + 1 < setup.steps else None

    run_rounds(
        stacked.offer(),
        then,
        method=rps,
        faults=setup.faults,
        seed=setup.seed,
        codec=stacked.codec,
        number=channel_of("model"),
    )
    crew = SimulatedCrew(setup.n, line(0.0), setup.seed)
    crew.world.call(1.0, lambda _: crew.world._link.change(setup.faults))  # all have met by then
    parts = shards(task, setup.n, setup.seed, setup.by_label)

    def loop(peer: SimulatedTransport) -> tuple[list[torch.Tensor], int]:
        first = torch.cat([p.initial(setup.seed, i).flatten() for i, p in enumerate(task.parameters)])
        model = Values(first)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=task.learning_rate),
            peer,
            method=rps,
            model=model,
            codec=stacked.codec,
            seed=setup.seed,
        )
        batches = Batches(parts[peer.me], task.batch, setup.seed, peer.me)
        sizes = [int(np.prod(p.shape)) for p in task.parameters]
        found, lost = [], 0
        for step in range(setup.steps):
            peer.pause(1.0 + step - peer.now_s())  # all begin a round at once, as the stacked ones do
            at = torch.from_numpy(batches.next())
            optimizer.zero_grad()
            pieces = torch.split(model.values, sizes)
            w = [x.view(p.shape) for x, p in zip(pieces, task.parameters, strict=True)]
            torch.nn.functional.cross_entropy(task.forward(w, task.train_x[at]), task.train_y[at]).backward()
            optimizer.step()
            assert optimizer.outcome is not None
            lost += int((~optimizer.outcome.averaged).sum())
            found.append(model.values.detach().clone())
        return found, lost

    users = [came for came in crew.run(loop) if came is not None]
    assert sum(lost for _, lost in users) > 4
    for step, together in enumerate(models):
        theirs = torch.stack([found[step] for found, _ in users])
        torch.testing.assert_close(together, theirs, rtol=1e-4, atol=1e-6)


def _outcome(mean: np.ndarray, weight: float):
    k = len(mean)
    return Outcome(
        channel=0,
        round=0,
        mean=mean,
        weight=np.full(k, weight, np.float32),
        heard=np.zeros(k, np.uint64),
        averaged=np.ones(k, np.bool_),
        missed=(),
        waited_for=(),
        started_s=0.0,
        scatter_s=0.0,
        gather_s=0.0,
        total_s=0.0,
        expired=False,
    )
