"""Auxiliaries in virtual time: they own blocks, contribute nothing, and cost no more than any owner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.codecs.dense import bf16
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.types import Outcome
from ragtag.protocols.channel.averager import Averager, guarded
from ragtag.protocols.node import GONE_AFTER
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.simulation.averaging import CHUNKS, ROUNDS, averages

LINES = Faults(latency_s=0.001, rate_bytes_per_s=1e8)
TRIMMED = guarded(ragtag.RPS(), ragtag.TrimmedMean(liars=0.2))


def crew(n: int, auxiliaries: int, faults: Faults = LINES) -> SimulatedCrew:
    return SimulatedCrew(n, faults, seed=3, cost=ComputeCost(0.05), check=True, auxiliaries=auxiliaries)


@pytest.mark.parametrize(
    "by",
    [ragtag.RPS(), ragtag.RPS(repair=True, quorum=3), ragtag.AllReduce(), TRIMMED],
    ids=lambda by: by.name + ("" if by.guard is None else ", guarded"),
)
def test_with_auxiliaries_the_average_is_that_of_the_trainers_and_each_sends_less(by: Averager) -> None:
    alone, helped = crew(4, 0), crew(4, 2)
    before, after = alone.run(averages(by)), helped.run(averages(by))
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None
        for expected, came in zip(one, other, strict=True):
            assert came.averaged.all() and (came.heard == 0b1111).all() and (came.weight == 4).all()
            np.testing.assert_array_equal(came.mean, expected.mean)
            assert came.missed == () and len(came.waited_for) == 3
    for rounds in helped.assisted.values():
        assert [outcome.round for outcome in rounds] == list(range(ROUNDS))
        for outcome in rounds:
            assert outcome.averaged.sum() == CHUNKS // 6 and outcome.waited_for == (0, 1, 2, 3)
    sent = [[sim.world.traffic(peer).bytes_sent for peer in range(sim.n)] for sim in (alone, helped)]
    # of n owners each peer sends n-1 of n parts as shares, and its own part of averages to 3 others: of 4
    # owners 3/4 + 3/4, of 6 it is 5/6 + 3/6
    assert max(sent[1][:4]) < min(sent[0])
    assert sum(sent[1][:4]) < 0.95 * sum(sent[0]), "the probe, to which trainers alone belong, is in both"


@pytest.mark.parametrize("by", [ragtag.RPS(), ragtag.AllReduce()], ids=lambda by: by.name)
def test_one_that_dies_in_a_round_costs_what_the_death_of_an_owner_costs(by: Averager) -> None:
    """It has the shares, and dies before all have its averages."""
    costs = {}
    for trainers, auxiliaries in ((4, 2), (6, 0)):
        calm = crew(trainers, auxiliaries).run(averages(by))
        assert calm[0] is not None
        at_s = calm[0][2].started_s + 0.4 * calm[0][2].total_s
        dies = Faults(latency_s=0.001, rate_bytes_per_s=1e8, crashes=(Crash(5, at_s),))
        came = crew(trainers, auxiliaries, dies).run(averages(by))
        for rounds in came[: min(5, trainers)]:
            assert rounds is not None
            assert [o.averaged.all() for o in rounds[:2]] == [True] * 2
            assert {peer for o in rounds for peer in o.missed} == {5}
            assert rounds[-1].averaged.all() and rounds[-1].heard[0].bit_count() == min(5, trainers)
            short = [o for o in rounds if not o.averaged.all()]
            costs[auxiliaries] = len(short), sum(o.total_s for o in short)
    (helped, helped_s), (owners, owners_s) = costs[2], costs[0]
    assert 0 < helped <= owners <= 1 + GONE_AFTER and helped_s <= 1.1 * owners_s


def test_one_that_freezes_comes_back_and_owns_its_blocks_again() -> None:
    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, freezes=(Freeze(4, 0.5, 0.3),))
    sim = crew(4, 1, lines)
    came = sim.run(averages(ragtag.RPS(), rounds=24))
    for rounds in came:
        assert rounds is not None
        assert [o.round for o in rounds if not o.averaged.all()] == [9, 10]
        assert [o.round for o in rounds if 4 in o.missed] == [9]
        assert all((o.heard == 0b1111).all() for o in rounds if o.averaged.all())
        assert rounds[10].total_s < 1.1 * rounds[8].total_s  # waited for no more
    served = [outcome.round for outcome in sim.assisted[4]]
    assert served[:9] == list(range(9)) and served[-6:] == list(range(18, 24))


def test_lost_datagrams_cost_chunks_and_none_with_repair() -> None:
    lines = Faults(latency_s=0.001, rate_bytes_per_s=1e8, loss=Loss(0.05))
    for repair, least in ((False, 0.8), (True, 0.99)):
        sim = crew(4, 2, lines)
        came = sim.run(averages(ragtag.RPS(repair=repair), rounds=24))
        shares = [o.heard[o.averaged].view(np.uint8).tolist() for rounds in came for o in (rounds or [])[12:]]
        whole = np.mean([byte.bit_count() / 4 for chunks in shares for byte in chunks[::8]])
        assert whole > least
        assert len(sim.assisted[4]) >= 23


def test_a_codec_of_fewer_bytes_is_served() -> None:
    def trained(peer: SimulatedTransport) -> bool:
        torch.manual_seed(peer.me)
        model = nn.Linear(40, 30)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), peer, model=model, codec=bf16
        )  # fmt: skip
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        return bool(optimizer.outcome is not None and optimizer.outcome.averaged.all())

    sim = crew(3, 1)
    assert sim.run(trained) == [True] * 3 and sim.assisted[3]


@pytest.mark.parametrize("options", [{"method": "ring"}, {"method": "moshpit=2"}, {"schedule": "softsync"}])
def test_what_has_no_owners_of_blocks_goes_on_without_it(options: dict[str, object]) -> None:
    def trained(peer: SimulatedTransport) -> bool:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        came = 0
        for _ in range(6):
            peer.compute()
            assert peer.live <= frozenset(range(4))
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            came += optimizer.outcome is not None and optimizer.outcome.averaged.all()
        return came >= 5  # in the last one others may have left

    sim = crew(4, 1)
    assert sim.run(trained) == [True] * 4
    assert not sim.assisted[4]


def test_peers_set_aside_own_nothing_and_an_auxiliary_need_not_know_of_them() -> None:
    """Its own blocks do not depend on what only trainers are told: each round is whole for all that take
    part."""

    def trained(peer: SimulatedTransport) -> list[Outcome]:
        torch.manual_seed(0)
        model = nn.Linear(60, 60)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), peer, model=model,
            schedule=ragtag.schedules.Partial(),
        )  # fmt: skip
        came: list[Outcome] = []
        for _ in range(30 if peer.me < 3 else 8):
            peer.pause(0.05 if peer.me < 3 else 0.4)
            optimizer.zero_grad()
            model(torch.ones(2, 60)).square().mean().backward()
            optimizer.step()
            if optimizer.outcome is not None:
                came.append(optimizer.outcome)
        return came

    sim = crew(4, 2)
    came = sim.run(trained)
    for rounds in came[:3]:
        assert rounds is not None
        late = rounds[15:25]
        assert all(o.averaged.all() for o in late)
        assert max(o.total_s for o in late) < 0.1
        assert all(3 not in o.waited_for for o in late)


def test_a_target_batch_counts_trainers_alone() -> None:
    """Samples, steps and goodput are as without it: nobody waits for what it gathers, or for its word."""

    def trained(peer: SimulatedTransport) -> tuple[int, float, float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), peer, model=model,
            average="gradients", target_batch=64, weight=lambda: 8.0,
        )  # fmt: skip
        data = torch.Generator().manual_seed(peer.me)
        for _ in range(24):
            peer.compute()
            x = torch.randn(8, 3, generator=data)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        samples = optimizer.samples
        assert samples is not None
        return samples.steps, samples.step_samples, samples.goodput

    alone, helped = (np.mean([came or (0, 0, 0) for came in crew(4, k).run(trained)], axis=0) for k in (0, 2))
    assert alone[0] == helped[0] == 11 and alone[1] == helped[1] == 64
    assert helped[2] == pytest.approx(alone[2], abs=0.03)
