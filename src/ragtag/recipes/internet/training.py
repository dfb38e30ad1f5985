"""Trains a small transformer on text by today's recipes for the internet, with a crew in virtual time.

Each peer runs a user's training loop. What a recipe is, is what ``crew.optimizer`` is asked for (``WAYS``);
nothing else differs between them. Lines are those of homes: RTT 100 ms, 100 Mbit/s.

A peer that is missing from a round computes on. It is cut off from all others from when that average is due,
for as long as steps take until its next one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ragtag.codecs.sparse.topk import CHUNK
from ragtag.core import seed as random
from ragtag.core.faults import Faults
from ragtag.core.types import Outcome
from ragtag.optim.outer import Outer
from ragtag.protocols.groups.channel import RandomGroups
from ragtag.protocols.rounds.rps import RPS
from ragtag.recipes.diloco.training import (
    WEIGHT_DECAY,
    Setup,
    TextJudge,
    learn_text,
    pretrained,
    text_adamw,
    text_batches,
    text_model,
    warm_cosine,
)
from ragtag.recipes.tasks.texts import CharTransformer
from ragtag.schedules.base import Compute, Decision, Progress, Skip
from ragtag.schedules.every import LocalSteps
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer

H = 30
"""Local steps between two averages of a value: SparseLoCo's, for all."""
QUORUM = 5
"""Of eight peers: more than half."""
FRAGMENTS = 3
LATENCY_S, BYTES_PER_S = 0.05, 12.5e6
STEP_S, JITTER = 0.1, 0.2

EVERY_STEP, ALONE = "gradients, every step", "no averages"
DILOCO, SPARSELOCO, NOLOCO = "DiLoCo", "SparseLoCo", "NoLoCo"
SHORT = "SparseLoCo, for a short run"
QUORATE, DECOUPLED, MULOCO = "DiLoCo with a quorum", "Decoupled DiLoCo", "MuLoCo"

