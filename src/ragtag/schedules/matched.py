"""Matched local steps: peers take as many as they can in the time that the slowest needs for its own.

Local SGD with unequal numbers of steps: "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020 (arXiv 2007.07481). Here the numbers
follow measured speed, so that all come to the average at about the same time and nobody waits; weigh averages
by samples, and what each peer did counts by how much it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ragtag.schedules.base import Average, Compute, Decision, Progress, is_number, whole


@dataclass(frozen=True, slots=True)
class Matched:
    """Average when the slowest live peer has taken ``steps`` local steps, or ``period_s`` have been computed.

    steps: of the slowest peer, between averages; the others take as many more as they are faster.
    period_s: instead of them, how long all compute between averages.
    most: local steps at most, which bounds how far replicas drift apart (``None``: no bound).

    Each takes one step at least. Where nothing has been measured yet, ``steps`` are taken.
    Raises ValueError: ``steps`` or ``most`` below 1, ``most`` below ``steps``, ``period_s`` not above 0.
    """

    steps: int = 1
    period_s: float | None = None
    most: int | None = None
    paced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("matched local steps: steps", self.steps, 1, "steps")
        if self.most is not None:
            whole(
                "matched local steps: most", self.most, self.steps, "steps, no fewer than the slowest takes"
            )
        if self.period_s is not None and not (is_number(self.period_s) and 0 < self.period_s < math.inf):
            raise ValueError(
                f"matched local steps: period_s is {self.period_s!r}; it must be a number of seconds above "
                "0, and finite"
            )

    def decide(self, progress: Progress) -> Decision:
        """Average where another step would end further from the common time than this one has."""
        taken = progress.since_average
        if taken < 1:
            return Compute()
        if self.most is not None and taken >= self.most:
            return Average()
        mine_s = progress.step_s.get(progress.me)
        if mine_s is None or progress.computed_s is None:
            return Average() if taken >= self.steps else Compute()
        period_s = self.period_s
        if period_s is None:
            period_s = self.steps * max(s for p, s in progress.step_s.items() if p in progress.live)
            if period_s <= mine_s * self.steps:  # the slowest itself goes by its count
                return Average() if taken >= self.steps else Compute()
        return Average() if progress.computed_s + mine_s / 2 >= period_s else Compute()
