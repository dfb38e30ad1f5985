"""What a simulated run came to, round by round and as a whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ragtag.app.experiment.setup import ExperimentSetup
from ragtag.core.faultspec import format_faults
from ragtag.core.types import Outcome, PeerId


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """One round over the peers that did it.

    peers: how many did.
    arrived: see ``core.arrival``.
    contributors: mean number of peers in a chunk.
    total_s: median time.
    slowest_s: the longest.
    disagreement: variance of a value over the peers, mean over values, in units of a step's variance.
    ended_s: when the last one was done.
    """

    round: int
    peers: int
    arrived: float
    contributors: float
    total_s: float
    slowest_s: float
    disagreement: float
    ended_s: float


class Staleness(NamedTuple):
    """Of updates of blocks of a central state, in versions."""

    mean: float
    p95: float
    most: int


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """What a simulated run came to. Times in ``rounds`` are virtual; ``wall_s`` is real.

    disagreement: mean over the second half of the rounds.
    round_s: median, 95th percentile and longest over peers and rounds.
    digest: equal for two runs of one setup.
    healed_round: with ``check``, the round in which all live peers heard all others after the network was
        healed; in groups, by which the values of all had come to all.
    alone: in groups, the share of peers' rounds in which they met nobody.
    staleness: at a central state, of updates (``None``: there were none).
    turns: at a central state, of each peer, by number (``None``: it is no central state).
    groups: at a central state, the last that an owner has told of.
    """

    setup: ExperimentSetup
    rounds: tuple[RoundFigures, ...]
    live: tuple[PeerId, ...]
    arrived: float
    disagreement: float
    round_s: tuple[float, float, float]
    bytes_sent: int
    datagrams_lost: int
    virtual_s: float
    wall_s: float
    events: int
    digest: str
    healed_round: int | None = None
    run_folder: Path | None = None
    staleness: Staleness | None = None
    turns: tuple[int, ...] | None = None
    groups: tuple[tuple[PeerId, ...], ...] = ()
    alone: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        plain = {
            k: v
            for k, v in asdict(replace(self, setup=ExperimentSetup(), run_folder=None)).items()
            if k != "setup"
        }
        settings = {name: getattr(self.setup, name) for name in ExperimentSetup.__dataclass_fields__}
        settings["faults"] = format_faults(self.setup.faults)
        median_s, p95_s, longest_s = self.round_s
        plain["round_s"] = {"median": median_s, "p95": p95_s, "longest": longest_s}
        plain["staleness"] = None if self.staleness is None else self.staleness._asdict()
        plain["run_folder"] = None if self.run_folder is None else str(self.run_folder)
        return {"setup": settings, **plain}


class OpenRound:
    """A round that some peers have done and others may still do."""

    def __init__(self, values: int) -> None:
        self.sum, self.squares = np.zeros(values), 0.0
        self.arrived: list[float] = []
        self.contributors: list[float] = []
        self.total_s: list[float] = []
        self.ended_s = 0.0

    def add(self, now_s: float, outcome: Outcome, arrived: float, contributors: float) -> None:
        """One more peer has done the round."""
        flat = outcome.mean.reshape(-1)[: len(self.sum)].astype(np.float64)
        self.sum += flat
        self.squares += float(flat @ flat)
        self.arrived.append(arrived)
        self.contributors.append(contributors)
        self.total_s.append(outcome.total_s)
        self.ended_s = now_s

    def figures(self, number: int) -> RoundFigures:
        """The round's figures over the peers that have done it by now."""
        n = len(self.total_s)
        spread = (self.squares - float(self.sum @ self.sum) / n) / max(1, n - 1)
        return RoundFigures(
            round=number,
            peers=n,
            arrived=float(np.mean(self.arrived)),
            contributors=float(np.mean(self.contributors)),
            total_s=float(np.median(self.total_s)),
            slowest_s=max(self.total_s),
            disagreement=max(0.0, spread / len(self.sum)),
            ended_s=self.ended_s,
        )
