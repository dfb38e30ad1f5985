"""Outer momentum on averages: what the crew learned in a round is one gradient of an outer optimiser.

"DiLoCo: Distributed Low-Communication Training of Language Models", Douillard, Feng, Rusu, Chhaparia,
Donchev, Kuncoro, Ranzato, Szlam, Shen, 2023 (arXiv 2311.08105), algorithm 1: inner AdamW for H steps, outer
Nesterov with learning rate .7 and momentum .9 on the mean of (old - new) over the peers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

        model: what all peers began the round with; average: of what they ended it with; momentum: of the
        last round. All float32 of one shape. Equation (Sutskever et al., ICML 2013, as torch has it):
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


def Outer(lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> Nesterov:
    """Outer momentum for ``crew.optimizer(..., every=50, outer=ragtag.Outer())``; DiLoCo's values by default.

    Raises ValueError: a learning rate that is not above 0, a momentum outside [0, 1).
    """
    return Nesterov(lr, momentum, nesterov)
