"""NoPeek in a loop: the same loss by hooks and by hand, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ragtag
from ragtag.core.seed import generator
from ragtag.privacy import NoPeek, distance_correlation
from ragtag.privacy.nopeek import NoPass


def drawn(*shape: int, name: str) -> Tensor:
    return torch.from_numpy(generator(0, name).standard_normal(shape)).float()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for i, p in enumerate(model.parameters()):
        p.data = 0.5 * drawn(*p.shape, name=f"weights {i}")
    return model


X, Y = drawn(24, 6, name="x"), torch.arange(24) % 3


def test_it_is_the_weighted_sum() -> None:
    z = drawn(24, 8, name="z")
    task = torch.tensor(2.0)
    found = NoPeek(weight=0.5, task_weight=3.0)(task, X, z)
    assert float(found) == pytest.approx(3.0 * 2.0 + 0.5 * float(distance_correlation(X, z)))


def test_hooks_see_what_a_loop_would_give() -> None:
    given, watched = net(), net()
    z = given[:2](X)
    NoPeek(weight=0.7)(F.cross_entropy(given[2](z), Y), X, z).backward()
    nopeek = ragtag.privacy.NoPeek(watched, "1", weight=0.7)
    nopeek(F.cross_entropy(watched(X), Y)).backward()
    plain = net()
    F.cross_entropy(plain(X), Y).backward()
    for a, b, c in zip(given.parameters(), watched.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and c.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    assert plain[0].weight.grad is not None and not torch.equal(plain[0].weight.grad, watched[0].weight.grad)
    assert torch.equal(plain[2].weight.grad, watched[2].weight.grad), (
        "what lies above the layer learns the task"
    )
    assert nopeek.training_dcor == pytest.approx(float(distance_correlation(X, z.detach())))


def test_training_with_it_lowers_what_a_layer_tells() -> None:
    told: dict[float, float] = {}
    for weight in (0.0, 2.0):
        model = net()
        nopeek = NoPeek(model, "1", weight=weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(60):
            nopeek(F.cross_entropy(model(X), Y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told[weight] = float(distance_correlation(X, model[:2](X).detach()))
        assert (nopeek.training_dcor is None) == (weight == 0)
    assert told[2.0] < told[0.0] - 0.1


@pytest.mark.parametrize("evaluated", ["the model", "the layer"])
def test_evaluation_between_pass_and_loss_does_not_count(evaluated: str) -> None:
    model = net()
    expected = float(distance_correlation(X, model[:2](X).detach()))
    nopeek = NoPeek(model, "1", weight=1.0)
    task = F.cross_entropy(model(X), Y)
    with torch.no_grad():
        model(X[:5]) if evaluated == "the model" else model[1](X[:5])
    nopeek(task).backward()
    assert nopeek.training_dcor == pytest.approx(expected)
    with pytest.raises(NoPass, match="has not run since the last loss"):
        nopeek(task)


def test_once_removed_it_sees_nothing() -> None:
    model = net()
    nopeek = NoPeek(model, "1", weight=1.0)
    nopeek.remove()
    with pytest.raises(NoPass):
        nopeek(F.cross_entropy(model(X), Y))


def test_it_does_not_stop_gradients_from_telling_samples() -> None:
    """Of a unit that one sample alone excites, the gradient by its weights is a multiple of that sample."""
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    for i, p in enumerate(model.parameters()):
        p.data = drawn(*p.shape, name=f"wide {i}")
    nopeek = NoPeek(model, "1", weight=5.0)
    nopeek(F.cross_entropy(model(X[:3]), Y[:3])).backward()
    weight, bias = model[0].weight.grad, model[0].bias.grad
    assert weight is not None and bias is not None
    told = weight[bias.abs() > 1e-4] / bias[bias.abs() > 1e-4, None]
    apart = torch.cdist(X[:3], told).min(1).values
    assert apart.max() < 1e-3, "all three are read off a federated model's update"


def test_what_cannot_be_is_refused() -> None:
    model = net()
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be 0 or more"):
            NoPeek(weight=weight)
    with pytest.raises(ValueError, match="no layer 'features'; it has 0, 1, 2"):
        NoPeek(model, "features", weight=1.0)
    with pytest.raises(ValueError, match="or neither"):
        NoPeek(model, weight=1.0)
    with pytest.raises(ValueError, match="needs x and z"):
        NoPeek(weight=1.0)(torch.tensor(1.0))
    with pytest.raises(ValueError, match="takes x and z from the model's pass"):
        NoPeek(model, "1", weight=1.0)(torch.tensor(1.0), X, X)
    NoPeek(model, "1", weight=1.0)
    with pytest.raises(TypeError, match="first argument must be the batch"):
        model(input=X)


def test_a_layer_that_makes_no_tensor_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    model = nn.Sequential(Pair())
    NoPeek(model, "0", weight=1.0)
    with pytest.raises(TypeError, match="makes a tuple"):
        model(X)
