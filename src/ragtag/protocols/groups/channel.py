"""Averaging in groups: a peer looks for its group, then reduce-scatter and all-gather inside it.

Moshpit All-Reduce (source: ``grid``) uses ``MoshpitKeys``, random groups use ``RandomKeys``. One ``Average``
is one round. Whatever fails, the round ends by measured deadlines, and the key moves on. ``host`` says what
hosts do. Inside a group ``rounds.reduce`` does the work, with members numbered from 0. So a death in
mid-round costs what the outcome says chunk by chunk (``heard``, ``averaged``), and at most one deadline.

A peer that is out of step with all others would stay so. Late for a group by most of a step, it is as late
for the next one; early, it has gone on when the others come. So a peer that has met no other for a while
gives its values to the next round at once, or waits in it, for as long as it computes between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ragtag.core.deadline import Deadline
from ragtag.core.seed import mix
from ragtag.core.types import (
    SEATS_MAX,
    Arm,
    Average,
    Done,
    Effect,
    Floats,
    Noted,
    Outcome,
    PeerId,
    Run,
    Send,
    Timer,
)
from ragtag.protocols.channel.averager import Averager, Opening
from ragtag.protocols.groups.grid import grid_of
from ragtag.protocols.groups.group import BLOCK_BITS, Group
from ragtag.protocols.groups.host import (
    ANNOUNCE,
    BEHIND,
    HOSTS,
    MET,
    TRIES,
    WAIT,
    Announcement,
    Host,
    Roster,
    decode_announce,
    decode_roster,
    decode_wait,
    encode_announce,
)
from ragtag.protocols.groups.keys import Keys, MoshpitKeys, Place, RandomKeys, View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine
from ragtag.protocols.rounds.asking import ANSWER, ANSWERS
from ragtag.protocols.rounds.base import NACK, SCATTER, blob_message

WAIT_MAX = 4.0
"""A host is believed that it waits at most so many times as long as this peer itself would. In the next round
twice as much is believed, and so on: the host may have learned that members come so far apart."""
BELIEF_MAX, BELIEF_DECAY = 64.0, 0.9
LONELY_MAX, LONELY_DECAY = 2.0, 0.9
"""After so many rounds alone a peer waits for others. Each round with a group takes a tenth off the count."""


@dataclass(slots=True)
class _Search:
    """Matchmaking under way.

    tries: announcements so far.
    host: the host that got the last one.
    answered: that host has answered, and will send the roster.
    reminded: it was asked again where the roster stays.
    waits: how often this peer has set a time for the roster.
    until_s: the roster is not waited for after this.
    """

    place: Place
    hosts: tuple[PeerId, ...]
    host: PeerId = -1
    tries: int = 0
    answered: bool = False
    reminded: bool = False
    waits: int = 0
    until_s: float = math.inf


class GroupNode(PartialMachine):
    """One peer that averages in groups.

    repair: what is lost inside a group is asked for again while its deadline allows.
    """

    def __init__(
        self, me: PeerId, view: View, seed: int, keys: Keys, channel: GroupChannel, *, repair: bool = False
    ) -> None:
        super().__init__(me, view, seed, channel)
        self.keys = keys
        self._answer = Deadline(channel.rtt_s)
        self._host = Host(me, channel.number, self._answer)
        self._restart()
        self._search: _Search | None = None
        self._sent_s: dict[tuple[int, int, PeerId], float] = {}
        """When this peer announced itself, by round, attempt and host, until that is answered."""
        self._alone = False
        self._lonely, self._ahead, self._ended_s = 0.0, False, math.inf
        self._belief = 1.0
        self._repair = repair
        self._spare: Floats | None = None
        self._group: Group | None = None
        self._last: Group | None = None  # answers requests for repair after its round
        self._budgets_s = (0.0, 0.0)
        self._met_s = self._late_s = math.inf
        """When the newest group met, and how much later its last message came, if that was after its
        round."""

    def _restart(self) -> None:
        probe_s = self.channel.probe_s
        self._scatter, self._gather = Deadline(probe_s), Deadline(probe_s)
        self._pauses = Deadline(probe_s, quantile=0.5)
        # Members come as far apart as they compute. A probe has room for that, a round trip has not. The
        # probe counts as a measurement: one or two small groups, which meet the sooner the fewer they are, do
        # not tell how far apart others come, and a peer that is not waited for is never measured.
        self._host.wait = Deadline(probe_s)
        self._host.wait.completed(probe_s)

    def deadline_s(self) -> float:
        """How long a round that begins now takes at most."""
        answer_s = self._answer.budget_s() * self._answer.backoff_max
        stages_s = max(self._scatter.budget_s(), answer_s) + max(self._gather.budget_s(), answer_s)
        return self._search_max_s(stages_s) + stages_s

    def _busy_s(self) -> float:
        return self._scatter.budget_s() + self._gather.budget_s()

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        old = self._last.machine.outcome if self._last is not None else None
        if self.channel.reuse and old is not None:
            self._spare = old.mean
        self._last, self._group = self._group, None
        # members hear of their group, and begin, up to a round trip apart
        self._scatter.floor_s = self._gather.floor_s = self._answer.budget_s()
        return self._look(now_s)

    def _skipped(self, number: int) -> None:
        self._search = self._group = None
        self.keys.moved(number, None)

    def wait_s(self) -> float:
        """How long this peer, as a host, waits for a group to fill."""
        return self._host.wait_s()

    def _search_max_s(self, stages_s: float) -> float:
        """How long a search may take. stages_s: how long others may average meanwhile."""
        answer_s = self._answer.budget_s() * self._answer.backoff_max
        wait_s = self._belief * WAIT_MAX * (self._host.wait.longest_s() + answer_s + stages_s)
        return HOSTS * TRIES * answer_s + wait_s + self._pauses.typical_s() + 2 * answer_s

    def _hold_s(self) -> float:
        """How much longer than usual the host should hold the group open, where this peer comes early.

        The others may still average. Where this peer has met no other for a while, they may compute for as
        long as it does itself.
        """
        if not self._alone:
            return 0.0
        pause_s = self._pauses.typical_s() if self._lonely >= LONELY_MAX else 0.0
        return max(self._busy_s(), pause_s)

    # -- Looking for a group: at hosts

    def _look(self, now_s: float) -> list[Effect]:
        """A round begins, or this peer has gone on to a later one: look for a group."""
        assert self.active is not None
        if now_s == self.started_s > self._ended_s:
            self._pauses.completed(now_s - self._ended_s)
        self._sent_s = {name: at_s for name, at_s in self._sent_s.items() if name[0] >= self.active - 1}
        place = self.keys.place(self.active, self.view)
        self._search = _Search(place, self.view.hosts(mix(place.key), HOSTS))
        return self._announce(now_s)

    def _announce(self, now_s: float) -> list[Effect]:
        """Announce this peer to its host; to the next host after ``TRIES``. Fail once all have been asked."""
        search = self._search
        assert search is not None and self.active is not None
        if search.tries >= TRIES * len(search.hosts):
            return self._fail(now_s, "no host")
        host = search.host = search.hosts[search.tries // TRIES]
        place = search.place
        ask = Announcement(place.key, place.index, place.most, self._hold_s())
        if host == self.me:
            search.answered = True
            effects, roster = self._host.announce(now_s, self.me, self.active, ask)
            if roster is not None:
                met = len(roster.peers) < 2 <= place.most
                return self._late(now_s) if met else effects + self._form(now_s, roster)
            until_s = now_s + self._host.alone_s() + ask.hold_s + self._answer.budget_s()
            return [*effects, self._await_roster(until_s)]  # a host with too many groups forgets some
        search.tries += 1
        self._sent_s[self.active, search.tries, host] = now_s
        ask = ask._replace(attempt=search.tries)
        until_s = now_s + self._answer.budget_s()
        return [self._announcement(host, ask, until_s), self._arm(f"answer/{search.tries}", until_s)]

    def _announcement(self, host: PeerId, ask: Announcement, until_s: float) -> Send:
        assert self.active is not None
        key = self.channel.key(self.active, ANNOUNCE, ask.attempt)
        return Send(blob_message(host, key, encode_announce(ask)), until_s)

    def _time(self, now_s: float, run: Run) -> None:
        """A host has answered an announcement, in time or late: take the round trip."""
        sent_s = self._sent_s.pop((run.key.round, run.key.block, run.peer), None)
        if sent_s is None:
            return
        took_s = now_s - sent_s
        if took_s <= self._answer.budget_s():
            self._answer.completed(took_s)
        else:
            self._answer.late(took_s)

    def _await_roster(self, until_s: float) -> Arm:
        """A timer for the roster, which should be here by ``until_s``."""
        search = self._search
        assert search is not None
        search.waits += 1
        return self._arm(f"roster/{search.waits}", until_s)

    def _wait_max_s(self) -> float:
        """The longest wait of a host that this peer believes."""
        return self._belief * WAIT_MAX * (self._host.alone_s() + self._busy_s())

    def _fail(self, now_s: float, why: str) -> list[Effect]:
        assert self.active is not None
        self._search = None
        self.keys.moved(self.active, None)
        return [Noted(why, self.me, f"round {self.active}"), *self.alone(now_s)]

    # -- Looking for a group: answers

    def _control(self, now_s: float, run: Run) -> list[Effect]:
        stage, number = run.key.stage, run.key.round
        if stage != ANNOUNCE:
            self._time(now_s, run)
        if stage == BEHIND:
            return self._catch_up(now_s)
        if stage != ANNOUNCE and not self._asked(run.peer, number):
            return []
        if stage == MET:
            return self._late(now_s)
        if len(run.payload) != 1 or (run.mask is not None and not run.mask[0]):
            return []  # lost on its way: only its end came
        blob = run.payload[0].tobytes()
        if stage == ANNOUNCE:
            return self._announced(now_s, run, blob)
        search = self._search
        assert search is not None
        if stage == WAIT:
            answer = decode_wait(blob)
            if answer is None or answer[0] != search.place.key or (search.answered and not search.reminded):
                return []
            if not search.answered:
                search.until_s = now_s + self._wait_max_s() + self._hold_s()
            # a host that is reminded and says this again holds the group open for another peer
            search.answered, search.reminded = True, False
            until_s = min(now_s + answer[1], search.until_s)
            return [self._await_roster(until_s + self._answer.budget_s())]
        roster = decode_roster(blob)
        if roster is None or roster.key != search.place.key or self.me not in roster.peers:
            return []
        return self._form(now_s, roster)

    def _asked(self, peer: PeerId, number: int) -> bool:
        """Whether this peer has announced itself to a host in this round: others have no say in it."""
        search = self._search
        if search is None or number != self.active:
            return False
        return peer in search.hosts[: -(-search.tries // TRIES)]

    def _announced(self, now_s: float, run: Run, blob: bytes) -> list[Effect]:
        number, ask = run.key.round, decode_announce(blob)
        if ask is None or run.peer not in self.view:
            return []
        ask = ask._replace(attempt=run.key.block)
        if number < self.done or (self.active is not None and number < self.active):
            newest = self.active if self.active is not None else self.done + 1
            behind = blob_message(run.peer, self.channel.key(newest, BEHIND), b"\0")
            return [Send(behind, now_s + self._answer.budget_s())]
        effects, roster = self._host.announce(now_s, run.peer, number, ask)
        if roster is not None and number == self.active:
            return effects + self._form(now_s, roster)
        return effects + self._catch_up(now_s)

    def _late(self, now_s: float) -> list[Effect]:
        """The group has met without this peer: the round fails, so that the peer is in time for the next one.

        A peer that is late by most of a step is late for the next one, too, where others' steps are as long
        as its own. After ``LONELY_MAX`` rounds alone it gives its values to the next round at once, and waits
        there.
        """
        if self._search is None or self._ask is None or self.active is None:
            return []
        self._alone = True
        if self._lonely < LONELY_MAX or self._ahead:
            return self._fail(now_s, "late")
        self._ahead = True
        return self._skip_to(now_s, self._ask, max(self.active + 1, self.highest))

    def _skip_to(self, now_s: float, ask: Average, number: int) -> list[Effect]:
        """Give up the round under way, and look for a group of a later one at once."""
        assert self.active is not None
        self.keys.moved(self.active, None)
        self.active = self.highest = number
        return [Noted("skipped", self.me, f"to round {number}"), *self._begin(now_s, ask)]

    def _catch_up(self, now_s: float) -> list[Effect]:
        """Others are in a later round: give up this one, and look for a group of that round at once."""
        if self._search is None or self._ask is None or self.active is None or self.highest <= self.active:
            return []
        if now_s - self.started_s > HOSTS * TRIES * self._answer.budget_s():
            return self._fail(now_s, "too far behind")
        return self._skip_to(now_s, self._ask, self.highest)

    def _form(self, now_s: float, roster: Roster) -> list[Effect]:
        """The roster is here: average in the group."""
        assert self.active is not None
        if self._search is None:
            return []
        self._search = None
        self._alone = len(roster.peers) < 2
        if self._alone:
            self.keys.moved(self.active, None)
            return self.alone(now_s, expired=True)
        self._host.wait.completed(roster.spread_s)
        self._belief = max(1.0, BELIEF_DECAY * self._belief)
        return self._average_in(now_s, roster)

    def _finish(self, now_s: float, outcome: Outcome) -> list[Effect]:
        self._ahead, self._ended_s = False, now_s
        if len(outcome.members) > 1:
            self._lonely *= LONELY_DECAY
        else:  # at LONELY_MAX it has waited for as long as others may compute: count anew
            self._lonely = self._lonely + 1 if self._lonely < LONELY_MAX else 0.0
        return super()._finish(now_s, outcome)

    # -- Looking for a group: timers

    def _searching(self, now_s: float, timer: Timer) -> list[Effect] | None:
        """A timer of matchmaking has run out; ``None``: it is another timer."""
        kind, search = timer.name.partition("/")[0], self._search
        if kind == "host":
            effects, roster = self._host.expire(now_s, timer)
            return effects + (self._form(now_s, roster) if roster and timer.round == self.active else [])
        if kind not in ("answer", "roster"):
            return None
        if timer.round != self.active or search is None:
            return []
        if kind == "roster":
            return self._remind(now_s) if int(timer.name[7:]) == search.waits else []
        if search.answered or int(timer.name[7:]) != search.tries:
            return []
        self._answer.missed()
        return self._announce(now_s)

    def _remind(self, now_s: float) -> list[Effect]:
        """The roster should be here: ask its host once more, in case it was lost or is still to come."""
        search = self._search
        assert search is not None and self.active is not None
        if search.reminded or search.host == self.me or now_s >= search.until_s:
            if not search.reminded and search.host != self.me:
                self._belief = min(BELIEF_MAX, 2 * self._belief)
            return self._fail(now_s, "no roster")
        place, answer_s = search.place, self._answer.budget_s()
        search.reminded = True
        ask = Announcement(place.key, place.index, place.most)
        return [
            self._announcement(search.host, ask, now_s + answer_s),
            self._await_roster(now_s + answer_s),
        ]

    # -- In the group

    def _average_in(self, now_s: float, roster: Roster) -> list[Effect]:
        assert self.active is not None and self._ask is not None
        repair_s = self._answer.typical_s() if self._repair else None
        scratch, self._spare = self._spare, None
        if self._late_s < math.inf:
            self._scatter.late(self._late_s)
        self._met_s, self._late_s = now_s, math.inf
        group = self._group = Group(self.me, self.active, roster, self.channel, repair_s, scratch)
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
        """A round's time teaches how long the next may take. A silent member lengthens no deadline."""
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
    """An averager in groups. keys: makes a peer's ``Keys`` from its number and the crew's seed."""

    def open_(opening: Opening) -> GroupNode:
        channel, crew = opening.channel, opening.crew
        if channel.fragments > 1:
            raise ValueError(f"{name} averages in groups, by rounds of their own: no fragments")
        mine = GroupChannel(
            opening.number,
            channel.codec,
            channel.n_chunks,
            channel.probe_s,
            channel.rtt_s,
            channel.reuse,
        )
        own = keys(crew.me, crew.seed)
        return GroupNode(crew.me, View(opening.peers), crew.seed, own, mine, repair=repair)

    return Averager(name, open_, "in groups", seats_max=SEATS_MAX, written=written)


