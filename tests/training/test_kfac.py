"""K-FAC with a crew in virtual time: what one process with the joint batch gets, and what goes wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ragtag
from ragtag.app.crew.transport import SoloTransport
from ragtag.codecs.dense import int8
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.optim.kfac.placement import LayerSize
from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.recipes.abreast import Keeps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.kfac import COSTS, CrewCommunicator, CrewSteps, Rows, require_gradients
from ragtag.training.named import Newest
from ragtag.training.optimizer.optimizer import CrewOptimizer

STEP_S = 0.05
SETTINGS: dict[str, Any] = {"damping": 0.01, "factor_every": 1, "inverse_every": 4, "scaling": "fisher"}


def crew(n: int, **faults: Any) -> SimulatedCrew:
    lines = Faults(**{"latency_s": 0.001, "rate_bytes_per_s": 1e8, **faults})
    return SimulatedCrew(n, lines, seed=3, cost=ComputeCost(STEP_S), check=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(4).eval(), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5))


def batch(step: int, at: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 24 images, or a part of them."""
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(24, 1, 4, 4, generator=rng)
    return x[at], (x.sum((1, 2, 3)) > 0).long()[at] + 2 * (x[:, 0, 0, 0] > 0).long()[at]


class Watched(torch.optim.SGD):
    """Remembers the gradients that it takes its steps with."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9)
        self.taken: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        """Hooks have had their turn."""
        self.taken.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def made(
    peer: SimulatedTransport | SoloTransport,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    **options: Any,
) -> tuple[CrewOptimizer, KFAC]:
    """As ``crew.optimizer`` and ``crew.kfac`` make them."""
    how = {"placement": "communication", "cost": "compute", **options}
    placement, cost = how.pop("placement"), how.pop("cost")
    averager = how.pop("factors", how.get("method"))
    weight, average = how.pop("weight", 1.0), how.pop("average", "gradients")
    optimizer = CrewOptimizer(
        inner,
        peer,
        method=how.pop("method", None),
        model=model,
        average=average,
        weight=weight,
        target_batch=how.pop("target_batch", None),
    )
    steps = CrewSteps([optimizer._averaged], inner, peer.heard_of)
    require_gradients(placement, steps)

    def joined(needs: Any) -> CrewCommunicator:
        return CrewCommunicator(
            peer,
            "kfac",
            needs,
            placement=placement,
            cost=cost,
            steps=steps,
            averager=averager,
            seed=3,
        )

    return optimizer, KFAC(model, inner, communicator=joined, **{**SETTINGS, **how})


def take_step(
    model: nn.Module, optimizer: CrewOptimizer, kfac: KFAC, x: torch.Tensor, y: torch.Tensor
) -> None:
    """As a user's loop does for a batch."""
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    optimizer.step()


Part = Callable[[int, int], slice]
SIZES = ((0, 4), (4, 12), (12, 24))


def of_three(peer: int, step: int) -> slice:
    """Parts of unlike size."""
    return slice(*SIZES[peer])


def trained(
    peer: SimulatedTransport | SoloTransport, steps: int, part: Part | None = of_three, **options: Any
) -> dict[str, Any]:
    """What a peer's training came to; part: of the joint batch; ``None``: all of it."""
    model = net()
    inner = Watched(model, 0.05)
    size = 0
    optimizer, kfac = made(peer, model, inner, weight=lambda: float(size), **options)
    ages, took_s, plain, losses = [], [], [], []
    for step in range(steps):
        began_s = peer.now_s()
        if isinstance(peer, SimulatedTransport):
            peer.compute()
        x, y = batch(step, slice(None) if part is None else part(peer.me, step))
        size = len(x)
        take_step(model, optimizer, kfac, x, y)
        took_s.append(peer.now_s() - began_s)
        ages.append(kfac.age)
        plain.append(kfac.plain)
        with torch.no_grad():
            x, y = batch(step)
            losses.append(functional.cross_entropy(model(x), y).item())
    return {
        "grads": inner.taken,
        "ages": ages,
        "took_s": took_s,
        "plain": plain,
        "losses": losses,
        "kfac": kfac,
        "values": [p.detach().clone() for p in model.parameters()],
    }


