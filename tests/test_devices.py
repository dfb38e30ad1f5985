"""The library's own tensors lie where it says: a script's default device is the script's."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ragtag
from ragtag.core.faults import Faults
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer

ROOT = Path(ragtag.__file__).parent
MADE = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""What ``torch.set_default_device`` moves elsewhere (``*_like`` and ``new_*`` go by their tensor)."""


def places(source: str) -> list[int]:
    """Lines in which a tensor is made with no word on where."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in MADE) == ("torch", True)
        and not {word.arg for word in call.keywords} & {"device", "out"}
    ]


def test_what_is_looked_for_is_found() -> None:
    assert places(
        "import torch\na = torch.zeros(3)\nb = torch.zeros(3, device='cpu')\nc = a.new_zeros(3)\n"
    ) == [2]


@pytest.mark.parametrize(
    "room", ["app", "codecs", "hooks", "network", "optim", "privacy", "simulation", "training"]
)
def test_each_tensor_is_made_on_a_device_that_is_named(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line in places(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "options",
    [
        {"average": "gradients"},
        {"average": "models", "overlap": True},
        {"average": "gradients", "compress": TopK(ratio=0.1, bypass=False)},
        {"average": "models", "outer": ragtag.Outer(fragments=2, delay=1), "every": 3},
    ],
    ids=["gradients", "models", "top-k", "fragments"],
)
def test_a_crew_trains_whatever_the_default_device_is(options: dict[str, Any]) -> None:
    """On "meta" tensors have no values."""

    def train(peer: SimulatedTransport) -> torch.Tensor:
        torch.set_default_device("meta")  # of this thread
        torch.manual_seed(0)
        model = nn.Linear(20, 20, device="cpu")
        optimizer = CrewOptimizer(torch.optim.SGD(model.parameters(), 0.1), peer, model=model, **options)
        for _ in range(8):
            optimizer.zero_grad()
            (model(torch.full((4, 20), 1.0 + peer.me, device="cpu")) - 1).square().mean().backward()
            optimizer.step()
        assert optimizer.outcome is not None
        assert optimizer.outcome.averaged.all()
        return model.weight.detach()

    for weight in SimulatedCrew(2, Faults(latency_s=0.001), seed=1).run(train):
        assert weight is not None
        assert weight.isfinite().all()
