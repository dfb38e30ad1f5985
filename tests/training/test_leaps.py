"""One peer's absurd values: who is told what when the others' models break by them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ragtag.core.errors import NotFinite
from ragtag.training.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

N, BAD = 4, 3


def trained(transport: FakeTransport, *, average: str, spoil: float, rounds: int = 6) -> str:
    """What a peer's optimizer raised: its own words, or that it trained to the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(transport.me))
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = CrewOptimizer(sgd, transport, model=model, average=average, align=False)
    for at in range(rounds):
        optimizer.zero_grad()
        (model(inputs) ** 2).square().sum().backward()
        if at == 2 and transport.me == BAD:
            with torch.no_grad():
                weight = model[2].weight
                (weight if average == "models" else weight.grad)[0, 1] = spoil  # type: ignore[index]
        try:
            optimizer.step()
        except NotFinite as error:
            transport.crew.leave(transport.me)
            return str(error)
    return "trained"


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_who_breaks_by_an_average_is_told_so_and_not_to_lower_its_learning_rate(average: str) -> None:
    said = run_peers(FakeCrew(N), lambda transport: trained(transport, average=average, spoil=1e30))
    for peer in range(N):
        if peer == BAD:
            continue
        assert "values that are not finite" in said[peer]
        assert (
            "It was not this peer's learning rate: the average of round 2, with values of peers 0, 1, 2, 3 in"
        )
        assert " in it, came to 2.5e+29 where this peer had sent " in said[peer]
        assert "Lower the learning rate" not in said[peer]
    assert "Lower the learning rate or clip gradients" in said[BAD]  # it was its own value


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_who_breaks_by_itself_is_told_to_lower_its_learning_rate(average: str) -> None:
    said = run_peers(FakeCrew(N), lambda transport: trained(transport, average=average, spoil=float("nan")))
    assert "Lower the learning rate or clip gradients" in said[BAD]
    assert [said[peer] for peer in range(N) if peer != BAD] == ["trained"] * (N - 1)
