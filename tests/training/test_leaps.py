"""One peer's absurd values: who is told what when the others' models break by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ragtag.core.errors import NotFinite
from ragtag.core.types import Noted
from ragtag.protocols.rounds.base import UNSOUND
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

N, BAD = 4, 3


def trained(
    transport: FakeTransport,
    *,
    average: str,
    spoil: float,
    note: Callable[[Noted], None] | None = None,
) -> str:
    """What a peer's optimizer raised: its own words, or that it trained to the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(transport.me))
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    sparse = average == "sparse"
    compress = TopK(0.5, values="fp32", resync=0, bypass=False) if sparse else None
    average = "gradients" if sparse else average
    optimizer = CrewOptimizer(
        sgd, transport, model=model, average=average, align=False, compress=compress, on_note=note
    )
    for at in range(6):
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
    said = run_peers(FakeCrew(N), lambda transport: trained(transport, average=average, spoil=1e15))
    for peer in range(N):
        if peer == BAD:
            continue
        assert "values that are not finite" in said[peer]
        assert "It was not this peer's learning rate: the average of round 2, with values" in said[peer]
        assert " of peers 0, 1, 2, 3 in it, came to 2.5e+14 where this peer had sent " in said[peer]
        assert "Lower the learning rate" not in said[peer]
    assert "Lower the learning rate or clip gradients" in said[BAD]  # it was its own value


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_who_breaks_by_itself_is_told_to_lower_its_learning_rate(average: str) -> None:
    said = run_peers(FakeCrew(N), lambda transport: trained(transport, average=average, spoil=float("nan")))
    assert "Lower the learning rate or clip gradients" in said[BAD]
    assert [said[peer] for peer in range(N) if peer != BAD] == ["trained"] * (N - 1)


@pytest.mark.parametrize("average", ["models", "gradients", "sparse"])
def test_who_diverges_to_huge_values_spoils_nobody_and_is_named(average: str) -> None:
    """They are finite, but a mean with them breaks whoever takes it. Its own model heals by the others'."""
    crew = FakeCrew(N)
    notes: list[Noted] = []
    assert (
        run_peers(crew, lambda transport: trained(transport, average=average, spoil=1e30, note=notes.append))
        == ["trained"] * N
    )
    noted = [note.peer for note in [*notes, *(note for _, note in crew.notes)] if note.what == UNSOUND]
    assert set(noted) == {BAD}