@pytest.mark.parametrize("placement", ["communication", "memory", 0.67])
@pytest.mark.parametrize("block_rows", [None, 7])
def test_a_crew_preconditions_as_one_process_with_the_joint_batch(
    placement: Any, block_rows: int | None
) -> None:
    """Where nothing is lost, whoever preconditions, also by blocks of factors, which are several
    peers'. Parts of the batch are of unlike size.
    """
    alone = trained(SoloTransport(3), 11, None, block_rows=block_rows)
    plain = nn.utils.parameters_to_vector(trained_by_sgd(11))
    options = {"placement": placement, "method": "allreduce", "block_rows": block_rows}
    crews = crew(3).run(lambda peer: trained(peer, 11, **options))
    workers = {"communication": 3, "memory": 1, 0.67: 2}[placement]
    assert sum(found["ages"][-1] is not None for found in crews) >= workers  # type: ignore[index]
    for found in crews:
        assert found is not None
        for step, (ours, theirs) in enumerate(zip(found["grads"], alone["grads"], strict=True)):
            for a, b in zip(ours, theirs, strict=True):
                assert (a - b).norm() <= 2e-5 * b.norm(), step
        if found["ages"][-1] is not None:
            assert found["ages"] == alone["ages"] == [None, 0, 1, 2, 4, 0, 1, 2, 4, 0, 1]
        assert found["plain"] == [("0", "4"), *[()] * 10]
    values = nn.utils.parameters_to_vector(alone["values"])
    assert (values - plain).norm() > 0.1 * plain.norm(), "it does something"


