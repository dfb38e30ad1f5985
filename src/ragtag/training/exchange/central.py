"""A central state that lives on the peers, as an averager: ``crew.optimizer(..., schedule=SoftSync(2))``.

What each peer learned since it last took the state, the difference of its model, goes to the owners of the
state's blocks; a schedule (``ragtag.schedules``: BackupWorkers, SoftSync, Asynchronous,
ProgressiveGrouping) says what of it counts and when; back comes the newest state, which is the peer's model
from then on. There is no master (``ragtag.protocols.central.channel``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from ragtag.core.types import Floats, PeerId
from ragtag.optim.compensate import compensated
from ragtag.protocols.central.block import Verdict
from ragtag.protocols.central.channel import Sharing, centre
from ragtag.protocols.channel.averager import Averager
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import BackupWorkers
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Arrival, Drop
from ragtag.schedules.centre import Centre as Rule
from ragtag.schedules.grouping import Groups, ProgressiveGrouping, plausible, scale, share


@dataclass(frozen=True, slots=True)
class Judged:
    """A schedule as the central state asks for it.

    A crew may shrink below what its schedule was made for (more spare peers than peers): it is then judged
    as the smallest crew for which the schedule has an answer, so that the peers that are left go on.
    """

    schedule: Rule

    @property
    def barrier(self) -> bool:
        """Whether peers stand by."""
        return self.schedule.barrier

    def judge(self, peer: PeerId, staleness: int, held: int, n: int) -> Verdict | None:
        """How much an update counts, and whether it closes a step; ``None``: it is dropped."""
        verdict = self.schedule.judge(Arrival(peer, staleness, held, max(n, self.schedule.peers_min)))
        return None if isinstance(verdict, Drop) else Verdict(verdict.scale, verdict.close)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Progressive grouping as the central state asks for it: a peer of absurd speed goes alone."""

    schedule: ProgressiveGrouping

    @property
    def barrier(self) -> bool:
        """Peers stand by for their group."""
        return True

    def judge(self, peer: PeerId, staleness: int, held: int, n: int) -> Verdict | None:
        """Groups decide; a crew that had none would be one."""
        return Verdict(1.0, close=held >= n)

    def groups(self, step_s: Mapping[PeerId, float], now: Groups) -> Groups:
        """The groups to go on with."""
        good, doubted = plausible(step_s)
        while good and doubted:
            good, doubted = plausible(good)  # the middle is another without them
        return self.schedule.groups(good, now) if good else ()

    def share(self, group: Iterable[PeerId], rate: Mapping[PeerId, float]) -> float:
        """A group's part of the crew's samples per second."""
        return share(group, rate)

    def scale(self, share: float, staleness: int) -> float:
        """A group's share, and never above 1/tau."""
        return scale(share, staleness)


@dataclass(frozen=True, slots=True)
class Compensation:
    """Brings stale updates of plain SGD up to date: an update is ``-rate`` times a gradient.

    strength: lambda.
    rate: the learning rate as it is now (``None``, or 0: updates stay as they are).
    """

    strength: float
    rate: Callable[[], float] | None = None

    def __call__(self, update: Floats, values: Floats, stale: Floats) -> Floats:
        """See ``optim.compensate.compensated``."""
        rate = np.float32(0.0 if self.rate is None else self.rate())
        if not rate > 0:
            return update
        with np.errstate(all="ignore"):  # what is not finite is not taken
            corrected: Floats = -rate * compensated(update / -rate, values, stale, self.strength)
        return corrected


