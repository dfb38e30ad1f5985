"""Replicas that average gradients stay alike whatever happens; where nothing happens nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ragtag.training.align.aligner as align_module
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults, Freeze, Partition, Window
from ragtag.core.types import nobodys
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.recipes.abreast import Keeps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.align.aligner import Aligner, Patch
from ragtag.training.align.plan import Align, Aligned
from ragtag.training.exchange.aligned import Aligning
from ragtag.training.exchange.base import layer
from ragtag.training.exchange.compress import TopK
from ragtag.training.exchange.dense import Replica
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.tensors.layout import GRADIENT, Part
from tests.training.fake_transport import FakeCrew
from tests.training.replicas import OPTIMIZERS, Training
from tests.training.test_replay import LATE, Wide
from tests.training.test_replay import OPTIMIZERS as MAKES
from tests.training.test_replay import Training as Newcomer

MODEL, REPLICAS = channel_of("model"), channel_of("model/replicas")
SPARSE = TopK(0.05, resync=0, bypass=False)


def same(one: Training, other: Training, peers: list[int]) -> bool:
    """Whether these peers have the same after each round in both, to the bit."""
    return all(
        torch.equal(vectors[peer], other.vectors[round_][peer])
        for round_, vectors in one.vectors.items()
        for peer in peers
        if peer in vectors
    )


# -- Where nothing is spoilt

CALM: dict[str, dict[str, Any]] = {
    "rps": {"method": RPS()},
    "all-reduce": {"method": AllReduce()},
    "ring": {"method": AllReduce(ring=True)},
    "bf16": {"codec": "bf16"},
    "local steps": {"every": 2},
    "sparse": {"compress": SPARSE},
    "sparse with momentum": {"compress": TopK(0.05, momentum_correction=0.9, values="2bit")},
}


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("options", CALM.values(), ids=CALM.keys())
def test_a_calm_crew_is_to_the_bit_what_it_is_without(options: dict[str, Any], n: int) -> None:
    with_it, without = (
        Training(n, 14, make=OPTIMIZERS["sgd"], width=40, options={**options, "align": align}).run()
        for align in (Align(every=3), False)
    )
    assert same(with_it, without, list(range(n)))
    assert all(found.apart == found.taken == found.given == 0 for found in with_it.aligned[0])
    assert len(with_it.aligned[0]) == (2 if "every" in options else 4)
    assert all(found.peers == n for found in with_it.aligned[0])
    assert with_it.notes == []


def test_one_row_a_peer_is_all_that_a_calm_crew_pays() -> None:
    training = Training(4, 12, width=40, options={"align": Align(every=4)}).run()
    rows = [run for run in training.crew.sent if run.key.channel == REPLICAS]
    assert (
        3 * 4 <= sum(len(run.payload) for run in rows) <= 3 * (4 * 4 + 2 * 4 * 3)
    )  # and rows that say: nothing
    assert training.sent(REPLICAS) < 0.2 * training.sent(MODEL), "a model of 8 chunks"


@pytest.mark.parametrize("method", [RPS(), AllReduce()], ids=lambda m: str(m.name))
def test_one_that_goes_astray_is_brought_back_and_nobody_else_is_moved(method: Averager) -> None:
    """It gives no gradients, since its would be of another place, and everybody's steps others."""
    training, aligned = (
        Training(
            4, 60, astray={2: 10}, make=OPTIMIZERS["adam"], width=60, options={"method": method, "align": of}
        ).run()
        for of in (False, Align(4, 0.2))
    )
    assert not training.alike(59)
    assert aligned.alike(59)
    assert same(aligned, training, [0, 1, 3])
    assert sum(found.taken for found in aligned.aligned[2]) == aligned.aligned[2][0].units
    assert all(found.taken == 0 for peer in (0, 1, 3) for found in aligned.aligned[peer])
    assert max(found.distance for found in aligned.aligned[2]) == pytest.approx(0.1 / 1.1, rel=0.3)
    givers = Counter({peer: sum(found.given for found in aligned.aligned[peer]) for peer in range(4)})
    assert min(givers[peer] for peer in (0, 1, 3)) > 0 and givers[2] == 0, "spread over those that have it"


