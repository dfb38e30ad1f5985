"""The methods that are compared, as arguments of ``crew.optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragtag.core.types import PeerId
from ragtag.protocols.central.block import Verdict
from ragtag.protocols.central.channel import centre
from ragtag.protocols.groups.channel import RandomGroups
from ragtag.protocols.rounds.allreduce import direct
from ragtag.recipes.grouping.training import STEP_S, Method, Work
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import BackupWorkers
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound
from ragtag.schedules.dropcompute import DropCompute, best_threshold_s
from ragtag.schedules.grouping import Groups, ProgressiveGrouping, equal_groups, scale, share
from ragtag.schedules.partial import Partial
from ragtag.simulation.cost import ComputeCost

WARM_UP = 4
"""Steps after which DropCompute's threshold is set."""


@dataclass(frozen=True, slots=True)
class FixedGroups:
    """Groups that are given, in the place of progressive grouping in the library's central state.

    One group of all is synchronous training: nobody goes on without the slowest, once its speed is known.

    corrected: updates count no more than 1 / staleness.
    """

    fixed: Groups
    corrected: bool = True

    @property
    def barrier(self) -> bool:
        """Peers stand by for their group."""
        return True

    def judge(self, peer: PeerId, staleness: int, held: int, n: int) -> Verdict | None:
        """Groups decide."""
        return Verdict(1.0, close=held >= n)

    def groups(self, step_s: Mapping[PeerId, float], now: Groups) -> Groups:
        """The same, whatever the speeds; without the peers that are gone."""
        return tuple(left for group in self.fixed if (left := tuple(p for p in group if p in step_s)))

    def share(self, group: Iterable[PeerId], rate: Mapping[PeerId, float]) -> float:
        """As in progressive grouping."""
        return share(group, rate)

    def scale(self, share: float, staleness: int) -> float:
        """As in progressive grouping, where it is corrected."""
        return scale(share, staleness if self.corrected else 0)


def scheduled(schedule: object, keeps: bool = False) -> Method:
    """The library's schedule."""
    return Method(lambda work: {"schedule": schedule}, keeps=keeps)


def grouped(g: int) -> Method:
    """Equal groups in the order of peers' numbers."""

    def options(work: Work) -> Mapping[str, Any]:
        groups = FixedGroups(equal_groups(range(work.n), g))
        return {"method": centre(f"{g} fixed groups", groups, groups)}

    return Method(options)


def cut(micro: int) -> Method:
    """DropCompute: gradients of micro-batches, averaged by samples. Its threshold is measured beforehand."""

    def options(work: Work) -> Mapping[str, Any]:
        if work.batch % micro:
            raise ValueError(f"batches of {work.batch} do not part into {micro} micro-batches")
        threshold_s = best_threshold_s(micro_s(work, micro))
        schedule = DropCompute(micro, threshold_s)
        return {"schedule": schedule, "method": direct, "average": "gradients"}

    return Method(options, micro)


def micro_s(work: Work, micro: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the micro-batches of ``WARM_UP`` steps take without a threshold, ``[steps, peers, micro]``."""
    cost = ComputeCost(STEP_S / work.batch, sigma=work.jitter, seed=work.seed)

    def took_s(step: int, peer: int, at: int) -> float:
        return cost.ends_s(peer, step * micro + at, work.batch // micro, 0.0, work.faults)

    steps, peers = range(WARM_UP), range(work.n)
    return np.array([[[took_s(s, p, i) for i in range(micro)] for p in peers] for s in steps])


SYNC = "synchronous"
PROGRESSIVE = "progressive grouping"
BACKUP = "backup workers, 1 spare"
DROP = "DropCompute, 8 micro-batches"
ASYNC = "asynchronous"
DISCARD_FROM = 32
RINGMASTER = f"Ringmaster, R = {DISCARD_FROM}"
BOUND, BOUNDS = 4, (2, 6)
SSP = f"SSP, s = {BOUND}"
DSSP = f"DSSP, s from {BOUNDS[0]} to {BOUNDS[1]}"
PARTIAL = "partial averages"
RANDOM = "random groups of 4"
FIXED = "4 fixed groups"

METHODS: Mapping[str, Callable[[], Method]] = {
    SYNC: lambda: grouped(1),
    BACKUP: lambda: scheduled(BackupWorkers(1)),
    DROP: lambda: cut(8),
    ASYNC: lambda: scheduled(Asynchronous()),
    RINGMASTER: lambda: scheduled(Asynchronous(DISCARD_FROM)),
    SSP: lambda: scheduled(BoundedStaleness(BOUND), keeps=True),
    DSSP: lambda: scheduled(DynamicBound(*BOUNDS), keeps=True),
    PARTIAL: lambda: scheduled(Partial(), keeps=True),
    RANDOM: lambda: Method(lambda work: {"method": RandomGroups(4)}, keeps=True),
    FIXED: lambda: grouped(4),
    PROGRESSIVE: lambda: scheduled(ProgressiveGrouping()),
}
