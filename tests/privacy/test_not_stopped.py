"""What NoPeek does not stop, measured: a server of ill will, and labels in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core.seed import generator
from ragtag.privacy import SplitModel, distance_correlation
from ragtag.privacy.meters import codes
from ragtag.recipes.nopeek.training import Samples, cut_net

pytestmark = pytest.mark.slow
WEIGHT = 10.0


@pytest.fixture(scope="module")
def samples() -> Samples:
    return Samples.of(None)


def trained(samples: Samples, scale: float, epochs: int, u_shaped: bool = False) -> SplitModel:
    """A client that trains with NoPeek; the server multiplies what it sends by ``scale``."""
    front, above = cut_net((1, 8, 8), 0)
    middle, back = (above[:3], above[3:]) if u_shaped else (above, None)
    split = SplitModel(
        front, middle, back, criterion=lambda made, y: scale * F.cross_entropy(made, y), nopeek=WEIGHT
    )
    parts = [part for part in (front, middle, back) if part is not None]
    optimizer = torch.optim.Adam(nn.ModuleList(parts).parameters(), 2e-3)
    draw = generator(0, "order")
    for _ in range(epochs):
        for some in torch.split(torch.from_numpy(draw.permutation(len(samples.train_y))), 128):
            split.backward(samples.train_x[some], samples.train_y[some])
            optimizer.step()
            optimizer.zero_grad()
    for part in parts:
        part.eval()
    return split


def dcor(split: SplitModel, samples: Samples) -> float:
    held = samples.held_x
    return float(distance_correlation(held, codes(split.front, held)))


def test_a_server_that_sends_larger_gradients_takes_the_weight_away(samples: Samples) -> None:
    """The client cannot tell what the gradients are of: a thousand times as large, they drown NoPeek's."""
    honest, greedy = (dcor(trained(samples, scale, 12), samples) for scale in (1.0, 1000.0))
    assert honest < 0.6
    assert greedy > honest + 0.2


def test_gradients_tell_labels_in_the_u_shaped_form_too(samples: Samples) -> None:
    """Labels never leave, but each sample's gradient lies with those of its class: ten known ones suffice."""
    split = trained(samples, 1.0, 12, u_shaped=True)
    assert split.back is not None
    x, y = samples.held_x, samples.held_y
    given = split.middle(split.front(x)).detach().requires_grad_()
    (seen,) = torch.autograd.grad(F.cross_entropy(split.back(given), y), given)
    seen = F.normalize(seen.flatten(1))
    known = torch.stack([(y == label).nonzero()[0, 0] for label in range(10)])
    guessed: Tensor = (seen @ seen[known].T).argmax(1)
    assert split.traffic.label_bytes == 0
    assert float((guessed == y).float().mean()) > 0.8
