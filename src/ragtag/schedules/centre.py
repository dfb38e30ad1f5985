"""What a centre does with each update that reaches it: a schedule seen from the other side. It is pure.

A centre holds the crew's model at some *version*, hands it out, and takes updates (gradients) that were
computed on it. When a rule closes a batch of updates, the centre steps by their mean, weighted by samples,
each times its scale; that makes the next version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ragtag.schedules.base import whole


@dataclass(frozen=True, slots=True)
class Arrival:
    """An update at the moment it reaches the centre.

    peer: the one that sent it.
    staleness: the centre's version less the one that it was computed on.
    held: updates that the centre holds for its next step, this one included.
    n: peers in the crew.
    """

    peer: int
    staleness: int
    held: int
    n: int

    def __post_init__(self) -> None:
        whole("an arrival's staleness", self.staleness, 0, "versions")
        whole("an arrival's number of updates held", self.held, 1, "updates")
        whole("an arrival's crew", self.n, 1, "peers")


@dataclass(frozen=True, slots=True)
class Take:
    """Keep the update, times ``scale``; ``close``: step now by the mean of all that are kept."""

    scale: float
    close: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave the update out: its compute is lost."""


Verdict = Take | Drop


class Centre(Protocol):
    """Which updates count, how much, and when the model steps.

    barrier: whether a peer stands by until the model steps, or goes on at once with the model as it is.
    peers_min: in a smaller crew it raises ValueError.
    """

    @property
    def barrier(self) -> bool:
        """Whether peers stand by."""
        ...

    @property
    def peers_min(self) -> int:
        """The smallest crew that it has an answer for."""
        ...

    def judge(self, arrival: Arrival) -> Verdict:
        """Say what becomes of an update."""
        ...


def inverse(staleness: int) -> float:
    """The share of its step that a stale update keeps: 1/tau, and all of it where tau is 0.

    "Staleness-aware Async-SGD for Distributed Deep Learning", Zhang, Gupta, Lian, Liu, IJCAI 2016
    (arXiv 1511.05950): alpha = alpha_0 / tau.
    """
    return 1.0 / max(1, staleness)
