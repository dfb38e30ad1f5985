"""What peers take from one of them, bit for bit, whatever its type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ragtag.training.state import fixed
from ragtag.training.state.fixed import Fixed, formed_alike
from ragtag.training.tensors.layout import Part
from ragtag.training.tensors.modules import buffer_parts, fixed_parts
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

PATIENCE_S = 30.0


def tensors(seed: int) -> list[torch.Tensor]:
    """Of many types and odd sizes, not in order of memory, at odd places, with values no mean could have."""
    stream = torch.Generator().manual_seed(seed)

    def raw(n_bytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=stream)

    return [
        raw(4 * 700).view(torch.float32),  # NaN and infinity among them, most likely
        torch.tensor([float("inf"), float("nan"), -0.0, seed], dtype=torch.float32),
        raw(2 * 301).view(torch.bfloat16),
        raw(8 * 5).view(torch.float64),
        torch.tensor([-(1 << 63), (1 << 63) - 1 - seed]),
        torch.randperm(1000, generator=stream),
        raw(13)[1:].view(3, 4),
        raw(13) > 100,
        torch.complex(torch.tensor([1.5 + seed]), torch.tensor([-2.0])),
        raw(4 * 120).view(torch.int32).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(seed),
        torch.zeros(0, 3),
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("round_bytes", [1024, 1 << 24])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_one_peers_values_are_taken_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, round_bytes: int, loss: float
) -> None:
    monkeypatch.setattr(fixed, "ROUND_BYTES", round_bytes)

    def work(transport: FakeTransport) -> tuple[list[str], list[torch.Tensor]]:
        own = tensors(transport.me)
        parts = [Part(str(at), "buffer", lambda t=tensor: t) for at, tensor in enumerate(own)]  # type: ignore[misc]
        held, said = Fixed("model", parts, transport), []
        said.append(held.stand().digest)
        for _ in range(3):
            held.average(1.0 if transport.me == 1 else 0.0, PATIENCE_S)
        said.append(held.stand().digest)
        return said, own

    found = run_peers(FakeCrew(3, loss=loss), work)
    assert len({said[0] for said, _ in found}) == 3
    assert {said[1] for said, _ in found} == {found[1][0][0]}
    for _, own in found:
        for tensor, wanted in zip(own, tensors(1), strict=True):
            assert bits(tensor) == bits(wanted), tensor


def test_stands_tell_forms_from_values() -> None:
    def stand(tensor: torch.Tensor, name: str = "a") -> fixed.Stand:
        return Fixed("model", [Part(name, "buffer", lambda: tensor)], FakeCrew(1).transport(0)).stand()

    one = stand(torch.tensor([1, 2]))
    assert formed_alike({0: one, 1: stand(torch.tensor([1, 3]))})
    for other in (
        stand(torch.tensor([1.0, 2.0])),
        stand(torch.tensor([1])),
        stand(torch.tensor([1, 2]), "b"),
    ):
        assert not formed_alike({0: one, 1: other})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        self.head, self.other = nn.Linear(3, 2), nn.Linear(2, 2)
        self.tied = self.body[0]
        self.on_meta = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
        self.lazy = nn.UninitializedParameter(requires_grad=False)
        self.expanded = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def test_fixed_is_what_the_optimizer_does_not_have_and_no_average_moves() -> None:
    model = Model()
    averaged = [*model.head.parameters(), model.body[0].bias]
    frozen = ["body.0.weight", "body.1.weight", "body.1.bias"]
    assert [part.name for part in fixed_parts(averaged, [model])] == frozen
    whole = [part.name for part in fixed_parts(averaged, [model], buffers=True)]
    assert sorted(whole) == sorted([*frozen, "order", "mask", "body.1.num_batches_tracked"])
    trainable = [part.name for part in fixed_parts(averaged, [model], trainable=True)]
    assert sorted(trainable) == sorted([*frozen, "other.weight", "other.bias"])
    assert not set(whole) & {part.name for part in buffer_parts([model])[0]}
    assert fixed_parts(averaged, [], buffers=True) == []
