"""AD-PSGD, a baseline that is not in the library: each peer averages its model with a random other's.

"Asynchronous Decentralized Parallel Stochastic Gradient Descent", Lian, Zhang, Zhang, Liu, ICML 2018
(arXiv 1710.06952), algorithm 1, on the loop and the cost of steps that all else in virtual time has. An
exchange takes no time. The mean of all models is evaluated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ragtag.core import seed as random
from ragtag.core.types import PeerId
from ragtag.recipes.grouping.training import STEP_S, Look, Trial, Work
from ragtag.recipes.tasks.digits import Indices, Pool, train_size
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.loop import Loop

NAME = "AD-PSGD"


class Gossip:
    """The peers' models, and the clock."""

    def __init__(self, work: Work) -> None:
        self._work, self._loop = work, Loop()
        self._cost = ComputeCost(STEP_S / work.batch, sigma=work.jitter, seed=work.seed)
        self._pool = Pool(train_size() if work.net else work.samples, work.seed)
        self._steps = [0] * work.n
        self._exchanges = 0
        self._trial = Trial(NAME, work.seed)
        first = work.net.initial(work.seed) if work.net else torch.zeros(1)
        self.models = [first] * work.n

    def run(self) -> Trial:
        """Train until all samples are in the models."""
        for peer in range(self._work.n):
            self._begin(peer)
        while self._trial.used < self._work.samples:
            self._loop.next()
        self._trial.took_s = self._loop.now_s
        return self._trial

    def mean(self) -> Tensor:
        """The mean of all models."""
        return torch.stack(self.models).mean(0)

    def _begin(self, peer: PeerId) -> None:
        """A peer takes a batch and begins a step: its gradient is of its model as it is now."""
        work, samples = self._work, self._pool.take(self._work.batch)
        at_s = self._cost.ends_s(peer, self._steps[peer], len(samples), self._loop.now_s, work.faults)
        self._steps[peer] += 1
        model = self.models[peer]
        self._loop.at(at_s, lambda: self._computed(peer, samples, model))

    def _computed(self, me: PeerId, samples: Indices, stale: Tensor) -> None:
        """Average with another peer, then step by the gradient at the model before."""
        work, net = self._work, self._work.net
        draw = random.uniform(random.stream_key(work.seed, "neighbour", self._exchanges))
        other = (me + 1 + int(draw * (work.n - 1))) % work.n if work.n > 1 else me
        self._exchanges += 1
        both = (self.models[me] + self.models[other]) / 2
        self.models[me] = self.models[other] = both
        if net is not None:
            even = np.full(len(samples), 1 / len(samples), np.float32)
            self.models[me] = both - work.learning_rate * net.gradient(stale, samples, even)
        trial, every = self._trial, work.samples / work.looks
        due = int((trial.used + len(samples)) / every) > int(trial.used / every)
        trial.used += len(samples)
        if not trial.half_s and 2 * trial.used >= work.samples:
            trial.half_s = self._loop.now_s
        if due and net is not None:
            trial.looks.append(Look(self._loop.now_s, trial.used, *net.look(self.mean())))
        self._begin(me)