def Centre(schedule: Rule | ProgressiveGrouping | None = None, compensate: float = 0.0) -> Averager:
    """Share a central state that has no master, under a schedule; by default each update counts as it comes.

    schedule: ``ragtag.schedules.BackupWorkers``, ``SoftSync``, ``Asynchronous`` or ``ProgressiveGrouping``. A
        schedule alone will do: ``crew.optimizer(..., schedule=ragtag.schedules.SoftSync(2))``; to push after
        some local steps only, say ``averager=ragtag.Centre(SoftSync(2)), every=8``. Needs average="models".
    compensate: delay compensation, lambda of DC-ASGD (``ragtag.optim.compensate``; Zheng et al., ICML 2017):
        a stale update is corrected to first order for what the model has moved by since. Owners keep what
        each peer was sent last, in all about one model more. For plain SGD (no momentum, one learning rate)
        that averages after every step, since an update must be one gradient; an owner takes the learning rate
        to be its own. What was made on values that an owner has not sent itself is not corrected.

    Raises TypeError: the schedule says when to average, not what a centre does with an update. ValueError:
    ``compensate`` is negative or not finite, or the schedule takes no stale updates.
    """
    schedule = Asynchronous() if schedule is None else schedule
    if not is_rule(schedule):
        raise TypeError(
            f"Centre: {schedule!r} says when peers average, not what becomes of an update; use one of "
            "ragtag.schedules.BackupWorkers, SoftSync, Asynchronous, ProgressiveGrouping"
        )
    if not (compensate >= 0 and math.isfinite(compensate)):
        raise ValueError(f"Centre: compensate={compensate}; it must be 0 or more, and finite")
    if compensate and isinstance(schedule, BackupWorkers):
        raise ValueError(
            f"Centre: {schedule!r} drops stale updates: there is none to compensate; leave it out"
        )
    name = repr(schedule) + (f", compensate={compensate:g}" if compensate else "")
    correction = Compensation(compensate) if compensate else None
    if isinstance(schedule, ProgressiveGrouping):
        grouped = Grouped(schedule)
        return centre(name, grouped, grouped, correction)
    return centre(name, Judged(schedule), None, correction)


def is_rule(schedule: Any) -> bool:
    """Whether a schedule is one for a centre."""
    if isinstance(schedule, ProgressiveGrouping):
        return True
    return hasattr(schedule, "judge") and hasattr(schedule, "barrier")


def is_centred(method: Averager) -> bool:
    """Whether a method is a central state."""
    return method.kind == "central"


def centred(
    method: Averager | None, schedule: Schedule | Rule | ProgressiveGrouping | None
) -> tuple[Averager | None, Schedule | None]:
    """The averager, and when to average, where the schedule given may be one for a central state.

    Raises ValueError: it is, and there is another averager.
    """
    if schedule is None or not is_rule(schedule):
        return method, cast(Schedule | None, schedule)
    if method is not None:
        raise ValueError(
            f"{schedule!r} is a schedule for a central state, which is an averager itself: leave out "
            f"averager=, or make it ragtag.Centre({schedule!r}) and say by every= how often to push"
        )
    return Centre(cast(Rule, schedule)), None


def rated(method: Averager, inner: torch.optim.Optimizer, n: int) -> Averager:
    """The averager; a central state's compensation now reads the learning rate of ``inner``.

    Raises ValueError: its rule asks for more peers than the ``n`` that the crew has (a crew of one goes on
    alone), or updates are to be compensated that are not one gradient each.
    """
    if not isinstance(method.open, Sharing):
        return method
    rule, correction = method.open.rule, method.open.correction
    if n > 1 and isinstance(rule, Judged):
        rule.schedule.judge(Arrival(0, 0, 1, n))
    if not isinstance(correction, Compensation):
        return method
    correction = replace(correction, rate=_rate_of(inner))
    return replace(method, open=replace(method.open, correction=correction))


def _rate_of(inner: torch.optim.Optimizer) -> Callable[[], float]:
    """Reads plain SGD's learning rate. Raises ValueError: it is not plain, or has several rates."""
    groups = inner.param_groups
    plain = isinstance(inner, torch.optim.SGD) and not any(g["momentum"] or g["maximize"] for g in groups)
    if not plain or len({float(group["lr"]) for group in groups}) != 1:
        raise ValueError(
            "compensate= needs updates that are a learning rate times a gradient: torch.optim.SGD without "
            f"momentum, with one learning rate for all parameters; this is {type(inner).__name__} "
            f"{[{k: g.get(k) for k in ('lr', 'momentum', 'maximize')} for g in groups]}"
        )
    return lambda: float(inner.param_groups[0]["lr"])
