"""What the demo came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragtag.app.demo.plan import DemoError
from ragtag.app.tracefile import read_run
from ragtag.core import trace


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, over ``n`` times."""

    n: int
    median_s: float
    p95_s: float
    longest_s: float

    @classmethod
    def of(cls, took_s: Sequence[float]) -> Times:
        """Figures of these durations."""
        times = np.array(took_s)
        return cls(len(took_s), float(np.median(times)), float(np.quantile(times, 0.95)), float(times.max()))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """How long rounds took: whole, from the end of one average to the end of the next (local steps and
    averaging), and averaging alone.

    A stopped process takes no rounds, so the one in which a peer itself was stopped is left out of its own.
    """

    whole: Times
    averaging: Times
    arrived: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo came to; accuracies in 0 to 1, on the test samples.

    survivors, calm: mean over the peers' own models; survivors_mean, calm_mean: of the mean of their models.
    """

    survivors: float
    survivors_lowest: float
    survivors_mean: float
    calm: float
    calm_mean: float
    alone: float
    all_data: float
    samples: dict[str, int]
    round_times: RoundTimes
    calm_round_times: RoundTimes
    training_s: dict[str, float]
    report: Path
    folder: Path
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all that was promised holds."""
        return all(self.checks.values())

    def to_json(self) -> dict[str, Any]:
        """As one JSON document."""
        return {**asdict(self), "report": str(self.report), "folder": str(self.folder), "ok": self.ok}


def round_times(folder: Path, peers: Sequence[int]) -> RoundTimes:
    """Round times over the given peers' traces, and the share of what others sent that was averaged."""
    ended: dict[int, float] = {}
    stopped: dict[int, list[tuple[float, float]]] = {}
    whole: list[float] = []
    averaging: list[float] = []
    arrived: list[float] = []
    for record in read_run(folder).records():
        if isinstance(record, trace.Fault) and record.name == "freeze":
            until = math.inf if record.until_t is None else record.until_t
            stopped.setdefault(record.peer, []).append((record.t, until))
        if (
            not isinstance(record, trace.Round)
            or record.peer not in peers
            or record.channel not in (0, "model")
        ):
            continue
        before, ended[record.peer] = ended.get(record.peer), record.t
        if any(
            from_t < record.t and (before or 0.0) < until for from_t, until in stopped.get(record.peer, [])
        ):
            continue
        averaging.append(record.total_s)
        arrived.append(record.arrived)
        if before is not None:
            whole.append(record.t - before)
    if not whole:
        raise DemoError(f"no rounds were traced in {folder}")
    return RoundTimes(Times.of(whole), Times.of(averaging), float(np.mean(arrived)))
