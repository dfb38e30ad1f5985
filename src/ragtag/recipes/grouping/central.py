"""Training at a central state with the machines that run live, in virtual time.

In ``training`` exchanging takes no time and a method is a few lines. Here each peer is a node over simulated
lines, with blocks, owners, barriers with deadlines, and groups from what peers say and owners see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Faults, Slow
from ragtag.core.types import Average, Floats, Noted, Outcome, PeerId
from ragtag.core.wire import n_chunks
from ragtag.protocols.central.channel import Sharing
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import Channel, Node
from ragtag.recipes.staleness.others import subject
from ragtag.recipes.tasks.digits import Pool
from ragtag.schedules.centre import Centre as Rule
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.worlds.rounds import World
from ragtag.training.exchange.central import Centre, Compensation

LATENCY_S, RATE_BYTES_PER_S = 5e-4, 1e9
"""Lines as on one machine."""
PROBE_S, RTT_S = 5e-3, 1e-3
LATE, LOOKS = 0.2, 20
"""In this last share of a run the model is evaluated so many times, as one evaluation is a matter of luck."""


@dataclass(frozen=True, slots=True)
class Training:
    """One run.

    model: a name that ``staleness.others.subject`` knows.
    n: peers.
    until_s: steps that would end later are not begun.
    slower: the last peer's steps take so many times as long as the others'.
    jitter: sigma of the lognormal factor on each step's time.
    strength: lambda of delay compensation; 0: none.
    """

    model: str
    rule: Rule | ProgressiveGrouping
    n: int
    learning_rate: float
    seed: int
    until_s: float
    step_s: float = 0.05
    slower: float = 1.0
    batch: int = 16
    jitter: float = 0.02
    strength: float = 0.0

    @property
    def method(self) -> Averager:
        """The averager."""
        made = Centre(self.rule, self.strength)
        central = made.open
        if not self.strength or not isinstance(central, Sharing):
            return made
        rated = Compensation(self.strength, lambda: self.learning_rate)
        return replace(made, open=replace(central, correction=rated))

    @property
    def faults(self) -> Faults:
        """The line's faults, and the slow peer."""
        slow = (Slow(self.n - 1, self.slower),) if self.slower != 1 else ()
        return Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE_BYTES_PER_S, slow=slow)


@dataclass(slots=True)
class Trained:
    """The results of a run.

    steps: of each peer.
    steps_per_s: of the peers that are not slow.
    quality: of the first peer's own model, mean over evaluations.
    staleness: mean over all updates of blocks.
    groups: how often the first peer's turns ended in so many groups.
    notes: time, peer, what, detail.
    """

    steps: list[int]
    steps_per_s: float = 0.0
    quality: float = float("nan")
    staleness: float = 0.0
    groups: dict[int, int] = field(default_factory=dict)
    notes: list[tuple[float, PeerId, str, str]] = field(default_factory=list)


def train_centrally(training: Training) -> Trained:
    """Train until the time is over, each peer with samples of one pool."""
    return _Run(training).run()


class _Run:
    def __init__(self, training: Training) -> None:
        self._training, self._subject = training, subject(training.model)
        first = self._subject.initial(training.seed).numpy()
        self._size, self._chunks = len(first), n_chunks(len(first), fp32.elements)
        self._pool = Pool(self._subject.samples, training.seed)
        self._rng = random.generator(training.seed, "noise of samples")
        self._cost = ComputeCost(training.step_s, sigma=training.jitter, seed=training.seed)
        self._found = Trained([0] * training.n)
        self._stale: list[int] = []
        self._looks: list[float] = []
        self._last: Floats | None = None
        nodes = [Node(peer, training.n, training.seed) for peer in range(training.n)]
        channel = Channel(training.method, fp32, self._chunks, probe_s=PROBE_S, rtt_s=RTT_S)
        for node in nodes:
            node.configure(0, channel)
        self._world = World(nodes, training.faults, training.seed, on_done=self._done, on_note=self._noted)
        for peer in range(training.n):
            values = np.zeros((self._chunks, fp32.elements), np.float32)
            values.reshape(-1)[: self._size] = first
            self._world.at(0.0, peer, Average(0, values, 0.0))

    def run(self) -> Trained:
        self._world.run()
        training, found = self._training, self._found
        fast = found.steps[:-1] if training.slower != 1 else found.steps
        found.steps_per_s = float(np.mean(fast)) / training.until_s
        found.staleness = float(np.mean(self._stale)) if self._stale else 0.0
        found.quality = float(np.mean(self._looks)) if self._looks else float("nan")
        return found

    def _noted(self, peer: PeerId, now_s: float, note: Noted) -> None:
        self._found.notes.append((now_s, peer, note.what, note.detail))

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        """A turn has ended: evaluate, take a step from the outcome, and push it when its time is over."""
        training, found = self._training, self._found
        self._stale += outcome.stale or ()
        if peer == 0:
            found.groups[len(outcome.groups)] = found.groups.get(len(outcome.groups), 0) + 1
            self._look(now_s, outcome.mean)
        ends_s = self._cost.ends_s(peer, found.steps[peer], 1, now_s, training.faults)
        if ends_s >= training.until_s:
            return
        found.steps[peer] += 1
        model = outcome.mean.reshape(-1)[: self._size]
        values = outcome.mean.copy()  # a mean may still be on its way to others
        values.reshape(-1)[: self._size] -= np.float32(training.learning_rate) * self._gradient(model)
        self._world.at(ends_s, peer, Average(0, values, float(training.batch)))

    def _gradient(self, model: Floats) -> NDArray[np.float32]:
        at = torch.from_numpy(self._pool.take(self._training.batch))
        models = torch.from_numpy(model.copy())[None]
        found: NDArray[np.float32] = self._subject.gradients(models, at[None], self._rng)[0].numpy()
        return found

    def _look(self, now_s: float, mean: Floats) -> None:
        until_s = self._training.until_s
        due_s = until_s * (1 - LATE + LATE * len(self._looks) / LOOKS)
        if now_s >= due_s and len(self._looks) < LOOKS:
            model = torch.from_numpy(mean.reshape(-1)[: self._size].copy())
            self._looks.append(self._subject.quality(model))
