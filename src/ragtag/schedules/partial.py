"""Partial averages: a round waits only for peers whose speed says that they will be there.

"Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations", Li, Ben-Nun,
Di Girolamo, Alistarh, Hoefler, PPoPP 2020 (arXiv 1908.04207; eager-SGD): fast peers do not wait, slow ones
add what they have to the round that they reach. How many are waited for is chosen as for backup workers
("Revisiting Distributed Synchronous SGD", Chen et al., 2016, arXiv 1604.00981, section 3.3): the number N at
which the fastest N take the most steps per second together, here from what each peer posts of its speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ragtag.schedules.base import Average, Compute, Decision, Progress, whole

GAIN = 1.1
"""Another set is worth a change where it takes so many times the steps per second: noise is not."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Average every ``every`` local steps, and do not wait for peers that are too slow to pay for the wait.

    Raises ValueError: ``every`` below 1.
    """

    every: int = 1
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("partial averages: every", self.every, 1, "local steps")

    def decide(self, progress: Progress) -> Decision:
        """Average when the steps have been taken."""
        return Average() if progress.since_average >= self.every else Compute()


def set_aside(
    step_s: Mapping[int, float], now: frozenset[int] = frozenset(), round_s: float = 0.0
) -> frozenset[int]:
    """The peers that a round does not wait for.

    step_s: seconds that each peer computes between averages, as measured.
    now: the peers set aside so far.
    round_s: what an average takes beside the wait.

    Of the N fastest that are waited for, each takes one turn in max(step_s) + round_s; the N with the most
    turns per second is taken, the largest of equals. The set stays as it is while another gains less than
    ``GAIN``.
    Raises ValueError: a time that is not a positive finite number.
    """
    for peer, s in step_s.items():
        if not (s > 0 and math.isfinite(s)):
            raise ValueError(
                f"partial averages: peer {peer} takes {s} s a step; it must be above 0 and finite"
            )
    ranked = sorted(step_s, key=lambda peer: (step_s[peer], peer))
    if not ranked:
        return frozenset()

    def rate(waited: int) -> float:
        return waited / (step_s[ranked[waited - 1]] + round_s)

    best = max(range(1, len(ranked) + 1), key=lambda waited: (rate(waited), waited))
    kept = [peer for peer in ranked if peer not in now]
    if kept:
        so_far = len(kept) / (step_s[kept[-1]] + round_s)
        if rate(best) < GAIN * so_far:
            return frozenset(now & step_s.keys())
    return frozenset(ranked[best:])
