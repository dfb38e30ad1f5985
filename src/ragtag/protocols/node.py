"""A node: one peer's part in all rounds of all channels.

It makes a machine for each round, routes runs and timers to it, keeps the deadlines that measurement
gives, and knows who has fallen silent. A round does not wait for a peer that was not heard in the round
before; after ``GONE_AFTER`` silent rounds its blocks go to others. Anything heard brings it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.core.deadline import Deadline
from ragtag.core.types import (
    PEERS_MAX,
    Arrived,
    Average,
    Begin,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Left,
    Measured,
    Met,
    Noted,
    Outcome,
    PeerId,
    Tell,
)
from ragtag.protocols.base import Round
from ragtag.protocols.meet import MEET, Exchange
from ragtag.protocols.method import Method, Setting

HEADROOM = 1.5
"""A stage may take this many times what nine in ten recent ones took."""
AHEAD = 2
"""Rounds that are taken in before this peer has begun them."""
BEHIND = 2
"""Rounds that are kept after they are done, to answer requests for repair."""
GONE_AFTER = 2
"""Silent rounds after which a peer owns no blocks."""
EXCHANGES_MAX = 32
"""Exchanges that are kept, to go on answering; the oldest is forgotten first."""
ALONE_MAX = 2
"""Rounds in a row in which a peer that hears less than half of the others takes itself for early."""
CATCH_UP = 8
"""A peer that skipped more rounds than this adds weight 0 to its first average: it takes, and gives later."""
JUMP_MAX = 1 << 24
"""Rounds that a peer can have missed; what is further ahead is not believed."""
ROUND_MAX = (1 << 32) - 1
"""Round numbers travel in 32 bits."""


@dataclass(frozen=True, slots=True)
class Channel:
    """What is averaged on a channel, how, and how long its first round may take (measured by a probe).

    floor_s: no stage's deadline is shorter, nor shorter than the measured round trip to the middle peer.
    reuse: use the memory of an outcome's mean again once the round after the next begins.
    """

    method: Method
    codec: Codec
    n_chunks: int
    probe_s: float
    rtt_s: float
    floor_s: float = 0.0
    reuse: bool = False


@dataclass(slots=True)
class _Lane:
    """A channel's state on this peer."""

    channel: Channel
    scatter: Deadline
    gather: Deadline
    ready_s: float = 0.0
    budgets_s: tuple[float, float] = (0.0, 0.0)
    done: int = -1
    highest: int = -1
    active: int | None = None
    passed: set[PeerId] = field(default_factory=set)
    behind: bool = False
    rounds: dict[int, Round] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    late_s: dict[int, float] = field(default_factory=dict)
    spare: list[Floats] = field(default_factory=list)


def _deadlines(channel: Channel) -> tuple[Deadline, Deadline]:
    headroom = HEADROOM * channel.method.patience
    return Deadline(channel.probe_s, headroom=headroom), Deadline(channel.probe_s, headroom=headroom)