def test_who_is_not_in_step_has_no_vote_until_it_has_what_the_others_have() -> None:
    """Two newcomers without a state have the same, and are more than the one member."""
    late = (1, 2)
    training, aligned = (
        Training(
            3, 60, astray=dict.fromkeys(late, 10), arrived=dict.fromkeys(late, 11), width=60,
            make=OPTIMIZERS["momentum"], options={"method": AllReduce(), "align": of},
        ).run()
        for of in (False, Align(4, 0.2))
    )  # fmt: skip
    assert aligned.alike(59) and not training.alike(59)
    assert same(aligned, training, [0])
    assert all(found.given == 0 for peer in late for found in aligned.aligned[peer])
    layers = [layer(optimizer._averaged._exchange, Aligning) for optimizer in aligned.optimizers.values()]
    voters = [found.aligner._votes for found in layers if found is not None]
    assert voters == [True] * 3


# -- Where rounds are spoilt


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in ("adagrad", "groups") else [])
        for name, make in OPTIMIZERS.items()
    ],
)
@pytest.mark.parametrize("method", [RPS(), AllReduce()], ids=lambda m: str(m.name))
def test_after_a_death_within_a_round_the_survivors_are_one_again(
    method: Averager, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    options = {"method": method}
    dies = {4: 10}
    without = Training(5, 60, dies=dies, make=make, options={**options, "align": False}, width=60).run()
    training = Training(5, 60, dies=dies, make=make, options={**options, "align": Align(6, 0.1)}, width=60)
    training.run()
    assert without.alike(9) and not without.alike(10), "some had its averages, and some had not"
    assert without.apart(59) > 0.5 * without.apart(12)
    assert training.alike(9) and not training.alike(10)
    assert training.alike(59)
    survivors = [note.what for note in training.notes]
    assert survivors == ["replicas differ"] * 4 + ["replicas alike"] * 4


def test_an_owner_that_dies_and_told_nobody_parts_no_replicas() -> None:
    """Nobody has an average of its block. Each peer would step there by a gradient of its own."""
    options: dict[str, Any] = {"dies": {4: 10}, "tells": False, "options": {"align": False}}
    for make in (OPTIMIZERS["sgd"], OPTIMIZERS["adam"]):
        training = Training(5, 14, make=make, **options).run()
        assert all(training.alike(step) for step in range(14))
        if make is OPTIMIZERS["sgd"]:
            of = [vectors[0] for vectors in training.vectors.values()]
            still = [float((of[step] == of[step - 1]).float().mean()) for step in (9, 10, 11, 13)]
            assert max(still[0], still[3]) < 0.02
            assert all(0.15 < share < 0.25 for share in still[1:3]), "its fifth, until it belongs to others"


def test_gradients_nobody_has_an_average_of_become_0_and_buffers_stay() -> None:
    crew = FakeCrew(1)
    gradient, running = torch.ones(300), torch.full((300,), 2.0)
    parts = [Part("w", GRADIENT, lambda: gradient), Part("mean", "buffer", lambda: running)]
    replica = Replica(parts, crew.transport(0), RPS(), fp32, content="gradients", share=False)
    replica.bucket.flatten()
    mean, n = np.full_like(replica.bucket.values, 5.0), len(replica.bucket.values)
    averaged, told = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    averaged[0] = told[0] = True
    alone = nobodys(0, mean, np.ones(n, np.float32), np.ones(n, np.uint64), None)
    replica._take(replace(alone, averaged=averaged, told=told))
    elements = fp32.elements
    assert (gradient[:elements] == 5.0).all() and (gradient[elements:] == 0.0).all()
    assert (running == 2.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_carried_gradients_of_many_samples_are_finite_in_a_short_type(dtype: torch.dtype) -> None:
    """100 times 4,096 samples is more than float16 can hold; two such are carried, and become one mean."""
    samples = 4096.0
    gradient = torch.full((300,), 100.0, dtype=dtype)
    crew = FakeCrew(1)
    parts = [Part("w", GRADIENT, lambda: gradient)]
    replica = Replica(parts, crew.transport(0), RPS(), fp32, content="gradients", share=False, carries=True)
    n = len(replica.bucket.flatten())
    nobody = nobodys(0, replica.bucket.values.copy(), np.ones(n, np.float32), np.ones(n, np.uint64), None)
    replica._weight = samples
    replica._take(replace(nobody, averaged=np.zeros(n, np.bool_), told=np.zeros(n, np.bool_)))
    assert (gradient == 0.0).all()
    gradient += 50.0
    assert (replica._flatten(samples).reshape(-1)[:300] == 150.0).all()
    assert (gradient == 150.0).all()


def test_a_spoilt_round_is_mended_long_before_the_next_comparison_by_number() -> None:
    training = Training(5, 31, dies={4: 10}, make=OPTIMIZERS["momentum"], options={"align": Align()}).run()
    assert not training.alike(11), "half of them had its averages"
    assert training.alike(30)
    looked = [found.round for found in training.aligned[0]]
    assert looked[0] == 15 and set(looked) <= {15, 19, 23, 27}, "who has heard of it by then takes part"
    assert {tuple(found.round for found in training.aligned[peer]) for peer in range(4)} == {tuple(looked)}
    assert not Training(4, 31, options={"align": Align()}).run().aligned[0]


@pytest.mark.parametrize("method", [RPS(), AllReduce()], ids=lambda m: str(m.name))
def test_a_large_model_is_looked_at_in_turns(method: Averager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align_module, "LOOK_BYTES", 6000)
    options = {"method": method, "align": Align(2, 0.3)}
    training = Training(4, 70, dies={3: 9}, make=OPTIMIZERS["momentum"], options=options, width=60).run()
    assert not training.alike(10) and training.alike(69)
    looked = training.aligned[0]
    assert max(found.units for found in looked) <= 6 and sum(found.units for found in looked[:3]) == 17
    said = [note.what for note in training.notes]  # a turn may differ once others are alike again
    assert said[:3] == ["replicas differ"] * 3 and said[-3:] == ["replicas alike"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("dies", [{}, {4: 100}], ids=["loss", "loss and a death"])
def test_under_loss_they_stay_near_and_are_one_again_when_it_is_over(
    name: str, dies: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_module, "_ROWS_LEAST", 1)
    ill, rounds, every = 400, 640, 8
    without, training = (
        Training(
            5, rounds, loss=0.1, ill=ill, dies=dies, make=OPTIMIZERS[name], width=60,
            options={"method": RPS(), "align": align},
        ).run()
        for align in (False, Align(every, 0.05))
    )  # fmt: skip
    early, late = range(20, 40), range(ill - 100, ill)
    grown, kept = (
        [float(np.mean([found.apart(round_) for round_ in rounds])) for rounds in (early, late)]
        for found in (without, training)
    )
    assert grown[1] > 1.5 * grown[0], grown
    assert kept[1] < 0.5 * grown[1], (kept, grown)
    assert without.apart(rounds - 1) > 0.5 * grown[1]
    assert training.alike(rounds - 1)
    digests = 5 * 5 / (2 * every * 4 * 16)  # rows of them, over those of the rounds: 16 of a model
    assert training.sent(REPLICAS) < (1.25 * 0.05 + 3 * digests) * training.sent(MODEL)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(3, 6),
    loss=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    deaths=st.dictionaries(st.integers(1, 5), st.integers(0, 29), max_size=2),
    astray=st.dictionaries(st.integers(1, 5), st.integers(0, 29), max_size=1),
    every=st.integers(1, 6),
    options=st.sampled_from(
        [{"method": RPS()}, {"method": RPS(repair=True)}, {"method": AllReduce()}, {"compress": SPARSE}]
    ),
    name=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_whatever_happens_survivors_are_one_when_it_is_over(
    n: int,
    loss: float,
    deaths: dict[int, int],
    astray: dict[int, int],
    every: int,
    options: dict[str, Any],
    name: str,
) -> None:
    dies = {peer: at for peer, at in deaths.items() if peer < n and len(deaths) < n - 1}
    off = {peer: at for peer, at in astray.items() if peer < n and peer not in dies}
    rounds = 30 + 20 * every
    training = Training(
        n, rounds, loss=loss, ill=30, dies=dies, astray=off, make=OPTIMIZERS[name], width=40,
        options={**options, "align": Align(every, 1.0)},
    ).run()  # fmt: skip
    assert training.alike(rounds - 1)
    calm = [found for found in training.aligned[0] if found.round < rounds][-2:]  # then the first one ends
    assert all(found.apart == 0 and found.peers == n - len(dies) for found in calm)


def test_a_round_that_a_deadline_ended_does_not_make_comparisons_long() -> None:
    """One peer stood still for ten steps. A comparison that not all came to could take four times as long as
    the round in which that one fell silent, until it was 32 rounds ago.
    """
    step_s, optimizers = 0.1, 3
    lines = Faults(latency_s=0.001, freezes=(Freeze(2, 1.2 + 10.3 * step_s, 1.0),))

    def train(peer: SimulatedTransport) -> list[float]:
        torch.manual_seed(0)
        keeps = Keeps(peer, 44)
        models = [nn.Linear(40, 40) for _ in range(optimizers)]
        options: dict[str, Any] = {"average": "gradients", "method": "rps+repair", "align": Align(every=4)}
        made = [
            CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                peer,
                model=model,
                name=f"m{at}",
                seed=44,
                **(options | keeps.hooks),
            )
            for at, model in enumerate(models)
        ]
        samples = torch.Generator().manual_seed(peer.me)
        peer.pause(max(0.0, 1.2 - peer.now_s()))
        took_s = []
        for _ in range(60):
            began_s = peer.now_s()
            peer.compute()
            x = torch.randn(4, 40, generator=samples)
            for model, optimizer in zip(models, made, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
            for optimizer in made:
                optimizer.step()
            took_s.append(peer.now_s() - began_s)
        return took_s

    made = SimulatedCrew(4, lines, 44, cost=ComputeCost(step_s)).run(train)
    for peer in (0, 1, 3):
        took_s = made[peer]
        assert took_s is not None
        assert max(took_s[14:50]) < 2.5 * median(took_s)


def test_comparisons_run_beside_the_next_step() -> None:
    """With one after each round, which takes a fifth of a step here, steps take as long as without any."""

    def steps_s(every: int) -> float:
        def train(peer: SimulatedTransport) -> float:
            torch.manual_seed(0)
            model = nn.Linear(40, 40)
            optimizer = CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model,
                average="gradients", method=AllReduce(), align=Align(every),
            )  # fmt: skip
            for _ in range(20):
                peer.compute()
                optimizer.zero_grad()
                model(torch.ones(8, 40)).square().mean().backward()
                optimizer.step()
            return peer.now_s()

        ends = SimulatedCrew(3, Faults(latency_s=0.05), 5, cost=ComputeCost(0.4)).run(train)
        return max(end for end in ends if end is not None)

    assert steps_s(1) < 1.05 * steps_s(1_000)


@pytest.mark.parametrize("frozen_s", [1.0, 3.0])
def test_after_a_freeze_no_comparison_makes_the_others_wait(frozen_s: float) -> None:
    """What the freeze had made of a round bounded them, four times: steps took up to eight medians."""
    faults = Faults(latency_s=0.002, rate_bytes_per_s=1e7, freezes=(Freeze(1, 1.08, frozen_s),))
    steps_s: dict[int, list[float]] = {}

    def train(peer: SimulatedTransport) -> None:
        torch.manual_seed(0)
        model, keeps = nn.Linear(40, 40), Keeps(peer, 3)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), peer, model=model,
            average="gradients", method=AllReduce(), align=Align(8), **keeps.hooks,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(peer.me)
        mine = steps_s.setdefault(peer.me, [])
        while optimizer.outcome is None or optimizer.outcome.round < 70:
            began_s = peer.now_s()
            peer.compute()
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=draw)).square().mean().backward()
            optimizer.step()
            mine.append(peer.now_s() - began_s)

    SimulatedCrew(5, faults, seed=26, cost=ComputeCost(0.1, sigma=0.05, seed=26)).run(train)
    for peer in (0, 2, 3, 4):
        assert max(steps_s[peer][15:]) < 1.5 * median(steps_s[peer]), peer


