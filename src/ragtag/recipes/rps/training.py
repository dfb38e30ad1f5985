"""Trains the replicas of a crew in virtual time, and averages models or gradients with real machines.

All replicas are in one process. Their gradients are one batched call, and their averages go through
``ragtag.protocols`` machines over a simulated line that loses datagrams.

The rounds are the library's. What follows from an average is written here for stacked replicas, whose
gradients are one call. ``tests/recipes/test_rps_training`` trains a crew of ``CrewOptimizer`` beside it: the
same messages are lost, and the models are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults
from ragtag.core.schema import ALIGN
from ragtag.core.types import Floats, Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.rps import rps, rps_repair
from ragtag.recipes.lockstep import DEADLINE_S_MIN, run_rounds
from ragtag.recipes.rps.theory import bursts, line
from ragtag.recipes.tasks.images import Batches, Task, load, shards

METHODS: dict[str, Averager] = {"all-reduce": direct, "RPS": rps, "RPS with repair": rps_repair}


@dataclass(frozen=True, slots=True)
class Setup:
    """One training run.

    what: "models" are averaged after the local step, or "gradients" before it.
    arrival: the share of messages that arrive.
    by_label: shards are sorted by label.
    divide: gradients are divided by the weight that "arrived", or by the number of peers ("n").
    unit: what is lost at once: a whole "block" (the paper's message), or a "datagram" of 1,088 bytes, of
        which a block has many.
    burst: mean length of bursts of loss; 0: losses are independent.
    deadline_s_min: measured deadlines are no shorter.
    momentum: of the local SGD.
    momentum_is: "local", or "averaged" as well.
    """

    what: str
    method: str
    arrival: float
    by_label: bool
    seed: int
    steps: int
    n: int = 16
    divide: str = "arrived"
    unit: str = "block"
    burst: float = 0.0
    deadline_s_min: float = DEADLINE_S_MIN
    momentum: float = 0.0
    momentum_is: str = "local"

    @property
    def faults(self) -> Faults:
        """The line between the peers."""
        loss = 1.0 - self.arrival
        return bursts(loss, self.burst) if self.burst else line(round(loss, 12))


@dataclass(frozen=True, slots=True)
class Point:
    """The crew after ``step`` steps.

    loss: on a fixed sample of the training examples, mean over the peers' own models.
    accuracy, lowest: on test examples (more of them near the end), mean and lowest over the own models.
    mean_loss, mean_accuracy: of the mean of all models.
    spread: mean squared distance to that mean.
    """

    step: int
    loss: float
    accuracy: float
    lowest: float
    mean_loss: float
    mean_accuracy: float
    spread: float


@dataclass(slots=True)
class Curve:
    """The results of one setup.

    kept: share of chunks for which no average came.
    virtual_s: how long it took in virtual time.
    """

    setup: Setup
    points: list[Point] = field(default_factory=list)
    kept: float = 0.0
    virtual_s: float = 0.0

    @property
    def end(self) -> Point:
        """The last quarter of training: the geometric mean of losses, and the mean of all else.

        One look is not enough: a step on a batch of one label moves the loss by a factor of two.
        """
        late = [p for p in self.points if _late(p.step, self.setup.steps)]
        table = {f.name: [getattr(p, f.name) for p in late] for f in fields(Point)}
        means = {
            name: float(np.exp(np.log(x).mean()) if name in ("loss", "mean_loss") else np.mean(x))
            for name, x in table.items()
            if name != "step"
        }
        return Point(step=late[-1].step, **means)


def _late(step: int, steps: int) -> bool:
    return step > steps * 3 // 4 or step == steps


def train(setup: Setup, data: Path | None, points: int = 24) -> Curve:
    """Train a crew as ``setup`` says, and evaluate it ``points`` times on the way.

    data: the folder to which ``tasks.cifar.decode`` has written CIFAR-10; ``None``: scikit-learn's digits.
    """
    task = load(data)
    crew = _Crew(setup, task)
    curve = Curve(setup)
    every = max(1, setup.steps // points)
    kept = 0.0

    def then(done: int, outcomes: list[Outcome]) -> Sequence[Floats] | None:
        nonlocal kept
        crew.apply(outcomes)
        kept += 1 - float(np.mean([o.averaged.mean() for o in outcomes]))
        step, last = done + 1, done + 1 == setup.steps
        if step % every == 0 or last:
            curve.points.append(crew.look(step))
        if last:
            end_s = max(o.started_s + o.total_s for o in outcomes)
            curve.kept, curve.virtual_s = kept / setup.steps, end_s
        return None if last else crew.offer()

    curve.points.append(crew.look(0))
    method = METHODS[setup.method]
    run_rounds(
        crew.offer(),
        then,
        method=method,
        faults=setup.faults,
        seed=setup.seed,
        codec=crew.codec,
        deadline_s_min=setup.deadline_s_min,
        number=channel_of("model"),
    )
    return curve


class _Crew:
    """The replicas of all peers, as rows of one table padded to whole chunks."""

    def __init__(self, setup: Setup, task: Task) -> None:
        self.setup, self.task = setup, task
        n = setup.n
        self._vectors = 2 if setup.momentum_is == "averaged" else 1
        values = task.size * self._vectors
        # with one chunk per block a datagram is the paper's message; else a block is many datagrams
        width = (
            fp32.elements if setup.unit == "datagram" else math.ceil(math.ceil(values / ALIGN) * ALIGN / n)
        )
        self.codec: Codec = fp32._replace(elements=width)
        self._chunks = math.ceil(values / width)
        start = torch.cat([p.initial(setup.seed, i).flatten() for i, p in enumerate(task.parameters)])
        self._models = start.repeat(n, 1)
        self._momentum = torch.zeros_like(self._models)
        parts = shards(task, n, setup.seed, setup.by_label)
        self._batches = [Batches(part, task.batch, setup.seed, peer) for peer, part in enumerate(parts)]
        self._gradient = vmap(grad(self._loss))
        sample = random.generator(0, "loss sample").permutation(len(task.train_y))[:192]
        self._sample = torch.from_numpy(np.sort(sample))

    def offer(self) -> list[Floats]:
        """Take one local step. Returns what each peer offers to the average: ``[n_chunks, elements]``."""
        indices = torch.from_numpy(np.stack([batches.next() for batches in self._batches]))
        gradients = self._gradient(self._models, self.task.train_x[indices], self.task.train_y[indices])
        if self.setup.what == "gradients":
            return self._chunked(gradients)
        if self.setup.momentum:
            # dampened, so that the step is as long as without momentum
            m = self.setup.momentum
            gradients = self._momentum = self._momentum * m + gradients * (1 - m)
        models = self._models - self.task.learning_rate * gradients
        return self._chunked(models if self._vectors == 1 else torch.cat([models, self._momentum], 1))

    def apply(self, outcomes: list[Outcome]) -> None:
        """Take a round's outcomes, each peer its own."""
        means = np.stack([o.mean for o in outcomes])
        if self.setup.divide == "n":
            means *= np.stack([o.weight for o in outcomes])[:, :, None] / np.float32(self.setup.n)
        table = torch.from_numpy(means.reshape(self.setup.n, -1))
        size = self.task.size
        if self.setup.what == "gradients":
            self._models = self._models - self.task.learning_rate * table[:, :size]
        else:
            self._models = table[:, :size]
            if self._vectors == 2:
                self._momentum = table[:, size : 2 * size]

    def look(self, step: int) -> Point:
        """Evaluate every peer's own model and the mean of all."""
        task = self.task
        models = torch.cat([self._models, self._models.mean(0, keepdim=True)])
        some = self._sample
        losses = self._evaluate(models, task.train_x[some], task.train_y[some], accuracy=False)
        held = slice(0, 500 if _late(step, self.setup.steps) else 64)
        right = self._evaluate(models, task.test_x[held], task.test_y[held], accuracy=True)
        spread = (self._models - models[-1]).square().sum(1).mean()
        return Point(
            step=step,
            loss=_number(losses[:-1].mean()),
            accuracy=_number(right[:-1].mean()),
            lowest=_number(right[:-1].min()),
            mean_loss=_number(losses[-1]),
            mean_accuracy=_number(right[-1]),
            spread=max(_number(spread), 1e-12),  # float32 resolves no less
        )

    @torch.no_grad()
    def _evaluate(self, models: Tensor, x: Tensor, y: Tensor, accuracy: bool) -> Tensor:
        total = torch.zeros(len(models))
        for i, model in enumerate(models):  # one by one is faster here than in one batched call
            out = self.task.forward(self._unflatten(model), x)
            total[i] = (out.argmax(1) == y).float().mean() if accuracy else F.cross_entropy(out, y)
        return total

    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.task.forward(self._unflatten(model), x), y)

    def _unflatten(self, model: Tensor) -> list[Tensor]:
        sizes = [math.prod(p.shape) for p in self.task.parameters]
        pieces = torch.split(model, sizes)
        return [w.view(p.shape) for w, p in zip(pieces, self.task.parameters, strict=True)]

    def _chunked(self, table: Tensor) -> list[Floats]:
        padded = torch.zeros(len(table), self._chunks * self.codec.elements)
        padded[:, : table.shape[1]] = table
        rows = padded.view(len(table), self._chunks, self.codec.elements).numpy()
        return list(rows)


def _number(value: Tensor) -> float:
    return float(value)
