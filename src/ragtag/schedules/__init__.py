"""When to average: ``crew.optimizer(..., schedule=ragtag.schedules.SSP(bound=4))``.

For a central state (``schedules.centre``; ``ragtag.Centre``): BackupWorkers, SoftSync, Asynchronous,
ProgressiveGrouping.
"""

from __future__ import annotations

from ragtag.schedules.asynchronous import Asynchronous
from ragtag.schedules.backup import BackupWorkers
from ragtag.schedules.base import Average, Compute, Decision, Progress, Schedule, Skip, Wait
from ragtag.schedules.bounded import BoundedStaleness, DynamicBound
from ragtag.schedules.dropcompute import DropCompute
from ragtag.schedules.every import EveryStep, LocalSteps
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.matched import Matched
from ragtag.schedules.partial import Partial
from ragtag.schedules.softsync import SoftSync

SSP, DSSP = BoundedStaleness, DynamicBound

__all__ = [
    "DSSP",
    "SSP",
    "Asynchronous",
    "Average",
    "BackupWorkers",
    "BoundedStaleness",
    "Compute",
    "Decision",
    "DropCompute",
    "DynamicBound",
    "EveryStep",
    "LocalSteps",
    "Matched",
    "Partial",
    "ProgressiveGrouping",
    "Skip",
    "Progress",
    "Schedule",
    "SoftSync",
    "Wait",
]
