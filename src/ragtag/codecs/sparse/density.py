"""How many entries a round sends, and when sending fewer does not pay."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Density:
    """A share of the entries, at least ``k_min``, never more than there are.

    warm_up_rounds: the share falls geometrically from ``start`` to ``ratio`` in so many rounds, while
    gradients change fast (Lin et al., "Deep gradient compression", ICLR 2018, section 3.3: from 25 %).

    Raises ValueError for what cannot be.
    """

    ratio: float = 0.001
    k_min: int = 1
    warm_up_rounds: int = 0
    start: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"a ratio of {self.ratio}: give a share of the entries, above 0 and at most 1")
        if self.k_min < 1:
            raise ValueError(f"k_min is {self.k_min}: at least 1 entry must be selected")
        if self.warm_up_rounds < 0:
            raise ValueError(f"a warm-up of {self.warm_up_rounds} rounds: give 0 or more")
        if self.warm_up_rounds and not self.ratio <= self.start <= 1:
            raise ValueError(f"a warm-up from {self.start} to {self.ratio}: it must fall, from at most 1")

    def share(self, round_: int) -> float:
        """The share in a round, counted from 0."""
        if round_ >= self.warm_up_rounds:
            return self.ratio
        return float(self.start * (self.ratio / self.start) ** (max(0, round_) / self.warm_up_rounds))

    def k(self, d: int, round_: int) -> int:
        """How many of ``d`` entries: 1 to ``d`` (``k_min`` of none)."""
        k = max(self.k_min, int(self.share(round_) * d))
        return min(k, d) if d else k


def break_even_bytes_per_s(
    dense_bytes: int, sparse_bytes: int, select_s: float, encode_s: float = 0.0, decode_s: float = 0.0
) -> float:
    """The link's rate at which sparse and dense take equally long; on a faster one, dense is faster.

    0 where sparse is no smaller; infinite where selecting and coding cost nothing.
    """
    saved, cost_s = dense_bytes - sparse_bytes, select_s + encode_s + decode_s
    if cost_s < 0 or not math.isfinite(cost_s):
        raise ValueError(f"selecting and coding take {cost_s} s: give what was measured")
    if saved <= 0:
        return 0.0
    return saved / cost_s if cost_s else math.inf
