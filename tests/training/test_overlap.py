"""Averages behind the next step: what they come to, and what they cost, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import pytest
import torch
from torch import nn

import ragtag
from ragtag.app.crew.peer import Peer
from ragtag.app.environment import Place
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Outcome
from ragtag.schedules.every import LocalSteps
from ragtag.schedules.matched import Matched
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew
from tests.training.simulated import TappedCrew


class Flat(nn.Module):
    def __init__(self, n: int = 300) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))


def pull(peer: int, step: int) -> torch.Tensor:
    """A step's gradient: another one on each peer."""
    return torch.full((1,), float(1 + peer) * (1 + step))


def trained(peer: SimulatedTransport, steps: int, n: int = 300, **options: Any) -> list[torch.Tensor]:
    """The model after each step, and at its end."""
    model = Flat(n)
    optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), peer, model=model, **options)
    seen = []
    for step in range(steps):
        peer.compute()
        model.w.grad = pull(peer.me, step).expand(n).clone()
        optimizer.step()
        seen.append(model.w.detach().clone())
    optimizer._averaged.settle()
    seen.append(model.w.detach().clone())
    return seen


@pytest.mark.parametrize("every", [1, 3])
def test_an_average_is_taken_over_one_step_later_with_what_that_step_changed(every: int) -> None:
    crew = SimulatedCrew(2, Faults(latency_s=0.001), cost=ComputeCost(0.05))
    found = crew.run(lambda peer: trained(peer, 8, every=every, overlap=True))
    models, sent = [0.0, 0.0], [0.0, 0.0]
    under_way = False
    for step in range(8):
        models = [w - float(pull(peer, step)) for peer, w in enumerate(models)]
        if under_way:
            mean = sum(sent) / 2
            models = [mean + (w - own) for w, own in zip(models, sent, strict=True)]
            under_way = False
        if (step + 1) % every == 0:
            sent, under_way = list(models), True
        for peer, seen in enumerate(found):
            assert seen is not None
            torch.testing.assert_close(seen[step], torch.full((300,), models[peer]), rtol=1e-5, atol=1e-4)
    if under_way:  # settled: no step has been taken since
        mean = sum(sent) / 2
        for seen in found:
            assert seen is not None
            torch.testing.assert_close(seen[-1], torch.full((300,), mean), rtol=1e-5, atol=1e-4)


def test_where_no_average_came_own_values_stay() -> None:
    crew = SimulatedCrew(2, Faults(loss=Loss(0.999), latency_s=0.001), cost=ComputeCost(0.05))
    found = crew.run(lambda peer: trained(peer, 4, every=1, overlap=True, deadline_s=0.2))
    for peer, seen in enumerate(found):
        assert seen is not None
        alone = -float(sum(pull(peer, step) for step in range(4)))
        assert (seen[3] == alone).float().mean() > 0.5


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_are_stepped_by_one_step_later(every: int) -> None:
    """Delayed parameter updates: what a step gathers meanwhile is of the next average, and whole."""
    crew = SimulatedCrew(2, Faults(latency_s=0.001), cost=ComputeCost(0.05))
    found = crew.run(lambda peer: trained(peer, 8, every=every, overlap=True, average="gradients"))
    model, due = 0.0, None
    gathered = list[float]()
    for step in range(8):
        gathered.append(sum(float(pull(peer, step)) for peer in range(2)) / 2)
        if due is not None:
            model, due = model - due, None
        if (step + 1) % every == 0:
            due = sum(gathered) / every
            gathered.clear()
        for seen in found:
            assert seen is not None
            torch.testing.assert_close(seen[step], torch.full((300,), model), rtol=1e-5, atol=1e-4)
    for seen in found:
        assert seen is not None
        settled = model if due is None else model - due
        torch.testing.assert_close(seen[-1], torch.full((300,), settled), rtol=1e-5, atol=1e-4)


