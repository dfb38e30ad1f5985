"""Names of a model's parts, whatever it is wrapped in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.optim.names import plain_name
from ragtag.training.tensors.modules import name_parameters


class Net(nn.Module):
    """With names that wrappers have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.rest = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.module(x))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compiled_inside(module: Net) -> nn.Module:
    module.rest[2] = compiled(module.rest[2])
    return compiled(module)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        compiled,
        compiled_inside,
        nn.DataParallel,
        lambda net: compiled(nn.DataParallel(net)),
        lambda net: nn.DataParallel(compiled(net)),
    ],
    ids=["plain", "compiled", "compiled inside", "parallel", "both", "both the other way"],
)
def test_a_wrapped_model_has_its_own_names(wrap: object) -> None:
    plain, net = Net(), wrap(Net())
    parameters = [name for name, _ in plain.named_parameters()]
    assert [plain_name(name, net) for name, _ in net.named_parameters()] == parameters
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    assert name_parameters(sgd.param_groups, [net]) == parameters
    wrapped, alone = KFAC(net, sgd, skip=["rest.0"]), KFAC(plain, lr=0.1, skip=["rest.0"])
    assert list(wrapped.layers) == ["module", "rest.2"]
    assert wrapped.left_out == alone.left_out == {"rest.0": "it is skipped"}
    alone.load_state_dict(wrapped.state_dict())


def test_a_layer_that_is_the_whole_model_is_called_so_compiled_too() -> None:
    layer = nn.Linear(2, 2)
    assert list(KFAC(compiled(layer), lr=0.1).layers) == ["model"]
    assert list(KFAC(compiled(nn.Sequential(nn.Linear(2, 2))), lr=0.1).layers) == ["0"]