def trained_by_sgd(steps: int) -> list[torch.Tensor]:
    model = net()
    optimizer = Watched(model, 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def own_part(peer: int, step: int) -> slice:
    """A quarter."""
    return slice(6 * peer, 6 * peer + 6)


@pytest.mark.parametrize("placement", ["communication", pytest.param("memory", marks=pytest.mark.slow)])
def test_with_loss_a_killed_and_a_frozen_owner_steps_go_on_and_ages_are_told(placement: Any) -> None:
    """Of four, one dies for good; another stands still for 5 s, fifty steps, and comes back."""
    step_s = 2 * STEP_S
    lines = Faults(
        loss=Loss(0.1),
        latency_s=0.001,
        rate_bytes_per_s=1e8,
        crashes=(Crash(1, 20.3 * step_s),),
        freezes=(Freeze(2, 35.3 * step_s, 5.0),),
    )
    four = SimulatedCrew(4, lines, seed=3, cost=ComputeCost(step_s), check=True)
    made = four.run(lambda peer: trained(peer, 110, own_part, placement=placement, inverse_every=3))
    assert made[1] is None and made[2] is not None
    for found in (made[0], made[3]):
        assert found is not None
        ages = [age for age in found["ages"] if age is not None]
        oldest = max(ages[10:85])
        assert oldest <= 3 * 4, "until its second owner computes"
        assert oldest > 3 or placement == "memory", "an owner was silent, and that is told"
        # of a crew that is lost from sight for a step a layer comes with the basis that was here before
        assert sorted(ages[-10:])[-2] <= 3 * 2
        assert sorted(found["took_s"])[-4] < 1.5 * median(found["took_s"]), "a death costs some deadlines"
        # rows of gradients go two ways, each of which loses a tenth; a worker is back before it is in step
        assert sum(map(bool, found["plain"][5:])) < (10 if placement == "communication" else 0.2 * 105 + 15)
        assert sum(found["losses"][60:80]) < 0.7 * sum(found["losses"][:20])


def wide_net() -> nn.Sequential:
    """Of several chunks, so that each peer owns some."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 5))


@pytest.mark.parametrize(("model_of", "seed"), [(wide_net, 5), (net, 4)])
def test_a_peer_that_was_frozen_publishes_bases_for_a_step_to_come(
    model_of: Callable[[], nn.Module], seed: int
) -> None:
    """It made them before, for a step that the others have long taken. These would begin to use them at
    different steps, as they come. The small net has one chunk: in each round all wait for its owner alone,
    and this one for the peer that comes back.
    """

    late = []

    class Steps(CrewSteps):
        def begun(self) -> int:
            late.append(super().begun() - (self.taken() or 0) > 5)
            return super().begun()

    def train(peer: SimulatedTransport) -> dict[int, torch.Tensor]:
        model, after, keeps = model_of(), dict[int, torch.Tensor](), Keeps(peer, seed)
        inner = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        how: dict[str, Any] = {"average": "gradients", "method": "rps+repair", "seed": seed}
        optimizer = CrewOptimizer(inner, peer, model=model, **how, **keeps.hooks)
        steps, crews = Steps([optimizer._averaged], inner, peer.heard_of), list[CrewCommunicator]()

        def joined(needs: Any) -> CrewCommunicator:
            crews.append(CrewCommunicator(peer, "kfac", needs, steps=steps, seed=seed))
            return crews[0]

        kfac = KFAC(model, inner, communicator=joined, **SETTINGS)
        keeps.keeper.keep(kfac=kfac, tensors=crews[0].tensors)
        for step in range(56):
            peer.compute()
            x, y = batch(step, own_part(peer.me, step))
            take_step(model, optimizer, kfac, x, y)
            if optimizer.outcome is not None:
                after[optimizer.outcome.round] = nn.utils.parameters_to_vector(model.parameters()).detach()
        return after

    frozen = Freeze(2, (20.3 + 0.37 * seed) * STEP_S, 1.0 + 0.13 * seed)
    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, freezes=(frozen,))
    first, *others = SimulatedCrew(4, lines, seed=seed, cost=ComputeCost(STEP_S)).run(train)
    assert first is not None and any(late)
    for other in others:
        assert other is not None
        common = [at for at in other if at in first and at < 55]
        assert [at for at in common if not torch.equal(other[at], first[at])] == []
        assert max(common) > 50


def test_the_same_seed_gives_the_same_run() -> None:
    def once() -> list[float]:
        found = crew(3, loss=Loss(0.1)).run(lambda peer: trained(peer, 8))[0]
        assert found is not None
        return [found["losses"][-1], found["took_s"][-1]]

    assert once() == once()


def test_local_steps_are_preconditioned_too() -> None:
    """Models are averaged: each peer takes its own steps, at once by the newest basis that it has."""

    def train(peer: SimulatedTransport) -> dict[str, Any]:
        return trained(peer, 20, own_part, average="models", inverse_every=2)

    for found in crew(2).run(train):
        assert found is not None
        assert found["plain"][2:] == [()] * 18 and max(found["ages"][2:]) <= 3
        assert sum(found["losses"][-4:]) < 0.7 * sum(found["losses"][:4])


def test_a_factor_that_is_not_finite_at_one_peer_is_named_there_and_the_crew_goes_on() -> None:
    told: list[tuple[int, str, str]] = []

    def train(peer: SimulatedTransport) -> dict[str, Any]:
        model = net()
        inner = Watched(model, 0.05)
        optimizer, kfac = made(peer, model, inner, on_note=lambda *note: told.append((peer.me, *note)))
        for step in range(12):
            peer.compute()
            x, y = batch(step, own_part(peer.me, step))
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            if peer.me == 1 and 3 <= step < 6:
                layer = kfac.layers["4"]
                assert layer._sums is not None
                layer._sums[0][0, 0] = math.nan
            kfac.step()
            optimizer.step()
        return {"kfac": kfac, "factors": [one.factors["A"] for one in kfac.layers.values()]}

    found = crew(3).run(train)
    what = "passes that are not finite: they are left out of its factors"
    assert told == [(1, "4", what)]
    for one in found:
        assert one is not None
        assert one["kfac"].plain == () and one["kfac"].age <= 4
        assert all(torch.isfinite(factor).all() for factor in one["factors"])
    assert [one["kfac"].dropped for one in found if one is not None] == [0, 3, 0]


class Forked(nn.Module):
    """Two experts, of which a peer runs one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](x)


