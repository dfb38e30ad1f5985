"""Bounded staleness: nobody runs more than s steps ahead of the slowest.

SSP: "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", Ho, Cipar, Cui, Lee,
Kim, Gibbons, Gibson, Ganger, Xing, NeurIPS 2013, section 2.
DSSP: "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", Zhao, An, Liu, Chen,
ICDCS 2019 (arXiv 1908.11848): the bound moves within a range, to where the wait is shortest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ragtag.schedules.base import Average, Compute, Decision, Progress, Wait, whole

_LOOKS = 8
"""A peer that waits looks again so often in a step of the slowest."""
_HEADROOM = 1.5
"""A wait ends after so many times what measurement says that it takes (as ``core.deadline`` has it)."""


@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """SSP: after each step, share it; while more than ``bound`` steps ahead of the slowest, wait first.

    Where nobody's clock is known there is nobody to wait for. A wait ends by itself after 1.5 times what
    the steps that are missing should take, by what the slowest (else this peer) was measured to need for
    one, and an average took. The steps that this peer takes then, or while another one is silent, are not
    counted: one that comes back has nothing to make up, and may stay so many steps behind.
    Raises ValueError: ``bound`` below 1 (0 is a barrier: average every step).
    """

    bound: int
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("bounded staleness: the bound", self.bound, 1, "steps (for 0, average every step)")

    def decide(self, progress: Progress) -> Decision:
        """Average, or wait for the slowest."""
        if progress.since_average < 1:
            return Compute()
        _, ahead = lead(progress)
        return Average() if ahead <= self.bound else wait_for(progress, ahead - self.bound)


@dataclass(frozen=True, slots=True)
class DynamicBound:
    """DSSP: bounds from ``low`` to ``high``; past ``low``, stop where the wait for the slowest is shortest.

    The paper grants a number of extra steps once; here the same choice is made again after each step from
    the newest measurements, so nothing need be remembered. Where steps were not measured it is SSP at
    ``low``. Raises ValueError: ``low`` below 1, or ``high`` not above it.
    """

    low: int
    high: int
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("moving bound: low", self.low, 1, "steps")
        whole("moving bound: high", self.high, self.low + 1, "steps, above low")

    def decide(self, progress: Progress) -> Decision:
        """Average, or wait for the slowest where waiting later would be no shorter."""
        if progress.since_average < 1:
            return Compute()
        slowest, ahead = lead(progress)
        if ahead <= self.low:
            return Average()
        mine, its = progress.step_s.get(progress.me), progress.step_s.get(slowest)
        if ahead <= self.high and mine is not None and its is not None:
            left, round_s = self.high - ahead + 1, progress.round_s or 0.0  # each step ends with an average
            if extra_steps(mine + round_s, its + round_s, progress.since_s.get(slowest, 0.0), left) > 0:
                return Average()
        return wait_for(progress, ahead - self.low)


def lead(progress: Progress) -> tuple[int, int]:
    """The slowest live peer, and by how many steps this one is ahead of it."""
    clocks: Mapping[int, int] = {
        peer: clock
        for peer, clock in progress.clocks.items()
        if peer in progress.live and peer != progress.me
    }
    if not clocks:
        return progress.me, 0
    slowest = min(clocks, key=lambda peer: (clocks[peer], peer))
    return slowest, max(0, progress.step - clocks[slowest])


def extra_steps(mine_s: float, its_s: float, since_s: float, most: int) -> int:
    """After how many more steps, 0 to ``most``, the wait for the slowest peer's next step is shortest.

    mine_s, its_s: seconds per step.
    since_s: how long ago the slowest finished its last.
    Returns the fewest, where several are equally good.
    Raises ValueError: a step's time is not a positive finite number.
    """
    for name, value in (("this peer", mine_s), ("the slowest", its_s)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"moving bound: {name} takes {value} s a step; it must be above 0 and finite")
    next_s = max(0.0, its_s - since_s)

    def wait_s(steps: int) -> float:
        over_s = steps * mine_s - next_s
        behind = max(0, math.ceil(over_s / its_s - 1e-9))
        return behind * its_s - over_s

    waits = [wait_s(steps) for steps in range(most + 1)]
    best = min(waits)
    return next(i for i, w in enumerate(waits) if w <= best + 1e-9 * its_s)


def wait_for(progress: Progress, steps: int) -> Wait:
    """Wait until the slowest has taken ``steps`` more, with an end derived from what its steps take.

    Each ends with an average, of which this peer's last one says how long it takes.
    """
    slowest, _ = lead(progress)
    known = [s for peer, s in progress.step_s.items() if peer in progress.live and s > 0 and math.isfinite(s)]
    round_s = progress.round_s or 0.0
    step_s = progress.step_s.get(slowest, max(known, default=0.0 if round_s else 1.0)) + round_s
    return Wait(step_s / _LOOKS, _HEADROOM * steps * step_s)
