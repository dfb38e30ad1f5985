"""Mixed chunks under a user's optimizer, and the benchmark of bursts in small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from benchmarks import bursts
from ragtag.core.faults import BurstLoss, Faults
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

PEERS, SIZES, LOUD = 4, (40_000, 9_000), 1e4


def tensors_of(peer: int) -> list[torch.Tensor]:
    """Two tensors, of which the first differs ten thousand times as much between peers."""
    draw = torch.Generator().manual_seed(peer)
    return [LOUD * torch.randn(SIZES[0], generator=draw), torch.randn(SIZES[1], generator=draw)]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_tensor_that_differs_much_does_not_drown_its_neighbour(codec: str) -> None:
    """A tenth of all datagrams is lost, in bursts."""

    def average(peer: SimulatedTransport) -> torch.Tensor:
        tensors = [nn.Parameter(tensor) for tensor in tensors_of(peer.me)]
        inner = torch.optim.SGD(tensors, lr=0.0)
        CrewOptimizer(inner, peer, method=ragtag.RPS(hadamard=8), codec=codec, every=10**9).average()
        return tensors[1].detach()

    crew = SimulatedCrew(PEERS, Faults(latency_s=0.002, loss=BurstLoss(0.02, 0.2)), seed=1)
    came = [end for end in crew.run(average) if end is not None]
    own = [tensors_of(peer)[1] for peer in range(PEERS)]
    mean = torch.stack(own).mean(0)
    lost = [
        float((a - mean).square().sum() / (b - mean).square().sum()) for a, b in zip(came, own, strict=True)
    ]
    assert len(lost) == PEERS
    assert 0.01 < max(lost) < 0.6


def test_bursts_no_longer_take_whole_layers_and_the_error_stays_what_it_was() -> None:
    rounds = 3
    plain, mixed = (
        bursts.errors(1, bursts.averages(ragtag.RPS(hadamard=size), bursts.LINES["bursts of 40"], rounds, 1))
        for size in (0, 64)
    )
    assert plain.shape == mixed.shape == (rounds, bursts.PEERS, len(bursts.layers_of(1)))
    worst = [float(np.median(table[:, :, :-1].max(axis=2))) for table in (plain, mixed)]
    assert worst[1] < 0.5 * worst[0]
    whole = [float(table[:, :, -1].mean()) for table in (plain, mixed)]
    assert 0.5 < whole[1] / whole[0] < 2
