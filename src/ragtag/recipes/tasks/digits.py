"""Fully connected nets on handwritten digits, and a pool of samples, for recipes about time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.core.types import Floats
from ragtag.recipes.tasks.images import digits

Indices = NDArray[np.int64]


@lru_cache(maxsize=1)
def digits_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs ``[N, 64]`` and labels, and those held out."""
    task = digits()
    return task.train_x.flatten(1), task.train_y, task.test_x.flatten(1), task.test_y


@lru_cache(maxsize=1)
def _arrays() -> tuple[Floats, Indices]:
    x, y, _, _ = digits_data()
    return x.numpy(), y.numpy()


@dataclass(frozen=True, slots=True)
class Net:
    """A classifier of digits. A model is one float32 vector of ``size`` values.

    hidden: widths of the ReLU layers; empty: multinomial logistic regression.
    """

    hidden: tuple[int, ...] = (64,)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weight and bias of each layer, from the input on."""
        widths = (64, *self.hidden, 10)
        return [shape for into, out in pairwise(widths) for shape in ((out, into), (out,))]

    @property
    def size(self) -> int:
        """How many values a model has."""
        return sum(math.prod(shape) for shape in self.shapes)

    def initial(self, seed: int) -> Tensor:
        """Initial weights: uniform, of variance 2 / fan_in (He et al., ICCV 2015); biases are 0."""
        parts = []
        for i, shape in enumerate(self.shapes):
            if len(shape) == 1:
                parts.append(np.zeros(shape, np.float32))
                continue
            draws = random.generator(seed, "initial weights", i).uniform(-1.0, 1.0, shape)
            parts.append((draws * math.sqrt(6.0 / shape[1])).astype(np.float32).ravel())
        return torch.from_numpy(np.concatenate(parts))

    def logits(self, model: Tensor, x: Tensor) -> Tensor:
        """Logits ``[N, 10]`` of inputs ``[N, 64]``."""
        shapes = self.shapes
        parts = torch.split(model, [math.prod(shape) for shape in shapes])
        for i in range(0, len(shapes), 2):
            x = F.linear(x if i == 0 else F.relu(x), parts[i].view(shapes[i]), parts[i + 1])
        return x

    def gradient(self, model: Tensor, indices: Indices, weights: NDArray[np.float32]) -> Tensor:
        """The sum over training samples of weight times the loss's gradient, in the model's shape.

        It is written out in numpy: these recipes' batches are so small that autograd's overhead would
        dominate.
        """
        x, y = _arrays()
        layers = self._layers(model.detach().numpy())
        inputs = [x[indices]]
        for i, (weight, bias) in enumerate(layers):
            before = inputs[-1] @ weight.T + bias
            inputs.append(np.maximum(before, 0) if i + 1 < len(layers) else before)
        scores = inputs.pop()
        odds = np.exp(scores - scores.max(1, keepdims=True))
        back = odds / odds.sum(1, keepdims=True)
        back[np.arange(len(indices)), y[indices]] -= 1
        back *= weights[:, None]
        found = np.empty(self.size, np.float32)
        gradients = self._layers(found)
        for i in range(len(layers) - 1, -1, -1):
            np.matmul(back.T, inputs[i], out=gradients[i][0])
            back.sum(0, out=gradients[i][1])
            if i:
                back = (back @ layers[i][0]) * (inputs[i] > 0)
        return torch.from_numpy(found)

    def _layers(self, values: Floats) -> list[tuple[Floats, Floats]]:
        """Weight and bias of each layer, as views of a model's values."""
        shapes = self.shapes
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(values, cuts), shapes, strict=True)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    @torch.no_grad()
    def look(self, model: Tensor) -> tuple[float, float]:
        """Training loss, and accuracy on held-out samples."""
        x, y, test_x, test_y = digits_data()
        loss = float(F.cross_entropy(self.logits(model, x), y))
        accuracy = float((self.logits(model, test_x).argmax(1) == test_y).float().mean())
        return loss if math.isfinite(loss) else math.inf, accuracy


def train_size() -> int:
    """How many training samples there are."""
    return len(digits_data()[1])


class Pool:
    """Samples that peers take as they need them, each once an epoch, in a new order each epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._rng = size, random.generator(seed, "pool")
        self._left: Indices = np.zeros(0, np.int64)

    def take(self, k: int) -> Indices:
        """The next ``k`` samples."""
        while len(self._left) < k:
            self._left = np.concatenate([self._left, self._rng.permutation(self._size)])
        taken, self._left = self._left[:k], self._left[k:]
        return taken
