"""DropCompute: a step's micro-batches stop at a threshold of time; a peer joins with what it has by then.

"DropCompute: simple and more robust distributed synchronous training via compute variance reduction",
Giladi, Gottlieb, Shkolnik, Karnieli, Banner, Hoffer, Levy, Soudry, NeurIPS 2023 (arXiv 2306.10598):
algorithm 1, and algorithm 2 for the threshold. The paper weighs averages by the samples that were used: give
``weight="samples"``, as each peer counts the same else, however many it dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragtag.schedules.base import Average, Compute, Decision, Progress, is_number, whole


@dataclass(frozen=True, slots=True)
class DropCompute:
    """Average after ``micro`` micro-batches, or as soon as ``threshold_s`` have been spent computing.

    A local step is one micro-batch, of which at least one is used. Where the time spent is not known, and
    with an infinite threshold, all are used. Raises ValueError: fewer than one micro-batch, or a threshold
    that is not above 0.
    """

    micro: int
    threshold_s: float = math.inf

    def __post_init__(self) -> None:
        whole("DropCompute: micro", self.micro, 1, "micro-batches a step")
        if not (is_number(self.threshold_s) and self.threshold_s > 0):
            raise ValueError(
                f"DropCompute: threshold_s is {self.threshold_s!r}; it must be a number of seconds above 0"
            )

    def decide(self, progress: Progress) -> Decision:
        """Average when the step is whole, or its time is over."""
        if progress.since_average < 1:
            return Compute()
        late = progress.computed_s is not None and progress.computed_s >= self.threshold_s
        return Average() if late or progress.since_average >= self.micro else Compute()


def best_threshold_s(micro_s: NDArray[np.float64], exchange_s: float = 0.0, candidates: int = 200) -> float:
    """Algorithm 2: the threshold at which most micro-batches are used per second of the whole crew.

    micro_s: what each micro-batch took, float64 ``[steps, peers, micro]``, measured without a threshold.
    exchange_s: what averaging takes.

    The effective speed-up at a threshold is the mean over steps of
    (T + exchange) / (min(threshold, T) + exchange), T being the slowest peer's time, times the share of
    micro-batches that are begun before the threshold. As ``DropCompute`` looks between micro-batches, a
    peer's time is counted to the end of the one under way. ``inf`` where no threshold helps.

    Raises ValueError: not such a table, or times that are not positive and finite.
    """
    if micro_s.ndim != 3 or not micro_s.size or not (np.isfinite(micro_s) & (micro_s > 0)).all():
        raise ValueError(
            f"DropCompute: times of shape {micro_s.shape}; they must be [steps, peers, micro], all above 0"
        )
    if not (exchange_s >= 0 and math.isfinite(exchange_s)):
        raise ValueError(f"DropCompute: averaging takes {exchange_s} s; it must be 0 or more and finite")
    ends = micro_s.cumsum(axis=2)
    begins = ends - micro_s
    whole_s = ends[:, :, -1].max(axis=1)
    tried: list[tuple[float, float]] = []
    for threshold_s in np.linspace(float(ends[:, :, 0].min()), float(whole_s.max()), candidates):
        begun = begins < threshold_s
        took_s = np.where(begun, ends, 0.0).max(axis=(1, 2))
        speed_up = float(((whole_s + exchange_s) / (took_s + exchange_s)).mean() * begun.mean())
        tried.append((speed_up, float(threshold_s)))
    best = max(speed_up for speed_up, _ in tried)
    if best <= 1 + 1e-9:
        return math.inf
    # Of equals the longest: it averages least often.
    return max(threshold_s for speed_up, threshold_s in tried if speed_up >= best * (1 - 1e-9))
