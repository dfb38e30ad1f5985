"""Training under a controlled delay of every update: the simulation model of Dai et al.

"Toward Understanding the Impact of Staleness in Distributed Machine Learning", Dai, Zhou, Dong, Zhang, Xing,
ICLR 2019 (arXiv 1810.03264), section 3. P workers each have a copy of the model. In step t each computes an
update from its own copy with its own optimiser. For each pair (p, p'), p' = p too, a delay r is drawn
uniformly from 0 .. s, and the update of p is added to the copy of p' at the start of step t + 1 + r. With
s = 0 all copies stay equal. Nothing is lost; updates may overtake each other.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.recipes.asynchronous_task import Net, Pool, digits_data, train_size

LEARNING_RATES = {"SGD": 0.01, "Momentum": 0.01, "Adagrad": 0.01, "Adam": 0.001, "RMSProp": 0.001}
"""By optimiser: what is held for all delays unless a study says otherwise."""


class Optimiser:
    """The updates of all workers at once, each from its own gradients and state; as torch.optim has them.

    Raises ValueError: no optimiser is called so.
    """

    def __init__(self, name: str, learning_rate: float, like: Tensor) -> None:
        if name not in LEARNING_RATES:
            raise ValueError(f"no optimiser is called {name!r}; there are: {', '.join(LEARNING_RATES)}")
        self._name, self._lr = name, learning_rate
        self._first, self._second, self._steps = torch.zeros_like(like), torch.zeros_like(like), 0

    def update(self, g: Tensor) -> Tensor:
        """What is to be added to a model, for gradients ``[P, D]``."""
        self._steps += 1
        name, lr = self._name, self._lr
        if name == "SGD":
            return -lr * g
        if name == "Momentum":
            self._first.mul_(0.9).add_(g)
            return -lr * self._first
        if name == "Adagrad":
            self._second.addcmul_(g, g)
            return -lr * g / (self._second.sqrt() + 1e-10)
        if name == "RMSProp":
            self._second.mul_(0.99).addcmul_(g, g, value=0.01)
            return -lr * g / (self._second.sqrt() + 1e-8)
        self._first.mul_(0.9).add_(g, alpha=0.1)
        self._second.mul_(0.999).addcmul_(g, g, value=0.001)
        first = self._first / (1 - 0.9**self._steps)
        return -lr * first / ((self._second / (1 - 0.999**self._steps)).sqrt() + 1e-8)


class Delays:
    """Copies of a model, and the updates that are on their way to them.

    Raises ValueError: no worker, or a largest delay below 0.
    """

    def __init__(self, start: Tensor, workers: int, s: int, seed: int) -> None:
        if workers < 1 or s < 0:
            raise ValueError(f"staleness: {workers} workers, s = {s}; at least 1, and 0 or more")
        self.copies = start.repeat(workers, 1)
        self._s, self._rng = s, random.generator(seed, "delays")
        self._coming = torch.zeros(s + 1, *self.copies.shape)
        self._step = 0
        self.drawn = np.zeros((workers, workers), np.int64)
        """The delays drawn last, ``[to, from]``."""

    def send(self, updates: Tensor) -> None:
        """End step t: draw a delay for each pair, and begin step t + 1 with what is due then."""
        workers = len(self.copies)
        self.drawn = r = self._rng.integers(0, self._s + 1, (workers, workers))
        for delay in np.unique(r):
            who = torch.from_numpy((r == delay).astype(np.float32))
            self._coming[(self._step + int(delay)) % (self._s + 1)].addmm_(who, updates)
        due = self._coming[self._step % (self._s + 1)]
        self.copies += due
        due.zero_()
        self._step += 1


class Coherence:
    """mu = min over the last s steps k of <grad F(x_t), grad F(x_k)> / |grad F(x_k)|^2 (definition 1)."""

    def __init__(self, s: int) -> None:
        self._past: deque[Tensor] = deque(maxlen=max(1, s))

    def add(self, gradient: Tensor) -> float:
        """mu at this step; NaN at the first, which has no past."""
        found = [float(gradient @ past / (past @ past + 1e-30)) for past in self._past]
        self._past.append(gradient)
        return min(found, default=math.nan)


@dataclass(frozen=True, slots=True)
class Study:
    """One run. depth: hidden layers of ``width``; s: the largest delay; batches_max: when to give up."""

    depth: int
    optimiser: str
    workers: int
    s: int
    seed: int
    learning_rate: float
    width: int = 64
    batch: int = 32
    target: float = 0.92
    batches_max: int = 8000
    coherence: bool = False


@dataclass(slots=True)
class Found:
    """What came of it. batches: of all workers, until the target was reached (``inf``: never);
    accuracies, losses, coherence: (batches, value) along the way, of the first worker's copy."""

    study: Study
    batches: float = math.inf
    losses: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    coherence: list[tuple[int, float]] = field(default_factory=list)


def run(study: Study) -> Found:
    """Train until the first worker's copy reaches the target, or the batches are used up."""
    net = Net((study.width,) * study.depth)
    delays = Delays(net.initial(study.seed), study.workers, study.s, study.seed)
    optimiser = Optimiser(study.optimiser, study.learning_rate, delays.copies)
    x, y, test_x, test_y = digits_data()
    pools = [Pool(train_size(), random.stream_key(study.seed, "worker", p)) for p in range(study.workers)]
    seen = Coherence(study.s)
    found = Found(study)
    every = max(1, 32 // study.workers)
    for step in range(study.batches_max // study.workers):
        batches = step * study.workers
        if step % every == 0:
            accuracy = _accuracy(net, delays.copies[:1], test_x, test_y)
            found.accuracies.append((batches, accuracy))
            if accuracy >= study.target:
                found.batches = batches
                break
        if study.coherence:
            gradient, loss = _whole(net, delays.copies[0], x, y)
            found.losses.append((batches, loss))
            found.coherence.append((batches, seen.add(gradient)))
        at = torch.from_numpy(np.stack([pool.take(study.batch) for pool in pools]))
        delays.send(optimiser.update(gradients(net, delays.copies, x[at], y[at])))
    return found


def _forward(net: Net, models: Tensor, x: Tensor) -> Tensor:
    """Logits ``[P, N, 10]`` of models ``[P, D]`` on inputs ``[P, N, 64]``."""
    shapes = net.shapes
    parts = torch.split(models, [math.prod(shape) for shape in shapes], dim=1)
    for i in range(0, len(shapes), 2):
        weight = parts[i].reshape(len(models), *shapes[i])
        x = x if i == 0 else F.relu(x)
        x = torch.baddbmm(parts[i + 1][:, None, :], x, weight.transpose(1, 2))
    return x


def gradients(net: Net, models: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Each model's mean gradient ``[P, D]`` on its own batch ``[P, N, 64]``."""
    leaf = models.detach().requires_grad_()
    logits = _forward(net, leaf, x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / x.shape[1]
    (found,) = torch.autograd.grad(loss, leaf)
    return found


@torch.no_grad()
def _accuracy(net: Net, models: Tensor, x: Tensor, y: Tensor) -> float:
    logits = _forward(net, models, x.expand(len(models), *x.shape))
    return float((logits.argmax(2) == y).float().mean())


def _whole(net: Net, model: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Gradient and loss over all training samples."""
    leaf = model.detach().requires_grad_()
    loss = F.cross_entropy(net.logits(leaf, x), y)
    (found,) = torch.autograd.grad(loss, leaf)
    return found, float(loss.detach())