@pytest.mark.parametrize(
    ("n", "every", "side", "parted_s", "seed"),
    [
        pytest.param(6, (6, 2), {1, 2, 3}, 1.7, 35, id="three and three"),
        pytest.param(4, (10, 7), {1, 3}, 2.572, 23, id="two and two"),
    ],
)
def test_peers_that_were_parted_compare_in_one_round_again(
    n: int, every: tuple[int, ...], side: set[int], parted_s: float, seed: int
) -> None:
    """Each counted the comparisons that it was in. So they were a round of them apart, and in each all waited
    for those in the other one, to its deadline.
    """
    heals_s = 0.606 + parted_s
    parted = Partition(frozenset(side), Window(0.606, heals_s))
    faults = Faults(latency_s=0.002, rate_bytes_per_s=1e7, partitions=(parted,))
    steps_s: dict[int, list[float]] = {}
    compared: list[tuple[int, Aligned]] = []

    def train(peer: SimulatedTransport) -> None:
        torch.manual_seed(0)
        models, keeps = [nn.Linear(40, 40) for _ in every], Keeps(peer, 3)
        optimizers = [
            CrewOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), peer, model=model, name=f"m{i}",
                average="gradients", method=AllReduce(), align=Align(every[i]), **keeps.hooks,
            )
            for i, model in enumerate(models)
        ]  # fmt: skip
        draw = torch.Generator().manual_seed(peer.me)
        mine = steps_s.setdefault(peer.me, [])
        while optimizers[0].outcome is None or optimizers[0].outcome.round < 60 + int(heals_s / 0.02):
            began_s = peer.now_s()
            peer.compute()
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(8, 40, generator=draw)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                found = optimizer._averaged.aligned
                if found is not None and began_s > heals_s + 0.5:
                    compared.append((peer.me, found))
            if began_s > heals_s + 0.5:
                mine.append(peer.now_s() - began_s)

    SimulatedCrew(n, faults, seed=seed, cost=ComputeCost(0.02, sigma=0.05, seed=seed)).run(train)
    assert {peer for peer, _ in compared} == set(range(n))
    assert not [(peer, found) for peer, found in compared if found.peers < n or found.expired]
    for peer, took_s in steps_s.items():
        assert max(took_s) < 2 * median(took_s), peer


