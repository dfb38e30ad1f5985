"""Gradient inversion finds samples in plain updates, and none where noise hides them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from ragtag.privacy import gradients_of, inversion
from ragtag.privacy.inversion import inverted


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(216, 24), nn.Tanh(),
            nn.Linear(24, 4),
        )  # fmt: skip


def samples(updates: int = 3, batch: int = 1) -> tuple[Tensor, Tensor]:
    draws = generator(1, "images")
    x = torch.from_numpy(draws.uniform(size=(updates, batch, 1, 3, 3))).float()
    y = torch.arange(batch).repeat(updates, 1) % 4
    return x.repeat_interleave(2, 3).repeat_interleave(2, 4), y


def test_gradients_are_those_of_each_batch_by_itself() -> None:
    model, (x, y) = net(), samples(batch=2)
    found = gradients_of(model, x, y)
    model.zero_grad()
    nn.functional.cross_entropy(model(x[1]), y[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name][1], parameter.grad)


def test_a_plain_update_gives_its_sample_away_and_a_noised_one_does_not() -> None:
    model, (x, y) = net(), samples()
    plain = inversion(model, x, y, steps=60)
    assert plain.hidden < 0.1 and plain.cosine > 0.97
    assert plain.ssim is not None and plain.blind_ssim is not None and plain.ssim > plain.blind_ssim + 0.2
    noised = {}
    gradients = gradients_of(model, x, y)
    norm = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)
    for name, gradient in gradients.items():
        scale = (1 / norm).view(-1, *[1] * (gradient.dim() - 1))
        drawn = torch.from_numpy(generator(2, name).normal(size=gradient.shape)).float()
        noised[name] = gradient * scale + drawn
    hidden = inversion(model, x, y, noised, steps=60)
    assert hidden.hidden > 0.6 and hidden.cosine < 0.5


def test_the_same_seed_finds_the_same() -> None:
    model, (x, y) = net(), samples(1)
    first, again = (inverted(model, gradients_of(model, x, y), y, x.shape[2:], steps=5)[0] for _ in range(2))
    assert torch.equal(first, again)
    other, _ = inverted(model, gradients_of(model, x, y), y, x.shape[2:], steps=5, seed=1)
    assert not torch.equal(first, other)
    assert first.min() >= 0 and first.max() <= 1


def test_what_is_found_is_where_the_model_is_and_of_its_type() -> None:
    """A stand-in for a device: values of another type are refused as those of another device are."""
    model = net().double()
    x, y = samples(1)
    found, cosines = inverted(model, gradients_of(model, x.double(), y), y, x.shape[2:], steps=2)
    assert found.dtype == cosines.dtype == torch.float64


def test_bad_input_is_named() -> None:
    model, (x, y) = net(), samples(1)
    with pytest.raises(ValueError, match=r"\[updates, batch, ...\]"):
        inversion(model, x[0], y[0])
    with pytest.raises(ValueError, match="all samples are equal"):
        inversion(model, torch.ones_like(x), y)
    broken = {name: g * float("nan") for name, g in gradients_of(model, x, y).items()}
    with pytest.raises(NotFinite, match=r"the update of '0.weight'"):
        inversion(model, x, y, broken)