def test_where_no_average_came_the_gradient_that_was_sent_counts() -> None:
    """Not what has been gathered since. In each round each peer has an average of some chunks of each owner:
    where an owner made none, nobody steps.
    """
    crew = SimulatedCrew(2, Faults(loss=Loss(0.3), latency_s=0.001), seed=3, cost=ComputeCost(0.05))
    outcomes: list[list[Outcome]] = [[], []]
    options = {"method": "rps", "every": 1, "overlap": True, "average": "gradients", "align": False}

    def keep(peer: int, outcome: Outcome) -> None:
        outcomes[peer].append(replace(outcome, mean=outcome.mean.copy()))  # its memory is used again

    found = crew.run(lambda peer: trained(peer, 4, 3_000, on_outcome=lambda o: keep(peer.me, o), **options))
    alone = 0
    for peer, seen in enumerate(found):
        model = torch.zeros(3_000)
        for step, outcome in enumerate(outcomes[peer]):
            mean = torch.from_numpy(outcome.mean.reshape(-1)[:3_000].copy())
            came = torch.from_numpy(outcome.averaged.repeat(outcome.mean.shape[1])[:3_000].copy())
            model -= torch.where(came, mean, pull(peer, step).expand(3_000))
            alone += int((~came).sum())
        assert seen is not None
        torch.testing.assert_close(seen[-1], model, rtol=1e-5, atol=1e-4)
    assert alone > 1_000


class Inputs:
    """A peer's batches, whose mean is 5; another stream on each."""

    def __init__(self, peer: int) -> None:
        self._stream = torch.Generator().manual_seed(peer)

    def next(self) -> torch.Tensor:
        return torch.randn(16, 4, generator=self._stream) + 5.0


def normed() -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def statistics_of(model: nn.Sequential) -> torch.Tensor:
    mean = model[0].running_mean
    assert isinstance(mean, torch.Tensor)
    return mean.clone()


def statistics(peer: SimulatedTransport, steps: int, **options: Any) -> list[torch.Tensor]:
    """BatchNorm's running mean after each step, and at the end."""
    model, inputs = normed(), Inputs(peer.me)
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), peer, model=model, average="gradients", **options
    )
    seen = []
    for _ in range(steps):
        peer.compute()
        optimizer.zero_grad()
        model(inputs.next()).square().mean().backward()
        optimizer.step()
        seen.append(statistics_of(model))
    optimizer._averaged.settle()
    seen.append(statistics_of(model))
    return seen


@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("options", [{"every": 1}, {"every": 3}, {"target_batch": 2.0, "weight": 1}], ids=str)
def test_what_forwards_do_to_buffers_meanwhile_stays(peers: int, options: dict[str, Any]) -> None:
    def found(**more: Any) -> list[list[torch.Tensor]]:
        crew = SimulatedCrew(peers, Faults(latency_s=0.001), cost=ComputeCost(0.05))
        seen = crew.run(lambda peer: statistics(peer, 24, **options, **more))
        return [one for one in seen if one is not None]

    plain, overlapped = found(), found(overlap=True)
    for one, other in zip(plain, overlapped, strict=True):
        assert all(not torch.equal(before, after) for before, after in pairwise(other[:-1]))
        torch.testing.assert_close(other[-1], one[-1], rtol=0.0, atol=0.15)


def seconds_per_step(rate: float, **options: Any) -> float:
    """The median time of a step in which .05 s are computed, of 600,000 values on lines of a rate."""
    crew = SimulatedCrew(4, Faults(latency_s=0.001, rate_bytes_per_s=rate), cost=ComputeCost(0.05))

    def train(peer: SimulatedTransport) -> list[float]:
        model = Flat(600_000)
        optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer, model=model, **options)
        took = []
        for _ in range(12):
            began_s = peer.now_s()
            peer.compute()
            model.w.grad = torch.ones_like(model.w)
            optimizer.step()
            took.append(peer.now_s() - began_s)
        optimizer._averaged.settle()
        return took[4:]

    return median(t for took in crew.run(train) if took is not None for t in took)


@pytest.mark.parametrize(("rate", "average"), [(1.2e8, "models"), (5e7, "models"), (5e7, "gradients")])
def test_an_average_is_hidden_behind_a_step_or_a_step_behind_an_average(rate: float, average: str) -> None:
    plain = seconds_per_step(rate, average=average)
    overlapped = seconds_per_step(rate, average=average, overlap=True)
    round_s = plain - 0.05
    assert round_s > 0.02
    assert overlapped <= 1.1 * max(0.05, round_s), (overlapped, round_s)
    assert overlapped < 0.8 * plain