@pytest.mark.parametrize("values", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_selections_drift_apart_and_are_one_again(values: Any) -> None:
    compress = TopK(0.05, resync=0, bypass=False, values=values)
    without, training = (
        Training(
            5, 130, loss=0.1, ill=70, dies={4: 40}, make=OPTIMIZERS["momentum"], width=60,
            options={"compress": compress, "align": align},
        ).run()
        for align in (False, Align(8, 0.2))
    )  # fmt: skip
    assert without.apart(129) > 0
    assert training.alike(129)
    assert sum(found.taken for found in training.aligned[0]) > 0


def test_peers_that_begin_with_other_weights_come_together() -> None:
    training = Training(3, 60, astray={1: 0, 2: 0}, options={"align": Align(4, 0.3)}, width=60).run()
    assert not training.alike(1) and training.alike(59)


# -- Newcomers


class Apart(Newcomer):
    """Members that differ, so that units are given in every round, one at least and few."""

    def run(self) -> None:
        made = iter([Wide(0), Wide(1), Wide(7)])
        self.model = lambda seed: next(made)
        super().run()


@pytest.mark.parametrize("method", [RPS(), AllReduce()], ids=lambda m: str(m.name))
def test_who_comes_late_takes_what_members_took_meanwhile(
    method: Averager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_module, "_ROWS_LEAST", 1)
    training = Apart(MAKES["momentum"], {"method": method, "align": Align(1, 0.02)})
    training.run()
    came = training.came
    assert came is not None and came.in_step and came.outcome is not None and came.redone >= training.lag
    round_ = came.outcome.round
    late, donor, other = (training.models[peer, round_] for peer in (LATE, 0, 1))
    assert torch.equal(late, donor), "whose state it has"
    assert not torch.equal(donor, other), "they were still coming together"


def test_without_what_members_took_it_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aligner, "followed", _nothing_followed)
    training = Apart(MAKES["momentum"], {"method": AllReduce(), "align": Align(1, 0.02)})
    training.run()
    assert training.came is not None and training.came.outcome is not None
    late, donor = (training.models[peer, training.came.outcome.round] for peer in (LATE, 0))
    assert not torch.equal(late, donor)


_followed = Aligner.followed


def _nothing_followed(aligner: Aligner, round_: int) -> Patch | None:
    return None if _followed(aligner, round_) is None else ()
