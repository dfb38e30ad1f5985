"""The schedules of a central state, as ``ragtag simulate --method softsync=2`` names them."""

from __future__ import annotations

from typing import cast

from ragtag.core.names import named
from ragtag.protocols.channel.averager import Averager
from ragtag.schedules.centre import Arrival, Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.names import CENTRES

__all__ = ["CENTRES", "method_of", "schedule_of"]


def schedule_of(text: str, peers: int) -> Centre | ProgressiveGrouping | None:
    """The schedule that a text names; ``None``: it names none.

    Raises ValueError: its number is none, or one that the schedule has no answer for in a crew of ``peers``.
    """
    if text.partition("=")[0] not in CENTRES:
        return None
    schedule = named(text, CENTRES, "schedule")
    if not isinstance(schedule, ProgressiveGrouping):
        schedule.judge(Arrival(0, 0, 1, peers))
    return schedule


def method_of(schedule: Centre | ProgressiveGrouping) -> Averager:
    """A central state under this schedule."""
    from ragtag.training.exchange.central import (
        Centre as central,  # needs torch, which other methods do without
    )

    return central(cast(Centre, schedule))