@pytest.mark.parametrize("quorum", [0, 3])
def test_where_a_quorum_is_enough_no_step_waits_for_an_average(quorum: int) -> None:
    """Rounds last longer than the steps between two. The next one begins with the step after one is over."""
    steps, step_s, latency_s = 80, 0.05, 0.15
    crew = SimulatedCrew(4, Faults(latency_s=latency_s), cost=ComputeCost(step_s))
    outcomes: list[Outcome] = []

    def train(peer: SimulatedTransport) -> float:
        model = Flat()
        options: dict[str, Any] = {"on_outcome": outcomes.append} if peer.me == 0 else {}
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), peer, model=model, every=4,
            method=ragtag.RPS(quorum=quorum), outer=ragtag.Outer(1.0, 0.0, delay=3), **options,
        )  # fmt: skip
        began_s = peer.now_s()
        for step in range(steps):
            peer.compute()
            model.w.grad = pull(peer.me, step).expand(300).clone()
            optimizer.step()
        return peer.now_s() - began_s

    took_s = max(found for found in crew.run(train) if found is not None)
    assert len(outcomes) >= 8 and all(outcome.averaged.all() for outcome in outcomes)
    if quorum == 0:
        assert took_s > 1.2 * steps * step_s
        return
    assert took_s == pytest.approx(steps * step_s)
    starts_s = [outcome.started_s for outcome in outcomes]
    apart_s = [later_s - earlier_s for earlier_s, later_s in pairwise(starts_s)]
    assert median(apart_s) == pytest.approx(2 * latency_s + step_s, abs=step_s)


def test_steps_behind_an_average_count_as_computed_for_the_next_one() -> None:
    """Peer 1 takes as long for a step as peer 0 for four: it averages after each of its own, and waits for
    nobody."""
    crew = SimulatedCrew(2, Faults(latency_s=0.001), cost=ComputeCost(0.05, speed=[1.0, 0.25]))

    def train(peer: SimulatedTransport) -> tuple[float, int]:
        model, outcomes = Flat(), list[Outcome]()
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), peer, model=model,
            schedule=Matched(), overlap=True, on_outcome=outcomes.append,
        )  # fmt: skip
        for step in range(30 if peer.me else 120):
            peer.compute()
            model.w.grad = pull(peer.me, step).expand(300).clone()
            optimizer.step()
        return peer.now_s(), len(outcomes)

    fast, slow = crew.run(train)
    assert fast is not None and slow is not None
    assert slow[0] <= 1.05 * 30 * 0.2
    assert fast[1] >= 27 and slow[1] >= 27


@pytest.mark.parametrize("least", [0, 5])
def test_peers_that_follow_the_first_stay_together_and_wait_for_nobody(least: int) -> None:
    """One of six takes a fifth longer for a step, and all vary. Without ``least`` they come apart."""
    n, steps, step_s = 6, 200, 0.05
    cost = ComputeCost(step_s, speed=[1.0] * (n - 1) + [1 / 1.2], sigma=0.2, seed=3)
    crew = SimulatedCrew(n, Faults(latency_s=0.005), cost=cost)

    def train(peer: SimulatedTransport) -> tuple[float, float, list[Outcome]]:
        outcomes: list[Outcome] = []
        model, computed_s = Flat(), 0.0
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), peer, model=model, method=ragtag.RPS(quorum=4),
            schedule=LocalSteps(10, least), outer=ragtag.Outer(1.0, 0.0, delay=9), on_outcome=outcomes.append,
        )  # fmt: skip
        began_s = peer.now_s()
        for step in range(steps):
            at_s = peer.now_s()
            peer.compute()
            computed_s += peer.now_s() - at_s
            model.w.grad = pull(peer.me, step).expand(300).clone()
            optimizer.step()
        return computed_s, peer.now_s() - began_s, outcomes

    ends = [end for end in crew.run(train) if end is not None]
    assert all(took_s == pytest.approx(computed_s) for computed_s, took_s, _ in ends)
    starts_s: dict[int, list[float]] = {}
    for _, _, outcomes in ends:
        for outcome in outcomes:
            starts_s.setdefault(outcome.round, []).append(outcome.started_s)
    apart_s = [max(begun) - min(begun) for begun in starts_s.values() if len(begun) == n]
    assert (max(apart_s) < 5 * step_s) == bool(least), apart_s
    complete = [bool((o.heard == (1 << n) - 1).all()) for _, _, outcomes in ends for o in outcomes]
    share = sum(complete) / len(complete)
    assert share > 0.85 if least else share < 0.6