WAYS: dict[str, dict[str, Any]] = {
    DILOCO: {"every": H, "outer": Outer()},
    SPARSELOCO: {
        "every": H,
        "outer": Outer(lr=0.4, momentum=0.0),
        "compress": TopK(64 / CHUNK, "chunked", "2bit", decay=0.95, resync=10, bypass=False),
    },
    SHORT: {
        "every": H,
        "outer": Outer(lr=0.7, momentum=0.8),
        "compress": TopK(1600 / CHUNK, "chunked", "2bit", decay=0.98, resync=0, bypass=False),
    },
    NOLOCO: {
        "every": H,
        "outer": Outer(lr=0.7, momentum=0.5, nesterov=False),
        "averager": RandomGroups(group=2),
    },
    QUORATE: {"every": H, "outer": Outer(), "averager": RPS(quorum=QUORUM)},
    DECOUPLED: {
        "schedule": LocalSteps(H // FRAGMENTS, least=H // FRAGMENTS // 2),
        "outer": Outer(fragments=FRAGMENTS, delay=H // FRAGMENTS - 1),
        "averager": RPS(quorum=QUORUM),
        "weight": "samples",
    },
    MULOCO: {"every": H, "outer": Outer()},
    EVERY_STEP: {"every": 1, "average": "gradients", "align": False},
}
"""What ``crew.optimizer`` is asked for. SparseLoCo's settings are those of a run of 72 billion values.
For a short run its steps are less sparse, and DiLoCo's outer momentum stays: by .4, without momentum, a
step is a twentieth of what DiLoCo's come to, and of a 64th of the values each is sent about once in 80
averages. MuLoCo's inner optimizers are Muon for the matrices of the layers and AdamW for the rest, each with
averages of its own. Decoupled DiLoCo's learners run on their own clocks: none waits for an average. The first
that is due begins one, and others bring what they have by then."""


def every_of(way: str) -> int:
    """How many local steps lie between two averages (0: there are none)."""
    asked = WAYS.get(way, {})
    return int(asked["schedule"].k if "schedule" in asked else asked.get("every", 0))


@dataclass(frozen=True, slots=True)
class Attends:
    """Average when it is due, but for a share ``missing`` of the times, drawn for each peer.

    every: after so many local steps.
    follows: or after half of them, once others have begun.
    """

    every: int
    missing: float
    seed: int
    me: int
    follows: bool = False

    @property
    def steps(self) -> LocalSteps:
        """When an average is due."""
        return LocalSteps(self.every, least=self.every // 2 if self.follows else 0)

    def away(self, step: int) -> bool:
        """Whether this peer is missing from the average that is, or was last, due at a step."""
        key = random.stream_key(self.seed, "internet missing", self.me)
        return step >= self.every and random.uniform(key, step // self.every) < self.missing

    def decide(self, progress: Progress) -> Decision:
        """Average when it is time, and this peer is there. One that is away is so until its next is due."""
        decision, step = self.steps.decide(progress), progress.step
        if isinstance(decision, Compute) or not self.away(step):
            return decision
        missed = progress.since_average == self.every or step % self.every == 0
        return Skip() if missed else Compute()


@dataclass(slots=True)
class WayRun:
    """The results of a run.

    size: values of the model.
    steps: of each evaluation.
    losses: of the mean of all models on held-out text, in nats per byte; without averages, the mean of the
        own models' losses.
    bytes: that a peer sent, mean over peers. rounds: in which a peer took part, likewise.
    without: the share of values in these rounds that came to no average.
    computed_s, elapsed_s: how long a peer computed and how long it took, mean over peers.
    """

    setup: Setup
    missing: float
    size: int = 0
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes: float = 0.0
    rounds: float = 0.0
    without: float = 0.0
    computed_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def way(self) -> str:
        """By which it was trained."""
        return self.setup.method.name

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return self.losses[-1]

    @property
    def computing(self) -> float:
        """The share of the time in which a peer computed."""
        return self.computed_s / self.elapsed_s


class Together:
    """Optimizers of parts of one model, stepped one after the other."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Take each one's step."""
        for optimizer in self._optimizers:
            optimizer.step()


def muon_and_adamw(model: CharTransformer, setup: Setup) -> list[Optimizer]:
    """Muon for the matrices between the embeddings and the output, AdamW for all else.

    The rate is AdamW's: Muon's steps are scaled to the size of AdamW's (Liu et al., 2025, arXiv 2502.16982).
    Raises ImportError: this torch has no Muon.
    """
    try:
        from torch.optim import Muon
    except ImportError as error:
        raise ImportError("MuLoCo needs torch.optim.Muon, of torch 2.9 or newer: update torch") from error
    values = list(model.weights)
    matrices = [value for value in values[2:-1] if value.ndim == 2]
    rest = [value for value in values if all(value is not matrix for matrix in matrices)]
    muon = Muon(matrices, setup.learning_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest, setup.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)]


def train_way(setup: Setup, missing: float, data: Path | None) -> WayRun:
    """Train as ``WAYS[setup.method.name]`` says. missing: the share of rounds from which a peer is missing.

    data: a text; ``None``: the source of Python's standard library.
    """
    torch.set_num_threads(1)
    return _Crew(setup, missing, data).run()


class _Crew:
    """All peers of a run, with evaluations on the way."""

    def __init__(self, setup: Setup, missing: float, data: Path | None) -> None:
        self._setup, self._judge = setup, TextJudge(setup, data)
        self._first = pretrained(setup, self._judge.text)
        lines = Faults(latency_s=LATENCY_S, rate_bytes_per_s=BYTES_PER_S)
        cost = ComputeCost(STEP_S, sigma=JITTER, seed=setup.seed)
        self._crew = SimulatedCrew(setup.n, lines, setup.seed, cost=cost)
        self._values: dict[int, list[Tensor]] = {}
        self._run = WayRun(setup, missing, sum(p.numel() for p in self._first.parameters()))

    def run(self) -> WayRun:
        """Train to the end."""
        ends = [end for end in self._crew.run(self._train) if end is not None]
        run = self._run
        run.bytes, run.rounds, run.without, run.computed_s, run.elapsed_s = np.mean(ends, axis=0).tolist()
        return run

    def _train(self, peer: SimulatedTransport) -> tuple[float, ...]:
        setup = self._setup
        model = text_model(setup)
        model.load_state_dict(self._first.state_dict())
        lacking: list[float] = []
        inner = [text_adamw(model, setup)]
        if setup.method.name == MULOCO:
            inner = muon_and_adamw(model, setup)
        follows = "schedule" in WAYS.get(setup.method.name, {})
        crews, attends = [], Attends(setup.method.every, self._run.missing, setup.seed, peer.me, follows)
        if setup.method.name != ALONE:
            crews = [self._averaged(at, one, model, peer, lacking, attends) for at, one in enumerate(inner)]
        optimizers: Sequence[Optimizer] = crews or inner
        paces = [LambdaLR(optimizer, warm_cosine(setup.steps)) for optimizer in optimizers]
        source = text_batches(self._judge.text, setup, peer.me, setup.n)
        both = Together(optimizers)
        sent, began_s, computed_s = self._sent(peer), peer.now_s(), 0.0
        for step in range(1, setup.steps + 1):
            at_s = peer.now_s()
            peer.compute()
            if crews and step % attends.every == 0 and attends.away(step):
                peer.cut_off(setup.method.every * STEP_S)  # until its next average
            computed_s += peer.now_s() - at_s
            learn_text(model, both, *next(source))
            for pace in paces:
                pace.step()
            if step == setup.steps:
                for optimizer in crews:
                    optimizer._averaged.settle()
            if step % (setup.steps // setup.looks) == 0 or step == setup.steps:
                self._look(step, parameters_to_vector(model.parameters()).detach().clone())
        elapsed_s, sent = peer.now_s() - began_s, self._sent(peer) - sent
        without = sum(lacking) / max(1, len(lacking))
        return sent, len(lacking) / len(optimizers), without, computed_s, elapsed_s

    def _averaged(
        self,
        at: int,
        inner: Optimizer,
        model: CharTransformer,
        peer: SimulatedTransport,
        lacking: list[float],
        attends: Attends,
    ) -> CrewOptimizer:
        setup = self._setup
        asked = dict(WAYS[setup.method.name])
        asked["method"] = asked.pop("averager", None)
        for when in ("every", "schedule"):
            asked.pop(when, None)
        taken = [0]
        inner.register_step_post_hook(lambda *_: taken.__setitem__(0, taken[0] + setup.batch))

        def over(outcome: Outcome) -> None:
            lacking.append(1.0 - float(outcome.averaged.mean()))

        return CrewOptimizer(
            inner,
            peer,
            model=model,
            schedule=attends,
            name=f"model {at}",
            samples=lambda: taken[0],
            on_outcome=over,
            seed=setup.seed,
            **asked,
        )

    def _sent(self, peer: SimulatedTransport) -> float:
        return float(self._crew.world.traffic(peer.me).bytes_sent)

    def _look(self, step: int, values: Tensor) -> None:
        """Store a peer's model. Once all peers' are there, evaluate them."""
        found = self._values.setdefault(step, [])
        found.append(values)
        if len(found) < self._setup.n:
            return
        models = torch.stack(self._values.pop(step))
        shown = models if self._setup.method.name == ALONE else models.mean(0, keepdim=True)
        self._run.losses.append(float(np.mean([self._judge.loss(model) for model in shown])))
        self._run.steps.append(step)
