"""A channel that all average at once: rounds begun, fed with what comes, ended; with peers that are ahead,
behind, or new. What one round does is a machine of its own (``base.Round``), which an averager brings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ragtag.core.types import (
    LARGER_CREWS,
    PEERS_MAX,
    Arrived,
    Average,
    Begin,
    Done,
    Effect,
    Event,
    Expired,
    Left,
    Noted,
    Offer,
    PeerId,
    PeerSet,
    Run,
    Visits,
)
from ragtag.protocols.channel.averager import Averager, Opening, Setting
from ragtag.protocols.channel.lane import Lane
from ragtag.protocols.rounds.base import BLOCK_BITS, GATHER, NO_VALUES, Round, peers_in, require_rows
from ragtag.protocols.rounds.hail import ANSWER, ANSWERS, HAIL, QUESTIONS, here
from ragtag.protocols.rounds.stages import Stages

CATCH_UP = 8
"""A peer that skipped more rounds than this adds weight 0 to its first average (of each fragment): it takes,
and gives later."""
TARDY_MAX = 4
"""Rounds in a row that a peer may begin when they are over for others, before it takes itself for behind."""
ROUND_MAX = (1 << 32) - 1
"""Round numbers travel in 32 bits."""


class Rounds:
    """One peer's part in all rounds of a channel that is averaged by all at once.

    make: the machine of one round.
    """

    def __init__(self, opening: Opening, make: Callable[[Setting], Round]) -> None:
        self.me, self._number, self._crew, self._make = opening.me, opening.number, opening.crew, make
        self.lane = Lane(opening.channel, ready_s=opening.now_s)
        self._newcomer = False

    @property
    def done(self) -> int:
        """The last round that is over."""
        return self.lane.done

    @property
    def highest(self) -> int:
        """The newest round that was heard of."""
        return self.lane.highest

    @property
    def active(self) -> int | None:
        """The round under way."""
        return self.lane.active

    def probed(self, probe_s: float, now_s: float) -> None:
        """One exchange of the whole vector takes this long; peers begin from now on."""
        self.lane.probed(replace(self.lane.channel, probe_s=probe_s), now_s)

    def resume(self, round_: int) -> None:
        """The next round comes after ``round_``; in it (for each fragment) this peer gives nothing."""
        self._newcomer = True
        self.lane.done = max(self.lane.done, round_)

    def newer(self) -> bool:
        """Whether others are past this peer's last round."""
        return self.lane.highest > self.lane.done

    def shows(self, peer: PeerId, number: int) -> bool:
        """What is of rounds long done shows that its sender lives, but is behind."""
        return number >= self.lane.done

    def budgets_s(self) -> tuple[float, float]:
        """How long the next round may scatter, and gather."""
        return self.lane.budgets_s(self._crew.rtt_s.values())

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; what arrives is of one round, or a question whether this peer is there."""
        if isinstance(event, Arrived):
            return self._arrived(now_s, event)
        if isinstance(event, Expired):
            return self._route(now_s, event.timer.round, event)
        if isinstance(event, Average | Offer):
            return self._begin(now_s, event)
        if isinstance(event, Left | Visits):
            self.lane.recut(self._crew.growth)
        if isinstance(event, Left) and self.lane.active is not None:
            return self._route(now_s, self.lane.active, event)
        return []

    def _arrived(self, now_s: float, event: Arrived) -> list[Effect]:
        first = event.runs[0].key
        if first.stage & HAIL:
            return [effect for run in event.runs for effect in self._hailed(now_s, run)]
        machine = self.lane.rounds.get(first.round)
        if machine is None and self._crew.n > PEERS_MAX:
            return []  # a probe from before the crew grew so large
        growth = self._crew.growth if machine is None else machine.spec.growth
        for run in event.runs:
            if run.key.block >> BLOCK_BITS != growth:
                return self._deliver_apart(now_s, first.round, event)
        return self._deliver_alike(now_s, first.round, event)

    # -- Begin and end

    def _begin(self, now_s: float, ask: Average | Offer) -> list[Effect]:
        """Begin the next round."""
        self._require(ask)
        lane = self.lane
        number = lane.next(ask.due if isinstance(ask, Average) else -1)
        early = lane.rounds.get(number)
        lane.tardy = lane.tardy + 1 if early is not None and early.too_late() else 0
        if self._leaves_it(number, ask):
            number, lane.tardy = number + 1, 0
        if number > ROUND_MAX:
            raise RuntimeError(f"channel {ask.channel} has had {number} rounds, as many as can be numbered")
        new, skipped = lane.done < 0, number - lane.done - 1
        lane.aside = ask.aside
        machine = self._machine(number)
        scatter_s, gather_s = lane.begin(number, now_s, ask.deadline_s, self._crew.rtt_s.values())
        lane.behind |= skipped > 0
        if self._newcomer or (skipped > CATCH_UP and not new):
            lane.taking = lane.channel.fragments
        self._newcomer = False
        weight = ask.weight if lane.taking == 0 else 0.0
        lane.taking = max(0, lane.taking - 1)
        effects: list[Effect] = []
        if skipped > 0 and not new and self.me not in ask.aside:
            effects.append(Noted("skipped", self.me, f"{skipped} round{'s' * (skipped > 1)}, to {number}"))
        waiting = self._crew.presence.waiting - ask.aside
        part = lane.channel.part(number)
        values, rows = (NO_VALUES, ask.rows) if isinstance(ask, Offer) else (ask.values[part], None)
        left_s = math.inf if ask.deadline_s is None else ask.deadline_s - scatter_s - gather_s
        grace_s = min(scatter_s, max(0.0, left_s))
        answer_s = ANSWER * max((self._crew.rtt_s.get(peer, 0.0) for peer in waiting), default=0.0)
        answer_s = lane.patience.factor * (answer_s or ANSWER * lane.channel.rtt_s)
        begin = Begin(values, weight, waiting, scatter_s, gather_s, lane.withheld, rows, grace_s, answer_s)
        return self._settle(effects + machine.step(now_s, begin))

    def _leaves_it(self, number: int, ask: Average | Offer) -> bool:
        """Whether the newest round that was heard of is left to those who are in it, and the next one begun.

        So it is where owners there have told their averages, for a slow peer that gives, and for one that is
        behind: as long as it is one round behind whenever it begins, nobody hears it in time, though it
        computes as fast as they do. Who is to take and not to give takes those averages.
        """
        lane = self.lane
        if ask.weight <= 0 or not lane.tardy:
            return False
        skipped = number - lane.done - 1
        behind = lane.behind or skipped > 0 or lane.tardy > TARDY_MAX
        return self.me in ask.aside or (behind and lane.done >= 0 and skipped <= CATCH_UP and not lane.taking)

    def _require(self, ask: Average | Offer) -> None:
        """Raise where the channel cannot be asked for this, or not now."""
        channel, number = self.lane.channel, self._number
        if self._crew.n > PEERS_MAX:
            raise RuntimeError(f"the crew has grown to {self._crew.n} seats; {LARGER_CREWS}")
        if self.active is not None:
            raise RuntimeError(f"round {self.active} of channel {number} is not done yet; one at a time")
        if isinstance(ask, Offer) != channel.averager.gathers:
            takes = "rows (Offer)" if channel.averager.gathers else "values (Average)"
            raise ValueError(f"channel {number} is one of {channel.averager.name}, which takes {takes}")
        if isinstance(ask, Offer):
            require_rows(ask.rows, channel.n_chunks)
            return
        want = (channel.fragments * channel.n_chunks, channel.codec.elements)
        if ask.values.shape != want:
            raise ValueError(f"values of shape {ask.values.shape} on a channel of {want}")
        if ask.values.dtype != np.float32 or not ask.values.flags.c_contiguous:
            raise ValueError(f"values of {ask.values.dtype}, or not in one piece; give contiguous float32")

    def _machine(self, number: int) -> Round:
        lane, crew = self.lane, self._crew

        def make() -> Round:
            setting = Setting(
                me=self.me,
                n=crew.cut,
                seed=crew.seed,
                channel=self._number,
                round=number,
                live=crew.live - lane.aside or crew.live,
                present=frozenset(range(crew.cut)) - crew.gone,
                n_chunks=lane.channel.n_chunks,
                codec=lane.channel.codec,
                repair_s=max(crew.rtt_s.values(), default=lane.channel.rtt_s),
                growth=crew.growth,
                scratch=lane.spare.pop() if lane.spare else None,
                earlier=tuple(lane.rounds[r] for r in sorted(lane.rounds) if r < number),
            )
            return self._make(setting)

        return lane.machine(number, make)

    def _settle(self, effects: list[Effect]) -> list[Effect]:
        """Look for the end of the active round among a machine's effects."""
        if not effects:
            return effects
        outcome = next((e.outcome for e in effects if isinstance(e, Done)), None)
        if outcome is None:
            return effects
        lane = self.lane
        owed = {p: came for p, came in lane.rounds[outcome.round].owed().items() if p not in lane.aside}
        _tell_given_up(lane, outcome.round)
        machine = lane.rounds[outcome.round]
        answered = machine.answered() if isinstance(machine, Stages) else frozenset[PeerId]()
        lane.end(outcome)
        in_vain = machine.in_vain if isinstance(machine, Stages) else set[PeerId]()
        lane.learn(outcome, {peer for peer, came in owed.items() if came and peer not in in_vain})
        effects = effects + self._crew.presence.count_silence(owed, answered)
        if isinstance(machine, Stages) and not machine.owns and outcome.averaged.any():
            effects += self._crew.presence.vouched(_in_any(outcome.heard))
        return effects

    # -- What comes

    def _hailed(self, now_s: float, run: Run) -> list[Effect]:
        """A peer asks whether this one is there, or answers that it is."""
        lane, number = self.lane, run.key.round
        if run.key.stage in QUESTIONS:  # who asks waits in that round; it may be waited for in an earlier one
            rtt_s = self._crew.rtt_s.get(run.peer, lane.channel.rtt_s)
            machine = lane.rounds.get(number)
            never = number < lane.now() or (isinstance(machine, Stages) and machine.never_sends(run))
            answer = here(now_s, run, rtt_s, never)
            return [answer, *self._asked_from(now_s, number, run.peer)]
        if run.key.stage not in ANSWERS:
            return []
        _tell_given_up(lane, number)
        lane.patience.answered(now_s, run.peer, number)
        return self._route(now_s, number, Arrived([run])) if number == lane.active else []

    def _asked_from(self, now_s: float, number: int, peer: PeerId) -> list[Effect]:
        """A peer asks in a round: it has long begun that, and left those before."""
        lane = self.lane
        machine = None if lane.active is None else lane.rounds[lane.active]
        if number - 1 != lane.active or lane.behind or not isinstance(machine, Stages):
            return self._see_ahead(now_s, number, [peer])
        return self._settle(machine.asked_from_next(now_s, peer))

    def _deliver_alike(self, now_s: float, number: int, event: Arrived) -> list[Effect]:
        """Runs of one round, whose senders cut the vector as this peer does."""
        lane = self.lane
        if number == lane.active:  # most are of the round under way
            effects = lane.rounds[number].step(now_s, event)
            return self._settle(effects) if effects else effects
        if not lane.admits(number):
            return []
        if number <= lane.done:
            if any(run.peer not in lane.aside for run in event.runs):
                lane.late(now_s, number)
        else:
            self._machine(number)
        effects = self._route(now_s, number, event)
        return effects + self._see_ahead(now_s, number, _seen_in(event.runs))

    def _deliver_apart(self, now_s: float, number: int, event: Arrived) -> list[Effect]:
        """Some senders cut the vector otherwise: one of them, or this peer, knows of newcomers already.

        Their chunks mean other values here, so this round goes on without them; whoever knows of fewer
        newcomers goes by the larger number from its next round on, so that one round is spoilt at most. It
        has heard that somebody comes to that place, or does not believe it: a number alone can be made up.
        Whoever knows that the peer in the last place is gone goes by the smaller number, and the others do
        once they have heard of it, too.
        """
        lane, crew = self.lane, self._crew
        growths = {id(run): run.key.block >> BLOCK_BITS for run in event.runs}
        believed = [g for g in growths.values() if crew.founded + g <= PEERS_MAX]
        news = [g for g in believed if crew.comes_or_is(crew.founded + g - 1)]
        crew.grow(crew.founded + max(news, default=0))
        if number != lane.active and number > lane.done and lane.grown(number, crew.growth):
            del lane.rounds[number]  # early runs of those that knew of fewer; none of them is waited for more
        machine = lane.rounds.get(number)
        growth = crew.growth if machine is None else machine.spec.growth
        alike = [run for run in event.runs if growths[id(run)] == growth]
        apart = [run.peer for run in event.runs if growths[id(run)] in believed and run not in alike]
        effects: list[Effect] = []
        if number == lane.active:
            for peer in apart:
                if lane.active == number:
                    effects += self._settle(lane.rounds[number].passed(now_s, peer))
        return effects + (self._deliver_alike(now_s, number, Arrived(alike)) if alike else [])

    def _see_ahead(self, now_s: float, number: int, peers: list[PeerId]) -> list[Effect]:
        """Peers are in this round: whether that is far enough ahead of the one under way here."""
        lane = self.lane
        if lane.active is None or number <= lane.active + (not lane.behind):
            return []
        ahead = [peer for peer in peers if peer not in lane.passed and peer != self.me]
        return self._pass(now_s, ahead)

    def _pass(self, now_s: float, peers: list[PeerId]) -> list[Effect]:
        """Peers are ahead of this one's round and send no more of it: end it soon, and catch up.

        They are certainly done with it when they are two rounds ahead. A message of the next round shows it
        too, but may have overtaken others; only a peer that knows itself to be behind goes by that.
        """
        lane = self.lane
        effects: list[Effect] = []
        for peer in peers:
            if lane.active is None:
                break
            if peer not in lane.passed:
                lane.passed.add(peer)
                effects += self._settle(lane.rounds[lane.active].passed(now_s, peer))
        return effects

    def _route(self, now_s: float, number: int, event: Arrived | Expired | Left) -> list[Effect]:
        machine = self.lane.rounds.get(number)
        return [] if machine is None else self._settle(machine.step(now_s, event))


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


def at_once(
    name: str,
    make: Callable[[Setting], Round],
    *,
    patience: float = 1.0,
    gathers: bool = False,
    written: str = "",
) -> Averager:
    """An averager by which all average in each round; ``make`` makes a round's machine."""
    return Averager(
        name, lambda opening: Rounds(opening, make), "at once", patience, gathers, PEERS_MAX, written
    )