@pytest.mark.parametrize(
    "options", [{"every": 3, "overlap": True}, {"every": 4, "outer": ragtag.Outer(delay=3)}]
)
def test_a_round_knows_when_its_average_is_due(options: dict[str, Any]) -> None:
    """As many steps later as the script asks for, each as long as it takes here."""
    crew, step_s = TappedCrew(2), 0.05
    crew.cost = ComputeCost(step_s)
    crew.run(lambda peer: trained(peer, 20, **options))
    delay = 1 if "overlap" in options else 3
    overlaps_s = [ask.overlap_s for ask in crew.asked]
    assert overlaps_s[:2] == [0.0, 0.0] and len(overlaps_s) >= 10
    assert overlaps_s[2:] == pytest.approx([delay * step_s] * len(overlaps_s[2:]))


def test_a_newcomer_gets_into_step_before_it_begins_one() -> None:
    model, outcomes = Flat(), list[Outcome]()
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), FakeCrew(1).transport(0), model=model, overlap=True,
        on_outcome=outcomes.append,
    )  # fmt: skip
    other = Flat()
    crew = CrewOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), FakeCrew(1).transport(0), model=other)
    brought = crew.average()
    optimizer._averaged.arrive = lambda: brought
    for _ in range(3):
        model.w.grad = torch.ones_like(model.w)
        optimizer.step()
    assert outcomes[0] is brought and len(outcomes) == 2
    assert optimizer._averaged.arrive is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"outer": ragtag.Outer(), "every": 5}, "Outer\\(delay=1\\)"),
        ({"compress": ragtag.TopK(0.1)}, "give one of them"),
        ({"schedule": "partial"}, "every=..."),
        ({"schedule": "asynchronous"}, "central state"),
    ],
)
def test_what_does_not_go_with_it_is_said(options: dict[str, Any], why: str) -> None:
    model = Flat()
    with pytest.raises(ValueError, match=why):
        CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), FakeCrew(1).transport(0), model=model, overlap=True,
            **options,
        )  # fmt: skip
    with pytest.raises(TypeError, match="True or False"):
        CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), FakeCrew(1).transport(0), model=model, overlap=2,
        )  # fmt: skip


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_two_optimizers_of_one_model_correct_its_buffers_once(
    average: Literal["models", "gradients"],
) -> None:
    """Corrected twice, what peers are apart keeps its size, and each batch adds to it."""

    def spread(optimizers: int) -> float:
        def train(peer: SimulatedTransport) -> list[torch.Tensor]:
            crew = ragtag.Crew(Peer(Place(peer.me, 4, "test", seed=1), peer, None, None, 0.0))  # type: ignore[arg-type]
            model, inputs = normed(), Inputs(peer.me)
            groups = [model.parameters()] if optimizers == 1 else [part.parameters() for part in model]
            made = [
                crew.optimizer(torch.optim.SGD(group, lr=0.01), model=model, average=average, overlap=True)
                for group in groups
            ]
            seen = []
            for _ in range(60):
                peer.compute()
                model(inputs.next()).square().mean().backward()
                for optimizer in made:
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(statistics_of(model))
            crew._peer.left = True
            return seen

        crew = SimulatedCrew(4, Faults(latency_s=0.001), cost=ComputeCost(0.05))
        found = torch.stack([torch.stack(one) for one in crew.run(train) if one is not None])
        return float(found[:, 20:].std(0).mean())

    assert spread(2) < 1.5 * spread(1)