@pytest.mark.parametrize("cost", ["compute", "measured"])
def test_a_layer_counts_at_the_peers_that_run_it_alone(cost: Any) -> None:
    """Of three, one runs expert 0: its factors are that peer's, and who decomposes them may be another."""

    def train(peer: SimulatedTransport) -> dict[str, Any]:
        model = Forked()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)  # so that output gradients are the same, too
        optimizer, kfac = made(peer, model, inner, method="allreduce", cost=cost)
        for step in range(8):
            peer.compute()
            optimizer.zero_grad()
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + peer.me))
            model(x, min(peer.me, 1)).square().mean().backward()
            kfac.step()
            optimizer.step()
        kfac._settle()
        return {"factors": [dict(one.factors) for one in kfac.layers.values()], "ages": kfac.ages()}

    alone = crew(1).run(train)[0]
    assert alone is not None
    for found in crew(3).run(train):
        assert found is not None
        for side in ("A", "G"):
            assert torch.allclose(found["factors"][0][side], alone["factors"][0][side], rtol=1e-4)
        assert all(age is not None for age in found["ages"].values())


@pytest.mark.parametrize("cost", ["time", None, "cube"])
def test_what_is_no_cost_is_refused(cost: Any) -> None:
    with pytest.raises(ValueError, match='give "compute", "memory" or "measured"'):
        trained(SoloTransport(1), 1, None, cost=cost)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("damping", (0.01, 0.1)),
        ("factor_every", (1, 2)),
        ("inverse_every", (4, 5)),
        ("form", ("eigen", "inverse")),
        ("factor_dtype", (torch.float32, torch.float64)),
        ("cost", ("compute", "measured")),
    ],
)
def test_peers_with_other_settings_are_refused_before_anything_is_averaged(
    what: str, values: tuple[Any, Any]
) -> None:
    def train(peer: SimulatedTransport) -> None:
        model = net()
        made(peer, model, Watched(model, 0.05), **{what: values[peer.me]})

    here, there = (f"with {what} {value}" for value in values)
    both = "|".join(re.escape(f"{a}, the other {b}. Build") for a, b in ((here, there), (there, here)))
    with pytest.raises(ragtag.SchemaMismatch, match=f"kfac: averaged ({both}) the same .* settings"):
        crew(2).run(train)


def test_peers_with_other_layers_are_told_which() -> None:
    def train(peer: SimulatedTransport) -> None:
        model = net()
        made(peer, model, Watched(model, 0.05), skip=("4",) if peer.me else ())

    with pytest.raises(ragtag.SchemaMismatch, match=r"tensor 2: .*'4\.A' \(17, 17\)"):
        crew(2).run(train)


def test_a_run_goes_on_from_a_crews_state() -> None:
    """Factors and counts by K-FAC's own state, bases by that of the named tensors."""
    states: dict[str, Any] = {}

    def first(peer: SimulatedTransport) -> None:
        found = trained(peer, 7, own_part)
        if peer.me == 0:
            kfac = found["kfac"]
            states.update(kfac=kfac.state_dict(), bases=kfac._peers.tensors.state_dict())

    def second(peer: SimulatedTransport) -> KFAC:
        model = net()
        _, kfac = made(peer, model, Watched(model, 0.05))
        kfac.load_state_dict(states["kfac"])
        kfac._peers.tensors.load_state_dict(states["bases"])
        peer.pause(1.0)
        return kfac

    crew(2).run(first)
    assert "bases" not in states["kfac"]
    for kfac in crew(2).run(second):
        assert kfac is not None and kfac.steps == 7
        assert all(age is not None and age <= 4 for age in kfac.ages().values())
        for name, layer in kfac.layers.items():
            assert torch.equal(layer.factors["A"], states["kfac"]["factors"][f"{name}.A"])


