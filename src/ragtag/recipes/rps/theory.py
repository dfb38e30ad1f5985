"""RPS's mixing matrix: closed forms, and the same quantities measured with the real machines.

In one round a block goes from the peers' values x to W x. Row i of W is what peer i ends with.
Yu et al. (ICML 2019, arXiv 1810.07766) have E[W^T W] = alpha1 I + (1 - alpha1) A and
E[W^T A W] = alpha2 I + (1 - alpha2) A (in transposed notation), with A the matrix of 1/n. Traces give

    alpha1 = (E |W|^2 - 1) / (n - 1)             |W|^2: the sum of squares of all entries
    alpha2 = (E |1^T W|^2 / n - 1) / (n - 1)     1^T W: the sums of the columns

W can be read off: peer k's values are the unit vector e_k in every chunk, so a chunk of peer i's outcome is
row i of W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import BurstLoss, Faults, Loss
from ragtag.core.types import Floats, Outcome
from ragtag.protocols.channel.averager import Averager, Setting
from ragtag.protocols.rounds.base import Round, Spec
from ragtag.protocols.rounds.layout import Layout, fixed_owners
from ragtag.protocols.rounds.reduce import scatter_gather
from ragtag.recipes.lockstep import LATENCY_S, run_rounds

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed forms for ``n`` peers and independent loss ``p`` (R = 1 + Bin(n-1, q) copies arrive)."""

    n: int
    p: float

    @property
    def _moments(self) -> tuple[float, float, float]:
        """E[R], E[R^2] and e = E[1/R]."""
        n, p, q = self.n, self.p, 1.0 - self.p
        mean = 1 + (n - 1) * q
        return mean, (n - 1) * p * q + mean**2, (1 - p**n) / (n * q)

    @property
    def alpha1(self) -> float:
        """The part of E[W^T W] beside the all-equal matrix."""
        mean, _, e = self._moments
        return (mean * e + self.n - mean - 1) / (self.n - 1)

    @property
    def alpha2(self) -> float:
        """The part of E[W^T A W] beside the all-equal matrix, about 2p(1-p)/n: how much the mean moves."""
        n = self.n
        mean, square, e = self._moments
        return ((square * e + 2 * (n * mean - square) * (1 - e) / (n - 1) + n - mean) / n - 1) / (n - 1)

    @property
    def beta(self) -> float:
        """The factor by which the peers' disagreement shrinks in each round."""
        return self.alpha1 - self.alpha2

    @property
    def steady(self) -> float:
        """The disagreement that stays when every round adds noise of unit variance."""
        return self.beta / (1 - self.beta)

    @property
    def owner_weight(self) -> float:
        """The weight of a block's owner in the peers' mean; 1: unbiased. Its own copy is never lost."""
        mean, _, e = self._moments
        return mean * e


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over independent rounds and its standard error."""

    value: float
    error: float

    @staticmethod
    def of(samples: Sequence[float] | Doubles) -> Estimate:
        """From at least two independent samples."""
        values = np.asarray(samples, np.float64)
        return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


@dataclass(frozen=True, slots=True)
class Mixing:
    """Measurements of W.

    kept: the share of chunks for which a peer kept its own values.
    own: the weight of peer ``j`` in the peers' mean of block ``j``; 1: unbiased. It shows a fixed owner's
        advantage.
    """

    alpha1: Estimate
    alpha2: Estimate
    kept: Estimate
    own: Estimate


def line(p: float) -> Faults:
    """A line that loses each datagram with probability ``p`` and delivers the others at once."""
    return Faults(loss=Loss(p) if p else None, latency_s=LATENCY_S)


def bursts(p: float, length: float) -> Faults:
    """A line that loses a share ``p`` of its datagrams in bursts of ``length`` on average."""
    leave = 1 / length
    return Faults(loss=BurstLoss(enter=leave * p / (1 - p), leave=leave), latency_s=LATENCY_S)


def mixing(
    n: int, faults: Faults, *, method: Averager, rounds: int, chunks_per_block: int, seed: int
) -> Mixing:
    """Measure W over ``rounds`` rounds of ``n * chunks_per_block`` chunks each.

    Datagrams are lost one by one, so every chunk shows a W of its own. With one chunk per block a datagram is
    the paper's block. Errors are those of independent rounds. Chunks have n values, the fewest that show W.
    """
    codec = fp32._replace(elements=n)
    n_chunks = n * chunks_per_block
    units = []
    for k in range(n):
        values = np.zeros((n_chunks, n), np.float32)
        values[:, k] = 1.0
        units.append(values)
    a1, a2, kept, own = [], [], [], []

    def read(done: int, outcomes: list[Outcome]) -> list[Floats] | None:
        w = np.stack([o.mean for o in outcomes]).astype(np.float64)  # [peer, chunk, column]
        a1.append((np.square(w).sum((0, 2)).mean() - 1) / (n - 1))
        sums = w.sum(0)
        a2.append((np.square(sums).sum(1).mean() / n - 1) / (n - 1))
        kept.append(1 - float(np.mean([o.averaged.mean() for o in outcomes])))
        own.append(sums.reshape(n, chunks_per_block, n).mean(1).diagonal().mean())
        return units if done + 1 < rounds else None

    run_rounds(units, read, method=method, faults=faults, seed=seed, codec=codec)
    return Mixing(*(Estimate.of(samples) for samples in (a1, a2, kept, own)))


def steady_disagreement(
    n: int, faults: Faults, *, method: Averager, rounds: int, chunks_per_block: int, seed: int
) -> Estimate:
    """The peers' variance after each round (unbiased, per value), where unit noise is added before each.

    The first rounds, until beta^t is negligible, do not count. The error takes rounds in tens, since
    neighbouring rounds are correlated by beta.
    """
    codec = fp32._replace(elements=32)
    shape = (n * chunks_per_block, codec.elements)
    warmup = 20
    spread: list[float] = []

    def noisy(done: int, states: Sequence[Floats]) -> list[Floats]:
        return [
            x + random.generator(seed, "unit noise", peer, done).standard_normal(shape, np.float32)
            for peer, x in enumerate(states)
        ]

    def measure(done: int, outcomes: list[Outcome]) -> list[Floats] | None:
        states = np.stack([o.mean for o in outcomes])
        if done >= warmup:
            spread.append(float(states.var(0, ddof=1, dtype=np.float64).mean()))
        # take away the common part, which does not matter and would grow without bound
        states -= states.mean(0)
        return noisy(done + 1, list(states)) if done + 1 < rounds + warmup else None

    zeros = [np.zeros(shape, np.float32)] * n
    run_rounds(noisy(0, zeros), measure, method=method, faults=faults, seed=seed, codec=codec)
    tens = np.array(spread[: len(spread) // 10 * 10]).reshape(-1, 10).mean(1)
    return Estimate.of(tens)


def slope(ns: Sequence[int], values: Sequence[float]) -> float:
    """The least-squares slope of log(values) over log(n)."""
    return float(np.polyfit(np.log(ns), np.log(values), 1)[0])


def fixed_owner_rps(setting: Setting) -> Round:
    """RPS with a bias: block ``j`` always belongs to peer ``j``."""
    return scatter_gather(
        Spec(
            me=setting.me,
            channel=setting.channel,
            round=setting.round,
            layout=Layout(setting.n_chunks, setting.n),
            owners=fixed_owners(setting.n, setting.live),
            members=frozenset(range(setting.n)),
            codec=setting.codec,
        )
    )


def difference(method: Averager, other: Averager, *, n: int, n_chunks: int, seed: int) -> float:
    """The largest difference between two averagers' means of the same values on a line without loss.

    It is relative to the largest value of the mean, and over all peers.
    """
    values = [
        random.generator(seed, "values", k).standard_normal((n_chunks, fp32.elements), np.float32)
        for k in range(n)
    ]
    found: list[Floats] = []

    def keep(done: int, outcomes: list[Outcome]) -> None:
        found.append(np.stack([o.mean for o in outcomes]))

    for each in (method, other):
        run_rounds(values, keep, method=each, faults=line(0.0), seed=seed)
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())
