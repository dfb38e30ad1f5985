"""The RPS recipe's tasks: a small net on handwritten digits, or a small ResNet on CIFAR-10.

A model is a list of float32 tensors and a pure function of them, so that all peers' replicas can be stacked
and differentiated in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core import seed as random

Forward = Callable[[Sequence[Tensor], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a model. fan_in: inputs of its layer; 0: a norm's scale; -1: a norm's shift."""

    shape: tuple[int, ...]
    fan_in: int

    def initial(self, seed: int, index: int) -> Tensor:
        """Initial values, the same on every peer: uniform, 1/sqrt(fan_in), as in torch's own layers."""
        if self.fan_in <= 0:
            return torch.ones(self.shape) if self.fan_in == 0 else torch.zeros(self.shape)
        draws = random.generator(seed, "initial weights", index).uniform(-1.0, 1.0, self.shape)
        return torch.from_numpy((draws / math.sqrt(self.fan_in)).astype(np.float32))


def _layer(*shape: int, bias: bool = True) -> list[Parameter]:
    fan_in = math.prod(shape[1:])
    return [Parameter(shape, fan_in), *([Parameter(shape[:1], fan_in)] if bias else [])]


class TaskModel(nn.Module):
    """A forward function as a module. Its parameters are drawn from the seed."""

    def __init__(self, forward: Forward, parameters: Sequence[Parameter], seed: int) -> None:
        super().__init__()
        self._function = forward
        self.weights = nn.ParameterList([p.initial(seed, i) for i, p in enumerate(parameters)])

    def forward(self, x: Tensor) -> Tensor:
        """The function's scores. Classes are dimension 1, as ``F.cross_entropy(scores, y)`` takes them."""
        return self._function(list(self.weights), x)


@dataclass(frozen=True, slots=True)
class Task:
    """Data, a model, and how it is trained (SGD without momentum).

    train_x, test_x: float32 or uint8 ``[N, C, H, W]``.
    train_y, test_y: int64 ``[N]``.
    batch: examples per peer and step.
    steps: how many by default.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    parameters: tuple[Parameter, ...]
    forward: Forward
    batch: int
    learning_rate: float
    steps: int

    @property
    def size(self) -> int:
        """How many values the model has."""
        return sum(math.prod(p.shape) for p in self.parameters)


def load(data: Path | None) -> Task:
    """Digits, or CIFAR-10 from the arrays that ``cifar.decode`` has written to ``data``."""
    return digits() if data is None else cifar(data)


def digits() -> Task:
    """scikit-learn's 1,797 handwritten digits (8 x 8) and a convolutional net of 38,282 values."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = list(random.permutation(random.stream_key(0, "digits split"), len(bunch.target)))
    x = torch.from_numpy(bunch.images[order].astype(np.float32) / 16.0)[:, None]
    y = torch.from_numpy(bunch.target[order].astype(np.int64))
    held = len(y) - 360
    shapes = ((16, 1, 3, 3), (32, 16, 3, 3), (64, 512), (10, 64))
    parameters = [p for shape in shapes for p in _layer(*shape)]
    return Task(
        name="digits",
        train_x=x[:held],
        train_y=y[:held],
        test_x=x[held:],
        test_y=y[held:],
        parameters=tuple(parameters),
        forward=_convnet,
        batch=8,
        learning_rate=0.1,
        steps=600,
    )


def _convnet(w: Sequence[Tensor], x: Tensor) -> Tensor:
    x = F.relu(F.conv2d(x, w[0], w[1], padding=1))
    x = F.relu(F.conv2d(x, w[2], w[3], padding=1))
    x = F.max_pool2d(x, 2).flatten(1)
    return F.linear(F.relu(F.linear(x, w[4], w[5])), w[6], w[7])


_WIDTHS = (8, 16, 32)
_GROUPS = 4
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
_STD = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]


