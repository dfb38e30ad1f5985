"""A peer's part in matchmaking: announcing itself at hosts, waiting for a roster, being late.

What hosts do stands in ``match``. A peer that is out of step with all others would stay so: late for a group
by most of a step, it is as late for the next one, and where it is early it has gone on when others come. So
who has met nobody for a while gives what it has to the next round at once, or waits in it, for as long as it
computes itself between two.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from ragtag.core.deadline import Deadline
from ragtag.core.seed import mix
from ragtag.core.types import Arm, Average, Effect, MessageKey, Noted, Outcome, PeerId, Run, Send, Timer
from ragtag.protocols.groups import host as match
from ragtag.protocols.groups.host import ANNOUNCE, BEHIND, MET, WAIT, Host, Roster
from ragtag.protocols.groups.keys import Keys, Place, View
from ragtag.protocols.groups.machine import Crowd, Lane
from ragtag.protocols.rounds.base import told

WAIT_MAX = 4.0
"""A host that says it waits so many times longer than this peer itself would is not believed. In the next
round twice as long is, and so on: it may have learned that others come so far apart."""
BELIEF_MAX, BELIEF_DECAY = 64.0, 0.9
LONELY_MAX, LONELY_DECAY = 2.0, 0.9
"""After so many rounds in which it met nobody a peer waits for others; each with a group forgets a tenth."""


@dataclass(slots=True)
class _Search:
    """Matchmaking under way.

    tries: announcements so far; host: whom the last one went to. answered: it will send the roster, or say
    again how long the group is held open; so often (waits) was that waited for. until_s: by then, or never.
    """

    place: Place
    hosts: tuple[PeerId, ...]
    host: PeerId = -1
    tries: int = 0
    answered: bool = False
    reminded: bool = False
    waits: int = 0
    until_s: float = math.inf


class Searcher(Crowd):
    """One peer that looks for a group in each round; what a group does is added to it."""

    def __init__(self, me: PeerId, view: View, seed: int, keys: Keys, lane: Lane) -> None:
        super().__init__(me, view, seed, lane)
        self.keys = keys
        self._answer = Deadline(lane.rtt_s)
        # Peers come as far apart as they compute: a probe has room for that, a round trip has not. It counts
        # as a measurement: one or two groups of a few, who meet the sooner the fewer they are, do not tell
        # how far others are apart, and who is not waited for is never measured.
        self._wait = Deadline(lane.probe_s)
        self._wait.completed(lane.probe_s)
        self._host = Host(me, lane.channel, self._wait, self._answer)
        self._search: _Search | None = None
        self._sent_s: dict[tuple[int, int], float] = {}
        """When this peer announced itself, by round and attempt; until it is answered."""
        self._alone = False
        self._lonely, self._ahead, self._ended_s = 0.0, False, math.inf
        self._pauses = Deadline(lane.probe_s, quantile=0.5)
        self._belief = 1.0

    @abstractmethod
    def _busy_s(self) -> float:
        """For how long others may be averaging in a group that has met without this peer."""

    @abstractmethod
    def _average_in(self, now_s: float, roster: Roster) -> list[Effect]:
        """A group of two or more has met: average in it."""

    def wait_s(self) -> float:
        """How long this peer, as a host, waits for a group to fill."""
        return self._host.wait_s()

    def _search_max_s(self, stages_s: float) -> float:
        """How long a search may take at most. stages_s: how long others may be averaging meanwhile."""
        answer_s = self._answer.budget_s() * self._answer.backoff_max
        wait_s = self._belief * WAIT_MAX * (self._wait.typical_s() + answer_s + stages_s)
        return match.HOSTS * match.TRIES * answer_s + wait_s + self._pauses.typical_s() + 2 * answer_s

    def _hold_s(self) -> float:
        """How much longer than usual a group should be held open for others: this peer comes early.

        They may still average, or, where it has met nobody for a while, compute as long as it does itself.
        """
        if not self._alone:
            return 0.0
        pause_s = self._pauses.typical_s() if self._lonely >= LONELY_MAX else 0.0
        return max(self._busy_s(), pause_s)

    # -- At hosts

    def _look(self, now_s: float) -> list[Effect]:
        """A round begins, or this peer has gone on to a later one: look for a group."""
        assert self.active is not None
        if now_s == self.started_s > self._ended_s:
            self._pauses.completed(now_s - self._ended_s)
        self._sent_s = {name: at_s for name, at_s in self._sent_s.items() if name[0] >= self.active - 1}
        place = self.keys.place(self.active, self.view)
        self._search = _Search(place, self.view.hosts(mix(place.key), match.HOSTS))
        return self._announce(now_s)

    def _announce(self, now_s: float) -> list[Effect]:
        """Ask a host; the next one after so many tries; nobody, when all have been asked."""
        search = self._search
        assert search is not None and self.active is not None
        if search.tries >= match.TRIES * len(search.hosts):
            return self._fail(now_s, "no host")
        host = search.host = search.hosts[search.tries // match.TRIES]
        place = search.place
        ask = match.Ask(place.key, place.index, place.most, self._hold_s())
        if host == self.me:
            search.answered = True
            effects, roster = self._host.announce(now_s, self.me, self.active, ask)
            if roster is not None:
                met = len(roster.peers) < 2 <= place.most
                return self._late(now_s) if met else effects + self._form(now_s, roster)
            until_s = now_s + self._host.wait_s() + ask.hold_s + self._answer.budget_s()
            return [*effects, self._await_roster(until_s)]  # in case it is forgotten among too many
        search.tries += 1
        self._sent_s[self.active, search.tries] = now_s
        ask = ask._replace(attempt=search.tries)
        until_s = now_s + self._answer.budget_s()
        return [self._announcement(host, ask, until_s), self._arm(f"answer/{search.tries}", until_s)]

    def _announcement(self, host: PeerId, ask: match.Ask, until_s: float) -> Send:
        assert self.active is not None
        key = self.lane.key(self.active, ANNOUNCE, ask.attempt)
        return Send(told(host, key, match.encode_announce(ask)), until_s)

    def _time(self, now_s: float, key: MessageKey) -> None:
        """A host has answered an announcement, in time or not: that is a round trip."""
        sent_s = self._sent_s.pop((key.round, key.block), None)
        if sent_s is None:
            return
        took_s = now_s - sent_s
        if took_s <= self._answer.budget_s():
            self._answer.completed(took_s)
        else:
            self._answer.late(took_s)

    def _await_roster(self, until_s: float) -> Arm:
        """The roster should be here by then."""
        search = self._search
        assert search is not None
        search.waits += 1
        return self._arm(f"roster/{search.waits}", until_s)

    def _wait_max_s(self) -> float:
        """For how long a host is believed that it waits."""
        return self._belief * WAIT_MAX * (self._host.wait_s() + self._busy_s())

    def _fail(self, now_s: float, why: str) -> list[Effect]:
        assert self.active is not None
        self._search = None
        self.keys.moved(self.active, None)
        return [Noted(why, self.me, f"round {self.active}"), *self.alone(now_s)]

    # -- Answers

    def _control(self, now_s: float, run: Run) -> list[Effect]:
        stage, number = run.key.stage, run.key.round
        if stage != ANNOUNCE:
            self._time(now_s, run.key)
        if stage == MET:
            return self._late(now_s) if number == self.active else []
        if stage == BEHIND:
            return self._catch_up(now_s)
        if len(run.payload) != 1 or (run.mask is not None and not run.mask[0]):
            return []  # lost on its way: only its end came
        blob = run.payload[0].tobytes()
        if stage == ANNOUNCE:
            return self._announced(now_s, run, blob)
        search = self._search
        if search is None or number != self.active:
            return []
        if stage == WAIT:
            answer = match.decode_wait(blob)
            if answer is None or answer[0] != search.place.key or (search.answered and not search.reminded):
                return []
            if not search.answered:
                search.until_s = now_s + self._wait_max_s() + self._hold_s()
            # who is reminded and says this again holds the group open for another one
            search.answered, search.reminded = True, False
            until_s = min(now_s + answer[1], search.until_s)
            return [self._await_roster(until_s + self._answer.budget_s())]
        roster = match.decode_roster(blob)
        if roster is None or roster.key != search.place.key or self.me not in roster.peers:
            return []
        return self._form(now_s, roster)

    def _announced(self, now_s: float, run: Run, blob: bytes) -> list[Effect]:
        number, ask = run.key.round, match.decode_announce(blob)
        if ask is None or run.peer not in self.view:
            return []
        ask = ask._replace(attempt=run.key.block)
        if number < self.done or (self.active is not None and number < self.active):
            newest = self.active if self.active is not None else self.done + 1
            behind = told(run.peer, self.lane.key(newest, BEHIND), b"\0")
            return [Send(behind, now_s + self._answer.budget_s())]
        effects, roster = self._host.announce(now_s, run.peer, number, ask)
        if roster is not None and number == self.active:
            return effects + self._form(now_s, roster)
        return effects + self._catch_up(now_s)

    def _late(self, now_s: float) -> list[Effect]:
        """The group has met without this peer: better in time for the next round than waiting for nobody.

        Who is late by most of a step is late for that, too, where others' steps are no longer than its own.
        After ``LONELY_MAX`` rounds it gives what it has to the next one at once, and waits there for them.
        """
        if self._search is None or self._ask is None or self.active is None:
            return []
        self._alone = True
        if self._lonely < LONELY_MAX or self._ahead:
            return self._fail(now_s, "late")
        self._ahead = True
        return self._skip_to(now_s, self._ask, max(self.active + 1, self.highest))

    def _skip_to(self, now_s: float, ask: Average, number: int) -> list[Effect]:
        """Give the round under way up, and look for a group of a later one at once."""
        assert self.active is not None
        self.keys.moved(self.active, None)
        self.active = self.highest = number
        return [Noted("skipped", self.me, f"to round {number}"), *self._begin(now_s, ask)]

    def _catch_up(self, now_s: float) -> list[Effect]:
        """Others are in a later round: give this one up, and look for a group of that one at once."""
        if self._search is None or self._ask is None or self.active is None or self.highest <= self.active:
            return []
        if now_s - self.started_s > match.HOSTS * match.TRIES * self._answer.budget_s():
            return self._fail(now_s, "too far behind")
        return self._skip_to(now_s, self._ask, self.highest)

    def _form(self, now_s: float, roster: Roster) -> list[Effect]:
        """The group is known."""
        assert self.active is not None
        if self._search is None:
            return []
        self._search = None
        self._alone = len(roster.peers) < 2
        if self._alone:
            self.keys.moved(self.active, None)
            return self.alone(now_s, expired=True)
        self._wait.completed(roster.spread_s)
        self._belief = max(1.0, BELIEF_DECAY * self._belief)
        return self._average_in(now_s, roster)

    def _finish(self, now_s: float, outcome: Outcome) -> list[Effect]:
        self._ahead, self._ended_s = False, now_s
        if len(outcome.members) > 1:
            self._lonely *= LONELY_DECAY
        else:  # also where it has waited for as long as others may compute
            self._lonely = self._lonely + 1 if self._lonely < LONELY_MAX else 0.0
        return super()._finish(now_s, outcome)

    # -- Timers

    def _searching(self, now_s: float, timer: Timer) -> list[Effect] | None:
        """A timer of matchmaking; ``None``: it is another one."""
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
        """The roster should be here: ask its host once more; it may have been lost, or be still to come."""
        search = self._search
        assert search is not None and self.active is not None
        if search.reminded or search.host == self.me or now_s >= search.until_s:
            if not search.reminded and search.host != self.me:
                self._belief = min(BELIEF_MAX, 2 * self._belief)
            return self._fail(now_s, "no roster")
        place, answer_s = search.place, self._answer.budget_s()
        search.reminded = True
        ask = match.Ask(place.key, place.index, place.most)
        return [
            self._announcement(search.host, ask, now_s + answer_s),
            self._await_roster(now_s + answer_s),
        ]
