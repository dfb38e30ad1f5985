"""Averaging in groups: matchmaking, then reduce-scatter and all-gather inside the group.

Moshpit All-Reduce (source: ``grid``) with ``MoshpitKeys``, random groups with ``RandomKeys``. One ``Average``
is one round. Whatever fails, it ends by deadlines that are measured, and the key moves on. Inside a group
``rounds.reduce`` does the work, its members numbered from 0; so a death in mid-round costs what the
outcome says chunk by chunk (``heard``, ``averaged``), and nothing waits for the dead but one deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ragtag.core.deadline import Deadline
from ragtag.core.types import (
    SEATS_MAX,
    Average,
    Done,
    Effect,
    Floats,
    Outcome,
    PeerId,
    Run,
    Timer,
)
from ragtag.protocols.channel.averager import Averager, Opening
from ragtag.protocols.groups.grid import grid_of
from ragtag.protocols.groups.group import BLOCK_BITS, Group
from ragtag.protocols.groups.host import ANNOUNCE, MET, Roster
from ragtag.protocols.groups.keys import Keys, MoshpitKeys, RandomKeys, View
from ragtag.protocols.groups.machine import Lane
from ragtag.protocols.groups.search import Searcher
from ragtag.protocols.rounds.base import NACK, SCATTER
from ragtag.protocols.rounds.hail import ANSWER, ANSWERS


class GroupNode(Searcher):
    """One peer that averages in groups, whoever else there is.

    repair: what is lost inside a group is asked for again while its deadline allows.
    """

    def __init__(
        self, me: PeerId, view: View, seed: int, keys: Keys, lane: Lane, *, repair: bool = False
    ) -> None:
        super().__init__(me, view, seed, keys, lane)
        self._repair = repair
        self._restart()
        self._spare: Floats | None = None
        self._group: Group | None = None
        self._last: Group | None = None  # answers requests for repair after its round
        self._budgets_s = (0.0, 0.0)
        self._met_s = self._late_s = math.inf
        """When the newest group met, and how much later its last message came, if after its round."""

    def _restart(self) -> None:
        self._scatter, self._gather = Deadline(self.lane.probe_s), Deadline(self.lane.probe_s)

    def deadline_s(self) -> float:
        """By when a round that begins now ends at the latest, counted from its beginning."""
        answer_s = self._answer.budget_s() * self._answer.backoff_max
        stages_s = max(self._scatter.budget_s(), answer_s) + max(self._gather.budget_s(), answer_s)
        return self._search_max_s(stages_s) + stages_s

    def _busy_s(self) -> float:
        return self._scatter.budget_s() + self._gather.budget_s()

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        old = self._last.machine.outcome if self._last is not None else None
        if self.lane.reuse and old is not None:
            self._spare = old.mean
        self._last, self._group = self._group, None
        # members hear of their group, and so begin, up to a round trip apart
        self._scatter.floor_s = self._gather.floor_s = self._answer.budget_s()
        return self._look(now_s)

    def _skipped(self, number: int) -> None:
        self._search = self._group = None
        self.keys.moved(number, None)

    # -- The group

    def _average_in(self, now_s: float, roster: Roster) -> list[Effect]:
        assert self.active is not None and self._ask is not None
        repair_s = self._answer.typical_s() if self._repair else None
        scratch, self._spare = self._spare, None
        if self._late_s < math.inf:
            self._scatter.late(self._late_s)
        self._met_s, self._late_s = now_s, math.inf
        group = self._group = Group(self.me, self.active, roster, self.lane, repair_s, scratch)
        self._budgets_s = self._scatter.budget_s(), self._gather.budget_s()
        answer_s = ANSWER * self._answer.budget_s()
        effects = self._settle(now_s, group.begin(now_s, self._ask, *self._budgets_s, answer_s))
        return effects + self._again(now_s)

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        key = run.key
        if ANNOUNCE <= key.stage <= MET:
            return self._control(now_s, run)
        if key.stage & ~NACK > SCATTER + 1 and key.stage not in ANSWERS:
            return []
        tag, group = key.block >> BLOCK_BITS, self._group
        if group is not None and key.round == group.machine.spec.round:
            if key.round == self.done and tag == group.tag:
                self._late_s = now_s - self._met_s
            return self._settle(now_s, group.take(now_s, run)) if tag == group.tag else []
        last = self._last
        if last is not None and key.round == last.machine.spec.round and tag == last.tag:
            return last.take(now_s, run)
        if key.round > self.done:
            self._keep(run)
        return []

    def _settle(self, now_s: float, effects: list[Effect]) -> list[Effect]:
        """Look for the end of the round among a group's effects."""
        for i, effect in enumerate(effects):
            if isinstance(effect, Done):
                outcome = replace(effect.outcome, started_s=self.started_s, total_s=now_s - self.started_s)
                self._learn(effect.outcome)
                group = self._group
                assert group is not None
                place = group.roster.peers.index(self.me)
                self.keys.moved(outcome.round, group.roster.indices[place])
                return effects[:i] + self._finish(now_s, outcome) + effects[i + 1 :]
        return effects

    def _learn(self, outcome: Outcome) -> None:
        """How long a round took teaches how long the next may take; silence alone lengthens nothing."""
        assert self._group is not None
        if outcome.expired:
            if self._group.owed_something(outcome.missed):
                self._scatter.missed()
                self._gather.missed()
            return
        scatter_s, gather_s = self._budgets_s
        if outcome.scatter_s > 0:
            self._scatter.completed(min(outcome.scatter_s, scatter_s))
        if outcome.gather_s > 0:
            self._gather.completed(min(outcome.gather_s, scatter_s + gather_s))

    def _left(self, now_s: float, peer: PeerId) -> list[Effect]:
        if self._group is None or self.active is None:
            return []
        return self._settle(now_s, self._group.passed(now_s, peer))

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        effects = self._searching(now_s, timer)
        if effects is not None:
            return effects
        if timer.round != self.active or self._group is None:
            return []
        return self._settle(now_s, self._group.expire(now_s, timer))