def cifar(arrays: Path) -> Task:
    """CIFAR-10 and a ResNet of 8 layers (He et al., CVPR 2016, section 4.2) of 19,954 values.

    It has group normalisation in place of batch normalisation: batch statistics of label-sorted shards break
    training by themselves (Hsieh et al., ICML 2020), which would hide the effect of loss.
    """

    def images(name: str) -> Tensor:
        array: NDArray[np.uint8] = np.load(arrays / f"{name}.npy", allow_pickle=False)
        return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()

    def labels(name: str) -> Tensor:
        array: NDArray[np.uint8] = np.load(arrays / f"{name}.npy", allow_pickle=False)
        return torch.from_numpy(array.astype(np.int64))

    def mixed(name: str) -> tuple[Tensor, Tensor]:
        """Shuffle the images: the archive goes class by class, and evaluations use a first part."""
        y = labels(f"{name}_y")
        order = list(random.permutation(random.stream_key(0, f"cifar {name}"), len(y)))
        return images(f"{name}_x")[order], y[order]

    train_x, train_y = mixed("train")
    test_x, test_y = mixed("test")
    return Task(
        name="CIFAR-10",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        parameters=tuple(_resnet_parameters()),
        forward=_resnet,
        batch=8,
        learning_rate=0.1,
        steps=500,
    )


def resnet() -> tuple[tuple[Parameter, ...], Forward]:
    """The ResNet of ``cifar``: uint8 ``[N, 3, H, W]`` of any size to scores ``[N, 10]``."""
    return tuple(_resnet_parameters()), _resnet


def _resnet_parameters() -> list[Parameter]:
    def conv(out: int, into: int, side: int) -> list[Parameter]:
        return [*_layer(out, into, side, side, bias=False), Parameter((out,), 0), Parameter((out,), -1)]

    parameters = conv(_WIDTHS[0], 3, 3)
    into = _WIDTHS[0]
    for width in _WIDTHS:
        parameters += [*conv(width, into, 3), *conv(width, width, 3)]
        parameters += conv(width, into, 1) if width != into else []
        into = width
    return [*parameters, *_layer(10, into)]


def _resnet(w: Sequence[Tensor], x: Tensor) -> Tensor:
    at = 0

    def conv(x: Tensor, stride: int, padding: int) -> Tensor:
        nonlocal at
        weight, scale, shift = w[at : at + 3]
        at += 3
        return F.group_norm(F.conv2d(x, weight, stride=stride, padding=padding), _GROUPS, scale, shift)

    x = F.relu(conv((x.float() / 255.0 - _MEAN) / _STD, 1, 1))
    into = _WIDTHS[0]
    for width in _WIDTHS:
        stride = 1 if width == into else 2
        y = conv(F.relu(conv(x, stride, 1)), 1, 1)
        x = F.relu(y + (x if width == into else conv(x, stride, 0)))
        into = width
    return F.linear(x.mean((2, 3)), w[at], w[at + 1])


def shards(task: Task, n: int, seed: int, by_label: bool) -> list[NDArray[np.int64]]:
    """The training examples of each of ``n`` peers: shuffled, or sorted by label and cut into pieces."""
    order = random.generator(seed, "shards").permutation(len(task.train_y))
    if by_label:
        order = order[np.argsort(task.train_y.numpy()[order], kind="stable")]
    return [np.asarray(part, np.int64) for part in np.array_split(order, n)]


class Batches:
    """One peer's batches: its shard in a new order each epoch, as from a data loader."""

    def __init__(self, shard: NDArray[np.int64], batch: int, seed: int, peer: int) -> None:
        if len(shard) < batch:
            raise ValueError(f"a shard of {len(shard)} examples for batches of {batch}: use fewer peers")
        self._shard, self._batch = shard, batch
        self._rng = random.generator(seed, "batches", peer)
        self._left = shard[:0]

    def next(self) -> NDArray[np.int64]:
        """Indices of the next batch, into the task's training set."""
        if len(self._left) < self._batch:
            self._left = self._rng.permutation(self._shard)
        taken, self._left = self._left[: self._batch], self._left[self._batch :]
        return taken
