"""Lost messages cost next to nothing where what was not delivered is sent again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Bools
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.compress import TopK
from ragtag.training.exchange.sent import Undecided
from ragtag.training.optimizer.optimizer import CrewOptimizer

LATENCY_S = 0.002
TIGHT_S = 8 * LATENCY_S
"""Each of a round's two stages has time for its message, one request for it and the answer, and no more."""
EXAMPLES, WIDE, CLASSES, BATCH = 2048, 32, 10, 32


class AsIfSent(Undecided):
    """Clears what was sent, whatever became of it."""

    def _settle(self, round_: int, sent: Any, there: Bools, not_there: Bools) -> tuple[int, int]:
        return super()._settle(round_, sent, there | not_there, np.zeros_like(there))


@dataclass
class End:
    """What a crew came to: the mean of the replicas' losses on all examples, and what became of fragments."""

    loss: float
    committed: int
    restored: int
    given_up: int


def task(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's labels, one in ten of them wrong: the loss has a floor that is not 0."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WIDE, generator=draw)
    hidden = torch.tanh(inputs @ torch.randn(WIDE, 24, generator=draw))
    labels = (hidden @ torch.randn(24, CLASSES, generator=draw)).argmax(1)
    wrong = torch.rand(EXAMPLES, generator=draw) < 0.1
    labels[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=draw)
    return inputs, labels


def trained(loss: float, tickets: bool, deadline_s: float | None, steps: int = 100, seed: int = 0) -> End:
    inputs, labels = task(seed)
    compress = TopK(ratio=0.02, resync=0, bypass=False)

    def train(transport: SimulatedTransport) -> tuple[float, int, int, int]:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(WIDE, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, CLASSES)
        )
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2),
            transport,
            model=model,
            average="gradients",
            compress=compress,
            deadline_s=deadline_s,
        )
        replica = optimizer._averaged.sparse
        assert replica is not None
        if not tickets:
            replica._sent.__class__ = AsIfSent
        draw = torch.Generator().manual_seed(1000 * seed + transport.me)
        committed = restored = given_up = 0
        for _ in range(steps):
            batch = torch.randint(0, EXAMPLES, (BATCH,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            found = replica.compression
            assert found is not None
            committed, restored = committed + found.committed, restored + found.restored
            given_up += found.given_up
        with torch.no_grad():
            return float(F.cross_entropy(model(inputs), labels)), committed, restored, given_up

    faults = Faults(latency_s=LATENCY_S, loss=Loss(loss) if loss else None)
    ends = [e for e in SimulatedCrew(4, faults, seed, cost=ComputeCost(0.01)).run(train) if e is not None]
    assert len(ends) == 4
    losses, *counts = zip(*ends, strict=True)
    committed, restored, given_up = map(sum, counts)
    return End(statistics.fmean(losses), committed, restored, given_up)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_with_tickets_the_loss_is_within_3_percent_of_the_loss_free_runs(loss: float) -> None:
    free = trained(0.0, True, TIGHT_S)
    tickets = trained(loss, True, TIGHT_S)
    cleared = trained(loss, False, TIGHT_S)
    repaired = trained(loss, True, None)
    assert free.restored == free.given_up == 0
    assert tickets.restored > 0.25 * loss * tickets.committed > 0
    assert tickets.loss < 1.03 * free.loss
    assert cleared.loss > tickets.loss
    assert repaired.loss < 1.01 * free.loss
