"""Fully asynchronous: every update is a step, unless it is too old.

Ringmaster: "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity", Maranjyan, Tyurin,
Richtarik, ICML 2025 (arXiv 2501.16168), algorithm 4: an update whose delay has reached R is ignored, and
its peer starts again on the newest model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragtag.schedules.base import whole
from ragtag.schedules.centre import Arrival, Drop, Take, Verdict


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Step with each update; each of n peers moves the model by an n-th of a full step.

    discard_from: the staleness (versions) from which an update is dropped; ``None``: never.
    Raises ValueError: ``discard_from`` below 1.
    """

    discard_from: int | None = None

    def __post_init__(self) -> None:
        if self.discard_from is not None:
            whole("asynchronous: the discard threshold", self.discard_from, 1, "versions")

    @property
    def barrier(self) -> bool:
        """Nobody stands by."""
        return False

    @property
    def peers_min(self) -> int:
        """Any crew will do."""
        return 1

    def judge(self, arrival: Arrival) -> Verdict:
        """Take it, unless it is too old."""
        if self.discard_from is not None and arrival.staleness >= self.discard_from:
            return Drop()
        return Take(1.0 / arrival.n, close=True)


def threshold(variance: float, epsilon: float) -> int:
    """Ringmaster's R = max(1, ceil(sigma^2 / epsilon)), in versions (section 4).

    variance: sigma^2, of one gradient about its mean (squared norm).
    epsilon: the squared gradient norm to be reached.
    Raises ValueError: either is not a positive finite number (the variance may be 0).
    """
    if not (variance >= 0 and math.isfinite(variance)) or not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(
            f"discard threshold: variance {variance}, epsilon {epsilon}; the first is 0 or more, the second "
            f"above 0, both finite"
        )
    return max(1, math.ceil(variance / epsilon))
