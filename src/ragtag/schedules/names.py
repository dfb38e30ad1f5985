"""The schedules by name: ``schedule="dssp=2/8"``, and ``ragtag simulate --method softsync=2``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ragtag import schedules
from ragtag.core.names import Named
from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import BackupWorkers
from ragtag.schedules.base import Schedule
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound
from ragtag.schedules.centre import Centre
from ragtag.schedules.dropcompute import DropCompute
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.matched import Matched
from ragtag.schedules.partial import Partial
from ragtag.schedules.softsync import SoftSync

CENTRES: Mapping[str, Named[Centre | ProgressiveGrouping]] = {
    "backup": Named(partial(BackupWorkers, spare=1), "spare"),
    "softsync": Named(partial(SoftSync, n=1), "n"),
    "asynchronous": Named(Asynchronous, "discard_from"),
    "grouping": Named(ProgressiveGrouping, "groups_max"),
}
"""Those of a central state."""

SCHEDULES: Mapping[str, Named[Schedule | Centre | ProgressiveGrouping]] = {
    "partial": Named(Partial, "every"),
    "matched": Named(Matched, "steps"),
    "ssp": Named(BoundedStaleness, "bound", needed=True),
    "dssp": Named(DynamicBound, "low/high", needed=True),
    # Without its threshold it would be local steps, and drop nothing.
    "dropcompute": Named(DropCompute, "micro/threshold_s", needed=True),
    **CENTRES,
}
"""All that whole numbers and seconds make, or nothing."""


def called(schedule: type) -> str:
    """A class's own name, and what ``ragtag.schedules`` calls it: a script may have written either."""
    others = (name for name, it in vars(schedules).items() if it is schedule)
    return " or ".join(dict.fromkeys((schedule.__name__, *others)))
