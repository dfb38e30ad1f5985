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
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ragtag.core import seed as random
from ragtag.recipes.staleness.others import subject
from ragtag.recipes.staleness.tasks import LEARNING_RATES, Subject
from ragtag.recipes.tasks.digits import Pool


class Optimiser:
    """The updates of all workers at once, each from its own gradients and state, as in torch.optim.

    Raises:
        ValueError: there is no optimiser of this name.
    """

    def __init__(self, name: str, learning_rate: float, like: Tensor) -> None:
        if name not in LEARNING_RATES:
            raise ValueError(f"no optimiser is called {name!r}; there are: {', '.join(LEARNING_RATES)}")
        self._name, self._lr = name, learning_rate
        self._first, self._second, self._steps = torch.zeros_like(like), torch.zeros_like(like), 0

    def update(self, g: Tensor) -> Tensor:
        """The updates to be added to models, ``[P, D]``, from gradients of that shape."""
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
        scale = (self._second / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
        return scale.reciprocal_().mul_(self._first).mul_(-lr / (1 - 0.9**self._steps))


class Delays:
    """Copies of a model, and the updates on their way to them.

    Raises:
        ValueError: there is no worker, or the largest delay is below 0.
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
        """End step t: draw a delay for each pair, and begin step t + 1 with the updates that are due."""
        workers = len(self.copies)
        self.drawn = r = self._rng.integers(0, self._s + 1, (workers, workers))
        coming, sent = self._coming.numpy(), updates.numpy()
        rings = (self._step + r) % (self._s + 1)
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges: ``train`` ends it
            for to, ring in enumerate(rings.tolist()):
                for p, at in enumerate(ring):  # row by row: a product of matrices takes several times as long
                    coming[at, to] += sent[p]
        due = self._coming[self._step % (self._s + 1)]
        self.copies += due
        due.zero_()
        self._step += 1


LOOK_BACK = 16
"""How many steps coherence looks back: the paper's s. It is the same without delay, so that runs compare."""


class Coherence:
    """mu = min over the last s steps k of <grad F(x_t), grad F(x_k)> / |grad F(x_k)|^2 (definition 1)."""

    def __init__(self, s: int) -> None:
        self._past: deque[Tensor] = deque(maxlen=s)

    def add(self, gradient: Tensor) -> float:
        """mu at this step; NaN at the first, which has no past."""
        found = [float(gradient @ past / (past @ past + 1e-30)) for past in self._past]
        self._past.append(gradient)
        return min(found, default=math.nan)


@dataclass(frozen=True, slots=True)
class Study:
    """One run.

    model: a subject's name.
    s: the largest delay, in steps.
    batches_max: when to give up.
    coherence: measure it.
    data: the subject's data (``others.subject``).
    """

    model: str
    optimiser: str
    workers: int
    s: int
    seed: int
    learning_rate: float
    batches_max: int = 8000
    coherence: bool = False
    data: Path | None = None


@dataclass(slots=True)
class Found:
    """The results of a run.

    batches: of all workers, until the target was reached; ``inf``: never.
    losses, qualities, coherence: (batches, value) of the first copy along the way. A quality is an accuracy
        or a loss.
    """

    study: Study
    batches: float = math.inf
    losses: list[tuple[int, float]] = field(default_factory=list)
    qualities: list[tuple[int, float]] = field(default_factory=list)
    coherence: list[tuple[int, float]] = field(default_factory=list)


def run(study: Study) -> Found:
    """Train until the first worker's copy reaches the target, or the batches are used up."""
    return train(subject(study.model, study.data), study)


def train(task: Subject, study: Study) -> Found:
    """Train a subject as ``study`` says (see ``run``)."""
    torch.set_num_threads(1)
    delays = Delays(task.initial(study.seed), study.workers, study.s, study.seed)
    optimiser = Optimiser(study.optimiser, study.learning_rate, delays.copies)
    pools = [Pool(task.samples, random.stream_key(study.seed, "worker", p)) for p in range(study.workers)]
    rng = random.generator(study.seed, "samples' noise")
    seen = Coherence(LOOK_BACK)
    found = Found(study)
    every = max(1, 32 // study.workers)
    for step in range(study.batches_max // study.workers):
        batches = step * study.workers
        if step % every == 0:
            quality = task.quality(delays.copies[0])
            found.qualities.append((batches, quality))
            if (quality >= task.target) if task.rises else (quality <= task.target):
                found.batches = batches
                break
            if not bool(torch.isfinite(delays.copies[0]).all()):
                break  # it has diverged for good
        if study.coherence:
            gradient, loss = task.whole(delays.copies[0])
            found.losses.append((batches, loss))
            found.coherence.append((batches, seen.add(gradient)))
        at = torch.from_numpy(np.stack([pool.take(task.batch) for pool in pools]))
        delays.send(optimiser.update(task.gradients(delays.copies, at, rng)))
    return found
