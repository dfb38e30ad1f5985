"""Trains a small transformer on text with a crew in virtual time, by a user's training loop.

Each peer has its model, its AdamW and its text, and averages by ``training.optimizer.CrewOptimizer`` over
``simulation.transport``. Rounds, outer steps and fragments are the library's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ragtag.core.faults import Faults
from ragtag.core.types import Outcome
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.rounds.allreduce import direct
from ragtag.recipes.lockstep import LATENCY_S, STEP_S
from ragtag.recipes.tasks.texts import CharTransformer, batches, load_text, split_text, windows
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

WARM_UP = 0.05
"""The learning rate rises in this share of the steps. Then it falls to ``FLOOR`` of itself (cosine)."""
FLOOR = 0.1
WEIGHT_DECAY = 0.01
HELD_WINDOWS = 512


@dataclass(frozen=True, slots=True)
class Method:
    """What is averaged, and when.

    every: local steps between two averages; 0: no averages.
    outer: the step on the average; ``None``: the average itself is taken.
    fragments: into how many parts the model is cut. One is averaged at a time, each once in ``every`` steps.
    gradients: gradients are averaged before each step, in place of models after it.
    """

    name: str
    every: int
    outer: Nesterov | None = None
    fragments: int = 1
    gradients: bool = False

    def __post_init__(self) -> None:
        if self.every < 0 or self.fragments < 1 or (self.every and self.every % self.fragments):
            raise ValueError(
                f"{self.name}: {self.fragments} fragments in {self.every} steps; the steps must be a multiple"
            )
        if self.gradients and (self.every, self.fragments) != (1, 1):
            raise ValueError(f"{self.name}: gradients are averaged at each step, all at once")
        if self.fragments > 1 and self.outer is None:
            raise ValueError(f"{self.name}: fragments are averaged by an outer optimizer")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``crew.optimizer``. Replicas are not compared, as nothing is lost."""
        if self.gradients:
            return {"average": "gradients", "align": False}
        outer = None if self.outer is None else Streaming(self.outer, self.fragments)
        return {"every": self.every // self.fragments, "outer": outer}


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    length: bytes of a window.
    batch: windows per peer and step.
    looks: evaluations.
    pretrained: steps that one peer takes by itself, on the whole text, before the crew begins.
    """

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
    """The results of a run.

    size: values of the model.
    steps: of each evaluation.
    losses: of the mean of all models on held-out text, in nats per byte; without averages: the mean of the
        own models' losses.
    bytes_at: the bytes that a peer had sent by then.
    rounds: averages.
    round_bytes: the bytes that a peer sent in one of them, mean over rounds and peers.
    largest_bytes: in the one in which it sent most, of all peers.
    """

    setup: Setup
    size: int = 0
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_at: list[float] = field(default_factory=list)
    rounds: int = 0
    round_bytes: float = 0.0
    largest_bytes: float = 0.0

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.losses[-1]

    @property
    def bytes(self) -> float:
        """The bytes that a peer sent in the whole run."""
        return self.rounds * self.round_bytes


def train(setup: Setup, data: Path | None) -> Run:
    """Train as ``setup`` says. data: a text; ``None``: the source of Python's standard library."""
    torch.set_num_threads(1)
    return _Training(setup, data).run()


class TextJudge:
    """A text in two parts: one to train on, and one held out by which models are judged."""

    def __init__(self, setup: Setup, data: Path | None) -> None:
        self.text, held = split_text(load_text(data))
        x, y = windows(held, setup.length)
        self._held = x[:HELD_WINDOWS], y[:HELD_WINDOWS]
        self._shown = text_model(setup)

    @torch.no_grad()
    def loss(self, values: Tensor) -> float:
        """The loss on the text held out of a model with these values, in nats per byte."""
        vector_to_parameters(values, self._shown.parameters())
        x, y = self._held
        return float(F.cross_entropy(self._shown(x), y))


class Trainee:
    """One peer: its model, its text, and the body of a user's training loop."""

    def __init__(self, setup: Setup, text: bytes, first: nn.Module, peer: SimulatedTransport) -> None:
        self._peer, self._setup, method = peer, setup, setup.method
        self.model = text_model(setup)
        self.model.load_state_dict(first.state_dict())
        inner = text_adamw(self.model, setup)
        self.averages: list[Outcome] = []
        self.optimizer: Optimizer = inner
        if method.every:
            self.optimizer = CrewOptimizer(
                inner,
                peer,
                method=direct,
                model=self.model,
                on_outcome=lambda outcome: self.averages.append(outcome),
                **method.options,
            )
        self._pace = LambdaLR(self.optimizer, warm_cosine(setup.steps))
        self._batches = text_batches(text, setup, peer.me, setup.n)

    def step(self) -> None:
        """A local step, and an average where one is due."""
        self._peer.compute()
        learn_text(self.model, self.optimizer, *next(self._batches))
        self._pace.step()

    @property
    def values(self) -> Tensor:
        """All parameters in a row, a copy."""
        return parameters_to_vector(self.model.parameters()).detach().clone()


class _Training:
    """The training of all peers, with evaluations on the way."""

    def __init__(self, setup: Setup, data: Path | None) -> None:
        self._setup, self._judge = setup, TextJudge(setup, data)
        self._text = self._judge.text
        self._first = pretrained(setup, self._text)
        self.loss = self._judge.loss
        self._crew = SimulatedCrew(setup.n, Faults(latency_s=LATENCY_S), setup.seed, cost=ComputeCost(STEP_S))
        self._values: dict[int, list[Tensor]] = {}
        self._before_bytes: list[int] = []
        self._run = Run(setup, sum(p.numel() for p in self._first.parameters()))

    def run(self) -> Run:
        """Raises RuntimeError: a peer missed another's values in an average, though no line loses any."""
        setup, run = self._setup, self._run
        peers = self._crew.run(self._train)
        rounds = {len(averages) for averages in peers if averages is not None}
        if len(rounds) != 1 or any(_missed(o, setup.n) for averages in peers for o in averages or ()):
            raise RuntimeError(f"{setup.method.name}: peers did {rounds} averages, or not with all others")
        run.rounds = rounds.pop()
        if run.rounds:
            run.round_bytes = self._sent() / run.rounds
        return run

    def _train(self, peer: SimulatedTransport) -> list[Outcome]:
        setup = self._setup
        me = Trainee(setup, self._text, self._first, peer)
        self._before_bytes.append(self._crew.world.traffic(peer.me).bytes_sent)
        every = setup.steps // setup.looks
        self._look(0, me)
        done, sent = 0, self._before_bytes[-1]
        for step in range(1, setup.steps + 1):
            me.step()
            if len(me.averages) > done:
                done, before = len(me.averages), sent
                sent = self._crew.world.traffic(peer.me).bytes_sent
                self._run.largest_bytes = max(self._run.largest_bytes, float(sent - before))
            if step % every == 0 or step == setup.steps:
                self._look(step, me)
        return me.averages

    def _look(self, step: int, peer: Trainee) -> None:
        """Store a peer's model. Once all peers' are there, evaluate them."""
        found = self._values.setdefault(step, [])
        found.append(peer.values)
        if len(found) < self._setup.n:
            return
        run, models = self._run, torch.stack(self._values.pop(step))
        shown = models if self._setup.method.every == 0 else models.mean(0, keepdim=True)
        run.losses.append(float(np.mean([self.loss(model) for model in shown])))
        run.steps.append(step)
        run.bytes_at.append(self._sent())

    def _sent(self) -> float:
        """The bytes that a peer has sent since it began, mean over peers."""
        sent = [self._crew.world.traffic(peer).bytes_sent for peer in range(self._setup.n)]
        return float(np.mean(sent) - np.mean(self._before_bytes))


def pretrained(setup: Setup, text: bytes) -> nn.Module:
    """The model that all peers begin with."""
    model = text_model(setup)
    optimizer = text_adamw(model, setup)
    warm = max(1, round(WARM_UP * setup.pretrained))
    pace = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    source = text_batches(text, setup, 0, 1)
    for _ in range(setup.pretrained):
        learn_text(model, optimizer, *next(source))
        pace.step()
    return model


def _missed(outcome: Outcome, n: int) -> bool:
    return not (outcome.averaged.all() and outcome.weight.min() == n)


def text_model(setup: Setup) -> CharTransformer:
    """The model with its first weights."""
    return CharTransformer(setup.width, setup.layers, setup.length, setup.seed)


def text_adamw(model: nn.Module, setup: Setup) -> Optimizer:
    """The inner optimizer of all methods."""
    return AdamW(model.parameters(), setup.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)


def text_batches(text: bytes, setup: Setup, peer: int, peers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One peer's batches of its part of the text."""
    how = {"batch": setup.batch, "length": setup.length, "seed": setup.seed}
    return batches(text, peer=peer, peers=peers, **how)


class Steps(Protocol):
    """What takes a step: an optimizer, or several."""

    def zero_grad(self) -> None: ...  # noqa: D102
    def step(self) -> object: ...  # noqa: D102


def learn_text(model: nn.Module, optimizer: Steps, x: Tensor, y: Tensor) -> None:
    """Take a step by a batch."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def warm_cosine(steps: int) -> Callable[[int], float]:
    """The learning rate's factor by step: it rises at first, and falls over the rest of the steps."""
    warm = max(1, round(WARM_UP * steps))

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        through = (step - warm) / max(1, steps - warm)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * through))

    return rate
