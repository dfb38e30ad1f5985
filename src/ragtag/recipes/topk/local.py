"""Local steps and sparse outer steps: every H steps a crew sends sparse differences to an anchor.

SparseLoCo (Sarfi, Thérien, Lidin, Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
2025, arXiv 2508.15706, algorithm 1): H local AdamW steps, then the difference to the common anchor goes
through error feedback with a decay of .95, top-k of each 4,096 entries and 2-bit values. The outer step
subtracts the mean. Beside it runs DiLoCo (arXiv 2311.08105): the same, dense, with Nesterov momentum.

Each peer runs a user's training loop, with ``training.optimizer.CrewOptimizer`` in virtual time. Selections,
error feedback, rounds and outer steps are the library's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from ragtag.codecs.sparse.topk import CHUNK
from ragtag.core.faults import Faults
from ragtag.core.types import Outcome
from ragtag.optim.outer import Nesterov
from ragtag.protocols.rounds.allreduce import direct
from ragtag.recipes.lockstep import LATENCY_S, STEP_S
from ragtag.recipes.tasks.images import Batches, Task, TaskModel, shards
from ragtag.recipes.topk.tasks import TRANSFORMER, Sources
from ragtag.recipes.topk.training import LOOKS
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer

DECAY = 0.95
PER_CHUNK = 64
"""Entries that are sent of each 4,096: 1.6 %, in the middle of what SparseLoCo tried."""

Values = Literal["fp32", "bf16", "int8", "2bit"]


@dataclass(frozen=True, slots=True)
class Local:
    """One run.

    values: how values of the sparse difference are sent; ``None``: the difference is sent dense, as fp32.
    outer: the step on the mean; ``None``: the mean itself is taken.
    """

    name: str
    values: Values | None
    outer: Nesterov | None = None
    n: int = 8
    local_steps: int = 15
    rounds: int = 40
    seed: int = 0
    learning_rate: float = 3e-3

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``crew.optimizer``. All rounds are sparse, and replicas are not compared."""
        found: dict[str, Any] = {"every": self.local_steps, "outer": self.outer}
        if self.values is None:
            return {**found, "method": direct}
        share = PER_CHUNK / CHUNK
        sparse = TopK(share, "chunked", self.values, decay=DECAY, resync=0, bypass=False)
        return {**found, "compress": sparse}


@dataclass(slots=True)
class Outer:
    """The results of a run.

    size: values of the model.
    losses: training loss after each round.
    bytes_at: bytes that one peer had given to rounds by then.
    kept: the share of the difference's energy (with the residual) that was sent, by round.
    held: loss on held-out examples.
    """

    setup: Local
    size: int
    losses: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    held: float = math.nan


def methods(n: int, rounds: int) -> list[Local]:
    """The runs that are compared."""
    return [
        Local("dense, DiLoCo", None, Nesterov(), n, rounds=rounds),
        Local("dense, mean", None, None, n, rounds=rounds),
        Local("top-k, fp32", "fp32", None, n, rounds=rounds),
        Local("top-k, int8", "int8", None, n, rounds=rounds),
        Local("top-k, 2-bit", "2bit", None, n, rounds=rounds),
    ]


def train_locally(setup: Local, data: Sources) -> Outer:
    """Train a small transformer on text as ``setup`` says.

    Raises:
        RuntimeError: an average came in part, though no line loses anything.
    """
    torch.set_num_threads(1)
    task = data.load(TRANSFORMER)
    found = Outer(setup, task.size)
    crew = SimulatedCrew(setup.n, Faults(latency_s=LATENCY_S), setup.seed, cost=ComputeCost(STEP_S))
    crew.run(lambda peer: _train(peer, task, found))
    return found


def _train(peer: SimulatedTransport, task: Task, found: Outer) -> None:
    """One peer's training. The first peer's model, which all have after an average, is evaluated."""
    setup = found.setup
    model = TaskModel(task.forward, task.parameters, setup.seed)
    inner = AdamW(model.parameters(), setup.learning_rate, (0.9, 0.95), weight_decay=0.1, fused=True)

    def averaged(outcome: Outcome) -> None:
        if not outcome.averaged.all():
            raise RuntimeError(f"{setup.name}: round {outcome.round} came in part")

    optimizer = CrewOptimizer(inner, peer, model=model, on_outcome=averaged, **setup.options)
    shard = shards(task, setup.n, setup.seed, by_label=False)[peer.me]
    batches = Batches(shard, task.batch, setup.seed, peer.me)
    for step in range(1, setup.rounds * setup.local_steps + 1):
        peer.compute()
        at = batches.next()
        optimizer.zero_grad()
        F.cross_entropy(model(task.train_x[at]), task.train_y[at]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if peer.me == 0 and step % setup.local_steps == 0:
            _look(model, task, found, optimizer)


@torch.no_grad()
def _look(model: nn.Module, task: Task, found: Outer, optimizer: CrewOptimizer) -> None:
    def loss(x: Tensor, y: Tensor) -> float:
        return float(F.cross_entropy(model(x[:LOOKS]), y[:LOOKS]))

    sent, given = optimizer._averaged.compression, 4 * found.size
    if sent is not None:
        found.kept.append(sent.captured)
        given = sent.bytes
    found.bytes_at.append(given + (found.bytes_at[-1] if found.bytes_at else 0))
    found.losses.append(loss(task.train_x, task.train_y))
    if len(found.losses) == found.setup.rounds:
        found.held = loss(task.test_x, task.test_y)
