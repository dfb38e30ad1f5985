"""The schedules of a central state by name, as ``ragtag simulate --method softsync=2`` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ragtag.protocols.method import Method
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import BackupWorkers
from ragtag.schedules.centre import Arrival, Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.softsync import SoftSync

CENTRES: dict[str, Callable[[int | None], Centre | ProgressiveGrouping]] = {
    "backup": lambda n: BackupWorkers(1 if n is None else n),
    "softsync": lambda n: SoftSync(1 if n is None else n),
    "asynchronous": Asynchronous,
    "grouping": lambda n: ProgressiveGrouping() if n is None else ProgressiveGrouping(groups_max=n),
}
"""By name, from the number after ``=`` (``None``: there is none): spare peers, n, the staleness from which
updates are discarded, the most groups."""


def schedule_of(text: str, peers: int) -> Centre | ProgressiveGrouping | None:
    """The schedule that a text names; ``None``: it names none.

    Raises ValueError: its number is none, or one that the schedule has no answer for in a crew of ``peers``.
    """
    name, equals, number = text.partition("=")
    if name not in CENTRES:
        return None
    if equals and not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r}: after {name}= stands a whole number, as {name}=2")
    schedule = CENTRES[name](int(number) if equals else None)
    if not isinstance(schedule, ProgressiveGrouping):
        schedule.judge(Arrival(0, 0, 1, peers))
    return schedule


def method_of(schedule: Centre | ProgressiveGrouping) -> Method:
    """A central state under this schedule."""
    from ragtag.training.centre import Centre as central  # needs torch, which other methods do without

    return central(cast(Centre, schedule))
