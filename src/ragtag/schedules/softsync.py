"""n-softsync: step after every floor(lambda / n) updates, however old; mean staleness is then about n.

"Staleness-aware Async-SGD for Distributed Deep Learning", Zhang, Gupta, Lian, Liu, IJCAI 2016
(arXiv 1511.05950): lambda learners, c = floor(lambda / n) updates to a step, and a learning rate
of alpha_0 / tau, each update by its own staleness tau.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.schedules.base import whole
from ragtag.schedules.centre import Arrival, Take, Verdict, inverse


@dataclass(frozen=True, slots=True)
class SoftSync:
    """``n`` steps in the time in which each peer sends one update. corrected: each weighs 1/tau.

    Raises ValueError: ``n`` below 1, or (when judging) above the number of peers.
    """

    n: int
    corrected: bool = True

    def __post_init__(self) -> None:
        whole("n-softsync: n", self.n, 1, "steps a round")

    @property
    def barrier(self) -> bool:
        """Nobody stands by."""
        return False

    @property
    def peers_min(self) -> int:
        """n: with fewer peers a step would have no update."""
        return self.n

    def to_step(self, peers: int) -> int:
        """How many updates make a step: c = floor(lambda / n)."""
        if self.n > peers:
            raise ValueError(f"n-softsync: n is {self.n}, more than the {peers} peers; it is 1 to {peers}")
        return peers // self.n

    def judge(self, arrival: Arrival) -> Verdict:
        """Take every update, over its staleness where that is corrected; each c-th closes a step."""
        scale = inverse(arrival.staleness) if self.corrected else 1.0
        return Take(scale, close=arrival.held >= self.to_step(arrival.n))