def Moshpit(group: int = 8, repair: bool = True) -> Averager:
    """Average in groups that change each round, on a grid that follows the live peers (NeurIPS 2021).

    For crews of up to 1,024 peers. Averagers that let all average at once take 64.

    group: peers in a group at most, 2 to 64, and fewer than twice as many where the grid is too thin: then
        groups are random. A crew of M^d peers in groups of M has one mean after d rounds.
    repair: ask again for what is missing in a group while its deadline allows.

    Raises:
        ValueError: ``group`` is not between 2 and 64.
    """
    grid_of(1, group)
    written = _written("Moshpit", group, repair)
    return in_groups(f"moshpit/{group}", lambda me, seed: MoshpitKeys(me, seed, group), repair, written)


def RandomGroups(group: int = 8, repair: bool = True) -> Averager:
    """Average in groups of about ``group`` peers, 2 to 64, drawn anew each round; for up to 1,024 peers.

    Raises:
        ValueError: ``group`` is not between 2 and 64.
    """
    grid_of(1, group)
    written = _written("RandomGroups", group, repair)
    return in_groups(f"random-groups/{group}", lambda me, seed: RandomKeys(me, seed, group), repair, written)


def _written(name: str, group: int, repair: bool) -> str:
    return f"{name}(group={group}{'' if repair else ', repair=False'})"