def stepped(
    peer: SimulatedTransport, steps: int, prepare: Callable[[KFAC], None], **options: Any
) -> list[dict[str, int | None]]:
    """The ages after each step of a training, whose K-FAC is prepared first."""
    model = net()
    optimizer, kfac = made(peer, model, Watched(model, 0.05), **options)
    prepare(kfac)
    ages = []
    for step in range(steps):
        peer.compute()
        x, y = batch(step, own_part(peer.me, step))
        take_step(model, optimizer, kfac, x, y)
        ages.append(kfac.ages())
    return ages


def test_a_peer_that_is_not_in_step_uses_bases_at_once() -> None:
    """It came without the crew's state, and its count of steps is another."""

    def train(peer: SimulatedTransport) -> list[dict[str, int | None]]:
        def prepare(kfac: KFAC) -> None:
            kfac.steps = 1000 * (1 - peer.me)

        return stepped(peer, 9, prepare)

    for ages in crew(2).run(train):
        assert ages is not None
        for step in ages[2:]:
            assert all(age is not None and age <= 4 for age in step.values())


@pytest.mark.parametrize("slowest_s", [0.1, 0.25])
def test_towards_a_target_batch_replicas_stay_the_same(slowest_s: float) -> None:
    """Peers have unlike numbers of batches for a step, and the slowest none for some steps of .3 s. Nobody
    waits for others' factors.
    """

    def train(peer: SimulatedTransport) -> tuple[dict[int, torch.Tensor], int]:
        model, seen = net(), dict[int, torch.Tensor]()
        inner = Watched(model, 0.05)
        optimizer, kfac = made(
            peer,
            model,
            inner,
            method="allreduce",
            factors=None,
            target_batch=48,
            weight=6,
            damping=lambda step: 0.01 + 0.01 * (step // 3),
        )
        number = 0
        while (outcome := optimizer.outcome) is None or outcome.round < 14:
            peer.pause((0.05, 0.08, slowest_s)[peer.me])
            x, y = batch(number, own_part(peer.me, 0))
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            began_s = peer.now_s()
            kfac.step()
            assert peer.now_s() == began_s
            optimizer.step()
            number += 1
            if optimizer.outcome is not None:
                seen[optimizer.outcome.round] = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert kfac.plain == () and kfac.steps == 15
        return seen, number

    (first, batches), *others = (one for one in crew(3).run(train) if one is not None)
    for seen, fewer in others:
        common = seen.keys() & first.keys()
        assert fewer < batches and len(common) >= 5
        assert [at for at in sorted(common) if not torch.equal(seen[at], first[at])] == []


@pytest.mark.parametrize(
    "faults",
    [Faults(latency_s=0.005), pytest.param(Faults(latency_s=0.005, loss=Loss(0.05)), marks=pytest.mark.slow)],
)
def test_towards_a_target_batch_factors_cost_nobody_a_gradient(faults: Faults) -> None:
    """All begin their rounds of factors where the crew takes its step, also a peer that has none to give: one
    that began them at a batch of its own was silent there, and then rounds of gradients did not wait for it.
    All batches of a step go into its factors.
    """

    def counts(with_kfac: bool) -> list[tuple[float, float, int]]:
        def train(peer: SimulatedTransport) -> tuple[float, float, int]:
            model = net()
            inner = Watched(model, 0.05)
            notes: list[tuple[str, str]] = []
            optimizer, kfac = made(
                peer,
                model,
                inner,
                method="allreduce",
                factors=None,
                target_batch=48,
                weight=6,
                on_note=lambda layer, what: notes.append((layer, what)),
            )
            if not with_kfac:
                kfac.close()
            weights: list[float] = []
            average = kfac._peers.average
            kfac._peers.average = (  # type: ignore[method-assign]
                lambda factors, weight: weights.append(weight) or average(factors, weight)
            )
            number = 0
            while (outcome := optimizer.outcome) is None or outcome.round < 30:
                peer.pause((0.05, 0.08, 0.08, 0.4)[peer.me])
                x, y = batch(number, own_part(peer.me % 3, 0))
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                if with_kfac:
                    kfac.step(samples=6)
                optimizer.step()
                number += 1
            assert sum(weights) == (6 * number if with_kfac else 0)
            of = optimizer.samples
            assert of is not None
            assert notes == [], "nor is a peer that computes no batch told that its passes are not seen"
            return of.computed, of.counted, of.steps

        return [one for one in SimulatedCrew(4, faults, seed=1).run(train) if one is not None]

    assert counts(True) == counts(False)


def test_a_second_owner_decomposes_for_one_that_lives_and_is_silent() -> None:
    """Peer 1 trains on, and publishes nothing from its 9th step on."""

    def train(peer: SimulatedTransport) -> list[dict[str, int | None]]:
        def prepare(kfac: KFAC) -> None:
            publish = kfac._peers.publish
            if peer.me == 1:
                kfac._peers.publish = lambda values, took_s, late, step: publish(  # type: ignore[method-assign]
                    values if step < 9 else {}, took_s, late, step
                )

        return stepped(peer, 40, prepare, inverse_every=2)

    for ages in crew(3).run(train):
        assert ages is not None
        oldest = [max(age for age in step.values() if age is not None) for step in ages[2:]]
        assert 2 * 2 < max(oldest[8:]) <= 2 * 4 and max(oldest[20:]) <= 2 + 3


WIDTHS = (24, 3, 4, 5, 6, 7, 8, 9, 10)
"""By cubes, one factor outweighs all others together."""


def placed(
    peer: SimulatedTransport, until_s: float, seconds: Callable[[int, int], float], **options: Any
) -> list[dict[str, Any]]:
    """By what a peer places, and where, at each step; seconds: of its decomposition of a size.

    All of the crew's peers take the same seeds; what is measured is given here, so that a run is its seed.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))
    optimizer, kfac = made(peer, model, Watched(model, 0.01), cost="measured", **options)
    crew = kfac._peers
    assert isinstance(crew, CrewCommunicator)
    publish, size_of = crew.publish, {name: one.shape[-1] for name, one in crew._needs.computed.items()}

    def timed(values: Any, took_s: Any, late: int, step: int) -> None:
        assert took_s.keys() == values.keys() and all(one > 0 for one in took_s.values())
        publish(values, {name: seconds(peer.me, size_of[name]) for name in took_s}, late, step)

    crew.publish = timed  # type: ignore[method-assign]
    found: list[dict[str, Any]] = []
    while peer.now_s() < until_s:
        step = len(found)
        peer.compute()
        optimizer.zero_grad()
        model(
            torch.randn(6, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        kfac.step()
        optimizer.step()
        owners = {name: pair.first for name, pair in crew.tensors.owners(crew._costs).items()}
        found.append(
            {
                "costs": crew._costs,
                "owners": owners,
                "live": peer.live,
                "age": kfac.age,
                "publishes": crew._publishes_costs,
                "formula": crew._costs == crew._priced(crew._formula),
            }
        )
    return found


def spread(owners: dict[str, int], seconds: Callable[[int, int], float], peers: int) -> float:
    """The largest load over the mean, of what decompositions take."""
    sizes = [size for pair in pairwise(WIDTHS) for size in pair]
    names = [name for name in owners if name != COSTS]
    loads = [0.0] * peers
    for name, size in zip(names, sizes, strict=True):
        loads[owners[name]] += seconds(0, size)
    return max(loads) * peers / sum(loads)


def steady(peer: int, size: int) -> float:
    """Small matrices take as long as large ones: what a call takes; and peers are of unlike speed."""
    return (1e-3 + 8e-8 * size**3) * (1 + peer)


@pytest.mark.parametrize("placement", ["communication", "memory"])
def test_owners_follow_from_measured_costs_from_one_step_on(placement: Any) -> None:
    runs = crew(3).run(lambda peer: placed(peer, 3.0, steady, placement=placement))
    assert all(run is not None for run in runs)
    first, last = runs[0][0]["owners"], runs[0][-1]["owners"]  # type: ignore[index]
    assert spread(first, steady, 3) > 1.4, "by cubes"
    assert spread(last, steady, 3) <= 1.1, "as measured"
    for at, looks in enumerate(zip(*runs, strict=True)):  # type: ignore[arg-type]
        assert all(look["owners"] == looks[0]["owners"] for look in looks), f"owners differ at step {at}"
        assert sum(look["publishes"] for look in looks) <= 1
        ages = [look["age"] for look in looks if placement == "communication" or look["age"] is not None]
        # whoever was a basis's owner and is its second one makes it for a turn more, and works on its layer
        late = 4 if placement == "communication" else 2 * 4
        assert at < 2 or max(ages) <= late, "no basis is late for it"
    settled = runs[0][len(runs[0]) // 2 :]  # type: ignore[index]
    assert all(look["owners"] == last for look in settled), "times that are measured again move nothing"


def test_where_cubes_are_right_measured_costs_move_nothing() -> None:
    runs = crew(3).run(lambda peer: placed(peer, 2.5, lambda me, size: 1e-7 * (1 + me) * size**3))
    for run in runs:
        assert run is not None and all(look["formula"] for look in run)


@pytest.mark.parametrize("placement", ["communication", "memory"])
def test_measured_costs_outlive_the_peer_that_publishes_them_and_reach_one_that_was_away(
    placement: Any,
) -> None:
    """Of four, with a tenth lost: the publisher of costs dies, and another peer stands still meanwhile."""
    calm = crew(4).run(lambda peer: placed(peer, 1.9, steady))
    publishes = next(me for me, run in enumerate(calm) if run is not None and run[-1]["publishes"])
    frozen = (publishes + 1) % 4
    lines = {
        "loss": Loss(0.1),
        "crashes": (Crash(publishes, 1.95),),
        "freezes": (Freeze(frozen, 1.95, 2.0),),
    }
    begun = crew(4, **lines).run(lambda peer: placed(peer, 7.0, steady, placement=placement))
    left = [run for run in begun if run is not None]
    assert len(left) == 3
    for run in left:
        assert not run[-1]["formula"] and run[-1]["costs"] == left[0][-1]["costs"]
        assert run[-1]["owners"] == left[0][-1]["owners"]
        alive = sorted(run[-1]["live"])
        assert publishes not in alive
        own = {name: alive.index(owner) for name, owner in run[-1]["owners"].items()}
        assert spread(own, steady, 3) <= 1.25, "names of a dead peer go to the living, others stay"
        assert run[-1]["age"] is None or run[-1]["age"] <= 8


@pytest.mark.parametrize("step", [0, 255, 256, 1001, 70_001, (1 << 24) - 1, (1 << 24) + 5])
def test_stamps_are_exact_in_each_codec_that_is_taken(step: int) -> None:
    for codec in ("fp32", "bf16"):
        done = [step - 1]

        class Counted(CrewSteps):
            def taken(self, done: list[int] = done) -> int:
                return done[0]

        def alone(given: Any, codec: Any = codec, steps: CrewSteps = Counted()) -> CrewCommunicator:  # noqa: B008
            return CrewCommunicator(SoloTransport(0), "kfac", given, codec=codec, steps=steps)

        kfac = KFAC(nn.Linear(3, 2), lr=0.1, communicator=alone)
        peers = kfac._peers
        peers.publish({"model.G.eigen": torch.ones(3, 2)}, {"model.G.eigen": 1.0}, 0, 7)
        done[0] += 1
        assert peers.newest("model.G.eigen", 7) is None, "all use it from the next step on"
        done[0] += 1
        assert peers.newest("model.G.eigen", 7) is not None


@pytest.mark.parametrize("odd", [math.inf, -math.inf, 1e30, -1e30, -1.0])
def test_what_another_peer_publishes_stops_nobody(odd: float) -> None:
    kfac = KFAC(
        nn.Linear(3, 2),
        lr=0.1,
        communicator=lambda needs: CrewCommunicator(SoloTransport(0), "kfac", needs, cost="measured"),
    )
    crew = kfac._peers
    assert isinstance(crew, CrewCommunicator)
    crew.tensors.newest = lambda name: Newest(torch.full((8,), odd), 1, 1, 0, 0.0, 0)  # type: ignore[method-assign]
    assert sorted(crew.mine(3)) == ["model.A.eigen", "model.G.eigen"]


def test_int8_leaves_too_little_of_a_basis_and_is_refused() -> None:
    for codec in ("int8", int8):
        with pytest.raises(ValueError, match=r'give "bf16" or "fp32"'):
            KFAC(
                nn.Linear(3, 2),
                lr=0.1,
                communicator=lambda needs, codec=codec: CrewCommunicator(
                    SoloTransport(0), "kfac", needs, codec=codec
                ),
            )


@pytest.mark.parametrize(("placement", "refused"), [("memory", True), (0.5, True), ("communication", False)])
def test_mixed_chunks_are_refused_where_gradients_travel(placement: Any, refused: bool) -> None:
    """What was lost would fall on all rows' counts, by which gradients are divided."""

    def made_by(averager: ragtag.Averager) -> None:
        KFAC(
            nn.Linear(3, 2),
            lr=0.1,
            communicator=lambda needs: CrewCommunicator(
                SoloTransport(0), "kfac", needs, placement=placement, averager=averager
            ),
        ).close()

    made_by(ragtag.RPS(quorum=2))
    if refused:
        with pytest.raises(ValueError, match=f'placement {placement!r} each row.*placement="communication"'):
            made_by(ragtag.RPS(hadamard=8))
    else:
        made_by(ragtag.RPS(hadamard=8))


def test_rows_tell_how_many_workers_are_in_them() -> None:
    layers = {"a": LayerSize(5, 7), "b": LayerSize(3, 4, groups=2)}
    rows = Rows(layers, 9)
    assert rows.shape == (5 + 3, 9)
    a, b = torch.randn(7, 5), torch.randn(2, 4, 3)
    both, one, none = rows.filled({"a": a, "b": b}), rows.filled({"b": b}), rows.filled({})
    mean = (both + one + none) / 3  # two workers of b, and one peer that works on neither
    found = rows.read(mean)
    assert torch.allclose(found["a"], a, atol=1e-6) and torch.allclose(found["b"], b, atol=1e-6)
    mean[6] = 0.0  # a chunk of b had no worker in it
    lost = rows.read(mean)["b"].reshape(-1)
    assert lost[8:16].isnan().all() and torch.allclose(lost[:8], b.reshape(-1)[:8], atol=1e-6)
    assert torch.allclose(lost[16:], b.reshape(-1)[16:], atol=1e-6)
    assert rows.read(none) == {}


@pytest.mark.parametrize("placement", ["somewhere", 0, 1.5, True, None])
def test_what_is_no_placement_is_refused(placement: Any) -> None:
    with pytest.raises(ValueError, match='give "communication", "memory", or a share'):
        trained(SoloTransport(1), 1, None, placement=placement)


def test_gradients_travel_only_where_all_average_them() -> None:
    with pytest.raises(ValueError, match='average="gradients"'):
        trained(SoloTransport(1), 1, None, placement="memory", average="models")
