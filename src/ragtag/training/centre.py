"""A central state that lives on the peers, as an averager: ``crew.optimizer(..., schedule=SoftSync(2))``.

What each peer learned since it last took the state, the difference of its model, goes to the owners of the
state's blocks; a schedule (``ragtag.schedules``: BackupWorkers, SoftSync, Asynchronous) says what of it
counts and when; back comes the newest state, which is the peer's model from then on. There is no master
(``ragtag.protocols.centre``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ragtag.core.types import PeerId
from ragtag.protocols.centre import Sharing, centre
from ragtag.protocols.centre_block import Verdict
from ragtag.protocols.method import Method
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Arrival, Drop
from ragtag.schedules.centre import Centre as Rule


@dataclass(frozen=True, slots=True)
class Judged:
    """A schedule as the central state asks for it.

    A crew may shrink below what its schedule was made for (more spare peers than peers): it is then judged
    as the smallest crew for which the schedule has an answer, so that those who are left go on.
    """

    schedule: Rule

    @property
    def barrier(self) -> bool:
        """Whether peers stand by."""
        return self.schedule.barrier

    def judge(self, peer: PeerId, staleness: int, held: int, n: int) -> Verdict | None:
        """What becomes of an update."""
        verdict = self.schedule.judge(Arrival(peer, staleness, held, max(n, self.schedule.peers_min)))
        return None if isinstance(verdict, Drop) else Verdict(verdict.scale, verdict.close)


def Centre(schedule: Rule | None = None) -> Method:
    """Share a central state that has no master, under a schedule; by default each update counts as it comes.

    schedule: ``ragtag.schedules.BackupWorkers``, ``SoftSync`` or ``Asynchronous``. A schedule alone will do:
    ``crew.optimizer(..., schedule=ragtag.schedules.SoftSync(2))``; to push after some local steps only, say
    ``averager=ragtag.Centre(SoftSync(2)), every=8``. Needs average="models".

    Raises TypeError: the schedule says when to average, not what a centre does with an update.
    """
    schedule = Asynchronous() if schedule is None else schedule
    if not is_rule(schedule):
        raise TypeError(
            f"Centre: {schedule!r} says when peers average, not what becomes of an update; use one of "
            "ragtag.schedules.BackupWorkers, SoftSync, Asynchronous"
        )
    return centre(repr(schedule), Judged(schedule))


def is_rule(schedule: Any) -> bool:
    """Whether a schedule is one for a centre."""
    return hasattr(schedule, "judge") and hasattr(schedule, "barrier")


def is_centred(method: Method) -> bool:
    """Whether a method is a central state."""
    return isinstance(method.crowd, Sharing)


def require_centred(method: Method, more: bool) -> None:
    """Raise ValueError where a central state is asked for together with what it cannot have."""
    if more and is_centred(method):
        raise ValueError(
            "a central state takes updates as they are: outer= and compress= need an average of all; use "
            "RPS() or AllReduce(), or leave them out"
        )


def centred(
    method: Method | None, schedule: Schedule | Rule | None, average: str, n: int
) -> tuple[Method | None, Schedule | None]:
    """The averager, and when to average, where the schedule given may be one for a central state.

    Raises ValueError: it is, and there is another averager; it asks for more peers than the ``n`` that the
    crew has (a crew of one goes on alone); or gradients are to be averaged.
    """
    when: Schedule | None = None
    if schedule is not None and is_rule(schedule):
        if method is not None:
            raise ValueError(
                f"{schedule!r} is a schedule for a central state, which is an averager itself: leave out "
                f"averager=, or make it ragtag.Centre({schedule!r}) and say by every= how often to push"
            )
        method = Centre(cast(Rule, schedule))
    else:
        when = cast(Schedule | None, schedule)
    if method is None or not isinstance(method.crowd, Sharing):
        return method, when
    if average != "models":
        raise ValueError('updates of a central state are what models were moved by; use average="models"')
    rule = method.crowd.rule
    if n > 1 and isinstance(rule, Judged):
        rule.schedule.judge(Arrival(0, 0, 1, n))
    return method, when