class Node:
    """The machine that a driver or a simulated world runs for one peer."""

    def __init__(self, me: PeerId, n: int, seed: int) -> None:
        if not 1 <= n <= PEERS_MAX:
            raise ValueError(f"a crew of {n} peers: one crew averages 1 to {PEERS_MAX} peers directly")
        if not 0 <= me < n:
            raise ValueError(f"peer {me} of {n}: a peer's number lies between 0 and {n - 1}")
        self.me, self.n, self._seed = me, n, seed
        self._lanes: dict[int, _Lane] = {}
        self._silent = dict.fromkeys((p for p in range(n) if p != me), 0)
        self._left: set[PeerId] = set()
        self._heard: set[PeerId] = set()
        self._exchanges: dict[int, Exchange] = {}
        self._rtt_s: dict[PeerId, float] = {}
        self._alone = 0
        self._changes = 0  # of who is silent or has left; counted after each
        self._live: tuple[int, frozenset[PeerId]] = (-1, frozenset())

    def configure(self, number: int, channel: Channel, now_s: float = 0.0) -> None:
        """Open a channel, ready from ``now_s`` on. All peers of the crew configure it alike."""
        if channel.n_chunks < 1:
            raise ValueError("a channel of no values: there is nothing to average")
        self._lanes[number] = _Lane(channel, *_deadlines(channel), ready_s=now_s)

    def probed(self, number: int, probe_s: float, now_s: float) -> None:
        """Set how long a channel's first round may take, now that it has been measured."""
        lane = self._lanes[number]
        lane.channel = replace(lane.channel, probe_s=probe_s)
        lane.scatter, lane.gather = _deadlines(lane.channel)
        lane.ready_s = now_s

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that own blocks now: this one, and those not silent for long."""
        counted, live = self._live  # asked for at every sample that a trainer draws, from another thread
        if counted != self._changes:
            counted = self._changes
            live = frozenset({self.me} | {p for p, k in self._silent.items() if k < GONE_AFTER} - self._left)
            self._live = counted, live
        return live

    @property
    def gone(self) -> frozenset[PeerId]:
        """The peers that have left."""
        return frozenset(self._left)

    def silent_rounds(self, peer: PeerId) -> int:
        """How many rounds in a row nothing has come from a peer."""
        return self._silent[peer]

    def budgets_s(self, number: int) -> tuple[float, float]:
        """How long the next round may scatter, and gather."""
        return self._budgets_s(self._lanes[number])

    def _budgets_s(self, lane: _Lane) -> tuple[float, float]:
        """A deadline below a round trip, as it is measured now, would cut off what has been sent."""
        rtts_s = sorted(self._rtt_s.values())
        floor_s = max(lane.channel.floor_s, rtts_s[len(rtts_s) // 2] if rtts_s else 0.0)
        lane.scatter.floor_s = lane.gather.floor_s = floor_s
        return lane.scatter.budget_s(), lane.gather.budget_s()

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Arrived):
            return self._arrived(now_s, event)
        if isinstance(event, Expired):
            if event.timer.channel == MEET:
                return self._miss(self._exchange(event.timer.round).step(now_s, event))
            return self._route(now_s, event.timer.channel, event.timer.round, event)
        if isinstance(event, Average):
            return self._average(now_s, event)
        if isinstance(event, Tell):
            return self._exchange(event.number).step(now_s, event)
        if isinstance(event, Measured):
            self._rtt_s[event.peer] = event.rtt_s
            return []
        if isinstance(event, Joined):
            self._left.discard(event.peer)
            self._changes += 1
            for exchange in self._exchanges.values():
                exchange.step(now_s, event)
            return self._hear(event.peer)
        if isinstance(event, Left):
            return self._leave(now_s, event)
        return []

    # -- Rounds

    def _average(self, now_s: float, ask: Average) -> list[Effect]:
        lane = self._lanes.get(ask.channel)
        if lane is None:
            raise KeyError(f"channel {ask.channel} is not configured; call configure() first")
        if lane.active is not None:
            raise RuntimeError(f"round {lane.active} of channel {ask.channel} is not done yet; one at a time")
        if ask.values.shape != (lane.channel.n_chunks, lane.channel.codec.elements):
            want = (lane.channel.n_chunks, lane.channel.codec.elements)
            raise ValueError(f"values of shape {ask.values.shape} on a channel of {want}")
        if ask.values.dtype != np.float32 or not ask.values.flags.c_contiguous:
            raise ValueError(f"values of {ask.values.dtype}, or not in one piece; give contiguous float32")
        number = max(lane.done + 1, lane.highest)
        if number > ROUND_MAX:
            raise RuntimeError(f"channel {ask.channel} has had {number} rounds, as many as can be numbered")
        skipped = number - lane.done - 1
        self._learn_late(lane)
        machine = self._machine(lane, ask.channel, number)
        lane.active = number
        lane.behind |= skipped > 0
        lane.begun_s[number] = now_s
        scatter_s, gather_s = self._budgets_s(lane)
        if lane.done < 0:  # no history: others may still compute what this peer took this long to compute
            scatter_s += lane.channel.method.patience * (now_s - lane.ready_s)
        if ask.deadline_s is not None:
            scatter_s = min(scatter_s, ask.deadline_s / 2)
            gather_s = min(gather_s, ask.deadline_s - scatter_s)
        lane.budgets_s = scatter_s, gather_s
        weight = ask.weight if skipped <= CATCH_UP or lane.done < 0 else 0.0
        effects: list[Effect] = []
        if skipped > 0 and lane.done >= 0:
            effects.append(Noted("skipped", self.me, f"{skipped} rounds, to {number}"))
        waiting = frozenset(p for p, rounds in self._silent.items() if rounds == 0) - self._left
        effects += machine.step(now_s, Begin(ask.values, weight, waiting, scatter_s, gather_s))
        return self._settle(lane, effects)

    def _machine(self, lane: _Lane, channel: int, number: int) -> Round:
        machine = lane.rounds.get(number)
        if machine is None:
            setting = Setting(
                me=self.me,
                n=self.n,
                seed=self._seed,
                channel=channel,
                round=number,
                live=self.live,
                present=frozenset(range(self.n)) - self._left,
                n_chunks=lane.channel.n_chunks,
                codec=lane.channel.codec,
                repair_s=max(self._rtt_s.values(), default=lane.channel.rtt_s),
                scratch=lane.spare.pop() if lane.spare else None,
            )
            machine = lane.rounds[number] = lane.channel.method.make(setting)
        return machine

    def _settle(self, lane: _Lane, effects: list[Effect]) -> list[Effect]:
        """Look for the end of the active round among a machine's effects."""
        if not effects:
            return effects
        outcome = next((e.outcome for e in effects if isinstance(e, Done)), None)
        if outcome is None:
            return effects
        owed = lane.rounds[outcome.round].owed()
        lane.done, lane.active = outcome.round, None
        lane.behind = bool(lane.passed)
        lane.passed.clear()
        for number in [r for r in lane.rounds if r <= outcome.round - BEHIND]:
            old = lane.rounds.pop(number)
            lane.begun_s.pop(number, None)
            if lane.channel.reuse and old.outcome is not None and not lane.spare:
                lane.spare.append(old.outcome.mean)
        self._learn(lane, outcome, owed)
        return effects + self._count_silence(owed)

    def _learn(self, lane: _Lane, outcome: Outcome, owed: dict[PeerId, bool]) -> None:
        if not outcome.waited_for:
            return
        if outcome.expired:
            if any(owed.get(peer) for peer in outcome.missed):  # silence alone lengthens nothing
                lane.scatter.missed()
                lane.gather.missed()
        else:
            scatter_s, gather_s = lane.budgets_s
            # a stage that outlasts its deadline, and yet did not run into it, was slept through
            for stage, took_s, most_s in (
                (lane.scatter, outcome.scatter_s, scatter_s),
                (lane.gather, outcome.gather_s, scatter_s + gather_s),
            ):
                if took_s > 0:  # else there was nothing to wait for, which says nothing about waiting
                    stage.completed(min(took_s, most_s))

    def _learn_late(self, lane: _Lane) -> None:
        for late_s in lane.late_s.values():
            lane.scatter.late(late_s)
        lane.late_s.clear()

    # -- Arrivals

    def _arrived(self, now_s: float, event: Arrived) -> list[Effect]:
        runs = event.runs
        effects: list[Effect] = []
        if len(runs) == 1:  # in a simulated world, always
            peer, key = runs[0].peer, runs[0].key
            if peer not in self._heard:
                if peer not in self._silent:
                    return []  # no peer of this crew, or oneself
                effects = self._hear_of(peer, key.channel, key.round)
            more = self._deliver(now_s, key.channel, key.round, event)
            return effects + more if effects else more
        if not all(run.peer in self._silent for run in runs):
            event = Arrived(runs := [run for run in runs if run.peer in self._silent])
        at = 0
        while at < len(runs):  # consecutive runs of one round go to its machine together
            channel, number = runs[at].key.channel, runs[at].key.round
            until = at + 1
            while until < len(runs) and runs[until].key[:2] == (channel, number):
                until += 1
            part = event if until - at == len(runs) else Arrived(runs[at:until])
            for run in part.runs:
                if run.peer not in self._heard:
                    effects += self._hear_of(run.peer, channel, number)
            effects += self._deliver(now_s, channel, number, part)
            at = until
        return effects

    def _exchange(self, number: int) -> Exchange:
        exchange = self._exchanges.get(number)
        if exchange is None:
            if len(self._exchanges) >= EXCHANGES_MAX:
                idle = [other for other, known in self._exchanges.items() if not known.under_way]
                del self._exchanges[min(idle or self._exchanges)]
            exchange = self._exchanges[number] = Exchange(self.me, self.n, number, self.gone)
        return exchange

    def _deliver(self, now_s: float, channel: int, number: int, event: Arrived) -> list[Effect]:
        if channel == MEET:
            return self._exchange(number).step(now_s, event)
        lane = self._lanes.get(channel)
        if lane is None:
            return []
        if number == lane.active:  # most are of the round under way
            effects = lane.rounds[number].step(now_s, event)
            return self._settle(lane, effects) if effects else effects
        if number > max(lane.done, 0) + JUMP_MAX:
            return []  # made up, or of a crew that this peer could not catch up with
        lane.highest = max(lane.highest, number)
        if number <= lane.done:
            self._late(now_s, lane, number, event.runs)
        elif number not in lane.rounds and number != lane.active:
            ahead = sorted(r for r in lane.rounds if r > lane.done and r != lane.active)
            if len(ahead) >= AHEAD:  # a peer that fell behind keeps what is newest
                if number < ahead[0]:
                    return []
                del lane.rounds[ahead[0]]
            self._machine(lane, channel, number)
        if lane.active is not None and number > lane.active + (not lane.behind):
            ahead_of = [run.peer for run in event.runs if run.peer not in lane.passed]
            return self._route(now_s, channel, number, event) + self._pass(now_s, lane, ahead_of)
        return self._route(now_s, channel, number, event)

    def _pass(self, now_s: float, lane: _Lane, peers: list[PeerId]) -> list[Effect]:
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

    def _late(self, now_s: float, lane: _Lane, number: int, runs: object) -> None:
        """A message came after its round was done: remember by how much, once a round."""
        begun_s = lane.begun_s.get(number)
        if begun_s is not None and number == lane.done:
            lane.late_s[number] = now_s - begun_s

    def _route(
        self, now_s: float, channel: int, number: int, event: Arrived | Expired | Left
    ) -> list[Effect]:
        lane = self._lanes.get(channel)
        machine = lane.rounds.get(number) if lane is not None else None
        if lane is None or machine is None:
            return []
        return self._settle(lane, machine.step(now_s, event))

    # -- Who is there

    def _hear_of(self, peer: PeerId, channel: int, number: int) -> list[Effect]:
        """Something came from a peer. What is of rounds long done shows that it lives, but is behind."""
        lane = self._lanes.get(channel)
        return self._hear(peer) if lane is None or number >= lane.done else []

    def _hear(self, peer: PeerId) -> list[Effect]:
        if peer not in self._silent:
            return []
        self._heard.add(peer)
        was, self._silent[peer] = self._silent[peer], 0
        if was:
            self._changes += 1
        return [Noted("heard again", peer, f"after {was} silent rounds")] if was else []

    def _miss(self, effects: list[Effect]) -> list[Effect]:
        """After a meeting: rounds do not wait for who told nothing in all its time, until it is heard."""
        missing = [p for e in effects if isinstance(e, Met) for p in e.missing if p not in self._left]
        for peer in missing:
            if self._silent[peer] == 0:
                effects.append(Noted("silent", peer, "told nothing when peers met"))
            # it keeps its blocks for now: who met sooner has begun, and would deal them differently
            self._silent[peer] = max(self._silent[peer], 1)
            self._heard.discard(peer)  # what it said before it fell silent
            self._changes += 1
        return effects

    def _count_silence(self, owed: dict[PeerId, bool]) -> list[Effect]:
        """After a round: who owed a message, and was not heard, early or late, in this round or another."""
        effects: list[Effect] = []
        silent = [peer for peer, came in owed.items() if not came and peer not in self._heard | self._left]
        waited = [peer for peer in owed if self._silent[peer] == 0]
        alone = len(waited) > 2 and 2 * sum(self._silent[peer] == 0 for peer in silent) > len(waited)
        self._alone = self._alone + 1 if alone else 0
        if (
            0 < self._alone <= ALONE_MAX
        ):  # more likely this peer is early than most have fallen silent at once
            owed = {peer: came or self._silent[peer] == 0 for peer, came in owed.items()}
        for peer, came in owed.items():
            if came or peer in self._heard:
                self._silent[peer] = 0
            elif peer not in self._left:
                self._silent[peer] += 1
                if self._silent[peer] == 1:
                    effects.append(Noted("silent", peer))
        self._heard.clear()
        self._changes += 1
        return effects

    def _leave(self, now_s: float, event: Left) -> list[Effect]:
        self._left.add(event.peer)
        self._changes += 1
        self._rtt_s.pop(event.peer, None)
        effects: list[Effect] = [Noted("left", event.peer)]
        for number, lane in self._lanes.items():
            if lane.active is not None:
                effects += self._route(now_s, number, lane.active, event)
        for exchange in self._exchanges.values():
            effects += exchange.step(now_s, event)
        return effects
