"""Local steps and sparse outer steps: what a crew sends every H steps is a sparse difference to an anchor.

SparseLoCo (Sarfi, Thérien, Lidin, Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
2025, arXiv 2508.15706, algorithm 1): H local AdamW steps; the difference to the anchor that all have goes
through error feedback with a decay of .95, top-k of each 4,096 entries and 2-bit values; the outer step
subtracts the mean. Beside it DiLoCo (arXiv 2311.08105): the same, dense, with Nesterov momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.gather import SparseSum
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.topk import CHUNK, chunked
from ragtag.core.types import Floats
from ragtag.optim.outer import Nesterov
from ragtag.recipes.tasks.images import Batches, Task, shards
from ragtag.recipes.topk.tasks import TRANSFORMER, Sources
from ragtag.recipes.topk.training import LOOKS

DECAY = 0.95
PER_CHUNK = 64
"""Entries of each 4,096: 1.6 %, in the middle of what SparseLoCo tried."""
_BETAS, _EPSILON, _WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1

Values = Literal["fp32", "bf16", "int8", "2bit"]


@dataclass(frozen=True, slots=True)
class Local:
    """One run. values: how values of the sparse difference are sent; ``None``: it is sent dense, as fp32."""

    name: str
    values: Values | None
    outer: Nesterov
    n: int = 8
    local_steps: int = 15
    rounds: int = 40
    seed: int = 0
    learning_rate: float = 3e-3


@dataclass(slots=True)
class Outer:
    """What a run came to: after each round, training loss and the bytes that one peer has sent."""

    setup: Local
    size: int
    losses: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    held: float = math.nan
    """kept: the share of the difference's energy (with the residual) that was sent, by round."""


def methods(n: int, rounds: int) -> list[Local]:
    """The runs that are compared."""
    sgd, nesterov = Nesterov(1.0, 0.0), Nesterov()
    return [
        Local("dense, DiLoCo", None, nesterov, n, rounds=rounds),
        Local("dense, mean", None, sgd, n, rounds=rounds),
        Local("top-k, fp32", "fp32", sgd, n, rounds=rounds),
        Local("top-k, int8", "int8", sgd, n, rounds=rounds),
        Local("top-k, 2-bit", "2bit", sgd, n, rounds=rounds),
    ]


def train_locally(setup: Local, data: Sources) -> Outer:
    """Train a small transformer on text as ``setup`` says."""
    torch.set_num_threads(1)
    crew = _Workers(setup, data.load(TRANSFORMER))
    found = Outer(setup, crew.task.size)
    for round_ in range(setup.rounds):
        sent = crew.round(round_, found)
        found.losses.append(crew.loss(train=True))
        found.bytes_at.append(sent + (found.bytes_at[-1] if found.bytes_at else 0))
    found.held = crew.loss(train=False)
    return found


class _Workers:
    """Replicas stacked in ``[n, size]``, each with its own AdamW, and the anchor that all begin with."""

    def __init__(self, setup: Local, task: Task) -> None:
        self.setup, self.task = setup, task
        parts = [p.initial(setup.seed, i) for i, p in enumerate(task.parameters)]
        self._shapes = [p.shape for p in parts]
        self._anchor: Floats = torch.cat([p.reshape(-1) for p in parts]).numpy()
        self._momentum = setup.outer.init(self._anchor)
        self._gradient = vmap(grad(self._loss))
        self._first = torch.zeros(setup.n, task.size)
        self._second = torch.zeros(setup.n, task.size)
        self._steps = 0
        cut = shards(task, setup.n, setup.seed, by_label=False)
        self._batches = [Batches(shard, task.batch, setup.seed, peer) for peer, shard in enumerate(cut)]
        self._peers: list[ErrorFeedback] = []
        if setup.values is not None:
            density = Density(PER_CHUNK / CHUNK)
            options = Options(density, chunked(CHUNK), setup.values, decay=DECAY)
            self._peers = [ErrorFeedback(task.size, options, peer=p) for p in range(setup.n)]

    def round(self, round_: int, found: Outer) -> int:
        """Local steps and the outer step; the bytes that one peer sent."""
        models = torch.from_numpy(np.tile(self._anchor, (self.setup.n, 1)))
        for _ in range(self.setup.local_steps):
            at = np.stack([b.next() for b in self._batches])
            self._adamw(models, self._gradient(models, self.task.train_x[at], self.task.train_y[at]))
        moved = self._anchor - models.numpy()
        mean, sent = (
            self._sparse_mean(moved, round_, found) if self._peers else (moved.mean(0), moved[0].nbytes)
        )
        self._anchor, self._momentum = self.setup.outer.update(
            self._anchor, self._anchor - mean, self._momentum
        )
        return sent

    def _sparse_mean(self, moved: Floats, round_: int, found: Outer) -> tuple[Floats, int]:
        gathered = SparseSum(self._peers[0].form(round_), round_, range(self.setup.n))
        for p, peer in enumerate(self._peers):
            chunks, ticket = peer.prepare(moved[p], round_)
            refused = gathered.add(p, chunks)
            if refused:
                raise RuntimeError(f"a fragment was refused: {refused[0]}")
            peer.commit(ticket)
        measured = self._peers[0].measure()
        found.kept.append(measured.captured)
        return gathered.mean(), measured.bytes

    def _adamw(self, models: Tensor, gradients: Tensor) -> None:
        """Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2."""
        self._steps += 1
        rate, (b1, b2) = self.setup.learning_rate, _BETAS
        self._first.lerp_(gradients, 1 - b1)
        self._second.mul_(b2).addcmul_(gradients, gradients, value=1 - b2)
        root = (self._second / (1 - b2**self._steps)).sqrt_().add_(_EPSILON)
        models.mul_(1 - rate * _WEIGHT_DECAY)
        models.addcdiv_(self._first, root, value=-rate / (1 - b1**self._steps))

    @torch.no_grad()
    def loss(self, *, train: bool) -> float:
        """Of the anchor, on the training or held-out text."""
        x, y = (self.task.train_x, self.task.train_y) if train else (self.task.test_x, self.task.test_y)
        return float(self._loss(torch.from_numpy(self._anchor), x[:LOOKS], y[:LOOKS]))

    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts, start = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            parts.append(model[start : start + size].view(shape))
            start += size
        return F.cross_entropy(self.task.forward(parts, x), y)
