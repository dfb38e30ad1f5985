"""How long a round's two stages may take, learned from the rounds before (``core.deadline``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median_low

from ragtag.core.deadline import Deadline
from ragtag.core.types import Outcome, PeerId
from ragtag.protocols.channel.averager import Channel

HEADROOM = 1.5
"""A stage may take this many times as long as nine in ten recent ones took."""
LEAP = 2.0
"""One round teaches at most this many times what is typical. A patient averager's deadline is twelve times
that, and two rounds that took all of it would teach one of minutes."""


APART = 0.25
"""Or this share of what a peer computes between two rounds. Peers that compute for a second end tenths of it
apart, on lines of a tenth of a millisecond: twice what is typical comes to that after ten rounds only. A
deadline that was learned so holds nobody for longer than ``HEADROOM`` times this share."""
APART_WINDOW = 8
"""The shortest of so many recent times between rounds counts: one in which a model was saved does not."""
_BEGINS_KEPT = 32


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long one round may take.

    scatter_s, gather_s: its two stages, at most.
    left_s: by how much more the first may be exceeded where most have not come.
    cycle_s: see ``Begin``.
    """

    scatter_s: float
    gather_s: float
    left_s: float = math.inf
    cycle_s: float = math.inf


class Budgets:
    """The deadlines of a channel on one peer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.scatter = Deadline(channel.probe_s, headroom=HEADROOM)
        self.gather = Deadline(channel.probe_s, headroom=HEADROOM)
        self._now_s = (0.0, 0.0)
        self._begun_s: dict[int, float] = {}  # of the round under way, and of the one before
        self._begins: deque[tuple[int, float]] = deque(maxlen=_BEGINS_KEPT)
        self._late_s: dict[int, float] = {}
        self._ended_s: float | None = None
        self._computed_s: deque[float] = deque(maxlen=APART_WINDOW)

    def next_s(
        self, rtts_s: Iterable[float], trip_s: float = 0.0, line_s: float = 0.0
    ) -> tuple[float, float]:
        """How long the next round may scatter, and gather.

        Neither is shorter than a round trip as measured now: that would cut off what has been sent. Of the
        usual ones the middle one counts, as a single one may be of a busy peer. But to wait for a peer, and
        not for as long as its answer takes on an idle line, is to wait in vain: one that begins a round as it
        hears of it would never be in time again, once the others have learned to do without it.

        The same holds for what the lines carry. A peer that was alone has measured nothing, and a crew that
        grew has measured less: what others send then takes as long as what this peer sends itself.

        trip_s: the shortest round trip to the farthest of the peers that are waited for.
        line_s: how long this peer's own part of a stage takes, at the rates that its ways deliver.
        """
        ranked = sorted(rtts_s)
        usual_s = ranked[len(ranked) // 2] if ranked else 0.0
        floor_s = max(self._channel.floor_s, usual_s, HEADROOM * (trip_s + line_s))
        self.scatter.floor_s = self.gather.floor_s = floor_s
        patience = self._channel.averager.patience
        return self.scatter.budget_s(patience), self.gather.budget_s(patience)

    def begin(
        self,
        number: int,
        now_s: float,
        computed_s: float,
        deadline_s: float | None,
        rtts_s: Iterable[float],
        trip_s: float = 0.0,
        line_s: float = 0.0,
        owns: bool = True,
        overlap_s: float = 0.0,
    ) -> StageTimes:
        """A round begins: how long it may take.

        owns: others owe this peer shares. A client sees none come. It measures when averages come, from its
            round's beginning, and what it measures has the others' first stage in it.
        computed_s: for how long this peer has computed, if this is its first round: others may need as long
            again; else 0.
        deadline_s: bounds both stages together.
        overlap_s: for how long its trainer goes on meanwhile. It may scatter at no cost for as long, less
            what averages take to come back.

        With a quorum an average is *due* then: peers are on clocks of their own, so what this one learned
        tells nothing. Where fewer are there by then, waiting on makes no average and delays the next.
        """
        free_s = max(0.0, overlap_s - self.usual_gather_s)
        due = free_s > 0 and bool(self._channel.averager.quorum)
        if self._ended_s is not None:
            self._computed_s.append(max(0.0, now_s - self._ended_s))
        for late_s in self._late_s.values():
            self.scatter.late(min(late_s, self._most_s(self.scatter)), self._apart_s())
        self._late_s.clear()
        scatter_s, gather_s = self.next_s(rtts_s, trip_s, line_s)
        if free_s > 0:
            scatter_s = max(free_s, self.scatter.floor_s if due else scatter_s)
        if not owns:
            scatter_s = 0.0
        scatter_s += self._channel.averager.patience * computed_s
        if deadline_s is not None:
            scatter_s = min(scatter_s, deadline_s / 2)
            gather_s = min(gather_s, deadline_s - scatter_s)
        left_s = math.inf if deadline_s is None else max(0.0, deadline_s - scatter_s - gather_s)
        cycle_s = now_s - max(self._begun_s.values(), default=-math.inf)
        for old in list(self._begun_s)[:-1]:
            del self._begun_s[old]
        self._begun_s[number] = now_s
        self._begins.append((number, now_s))
        self._now_s = scatter_s, gather_s
        if due:
            return StageTimes(scatter_s, gather_s, left_s=0.0)
        return StageTimes(scatter_s, gather_s, left_s, cycle_s)

    def others_computed(self, computed_s: float) -> None:
        """At an auxiliary, whose first round begins: the first peer that gives has computed for so long.

        A peer that gives has measured an exchange by a probe. An auxiliary knows no more than a round trip,
        and would need some rounds to learn how far apart those come that compute.
        """
        self._computed_s.append(computed_s)

    def learn(self, outcome: Outcome, slow: Collection[PeerId], came_s: tuple[float, float]) -> None:
        """A round's time teaches how long the next may take.

        slow: missed peers whose messages would have come with more time.
        came_s: how long after its beginning each stage's last share came. A stage that waited on, until a
            peer was seen in a later round, measured how long that one waits, and not how long shares take.
        """
        begun_s = self._begun_s.get(outcome.round)
        self._ended_s = None if begun_s is None else begun_s + outcome.scatter_s + outcome.gather_s
        if not outcome.waited_for:
            return
        if outcome.expired:
            if any(peer in slow for peer in outcome.missed):  # a silent peer lengthens no deadline
                self.scatter.missed()
                self.gather.missed()
            return
        scatter_s, gather_s = self._now_s
        # a stage longer than its deadline that did not run into it: the process slept
        for stage, took_s, most_s in (
            (self.scatter, came_s[0], scatter_s),
            (self.gather, came_s[1], scatter_s + gather_s),
        ):
            if took_s > 0:  # else there was nothing to wait for
                most_s = min(most_s, self._most_s(stage), max(self._apart_s(), LEAP * stage.typical_s()))
                stage.completed(min(took_s, most_s))

    def recut(self) -> None:
        """Blocks are of other sizes from now on: what was learned may be a little too short once."""
        self.scatter.missed()
        self.gather.missed()

    def _most_s(self, stage: Deadline) -> float:
        """What a round teaches at most, so that deadlines do not grow by peers that wait for each other.

        Peers in one round begin it at most as far apart as the longest of them computes: one that is later
        still is nearer to the round after. Beyond that a share takes as long as the quickest lately did.
        """
        return LEAP * (max(self._computed_s, default=math.inf) + stage.quickest_s(APART_WINDOW))

    @property
    def computed_s(self) -> float:
        """How long this peer computes between two rounds: the middle one of the last; 0: not known."""
        return median_low(self._computed_s) if self._computed_s else 0.0

    @property
    def usual_gather_s(self) -> float:
        """How long the second stage takes where no owner waits for another peer.

        By the middle one of the last ones. Peers that find out that others are not there hold up those that
        wait for their averages. If these took that for usual, they would be as slow to find out in turn.
        """
        return self.gather.middle_s()

    @property
    def usual_scatter_s(self) -> float:
        """How long the first stage takes, by the middle one of the last, and a part of a step at most.

        A peer that hears nothing for longer is cut off, or earlier than it usually is. Were there no bound,
        peers that find out late that they are cut off would be late in the next round, and teach the others
        to find out as late.
        """
        return max(self.usual_gather_s, min(self.scatter.middle_s(), APART * self.computed_s))

    def _apart_s(self) -> float:
        return APART * min(self._computed_s, default=0.0)

    def age_s(self, number: int, now_s: float) -> float:
        """How long ago this peer began a round, or the first one after it; inf: longer than is kept."""
        if self._begins and number < self._begins[0][0]:
            return math.inf
        return next((now_s - begun_s for begun, begun_s in self._begins if begun >= number), math.inf)

    def late(self, now_s: float, number: int) -> None:
        """A message came after its round was done: remember the latest time at which one did."""
        if number in self._begun_s:
            self._late_s[number] = now_s - self._begun_s[number]
