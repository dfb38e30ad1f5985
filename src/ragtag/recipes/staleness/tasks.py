"""The staleness recipe's models: those of Dai et al.'s study, small.

A subject has its data, its model as one float32 vector, the gradients of many copies at once, and a target.
An optimiser's learning rate is the same for all delays. Targets and tuned rates were fixed by runs without
delay (s = 0), before any delayed one: see ``tune``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.recipes.tasks.digits import Net, digits_data
from ragtag.recipes.tasks.images import Parameter

LEARNING_RATES: Mapping[str, float] = {
    "SGD": 0.01,
    "Momentum": 0.01,
    "Adagrad": 0.01,
    "Adam": 0.001,
    "RMSProp": 0.001,
}
"""For the fully connected nets: .01 for SGD and .001 for Adam are the paper's. Related optimisers have the
same."""
DEPTHS = (0, 1, 2, 3, 4, 5, 6)
"""Hidden layers of the fully connected nets; 0: multinomial logistic regression (MLR)."""
PARTS_MAX = 512
"""A loss over all samples takes at most so many, where a model is not small."""


class Subject(Protocol):
    """A model, its data and its target.

    samples: to train on.
    batch: samples of one worker's step.
    rises: whether the quality is to rise to the target (accuracy) or to fall to it (a loss).
    """

    @property
    def samples(self) -> int: ...  # noqa: D102
    @property
    def batch(self) -> int: ...  # noqa: D102
    @property
    def target(self) -> float: ...  # noqa: D102
    @property
    def rises(self) -> bool: ...  # noqa: D102
    @property
    def rates(self) -> Mapping[str, float]: ...  # noqa: D102

    def initial(self, seed: int) -> Tensor:
        """An initial model, ``[D]``."""
        ...

    def gradients(self, models: Tensor, at: Tensor, rng: np.random.Generator) -> Tensor:
        """Each model's ``[P, D]`` mean gradient on its own batch of samples ``at`` ``[P, N]``."""
        ...

    def quality(self, model: Tensor) -> float:
        """The quality of a model on held-out samples."""
        ...

    def whole(self, model: Tensor) -> tuple[Tensor, float]:
        """Gradient and loss over fixed training samples."""
        ...


@dataclass(frozen=True, slots=True)
class Classifier:
    """A fully connected net on digits, with ``depth`` hidden layers of 64 (the paper: MNIST, 256)."""

    depth: int
    width: int = 64
    batch: int = 32
    target: float = 0.92

    @property
    def rises(self) -> bool:
        """Yes: the quality is an accuracy."""
        return True

    @property
    def rates(self) -> Mapping[str, float]:
        """Learning rates by optimiser."""
        return LEARNING_RATES

    @property
    def net(self) -> Net:
        """The net itself."""
        return Net((self.width,) * self.depth)

    @property
    def samples(self) -> int:
        """To train on."""
        return len(digits_data()[1])

    def initial(self, seed: int) -> Tensor:
        """See ``Subject``."""
        return self.net.initial(seed)

    def gradients(self, models: Tensor, at: Tensor, rng: np.random.Generator) -> Tensor:
        """See ``Subject``."""
        x, y, _, _ = digits_data()
        leaf = models.detach().requires_grad_()
        logits = self._forward(leaf, x[at])
        loss = F.cross_entropy(logits.flatten(0, 1), y[at].flatten(), reduction="sum") / at.shape[1]
        (found,) = torch.autograd.grad(loss, leaf)
        return found

    def quality(self, model: Tensor) -> float:
        """Accuracy on held-out digits."""
        return self.net.look(model)[1]

    def whole(self, model: Tensor) -> tuple[Tensor, float]:
        """Gradient and loss over all training samples."""
        x, y, _, _ = digits_data()
        leaf = model.detach().requires_grad_()
        loss = F.cross_entropy(self.net.logits(leaf, x), y)
        (found,) = torch.autograd.grad(loss, leaf)
        return found, float(loss.detach())

    def _forward(self, models: Tensor, x: Tensor) -> Tensor:
        """Logits ``[P, N, 10]`` of models ``[P, D]`` on inputs ``[P, N, 64]``, faster than by ``vmap``."""
        shapes = self.net.shapes
        parts = torch.split(models, [math.prod(shape) for shape in shapes], dim=1)
        for i in range(0, len(shapes), 2):
            weight = parts[i].reshape(len(models), *shapes[i])
            x = x if i == 0 else F.relu(x)
            x = torch.baddbmm(parts[i + 1][:, None, :], x, weight.transpose(1, 2))
        return x


Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Functional:
    """Any model that is a function of a list of tensors.

    train, held: columns with one row per sample.
    loss: the mean over the rows of columns (and, with ``noise``, of a last column of normal draws).
    accuracy: of a model on held columns; ``None``: the quality is the loss on them.
    noise: normal draws per row.
    stacked: the losses ``[P]`` of many models at once, where that is faster than ``vmap`` of ``loss``.
    """

    parameters: tuple[Parameter, ...]
    train: tuple[Tensor, ...]
    held: tuple[Tensor, ...]
    loss: Loss
    batch: int
    target: float
    rates: Mapping[str, float]
    accuracy: Loss | None = None
    noise: int = 0
    stacked: Loss | None = None

    @property
    def rises(self) -> bool:
        """Whether the quality is an accuracy."""
        return self.accuracy is not None

    @property
    def samples(self) -> int:
        """To train on."""
        return len(self.train[0])

    def initial(self, seed: int) -> Tensor:
        """See ``Subject``."""
        return torch.cat([p.initial(seed, i).reshape(-1) for i, p in enumerate(self.parameters)])

    def gradients(self, models: Tensor, at: Tensor, rng: np.random.Generator) -> Tensor:
        """See ``Subject``."""
        columns = [column[at] for column in self.train]
        if self.noise:
            columns.append(_normal(rng, (*at.shape, self.noise)))
        if self.stacked is not None:
            leaf = models.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.stacked(self._parts(leaf), columns).sum(), leaf)
            return found
        each: Tensor = vmap(grad(self._of))(models, columns)
        return each

    @torch.no_grad()
    def quality(self, model: Tensor) -> float:
        """Accuracy or loss on held-out samples; not finite where the model is not."""
        columns = self._fixed(self.held)
        if self.accuracy is not None:
            return float(self.accuracy(self._parts(model), columns))
        return float(self._of(model, columns))

    def whole(self, model: Tensor) -> tuple[Tensor, float]:
        """Gradient and loss over the first ``PARTS_MAX`` training samples."""
        found, loss = grad_and_value(self._of)(model, self._fixed(self.train))
        return found, float(loss)

    def _of(self, model: Tensor, columns: Sequence[Tensor]) -> Tensor:
        return self.loss(self._parts(model), columns)

    def _fixed(self, columns: Sequence[Tensor]) -> list[Tensor]:
        rows = [column[:PARTS_MAX] for column in columns]
        if self.noise:
            rng = random.generator(0, "noise of looks")
            rows.append(_normal(rng, (len(rows[0]), self.noise)))
        return rows

    def _parts(self, model: Tensor) -> list[Tensor]:
        sizes = [math.prod(p.shape) for p in self.parameters]
        parts = torch.split(model, sizes, dim=-1)
        many = model.shape[:-1]
        return [part.view(*many, *p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))
