"""Outer momentum on averages: what the crew learned in a round is one gradient of an outer optimiser.

"DiLoCo: Distributed Low-Communication Training of Language Models", Douillard, Feng, Rusu, Chhaparia,
Donchev, Kuncoro, Ranzato, Szlam, Shen, 2023 (arXiv 2311.08105), algorithm 1: inner AdamW for H steps, outer
Nesterov with learning rate .7 and momentum .9 on the mean of (old - new) over the peers.

NoLoCo (Kolehmainen et al., 2025, arXiv 2506.10911) averages with one random partner, so that each peer i has
an old model of its own. Its momentum has a term that pulls the two together:
m = a m + b mean(new - old) + g (mean(old) - old_i); next_i = old_i + m. The authors' code has g = b. Then
both terms are b (mean(new) - old_i) together, which is the step here without Nesterov's look ahead, of a mean
over the pair: ``Outer(lr=b, momentum=a, nesterov=False)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragtag.core.schema import FRAGMENTS_MAX

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Outer SGD with Nesterov momentum, as values: ``init`` makes a state, ``update`` the next model.

    With a learning rate of 1 and no momentum the model becomes the average (plain model averaging).
    nesterov: look ahead along the momentum; without, heavy-ball momentum (Polyak, 1964).
    Raises ValueError: a learning rate that is not above 0, a momentum outside [0, 1).
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"outer learning rate {self.learning_rate}: it must be above 0 and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum {self.momentum}: it must be at least 0 and below 1")

    def init(self, model: Vector) -> Vector:
        """The momentum to begin with: zeros, float32 of the model's shape."""
        return np.zeros_like(model)

    def update(self, model: Vector, average: Vector, momentum: Vector) -> tuple[Vector, Vector]:
        """The next model and momentum; nothing is changed in place.

        model: what all peers began the round with.
        average: of what they ended it with.
        momentum: of the last round.

        All are float32 of one shape. Equation (Sutskever et al., ICML 2013, as torch has it):
        d = model - average; m = mu m + d; next = model - lr (d + mu m); without nesterov model - lr m.
        Raises ValueError: shapes differ, or the average is not finite (keep the model then).
        """
        if not model.shape == average.shape == momentum.shape:
            raise ValueError(
                f"outer step: model {model.shape}, average {average.shape}, momentum {momentum.shape}; "
                f"they must have one shape"
            )
        if not np.isfinite(average).all():
            raise ValueError("outer step: the average is not finite; keep the model and go on")
        mu, lr = np.float32(self.momentum), np.float32(self.learning_rate)
        moved = model - average
        grown = np.asarray(mu * momentum + moved, np.float32)
        step = moved + mu * grown if self.nesterov else grown
        return np.asarray(model - lr * step, np.float32), grown


@dataclass(frozen=True, slots=True)
class Streaming:
    """Outer steps on fragments of the model in turn, while local steps go on.

    "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", Douillard et al.,
    2025 (arXiv 2501.18512). Here fragments are equal consecutive parts of all values, and the codec is the
    channel's (the paper has layers in strides, and sends 4 bits a value).

    fragments: P; each average is of one of them, so it moves 1/P of the bytes.
    delay: tau, how many local steps are taken between the beginning of an average and its use (0: none, steps
        wait for it). Where the averager has a quorum it is the least number: no step waits for an average.
    kept: alpha, how much of what the fragment has become meanwhile is kept; the rest is the outer step's.
    Raises ValueError: fragments below 1, a delay below 0, kept outside [0, 1].
    """

    rule: Nesterov
    fragments: int = 1
    delay: int = 0
    kept: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.fragments, int) or not 1 <= self.fragments <= FRAGMENTS_MAX:
            raise ValueError(f"{self.fragments} fragments; a whole number from 1 to {FRAGMENTS_MAX}")
        if not isinstance(self.delay, int) or self.delay < 0:
            raise ValueError(f"a delay of {self.delay} local steps; a whole number, 0 or more")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"kept is {self.kept}; a share, from 0 to 1")


def Outer(
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    *,
    fragments: int = 1,
    delay: int = 0,
    kept: float = 0.5,
) -> Nesterov | Streaming:
    """Outer momentum for ``crew.optimizer(..., every=50, outer=ragtag.Outer())``; by default as in DiLoCo.

    fragments: so many parts of the model are averaged in turn: with ``every=10, fragments=5`` one each 10
        steps, and all of them once in 50.
    delay, kept: let so many local steps go on meanwhile (``Streaming``).
    Raises ValueError: a learning rate that is not above 0, a momentum outside [0, 1); fragments below 1, a
        delay below 0, kept outside [0, 1].
    """
    rule = Nesterov(lr, momentum, nesterov)
    return rule if (fragments, delay) == (1, 0) else Streaming(rule, fragments, delay, kept)
