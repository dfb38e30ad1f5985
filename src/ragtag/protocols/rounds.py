"""Rounds on a peer's lanes: begun, fed with what comes, ended; with peers that are ahead, behind, or new."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ragtag.core.types import (
    LARGER_CREWS,
    PEERS_MAX,
    Arrived,
    Average,
    Begin,
    Done,
    Effect,
    Expired,
    Left,
    Noted,
    Offer,
    PeerId,
    PeerSet,
    Run,
)
from ragtag.protocols.base import BLOCK_BITS, GATHER, Round, peers_in
from ragtag.protocols.gather import NO_VALUES, require_rows
from ragtag.protocols.hail import ANSWER, ANSWERS, QUESTIONS, here
from ragtag.protocols.lane import Lane
from ragtag.protocols.method import Setting
from ragtag.protocols.presence import Presence
from ragtag.protocols.stages import Stages

CATCH_UP = 8
"""A peer that skipped more rounds than this adds weight 0 to its first average (of each fragment): it takes,
and gives later."""
TARDY_MAX = 4
"""Rounds in a row that a peer may begin when they are over for others, before it takes itself for behind."""
ROUND_MAX = (1 << 32) - 1
"""Round numbers travel in 32 bits."""


class Rounds:
    """All rounds of one peer's lanes.

    me: this peer; n: how many places the crew has, founded: had when it began; rtt_s: as measured, by peer.
    """

    def __init__(self, me: PeerId, n: int, seed: int, founded: int) -> None:
        self.me, self.n, self.founded, self._seed = me, n, founded, seed
        self.cut = n
        """A vector is cut into so many blocks: one for each place up to the highest of a living peer."""
        self._newer_places = set(range(founded, n))  # that somebody has, of those beyond the founders'
        self._departed: set[PeerId] = set()  # had such a place, and is gone
        self._lanes: dict[int, Lane] = {}
        self._presence = Presence(me, n)
        self._rtt_s: dict[PeerId, float] = {}

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that own blocks now: this one, and those not silent for long."""
        return self._presence.live

    @property
    def gone(self) -> frozenset[PeerId]:
        """The peers that have left."""
        return self._presence.gone

    # -- Begin and end

    def _begin(self, now_s: float, ask: Average | Offer, newcomer: bool) -> list[Effect]:
        """Begin a lane's next round; of its first (of each fragment) a newcomer takes, and gives nothing."""
        lane = self._ready(ask)
        number = lane.next(ask.due if isinstance(ask, Average) else -1)
        early = lane.rounds.get(number)
        lane.tardy = lane.tardy + 1 if early is not None and early.too_late() else 0
        if self._leaves_it(lane, number, ask):
            number, lane.tardy = number + 1, 0
        if number > ROUND_MAX:
            raise RuntimeError(f"channel {ask.channel} has had {number} rounds, as many as can be numbered")
        new, skipped = lane.done < 0, number - lane.done - 1
        lane.aside = ask.aside
        machine = self._machine(lane, ask.channel, number)
        scatter_s, gather_s = lane.begin(number, now_s, ask.deadline_s, self._rtt_s.values())
        lane.behind |= skipped > 0
        if newcomer or (skipped > CATCH_UP and not new):
            lane.taking = lane.channel.fragments
        weight = ask.weight if lane.taking == 0 else 0.0
        lane.taking = max(0, lane.taking - 1)
        effects: list[Effect] = []
        if skipped > 0 and not new and self.me not in ask.aside:
            effects.append(Noted("skipped", self.me, f"{skipped} round{'s' * (skipped > 1)}, to {number}"))
        waiting = self._presence.waiting - ask.aside
        part = lane.channel.part(number)
        values, rows = (NO_VALUES, ask.rows) if isinstance(ask, Offer) else (ask.values[part], None)
        left_s = math.inf if ask.deadline_s is None else ask.deadline_s - scatter_s - gather_s
        grace_s = min(scatter_s, max(0.0, left_s))
        answer_s = ANSWER * max((self._rtt_s.get(peer, 0.0) for peer in waiting), default=0.0)
        answer_s = lane.patience.factor * (answer_s or ANSWER * lane.channel.rtt_s)
        begin = Begin(values, weight, waiting, scatter_s, gather_s, lane.withheld, rows, grace_s, answer_s)
        return self._settle(lane, effects + machine.step(now_s, begin))

    def _leaves_it(self, lane: Lane, number: int, ask: Average | Offer) -> bool:
        """Whether the newest round that was heard of is left to those who are in it, and the next one begun.

        So it is where owners there have told their averages, for a slow peer that gives, and for one that is
        behind: as long as it is one round behind whenever it begins, nobody hears it in time, though it
        computes as fast as they do. Who is to take and not to give takes those averages.
        """
        if ask.weight <= 0 or not lane.tardy:
            return False
        skipped = number - lane.done - 1
        behind = lane.behind or skipped > 0 or lane.tardy > TARDY_MAX
        return self.me in ask.aside or (behind and lane.done >= 0 and skipped <= CATCH_UP and not lane.taking)

    def _ready(self, ask: Average | Offer) -> Lane:
        """The channel that is asked for an average, if it can be."""
        lane = self._lanes.get(ask.channel)
        if lane is None:
            raise KeyError(f"channel {ask.channel} is not configured; call configure() first")
        if self.n > PEERS_MAX:
            raise RuntimeError(f"the crew has grown to {self.n} seats; {LARGER_CREWS}")
        if lane.active is not None:
            raise RuntimeError(f"round {lane.active} of channel {ask.channel} is not done yet; one at a time")
        if isinstance(ask, Offer) != lane.channel.method.gathers:
            takes = "rows (Offer)" if lane.channel.method.gathers else "values (Average)"
            raise ValueError(
                f"channel {ask.channel} is one of {lane.channel.method.name}, which takes {takes}"
            )
        if isinstance(ask, Offer):
            require_rows(ask.rows, lane.channel.n_chunks)
            return lane
        want = (lane.channel.fragments * lane.channel.n_chunks, lane.channel.codec.elements)
        if ask.values.shape != want:
            raise ValueError(f"values of shape {ask.values.shape} on a channel of {want}")
        if ask.values.dtype != np.float32 or not ask.values.flags.c_contiguous:
            raise ValueError(f"values of {ask.values.dtype}, or not in one piece; give contiguous float32")
        return lane

    def _machine(self, lane: Lane, channel: int, number: int) -> Round:
        def make() -> Round:
            setting = Setting(
                me=self.me,
                n=self.cut,
                seed=self._seed,
                channel=channel,
                round=number,
                live=self.live - lane.aside or self.live,
                present=frozenset(range(self.cut)) - self.gone,
                n_chunks=lane.channel.n_chunks,
                codec=lane.channel.codec,
                repair_s=max(self._rtt_s.values(), default=lane.channel.rtt_s),
                growth=self.growth,
                scratch=lane.spare.pop() if lane.spare else None,
                earlier=tuple(lane.rounds[r] for r in sorted(lane.rounds) if r < number),
            )
            return lane.channel.method.make(setting)

        return lane.machine(number, make)

    def _settle(self, lane: Lane, effects: list[Effect]) -> list[Effect]:
        """Look for the end of the active round among a machine's effects."""
        if not effects:
            return effects
        outcome = next((e.outcome for e in effects if isinstance(e, Done)), None)
        if outcome is None:
            return effects
        owed = {p: came for p, came in lane.rounds[outcome.round].owed().items() if p not in lane.aside}
        _tell_given_up(lane, outcome.round)
        machine = lane.rounds[outcome.round]
        answered = machine.answered() if isinstance(machine, Stages) else frozenset[PeerId]()
        lane.end(outcome)
        in_vain = machine.in_vain if isinstance(machine, Stages) else set[PeerId]()
        lane.learn(outcome, {peer for peer, came in owed.items() if came and peer not in in_vain})
        effects = effects + self._presence.count_silence(owed, answered)
        if isinstance(machine, Stages) and not machine.owns and outcome.averaged.any():
            effects += self._presence.vouched(_in_any(outcome.heard))
        return effects

    # -- What comes

    def _hailed(self, now_s: float, run: Run) -> list[Effect]:
        """A peer asks whether this one is there, or answers that it is."""
        channel, number = run.key.channel, run.key.round
        lane = self._lanes[channel]
        if run.key.stage in QUESTIONS:  # who asks waits in that round; it may be waited for in an earlier one
            rtt_s = self._rtt_s.get(run.peer, lane.channel.rtt_s)
            machine = lane.rounds.get(number)
            never = number < lane.now() or (isinstance(machine, Stages) and machine.never_sends(run))
            answer = here(now_s, run, rtt_s, never)
            return [answer, *self._asked_from(now_s, lane, number, run.peer)]
        if run.key.stage not in ANSWERS:
            return []
        _tell_given_up(lane, number)
        lane.patience.answered(now_s, run.peer, number)
        return self._route(now_s, channel, number, Arrived([run])) if number == lane.active else []

    def _asked_from(self, now_s: float, lane: Lane, number: int, peer: PeerId) -> list[Effect]:
        """A peer asks in a round: it has long begun that, and left those before."""
        machine = None if lane.active is None else lane.rounds[lane.active]
        if number - 1 != lane.active or lane.behind or not isinstance(machine, Stages):
            return self._see_ahead(now_s, lane, number, [peer])
        return self._settle(lane, machine.asked_from_next(now_s, peer))

    def _deliver_alike(self, now_s: float, lane: Lane, number: int, event: Arrived) -> list[Effect]:
        """Runs of one round, whose senders cut the vector as this peer does."""
        channel = event.runs[0].key.channel
        if number == lane.active:  # most are of the round under way
            effects = lane.rounds[number].step(now_s, event)
            return self._settle(lane, effects) if effects else effects
        if not lane.admits(number):
            return []
        if number <= lane.done:
            if any(run.peer not in lane.aside for run in event.runs):
                lane.late(now_s, number)
        else:
            self._machine(lane, channel, number)
        effects = self._route(now_s, channel, number, event)
        return effects + self._see_ahead(now_s, lane, number, _seen_in(event.runs))

    def _deliver_apart(self, now_s: float, channel: int, number: int, event: Arrived) -> list[Effect]:
        """Some senders cut the vector otherwise: one of them, or this peer, knows of newcomers already.

        Their chunks mean other values here, so this round goes on without them; whoever knows of fewer
        newcomers goes by the larger number from its next round on, so that one round is spoilt at most. It
        has heard that somebody comes to that place, or does not believe it: a number alone can be made up.
        Whoever knows that the peer in the last place is gone goes by the smaller number, and the others do
        once they have heard of it, too.
        """
        lane = self._lanes[channel]
        growths = {id(run): run.key.block >> BLOCK_BITS for run in event.runs}
        believed = [g for g in growths.values() if self.founded + g <= PEERS_MAX]
        news = [g for g in believed if self._comes_or_is(self.founded + g - 1)]
        self._grow(self.founded + max(news, default=0))
        if number != lane.active and number > lane.done and lane.grown(number, self.growth):
            del lane.rounds[number]  # early runs of those that knew of fewer; none of them is waited for more
        machine = lane.rounds.get(number)
        growth = self.growth if machine is None else machine.spec.growth
        alike = [run for run in event.runs if growths[id(run)] == growth]
        apart = [run.peer for run in event.runs if growths[id(run)] in believed and run not in alike]
        effects: list[Effect] = []
        if number == lane.active:
            for peer in apart:
                if lane.active == number:
                    effects += self._settle(lane, lane.rounds[number].passed(now_s, peer))
        return effects + (self._deliver_alike(now_s, lane, number, Arrived(alike)) if alike else [])

    def _comes_or_is(self, peer: PeerId) -> bool:
        """Whether somebody is known to have a place, or to be on the way to it."""
        return peer not in self._departed and (peer in self._presence or peer < self.n)

    def _grow(self, n: int) -> None:
        """The crew has ``n`` places at least, and deals as many blocks."""
        self.cut = max(self.cut, n)
        if n > self.n:
            self.n = n
            self._presence.grow(n)

    def _came(self, peer: PeerId) -> None:
        """A peer takes part, maybe in a place beyond the founders'."""
        self._departed.discard(peer)
        if peer >= self.founded:
            self._newer_places.add(peer)
        self._grow(peer + 1)

    def _comes(self, peer: PeerId) -> None:
        """A peer is on its way in, and has no blocks until it takes part."""
        self._went(peer)
        self._departed.discard(peer)

    def _went(self, peer: PeerId) -> None:
        """A peer is gone: of the last places, those that nobody has any more get no blocks."""
        self._newer_places.discard(peer)
        if peer >= self.founded:
            self._departed.add(peer)
        self.cut = min(self.cut, max({self.founded, self.me + 1, *(p + 1 for p in self._newer_places)}))
        for lane in self._lanes.values():
            lane.recut(self.growth)

    @property
    def growth(self) -> int:
        """How many more blocks a vector is cut into than when the crew was founded."""
        return self.cut - self.founded

    def _see_ahead(self, now_s: float, lane: Lane, number: int, peers: list[PeerId]) -> list[Effect]:
        """Peers are in this round: whether that is far enough ahead of the one under way here."""
        if lane.active is None or number <= lane.active + (not lane.behind):
            return []
        ahead = [peer for peer in peers if peer not in lane.passed and peer != self.me]
        return self._pass(now_s, lane, ahead)

    def _pass(self, now_s: float, lane: Lane, peers: list[PeerId]) -> list[Effect]:
        """Peers are ahead of this one's round and send no more of it: end it soon, and catch up.

        They are certainly done with it when they are two rounds ahead. A message of the next round shows it
        too, but may have overtaken others; only a peer that knows itself to be behind goes by that.
        """
        effects: list[Effect] = []
        for peer in peers:
            if lane.active is None:
                break
            if peer not in lane.passed:
                lane.passed.add(peer)
                effects += self._settle(lane, lane.rounds[lane.active].passed(now_s, peer))
        return effects

    def _route(
        self, now_s: float, channel: int, number: int, event: Arrived | Expired | Left
    ) -> list[Effect]:
        lane = self._lanes.get(channel)
        machine = lane.rounds.get(number) if lane is not None else None
        if lane is None or machine is None:
            return []
        return self._settle(lane, machine.step(now_s, event))


def _tell_given_up(lane: Lane, number: int) -> None:
    """Whom a round waits for no longer: from those that answer after all, patience is learned."""
    machine = lane.rounds.get(number)
    if isinstance(machine, Stages):
        lane.patience.gave_up(number, machine.given_up)
        machine.given_up.clear()


def _seen_in(runs: Iterable[Run]) -> list[PeerId]:
    """Who was in the round of these runs: their senders, and whose values are in what owners have averaged.

    A peer that owns nothing sends to owners only; who takes others for owners hears of it in no other way.
    """
    peers: dict[PeerId, None] = {}
    for run in runs:
        peers[run.peer] = None
        if run.key.stage == GATHER and len(run.heard):
            peers.update(dict.fromkeys(_in_any(run.heard)))
    return list(peers)


def _in_any(heard: PeerSet) -> list[PeerId]:
    """The peers that are in any of these sets."""
    return peers_in(int(np.bitwise_or.reduce(heard)))