def in_groups(name: str, keys: Callable[[PeerId, int], Keys], repair: bool, written: str) -> Averager:
    """An averager in groups; ``keys(me, seed)`` says how a peer chooses its own."""

    def open_(opening: Opening) -> GroupNode:
        channel, crew = opening.channel, opening.crew
        if channel.fragments > 1:
            raise ValueError(f"{name} averages in groups, by rounds of their own: no fragments")
        lane = Lane(
            opening.number,
            channel.codec,
            channel.n_chunks,
            channel.probe_s,
            channel.rtt_s,
            channel.reuse,
        )
        own = keys(crew.me, crew.seed)
        return GroupNode(crew.me, View(opening.peers), crew.seed, own, lane, repair=repair)

    return Averager(name, open_, "in groups", seats_max=SEATS_MAX, written=written)


def Moshpit(group: int = 8, repair: bool = True) -> Averager:
    """Average in groups that change each round, on a grid that follows who is there (NeurIPS 2021).

    For crews of up to 1,024 peers; the averagers that meet all at once take 64.
    group: peers in a group at most, 2 to 64; a crew of M^d peers in groups of M is as one after d rounds.
    repair: ask again for what is missing in a group while its deadline allows.
    Raises ValueError for groups not of 2 to 64.
    """
    grid_of(1, group)
    written = _written("Moshpit", group, repair)
    return in_groups(f"moshpit/{group}", lambda me, seed: MoshpitKeys(me, seed, group), repair, written)


def RandomGroups(group: int = 8, repair: bool = True) -> Averager:
    """Average in groups of about ``group`` peers, 2 to 64, drawn anew each round; of up to 1,024 peers.

    Raises ValueError for groups not of 2 to 64.
    """
    grid_of(1, group)
    written = _written("RandomGroups", group, repair)
    return in_groups(f"random-groups/{group}", lambda me, seed: RandomKeys(me, seed, group), repair, written)


def _written(name: str, group: int, repair: bool) -> str:
    return f"{name}(group={group}{'' if repair else ', repair=False'})"
