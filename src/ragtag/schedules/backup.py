"""Backup workers: of N + b peers, the first N updates of a version count; what comes later is dropped.

"Revisiting Distributed Synchronous SGD", Chen, Pan, Monga, Bengio, Jozefowicz, 2016 (arXiv 1604.00981).
With b = 0 it is synchronous SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.schedules.base import whole
from ragtag.schedules.centre import Arrival, Drop, Take, Verdict


@dataclass(frozen=True, slots=True)
class BackupWorkers:
    """Step as soon as all but ``spare`` updates of this version are there.

    Raises ValueError: ``spare`` below 0, or (when judging) no peer left to wait for.
    """

    spare: int = 0

    def __post_init__(self) -> None:
        whole("backup workers: spare", self.spare, 0, "peers")

    @property
    def barrier(self) -> bool:
        """Peers stand by for the others."""
        return True

    @property
    def peers_min(self) -> int:
        """Somebody is waited for."""
        return self.spare + 1

    def judge(self, arrival: Arrival) -> Verdict:
        """Take what is of this version, drop what is older."""
        if self.spare >= arrival.n:
            raise ValueError(
                f"backup workers: {self.spare} spare of {arrival.n} peers leaves none to wait for; "
                f"spare at most {arrival.n - 1}"
            )
        if arrival.staleness > 0:
            return Drop()
        return Take(1.0, close=arrival.held >= arrival.n - self.spare)


SYNCHRONOUS = BackupWorkers(0)
"""Every update of every version: the barrier that waits for all."""
