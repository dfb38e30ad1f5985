"""The same machines, simulated and over real datagrams, come to the same averages."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.faults import BurstLoss, Faults, Loss
from ragtag.core.types import Average, Bools, Outcome, PeerId
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.simulation.check.replay import replay
from ragtag.simulation.worlds.rounds import World
from tests.network.crew import PROBE_S, Crew, values_of

N_CHUNKS = 90
ROUNDS = 3
LOSSES = {"independent": Loss(0.1), "heavy": Loss(0.4), "bursts": BurstLoss(0.02, 0.2)}


def simulated(n: int, method: Averager, faults: Faults, seed: int) -> list[list[Outcome]]:
    """Rounds of a simulated crew: outcomes by peer and round."""
    nodes = [Node(peer, n, seed) for peer in range(n)]
    for node in nodes:
        node.configure(0, Channel(method, fp32, N_CHUNKS, probe_s=PROBE_S, rtt_s=1e-3, floor_s=PROBE_S))
    outcomes: list[list[Outcome]] = [[] for _ in range(n)]

    def ask(peer: PeerId, round_: int) -> Average:
        return Average(0, values_of(peer, N_CHUNKS, round_), 1.0)

    def on_done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        outcomes[peer].append(outcome)
        if all(len(rounds) == len(outcomes[peer]) for rounds in outcomes) and len(outcomes[peer]) < ROUNDS:
            for other in range(n):
                world.at(now_s + 1e-3, other, ask(other, len(outcomes[other])))

    world = World(nodes, faults, seed, on_done=on_done)
    for peer in range(n):
        world.at(0.0, peer, ask(peer, 0))
    world.run(until_s=1e3)
    return outcomes


def real(n: int, method: Averager, faults: Faults, seed: int) -> list[list[Outcome]]:
    """The same rounds over UDP on loopback."""
    with Crew(n, N_CHUNKS, method=method, faults=faults, seed=seed) as crew:
        rounds = [crew.average(round_=round_) for round_ in range(ROUNDS)]
    return [[outcomes[peer] for outcomes in rounds] for peer in range(n)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_masks_give_the_same_averages(n: int, loss: str) -> None:
    """What is lost is drawn from the seed; so who is heard in each chunk is the same in both worlds."""
    faults = Faults(loss=LOSSES[loss])
    reality = real(n, rps, faults, seed=5)
    assert not all(outcome.averaged.all() for live in reality for outcome in live), "the loss shows"
    for virtual, live in zip(simulated(n, rps, faults, seed=5), reality, strict=True):
        assert len(virtual) == len(live) == ROUNDS
        for here, there in zip(virtual, live, strict=True):
            assert not here.expired
            assert not there.expired
            assert np.array_equal(here.averaged, there.averaged)
            assert np.array_equal(here.heard, there.heard)
            assert np.array_equal(here.weight, there.weight)
            assert np.allclose(here.mean, there.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [rps_repair, direct, ring], ids=lambda method: method.name)
def test_what_is_repaired_is_the_same_in_both_worlds(method: Averager) -> None:
    faults = Faults(loss=Loss(0.1))
    for virtual, live in zip(simulated(3, method, faults, 2), real(3, method, faults, 2), strict=True):
        for here, there in zip(virtual, live, strict=True):
            assert here.averaged.all()
            assert there.averaged.all()
            assert np.array_equal(here.heard, there.heard)
            assert np.allclose(here.mean, there.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda method: method.name)
def test_the_real_order_of_arrival_replayed_gives_the_same_bits(method: Averager) -> None:
    """A recording of what a real peer was told, told to a fresh machine: bit for bit the same outcomes."""
    n, seed = 3, 4
    with Crew(n, N_CHUNKS, method=method, faults=Faults(loss=Loss(0.1)), seed=seed, record=True) as crew:
        rounds = [crew.average(round_=round_) for round_ in range(ROUNDS)]
        live = {peer: [outcomes[peer] for outcomes in rounds] for peer in range(n)}
    for peer in range(n):
        fresh = Node(peer, n, seed)
        fresh.configure(0, crew.channel)
        recording = crew.recordings[peer]
        assert recording is not None
        again = replay(fresh, list(recording))
        assert len(again) == ROUNDS
        for here, there in zip(again, live[peer], strict=True):
            assert here.mean.tobytes() == there.mean.tobytes()
            assert here.heard.tobytes() == there.heard.tobytes()
            assert here.weight.tobytes() == there.weight.tobytes()


@pytest.mark.parametrize("method", [rps, direct, ring], ids=lambda method: method.name)
def test_every_peer_that_hears_a_chunk_holds_the_same_bits(method: Averager) -> None:
    for outcomes in zip(*real(4, method, Faults(loss=Loss(0.2)), seed=9), strict=True):
        for chunk in range(N_CHUNKS):
            held = {
                outcome.mean[chunk].tobytes() for outcome in outcomes if averaged(outcome.averaged, chunk)
            }
            assert len(held) <= 1


def averaged(flags: Bools, chunk: int) -> bool:
    return bool(flags[chunk])
