"""A crew in virtual time in which one peer lies: it learns all the same with a guard, and not without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.faults import Faults, Loss
from ragtag.core.schema import SchemaMismatch
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport

PEERS, LIAR, STEPS = 5, 2, 10
GUARDS = [ragtag.TrimmedMean(0.2), ragtag.CentredClipping(0.2)]


def train(peer: SimulatedTransport, factor: float, options: dict[str, Any]) -> tuple[float, float]:
    """The loss before and after; the liar steps by ``factor`` times its gradient."""
    torch.manual_seed(0)
    model = nn.Linear(4, 64)
    optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer, model=model, **options)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1 + peer.me))
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(STEPS):
        peer.compute()
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum(1).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if peer.me == LIAR:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor
        optimizer.step()
    return losses[0], losses[-1]


def honest_losses(factor: float, loss: float = 0.0, **options: Any) -> list[float]:
    """What is left of the honest peers' losses, as a share of the first."""
    lines = Faults(latency_s=0.001, loss=Loss(loss) if loss else None)
    crew = SimulatedCrew(PEERS, lines, seed=5, cost=ComputeCost(0.05), check=True)
    ends = crew.run(lambda peer: train(peer, factor, options))
    return [end[1] / end[0] for at, end in enumerate(ends) if end is not None and at != LIAR]


@pytest.mark.parametrize("factor", [-8.0, 50.0], ids=["flip", "scale"])
@pytest.mark.parametrize("average", ["gradients", "models"])
@pytest.mark.parametrize("guard", [None, *GUARDS], ids=str)
def test_one_of_five_lies(guard: Any, average: str, factor: float) -> None:
    left = honest_losses(factor, average=average, guard=guard)
    if guard is None:
        assert min(left) > 1, "without a guard nobody learns"
    else:
        assert max(left) < 0.2, "with one all do"


@pytest.mark.parametrize("guard", GUARDS, ids=str)
def test_chunks_are_lost_meanwhile(guard: Any) -> None:
    assert max(honest_losses(50.0, loss=0.1, guard=guard)) < 0.2


def test_peers_compare_their_guards() -> None:
    def differ(peer: SimulatedTransport) -> None:
        train(peer, 1.0, {"guard": GUARDS[peer.me % 2]})

    with pytest.raises(SchemaMismatch, match="guarded by a trimmed mean"):
        SimulatedCrew(3, seed=1).run(differ)


@pytest.mark.parametrize(
    ("peers", "liars", "instead"), [(4, 0.3, "liars=0.25 or less"), (2, 0.2, "begin with 3 peers")]
)
def test_a_crew_that_is_too_small_for_its_guard_is_refused(peers: int, liars: float, instead: str) -> None:
    """Each of its rounds was without an average, and nothing told."""

    def begin(peer: FakeTransport) -> CrewOptimizer:
        inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return CrewOptimizer(inner, peer, guard=ragtag.CentredClipping(liars))

    with pytest.raises(ValueError, match=instead):
        begin(FakeCrew(peers).transport(0))
    begin(FakeCrew(1).transport(0))
    late = FakeCrew(peers).transport(0)
    late.late = True
    begin(late)
