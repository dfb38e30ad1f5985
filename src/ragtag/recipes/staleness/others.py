"""The other models of the staleness recipe: a ResNet, matrix factorisation, a VAE and an LSTM, all small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.recipes.staleness.tasks import Classifier, Functional, Subject
from ragtag.recipes.tasks.images import Parameter, cifar, digits, resnet
from ragtag.recipes.tasks.texts import load_text, lstm, lstm_parameters, split_text, stacked_lstm, windows

OTHERS = ("ResNet", "MF", "VAE", "LSTM")
RATES: Mapping[str, Mapping[str, float]] = {
    "ResNet": {"SGD": 0.01, "Adam": 0.0003},
    "MF": {"SGD": 3.0, "Adam": 0.01},
    "VAE": {"SGD": 0.01, "Adam": 0.001},
    "LSTM": {"SGD": 1.0, "Adam": 0.003},
}
"""Learning rates that ``tune`` chose at s = 0."""
TARGETS: Mapping[str, float] = {"ResNet": 0.92, "MF": 0.7, "VAE": 26.5, "LSTM": 2.8}
"""In this order: accuracy; squared error of a rating; bound on nats per image; nats per byte."""
CIFAR_TARGET = 0.4
SLOW, SLOW_MAX = ("ResNet", "LSTM"), 3200
"""Models whose runs end after so many batches, since they take long."""
USERS, ITEMS, RATINGS, RANK = 300, 200, 12_000, 5
LATENT = 8
LENGTH = 32
"""Bytes of a window of text."""
HELD_WINDOWS = 256


@lru_cache(maxsize=16)
def subject(model: str, data: Path | None = None) -> Subject:
    """The subject of this name: "DNN 0" (MLR) to "DNN 6", or one of ``OTHERS``.

    data: for the ResNet a folder with CIFAR-10's arrays (``cifar.decode``), for the LSTM a text; ``None``:
        digits, and the source of Python's standard library.

    Raises:
        ValueError: there is no model of this name.
        FileNotFoundError: see ``load_text``.
    """
    if model.startswith("DNN "):
        return Classifier(int(model.removeprefix("DNN ")))
    builders = {"ResNet": _resnet, "MF": _factors, "VAE": _vae, "LSTM": _lstm}
    if model not in builders:
        raise ValueError(f"no model is called {model!r}; there are DNN 0 to 6, {', '.join(OTHERS)}")
    return builders[model](data)


def _resnet(arrays: Path | None) -> Functional:
    """Eight layers with group norm. Digits are grey images of 8 x 8."""
    parameters, forward = resnet()
    if arrays is None:
        task = digits()
        x, held = ((part * 255).byte().repeat(1, 3, 1, 1) for part in (task.train_x, task.test_x))
    else:
        task = cifar(arrays)
        x, held = task.train_x, task.test_x

    def loss(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(forward(w, columns[0]), columns[1])

    def accuracy(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        return (forward(w, columns[0]).argmax(1) == columns[1]).float().mean()

    target = TARGETS["ResNet"] if arrays is None else CIFAR_TARGET
    train, test = (x, task.train_y), (held, task.test_y)
    return Functional(parameters, train, test, loss, 16, target, RATES["ResNet"], accuracy)


def ratings(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and ratings (1 to 5) from a seed, in shape like MovieLens.

    There are ``RANK`` hidden tastes, biases of users and items, popular items (Zipf) and noise of half a
    star; ratings are whole stars. int64, int64, float32, all ``[RATINGS]``, no pair twice.
    """
    rng = random.generator(seed, "ratings")
    tastes = rng.normal(0, 1, (USERS, RANK)) @ rng.normal(0, 1, (ITEMS, RANK)).T / RANK**0.5
    means = 3.5 + rng.normal(0, 0.4, (USERS, 1)) + rng.normal(0, 0.4, (1, ITEMS))
    stars = np.clip(np.rint(means + 0.8 * tastes + rng.normal(0, 0.5, tastes.shape)), 1, 5)
    popular = 1.0 / (10.0 + rng.permutation(ITEMS))
    odds = np.tile(popular / popular.sum() / USERS, (USERS, 1)).ravel()
    chosen = rng.choice(USERS * ITEMS, RATINGS, replace=False, p=odds)
    user, item = np.divmod(chosen, ITEMS)
    return (
        torch.from_numpy(user),
        torch.from_numpy(item),
        torch.from_numpy(stars.ravel()[chosen].astype(np.float32)),
    )


def _factors(_: Path | None) -> Functional:
    """Matrix factorisation (Koren, Bell, Volinsky, Computer 2009): mean, two biases, a product of factors."""
    columns = ratings()
    cut = RATINGS * 9 // 10
    mean = float(columns[2][:cut].mean())

    def error(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        user, item, stars = columns
        u, v = F.embedding(user, w[0]), F.embedding(item, w[1])
        biases = F.embedding(user, w[2]) + F.embedding(item, w[3])
        return (mean + biases[..., 0] + (u * v).sum(-1) - stars).square().mean()

    # fan_in 10: factors within .32; -1: biases begin at zero
    shapes = (((USERS, RANK), 10), ((ITEMS, RANK), 10), ((USERS, 1), -1), ((ITEMS, 1), -1))
    parameters = tuple(Parameter(shape, fan_in) for shape, fan_in in shapes)
    train, held = tuple(c[:cut] for c in columns), tuple(c[cut:] for c in columns)
    return Functional(parameters, train, held, error, 128, TARGETS["MF"], RATES["MF"])


def _vae(_: Path | None) -> Functional:
    """A VAE (Kingma, Welling, ICLR 2014) with a hidden layer of 64 each way; minus the ELBO, in nats."""
    task = digits()

    def layer(out: int, into: int) -> tuple[Parameter, Parameter]:
        return Parameter((out, into), into), Parameter((out,), into)

    def bound(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        x, noise = columns
        code = F.linear(F.relu(F.linear(x, w[0], w[1])), w[2], w[3])
        mean, log_variance = code[..., :LATENT], code[..., LATENT:]
        hidden = F.relu(F.linear(mean + noise * (0.5 * log_variance).exp(), w[4], w[5]))
        off = F.binary_cross_entropy_with_logits(F.linear(hidden, w[6], w[7]), x, reduction="none").sum(-1)
        apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return (off + apart).mean()

    parameters = (*layer(64, 64), *layer(2 * LATENT, 64), *layer(64, LATENT), *layer(64, 64))
    train, held = (task.train_x.flatten(1),), (task.test_x.flatten(1),)
    return Functional(parameters, train, held, bound, 32, TARGETS["VAE"], RATES["VAE"], noise=LATENT)


def _lstm(data: Path | None) -> Functional:
    """An LSTM of one layer of 64 on bytes."""
    train, held = split_text(load_text(data))

    def loss(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(lstm(w, columns[0]), columns[1])

    def losses(w: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        scores = stacked_lstm(w, columns[0])
        each = F.cross_entropy(scores.flatten(0, 1), columns[1].flatten(0, 1), reduction="none")
        return each.view(len(scores), -1).mean(1)

    x, y = windows(held, LENGTH)
    parts = windows(train, LENGTH), (x[:HELD_WINDOWS], y[:HELD_WINDOWS])
    return Functional(
        lstm_parameters(16, 64), *parts, loss, 8, TARGETS["LSTM"], RATES["LSTM"], stacked=losses
    )
