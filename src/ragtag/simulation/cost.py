"""How long a peer computes: a cost model in virtual time.

A local step of ``samples`` samples costs ``samples * seconds_per_sample / speed`` seconds, times a
lognormal jitter of mean 1, stretched while the peer is slow and halted while it is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ragtag.core import seed as random
from ragtag.core.faults import Faults
from ragtag.core.types import PeerId


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """When a peer's local step ends.

    seconds_per_sample: on a peer of speed 1.
    speed: each peer's factor, faster above 1; empty: all are 1.
    sigma: of the jitter's logarithm; 0: no jitter.
    seed: of the jitter, which is drawn for each peer and step.
    """

    seconds_per_sample: float
    speed: Sequence[float] = ()
    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds_per_sample >= 0 or not self.sigma >= 0:
            raise ValueError(
                f"cost: {self.seconds_per_sample} s per sample, sigma {self.sigma}: neither may be below 0"
            )
        if any(not factor > 0 for factor in self.speed):
            raise ValueError(f"cost: speeds {list(self.speed)}; each must be above 0")

    def work_s(self, peer: PeerId, step: int, samples: int) -> float:
        """How long a step takes where no fault slows it down."""
        work_s = samples * self.seconds_per_sample / (self.speed[peer] if self.speed else 1.0)
        if self.sigma == 0:
            return work_s
        key = random.stream_key(self.seed, "compute", peer, step)
        u, v = 1.0 - random.uniform(key, 0), random.uniform(key, 1)
        normal = math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)  # Box, Muller 1958
        return work_s * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def ends_s(
        self,
        peer: PeerId,
        step: int,
        samples: int,
        now_s: float,
        faults: Faults = Faults(),  # noqa: B008
    ) -> float:
        """When a step that begins now ends, with the peer's faults; ``inf``: the peer crashes before."""
        ends_s = _stretched(peer, now_s, self.work_s(peer, step, samples), faults)
        gone_s = min((crash.at_s for crash in faults.crashes if crash.peer == peer), default=math.inf)
        return ends_s if ends_s < gone_s else math.inf


def _stretched(peer: PeerId, now_s: float, work_s: float, faults: Faults) -> float:
    """When ``work_s`` of work is done. It goes from one change of the peer's pace to the next."""
    frozen = [(f.at_s, f.at_s + f.for_s) for f in faults.freezes if f.peer == peer]
    slow = [(s.window.from_s, s.window.until_s) for s in faults.slow if s.peer == peer]
    if not frozen and not slow:
        return now_s + work_s
    changes = sorted({edge for span in frozen + slow for edge in span if now_s < edge < math.inf})
    for change_s in [*changes, math.inf]:
        if not any(a <= now_s < b for a, b in frozen):
            pace = faults.slowdown(peer, now_s)
            if now_s + work_s * pace <= change_s:
                return now_s + work_s * pace
            work_s -= (change_s - now_s) / pace
        now_s = change_s
    return math.inf
