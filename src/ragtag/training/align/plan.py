"""What is asked of an alignment, what it comes to, and which peer is to give what: see ``align``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ragtag.core.types import Outcome, PeerId
from ragtag.schedules.base import whole
from ragtag.training.align.rows import View

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it fall everywhere between 0 and 1."""
_ROWS_FIRST = 256  # so many are given at once, to begin with


@dataclass(frozen=True, slots=True)
class Align:
    """How often replicas are compared: ``crew.optimizer(..., average="gradients", align=ragtag.Align())``.

    every: rounds from one look to the next.
    share: how much making replicas alike may take while they differ, of the bytes of dense rounds.
    Raises ValueError for what cannot be.
    """

    every: int = 32
    share: float = 0.02

    def __post_init__(self) -> None:
        whole("align: every", self.every, 1, "rounds")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(
                f"align: share is {self.share!r}; it is a share of the bytes, above 0, at most 1"
            )

    @property
    def name(self) -> str:
        """What peers must agree on."""
        return f"aligned every {self.every} within {self.share:g}"


@dataclass(frozen=True, slots=True)
class Aligned:
    """What one comparison came to, as this peer sees it.

    round: the round after which it took place.
    units: how many units were looked at.
    apart: units of which not all peers had the same version.
    own: units of which this peer had a version that does not count.
    peers: peers whose digests came.
    given: units that this peer gave.
    taken: units that this peer took and had in another version.
    distance: norm of the change to the parameters taken, over their norm before (0: none was taken).
    expired: a deadline ended the round.
    """

    round: int
    units: int
    apart: int
    own: int
    peers: int
    given: int
    taken: int
    distance: float
    expired: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """A unit that peers have in several ways.

    giver: the peer that is to give it.
    votes: how many peers have the version that counts.
    """

    giver: PeerId
    votes: int


def judge(view: View, first: int, number: int) -> tuple[dict[int, Wanted], dict[int, int]]:
    """Units that differ, from ``first`` on: for each the peer that is to give it, and the digest that counts.

    A function of its arguments alone, so peers with the same view agree.
    view: only voters count; where there are none, all do.
    number: of the comparison.
    """
    peers = sorted(view.voters or view.digests)
    all_of = np.stack(list(view.digests.values())) if peers else np.zeros((0, 0), np.uint32)
    table = np.stack([view.digests[peer] for peer in peers]) if peers else all_of
    wanted: dict[int, Wanted] = {}
    counts: dict[int, int] = {}
    for at in np.flatnonzero((all_of != all_of[:1]).any(0)).tolist():
        votes = Counter(table[:, at].tolist())
        most = max(votes.values())
        turn = (at + first + number) % len(peers)
        order = [*range(turn, len(peers)), *range(turn)]
        giver = next(place for place in order if votes[int(table[place, at])] == most)
        wanted[first + at] = Wanted(peers[giver], most)
        counts[first + at] = int(table[giver, at])
    return wanted, counts


@dataclass(slots=True)
class Pace:
    """How many rows are given at once: twice as many where all came in time, half as many where not."""

    most: int
    now: int = field(init=False)

    def __post_init__(self) -> None:
        self.now = min(self.most, _ROWS_FIRST)

    def learn(self, given: int, outcome: Outcome) -> None:
        """``given``: rows by all peers."""
        if outcome.expired:
            self.now = max(1, self.now // 2)
        elif 2 * given >= self.now and outcome.averaged.all():
            self.now = min(self.most, 2 * self.now)
