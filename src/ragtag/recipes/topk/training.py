"""Trains one model on the sparsified gradients of several peers, and measures the vectors that are selected
from.

All peers are in lockstep and have one model, so their gradients are one batched call. What they send goes
through the wire format, and fragments are lost by a seeded draw. One aggregate per round counts for all: the
mean over all peers of what came.

Selection, error feedback, tickets, wire format and sum are the library's. The rounds are not, since losses
are to be the same for all receivers (``local`` has the library's rounds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.gather import SparseSum
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.selection import Selector
from ragtag.codecs.sparse.threshold import gaussian, gaussian_strict, gaussian_threshold
from ragtag.codecs.sparse.topk import exact, randomly, sampled
from ragtag.core import seed as random
from ragtag.core.types import Floats
from ragtag.recipes.tasks.images import Batches, Task, shards
from ragtag.recipes.topk.tasks import IMAGES, Sources

SELECTORS: dict[str, Selector] = {s.name: s for s in (exact, sampled, gaussian, gaussian_strict, randomly)}
LOOKS = 1024
"""Examples on which a loss is evaluated."""
BINS = np.linspace(-6, 6, 121)
"""Edges of the histogram of u, in standard deviations of u."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    selector: its name; "dense": all of the gradient is sent.
    ratio: k over the size of the model.
    loss: the probability that a fragment is lost.
    tickets: a lost fragment goes back into the residual; else it is cleared as if it had been sent.
    task: see ``tasks``.
    """

    selector: str
    ratio: float = 0.01
    loss: float = 0.0
    tickets: bool = True
    n: int = 8
    steps: int = 400
    seed: int = 0
    task: str = IMAGES


@dataclass(slots=True)
class Trained:
    """The results of a run. Lists from ``share`` to ``rest`` have an entry per step, of peer 0's u before
    selection.

    held: loss on held-out examples.
    bytes: sent by one peer.
    lost: fragments that were lost.
    steps, losses, bytes_at: of each evaluation.
    share: selected entries over k.
    off: |u - v|^2 / |u|^2, where v is what was sent of u, as its error feedback says.
    off_chosen: the same if the chosen entries were sent as they are. They are rounded to int8.
    off_least: the least that that could be: the k largest magnitudes, found here by sorting.
    off_random: the same for random-k of this u.
    shape: excess kurtosis of u; 0: a normal's.
    fit: the normal fit's threshold over the right one, which is the k-th largest magnitude.
    leap, rest: entries above half of the right threshold, and above one and a half of it, over k.
    """

    setup: Setup
    size: int
    loss: float = math.nan
    accuracy: float = math.nan
    held: float = math.nan
    bytes: int = 0
    lost: int = 0
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    off_chosen: list[float] = field(default_factory=list)
    off_least: list[float] = field(default_factory=list)
    off_random: list[float] = field(default_factory=list)
    shape: list[float] = field(default_factory=list)
    fit: list[float] = field(default_factory=list)
    leap: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    histograms: dict[int, list[float]] = field(default_factory=dict)

    @property
    def k(self) -> int:
        """The number of entries to select."""
        return Density(self.setup.ratio).k(self.size, 0)


def train(setup: Setup, data: Sources, points: int = 20) -> Trained:
    """Train as ``setup`` says, and evaluate the loss ``points`` times."""
    torch.set_num_threads(1)
    crew = _Crew(setup, data.load(setup.task))
    found = Trained(setup, crew.task.size)
    looks = {round(setup.steps * i / points) for i in range(1, points + 1)}
    for step in range(setup.steps):
        crew.step(step, found)
        if step + 1 in looks:
            found.steps.append(step + 1)
            found.losses.append(crew.look(train=True)[0])
            found.bytes_at.append(found.bytes)
    found.loss = found.losses[-1]
    found.held, found.accuracy = crew.look(train=False)
    return found


class _Crew:
    """The peers: their batches, residuals, and the model that they share."""

    def __init__(self, setup: Setup, task: Task) -> None:
        self.setup, self.task = setup, task
        parts = [p.initial(setup.seed, i) for i, p in enumerate(task.parameters)]
        self._shapes = [p.shape for p in parts]
        self._model = torch.cat([p.reshape(-1) for p in parts])
        self._gradient = vmap(grad(self._loss), in_dims=(None, 0, 0))
        cut = shards(task, setup.n, setup.seed, by_label=False)
        self._batches = [Batches(shard, task.batch, setup.seed, peer) for peer, shard in enumerate(cut)]
        self._sparse = setup.selector != "dense"
        chosen = Options(Density(setup.ratio), SELECTORS.get(setup.selector, sampled))
        self._peers = [ErrorFeedback(task.size, chosen, peer=p, seed=setup.seed) for p in range(setup.n)]

    def step(self, step: int, found: Trained) -> None:
        at = np.stack([b.next() for b in self._batches])
        gradients = self._gradient(self._model, self.task.train_x[at], self.task.train_y[at])
        if not self._sparse:
            found.bytes += 4 * self.task.size
            mean = gradients.mean(0)
        else:
            mean = torch.from_numpy(self._average(step, gradients.numpy(), found))
        self._model -= self.task.learning_rate * mean

    def _average(self, step: int, gradients: Floats, found: Trained) -> Floats:
        setup, form = self.setup, self._peers[0].form(step)
        gathered = SparseSum(form, step, range(setup.n))
        sent, total = [], 0.0
        for p, peer in enumerate(self._peers):
            if p == 0:
                total = _look_at(peer.residual + gradients[0], step, form.k, found)
            chunks, ticket = peer.prepare(gradients[p], step)
            key = random.stream_key(setup.seed, "fragments lost", p, step)
            came = random.uniforms(key, len(chunks)) >= setup.loss
            refused = gathered.add(p, chunks[came])
            if refused:
                raise RuntimeError(f"a fragment was refused: {refused[0]}")
            found.lost += int((~came).sum())
            sent.append(ticket)
        measured = self._peers[0].measure()
        found.bytes += measured.bytes
        found.share.append(measured.entries / form.k)
        found.off.append(1 - measured.captured)
        if total:
            left = measured.residual_norm**2
            found.off_chosen.append(1 - measured.captured * left / (1 - measured.captured) / total)
        gathered.close()
        for p, (peer, ticket) in enumerate(zip(self._peers, sent, strict=True)):
            heard = gathered.heard(p, ticket.fragments)
            peer.settle(ticket, heard if setup.tickets else np.ones_like(heard))
        return gathered.mean()

    @torch.no_grad()
    def look(self, *, train: bool) -> tuple[float, float]:
        """Loss and accuracy of the model on the training or test examples."""
        x, y = (self.task.train_x, self.task.train_y) if train else (self.task.test_x, self.task.test_y)
        x, y = x[:LOOKS], y[:LOOKS]
        scores = self.task.forward(self._parts(self._model), x)
        return float(F.cross_entropy(scores, y)), float((scores.argmax(1) == y).float().mean())

    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.task.forward(self._parts(model), x), y)

    def _parts(self, model: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            parts.append(model[start : start + size].view(shape))
            start += size
        return parts


def _look_at(u: Floats, step: int, k: int, found: Trained) -> float:
    """Measure the theory's quantities: how much of u's energy random-k leaves behind, and the shape of u.

    The result is that energy, |u|^2. Where it is 0 nothing is measured.
    """
    energy = u.astype(np.float64) ** 2
    total = float(energy.sum())
    if not total:
        return 0.0
    largest = np.partition(energy, len(u) - k)[len(u) - k :]
    right = math.sqrt(float(largest[0]))
    found.off_least.append(1 - float(largest.sum()) / total)
    found.fit.append(gaussian_threshold(u, k) / right if right else math.inf)
    found.leap.append(float((energy > right**2 / 4).sum()) / k)
    found.rest.append(float((largest > right**2 * 9 / 4).sum()) / k)
    drawn = randomly.select(u, k, randomly.init(), random.stream_key(1, "looks", step)).indices
    found.off_random.append(1 - float(energy[drawn].sum()) / total)
    deviation = float(u.std(dtype=np.float64))
    scaled = (u - u.mean(dtype=np.float64)) / deviation
    found.shape.append(float((scaled**4).mean()) - 3.0)
    if step in (0, found.setup.steps // 20, found.setup.steps // 4, found.setup.steps - 1):
        found.histograms[step] = (np.histogram(scaled, BINS)[0] / len(u)).tolist()
    return total
