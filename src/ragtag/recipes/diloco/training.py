"""Trains a small transformer on text with a crew whose every average goes through real machines.

All peers live in one process: their gradients are one batched call, their averages are rounds of direct
all-reduce among ``ragtag.protocols`` machines over ``ragtag.simulation`` links (``lockstep``). The outer step
is ``ragtag.optim.outer``; the inner one is torch's AdamW, whose state stays each peer's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.types import Floats, Outcome
from ragtag.optim.outer import Nesterov
from ragtag.protocols.rounds.allreduce import direct
from ragtag.recipes.lockstep import run_rounds
from ragtag.recipes.tasks.texts import (
    batches,
    load_text,
    split_text,
    stacked_transformer,
    transformer,
    transformer_parameters,
    windows,
)

WARM_UP = 0.05
"""The share of steps in which the learning rate rises; then it falls to ``FLOOR`` of itself (cosine)."""
FLOOR = 0.1
WEIGHT_DECAY = 0.01
HELD_WINDOWS = 512


@dataclass(frozen=True, slots=True)
class Method:
    """What is averaged, and when.

    every: local steps between two averages (0: none ever). outer: the step on the average. fragments: into
    how many parts the model is cut; one of them is averaged at a time, each once in ``every`` steps.
    gradients: they are averaged, before each step, in place of models after it.
    """

    name: str
    every: int
    outer: Nesterov = Nesterov(1.0, 0.0)  # noqa: RUF009
    fragments: int = 1
    gradients: bool = False

    def __post_init__(self) -> None:
        if self.every < 0 or self.fragments < 1 or (self.every and self.every % self.fragments):
            raise ValueError(
                f"{self.name}: {self.fragments} fragments in {self.every} steps; the steps must be a multiple"
            )
        if self.gradients and (self.every, self.fragments) != (1, 1):
            raise ValueError(f"{self.name}: gradients are averaged at each step, all at once")


@dataclass(frozen=True, slots=True)
class Setup:
    """One run. batch: windows of ``length`` bytes per peer and step. pretrained: steps that one peer has
    taken by itself, on the whole text, before the crew begins."""

    method: Method
    seed: int
    steps: int
    learning_rate: float
    n: int = 8
    width: int = 32
    layers: int = 2
    length: int = 32
    batch: int = 4
    looks: int = 20
    pretrained: int = 0


@dataclass(slots=True)
class Run:
    """What came of it. steps, losses, bytes_at: at each look, the loss of the mean of all models on text
    held out (nats per byte; without averages: the mean of the own models' losses) and what a peer had sent.
    rounds, round_bytes: how many averages, and what a peer sent in one of them (mean over peers)."""

    setup: Setup
    size: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_at: list[float] = field(default_factory=list)
    rounds: int = 0
    round_bytes: float = 0.0

    @property
    def loss(self) -> float:
        """At the end."""
        return self.losses[-1]

    @property
    def bytes(self) -> float:
        """Sent by a peer in the whole run."""
        return self.rounds * self.round_bytes


def train(setup: Setup, data: Path | None) -> Run:
    """Train as ``setup`` says; data: a text, or the source of Python's standard library."""
    torch.set_num_threads(1)
    crew = _Crew(setup, data)
    if setup.method.every == 0:
        crew.local_steps(setup.steps)
        return crew.run
    traffic = run_rounds(crew.first(), crew.then, method=direct, faults=Faults(), seed=setup.seed)
    run = crew.run
    run.round_bytes = float(np.mean([t.bytes_sent for t in traffic])) / run.rounds
    run.bytes_at = [rounds * run.round_bytes for rounds in run.bytes_at]
    return run


class _Crew:
    """The peers' models (stacked), their inner optimisers, outer momenta, and where they are."""

    def __init__(self, setup: Setup, data: Path | None) -> None:
        self.setup, method = setup, setup.method
        self._parameters = transformer_parameters(setup.width, setup.layers, setup.length)
        self._sizes = [math.prod(p.shape) for p in self._parameters]
        text, held = split_text(load_text(data))
        start = self._pretrain(text)
        self._size = len(start)
        chunks = math.ceil(self._size / (fp32.elements * method.fragments))
        self._rows, self._chunks = chunks * method.fragments, chunks
        self.models = nn.Parameter(start.repeat(setup.n, 1))
        self._inner, self._pace = self._optimiser(self.models, setup.steps)
        self._anchor = self._table(start.repeat(setup.n, 1))
        self._momentum = method.outer.init(self._anchor)
        how = {"batch": setup.batch, "length": setup.length, "seed": setup.seed, "peers": setup.n}
        self._text = [batches(text, peer=peer, **how) for peer in range(setup.n)]
        x, y = windows(held, setup.length)
        self._held = x[:HELD_WINDOWS], y[:HELD_WINDOWS]
        self._step = 0
        self.run = Run(setup, self._size)
        self._look()

    def _pretrain(self, text: bytes) -> Tensor:
        """The model that all peers begin with."""
        setup = self.setup
        parts = [p.initial(setup.seed, i).reshape(-1) for i, p in enumerate(self._parameters)]
        model = nn.Parameter(torch.cat(parts))
        optimiser, pace = self._optimiser(model, 0)
        source = batches(text, batch=setup.batch, length=setup.length, seed=setup.seed, peer=0)
        for _ in range(setup.pretrained):
            (model.grad,) = torch.autograd.grad(self._loss(model, *next(source)), model)
            optimiser.step()
            pace.step()
        return model.detach()

    def _optimiser(self, models: nn.Parameter, steps: int) -> tuple[Optimizer, LRScheduler]:
        """AdamW whose rate warms up and, over so many ``steps`` (0: never), falls again."""
        warm = max(1, round(WARM_UP * (steps or self.setup.pretrained)))

        def rate(step: int) -> float:
            if step < warm or not steps:
                return min(1.0, (step + 1) / warm)
            through = (step - warm) / max(1, steps - warm)
            return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * through))

        optimiser = AdamW([models], self.setup.learning_rate, weight_decay=WEIGHT_DECAY)
        return optimiser, LambdaLR(optimiser, rate)

    def first(self) -> list[Floats]:
        """What the peers average first."""
        return self._next()

    def then(self, round_: int, outcomes: Sequence[Outcome]) -> Sequence[Floats] | None:
        """An average came: step by it, go on, and answer with what is averaged next."""
        self.run.rounds += 1
        means = np.stack([outcome.mean for outcome in outcomes])
        if self.setup.method.gradients:
            self._take(torch.from_numpy(means.reshape(self.setup.n, -1)[:, : self._size]))
        else:
            self._outer_step(round_, means)
        self._look_if_due()
        return self._next() if self._step < self.setup.steps else None

    def local_steps(self, count: int) -> None:
        """Each peer for itself."""
        for _ in range(count):
            self._take(self._gradients())
            if self.setup.method.every == 0:
                self._look_if_due()

    def _next(self) -> list[Floats]:
        method = self.setup.method
        if method.gradients:
            return list(self._table(self._gradients()))
        gap = method.every // method.fragments
        self.local_steps(min(gap, self.setup.steps - self._step))
        part = self._part(self.run.rounds)
        return [np.ascontiguousarray(mine[part]) for mine in self._table(self.models.detach())]

    def _outer_step(self, round_: int, means: Floats) -> None:
        """The fragment's next values on all peers; its anchor is what they began with."""
        part = self._part(round_)
        anchor, momentum = self._anchor[:, part], self._momentum[:, part]
        new, self._momentum[:, part] = self.setup.method.outer.update(anchor, means, momentum)
        self._anchor[:, part] = new
        table = self._table(self.models.detach())
        table[:, part] = new
        with torch.no_grad():
            self.models.copy_(torch.from_numpy(table.reshape(self.setup.n, -1)[:, : self._size]))

    def _part(self, round_: int) -> slice:
        at = round_ % self.setup.method.fragments * self._chunks
        return slice(at, at + self._chunks)

    def _table(self, values: Tensor) -> Floats:
        """``[n, chunks, elements]``, padded with zeros."""
        table = np.zeros((len(values), self._rows * fp32.elements), np.float32)
        table[:, : self._size] = values.numpy()
        return table.reshape(len(values), self._rows, fp32.elements)

    def _gradients(self) -> Tensor:
        x, y = (torch.stack(column) for column in zip(*(next(t) for t in self._text), strict=True))
        leaf = self.models.detach().requires_grad_()
        scores = stacked_transformer(self._weights(leaf), x).transpose(2, 3)
        loss = F.cross_entropy(scores.flatten(0, 2), y.flatten(), reduction="sum") / y[0].numel()
        (found,) = torch.autograd.grad(loss, leaf)
        return found

    def _take(self, gradients: Tensor) -> None:
        self.models.grad = gradients
        self._inner.step()
        self._pace.step()
        self._step += 1

    def _look_if_due(self) -> None:
        every = self.setup.steps // self.setup.looks
        if self._step % every == 0 or self._step == self.setup.steps:
            self._look()

    @torch.no_grad()
    def _look(self) -> None:
        models = self.models.detach()
        shown = models if self.setup.method.every == 0 else models.mean(0, keepdim=True)
        self.run.losses.append(float(np.mean([float(self._loss(m, *self._held)) for m in shown])))
        self.run.steps.append(self._step)
        self.run.bytes_at.append(float(self.run.rounds))

    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(transformer(self._weights(model), x), y)

    def _weights(self, models: Tensor) -> list[Tensor]:
        """The tensors of a model ``[D]``, or, stacked, of many ``[P, D]``."""
        parts = torch.split(models, self._sizes, dim=-1)
        many = models.shape[:-1]
        return [part.view(*many, *p.shape) for part, p in zip(parts, self._parameters, strict=True)]
