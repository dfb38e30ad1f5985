"""A node: one peer's part in all rounds of all channels.

It makes a machine for each round, routes runs and timers to it, keeps the deadlines that measurement
gives (``lane``), and knows who has fallen silent (``presence``).
"""

from __future__ import annotations

from dataclasses import replace

from ragtag.core.types import (
    LARGER_CREWS,
    PEERS_MAX,
    SEATS_MAX,
    Arrived,
    Average,
    Effect,
    Event,
    Expired,
    Joined,
    Left,
    Measured,
    Met,
    Noted,
    Offer,
    PeerId,
    Post,
    Tell,
    Visits,
)
from ragtag.protocols.base import BLOCK_BITS
from ragtag.protocols.board import BOARD, Board
from ragtag.protocols.district import partners
from ragtag.protocols.hail import HAIL
from ragtag.protocols.lane import HEADROOM, Channel, Lane
from ragtag.protocols.meet import MEET, Exchange, Meetings
from ragtag.protocols.method import CrowdSetting, Many
from ragtag.protocols.presence import GONE_AFTER
from ragtag.protocols.rounds import CATCH_UP, Rounds

__all__ = ["CATCH_UP", "GONE_AFTER", "HEADROOM", "Channel", "Node"]


class Node(Rounds):
    """The machine that a driver or a simulated world runs for one peer.

    n: how many places the crew has, taken or not; it grows when a peer comes for whom there is none.
    founded: how many there were when the crew began, on all peers the same (``None``: ``n``).

    With more places than ``PEERS_MAX`` only methods that work in groups are taken; meetings are with a few
    others, and the notice board is that of a district (``district``).
    """

    def __init__(self, me: PeerId, n: int, seed: int, founded: int | None = None) -> None:
        founded = n if founded is None else founded
        if not 1 <= n <= SEATS_MAX:
            raise ValueError(f"a crew of {n} peers: a crew has 1 to {SEATS_MAX}")
        if not 0 <= me < n:
            raise ValueError(f"peer {me} of {n}: a peer's number lies between 0 and {n - 1}")
        if not 1 <= founded <= n:
            raise ValueError(f"a crew of {n} peers that began with {founded}: crews grow, from 1 on")
        super().__init__(me, n, seed, founded)
        self._meetings = Meetings()
        self._crowds: dict[int, Many] = {}
        self._newcomer_to: set[int] = set()
        self._room: dict[int, int] = {}
        self.board = Board(me, n)

    def configure(self, number: int, channel: Channel, now_s: float = 0.0) -> None:
        """Open a channel, ready from ``now_s`` on. All peers of the crew configure it alike.

        Raises ValueError: the channel's, or the crew has more seats than the method can average.
        """
        if channel.n_chunks < 1:
            raise ValueError("a channel of no values: there is nothing to average")
        most = channel.method.seats_max
        if self.n > most:
            raise ValueError(
                f"{self.n} seats, and {channel.method.name!r} averages {most} at most; {LARGER_CREWS}"
            )
        self._room[number] = SEATS_MAX if channel.passing else most
        if channel.method.crowd is None:
            self._lanes[number] = Lane(channel, ready_s=now_s)
            return
        if channel.fragments > 1:
            raise ValueError(
                f"{channel.method.name} averages in groups, by rounds of their own: no fragments"
            )
        self._crowds[number] = channel.method.crowd(
            CrowdSetting(
                me=self.me,
                peers=frozenset(range(self.n)) - self.gone,
                seed=self._seed,
                channel=number,
                codec=channel.codec,
                n_chunks=channel.n_chunks,
                probe_s=channel.probe_s,
                rtt_s=channel.rtt_s,
                reuse=channel.reuse,
            )
        )

    def probed(self, number: int, probe_s: float, now_s: float) -> None:
        """Set how long a channel's first round may take, now that it has been measured."""
        if number in self._crowds:
            self._crowds[number].probed(probe_s)
            return
        lane = self._lanes[number]
        lane.probed(replace(lane.channel, probe_s=probe_s), now_s)

    @property
    def room(self) -> int:
        """How many seats the crew may have: as many as all its methods can average."""
        return min(self._room.values(), default=SEATS_MAX)

    def silent_rounds(self, peer: PeerId) -> int:
        """How many rounds in a row nothing has come from a peer."""
        return self._presence.silent_rounds(peer)

    def heard_lately(self, peer: PeerId) -> bool:
        """Whether a peer is here, and has not been silent when it owed a message."""
        return self._presence.heard_lately(peer)

    def resume(self, number: int, round_: int) -> None:
        """A channel's next round comes after ``round_``: the crew has averaged before this peer came.

        Its first average (of each fragment) has weight 0: it takes the crew's values, and gives from then on.
        """
        self._newcomer_to.add(number)
        channel = self._channel(number)
        channel.done = max(channel.done, round_)

    def heard_of(self, number: int) -> int:
        """The newest round of a channel that anything has come of; -1: none."""
        return self._channel(number).highest

    def newer(self, number: int) -> bool:
        """Whether others are known to be past this peer's last round of a channel, so that it can follow.

        In a crowd that shows when it looks for a group.
        """
        channel = self._channel(number)
        return number in self._crowds or channel.highest > channel.done

    def _channel(self, number: int) -> Lane | Many:
        return self._crowds[number] if number in self._crowds else self._lanes[number]

    def budgets_s(self, number: int) -> tuple[float, float]:
        """How long the next round may scatter, and gather."""
        return self._lanes[number].budgets_s(self._rtt_s.values())

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Arrived):
            return self._arrived(now_s, event)
        if isinstance(event, Expired):
            if event.timer.channel == BOARD:
                return self.board.step(now_s, event)
            if event.timer.channel == MEET:
                return self._miss(self._exchange(event.timer.round).step(now_s, event))
            if event.timer.channel in self._crowds:
                return self._crowds[event.timer.channel].step(now_s, event)
            return self._route(now_s, event.timer.channel, event.timer.round, event)
        if isinstance(event, Average | Offer):
            return self._average(now_s, event)
        if isinstance(event, Tell):
            exchange = self._exchange(event.number)
            # one that met nobody is not waited for again, unless the others know that it comes
            exchange.without(self.gone if event.silent else self._presence.absent)
            return exchange.step(now_s, event)
        if isinstance(event, Post):
            return self.board.step(now_s, event)
        if isinstance(event, Measured):
            self._rtt_s[event.peer] = event.rtt_s
            return self.board.step(now_s, event)
        if isinstance(event, Joined):
            if event.peer >= self.room:
                why = f"seat {event.peer}, and this crew averages at most {self.room}; {LARGER_CREWS}"
                return [Noted("refused", event.peer, why)]
            self._came(event.peer)
            self._meetings.tell(now_s, event)
            effects = self._presence.joined(event.peer) + self._tell_crowds(now_s, event)
            return effects + self.board.step(now_s, event)
        if isinstance(event, Visits):
            self._presence.visit(event.peer)
            self._comes(event.peer)
            return self._meetings.tell(now_s, event)
        if isinstance(event, Left):
            return self._leave(now_s, event)
        return []

    # -- Rounds

    def _tell_crowds(self, now_s: float, event: Joined | Left) -> list[Effect]:
        return [effect for crowd in self._crowds.values() for effect in crowd.step(now_s, event)]

    def _average(self, now_s: float, ask: Average | Offer) -> list[Effect]:
        newcomer = ask.channel in self._newcomer_to
        self._newcomer_to.discard(ask.channel)
        if ask.channel in self._crowds:
            if isinstance(ask, Offer):
                raise ValueError(
                    f"channel {ask.channel} averages in groups; rows are gathered by all at once"
                )
            return self._crowds[ask.channel].step(now_s, replace(ask, weight=0.0) if newcomer else ask)
        return self._begin(now_s, ask, newcomer)

    # -- Arrivals

    def _arrived(self, now_s: float, event: Arrived) -> list[Effect]:
        runs, presence = event.runs, self._presence
        effects: list[Effect] = []
        hails = [run for run in runs if run.key.stage & HAIL and run.key.channel in self._lanes]
        if hails:  # who only answers may still compute: that is no sign that it takes part
            for run in hails:
                effects += self._hailed(now_s, run) if run.peer in presence else []
            rest = [run for run in runs if run not in hails]
            return effects + (self._arrived(now_s, Arrived(rest)) if rest else [])
        if len(runs) == 1:  # in a simulated world, always
            peer, key = runs[0].peer, runs[0].key
            if peer not in presence.heard:
                if peer not in presence:
                    return []  # no peer of this crew, or oneself
                effects = self._hear_of(peer, key.channel, key.round)
            more = self._deliver(now_s, key.channel, key.round, event)
            return effects + more if effects else more
        if not all(run.peer in presence for run in runs):
            event = Arrived(runs := [run for run in runs if run.peer in presence])
        at = 0
        while at < len(runs):  # consecutive runs of one round go to its machine together
            channel, number = runs[at].key.channel, runs[at].key.round
            until = at + 1
            while until < len(runs) and runs[until].key[:2] == (channel, number):
                until += 1
            part = event if until - at == len(runs) else Arrived(runs[at:until])
            for run in part.runs:
                if run.peer not in presence.heard:
                    effects += self._hear_of(run.peer, channel, number)
            effects += self._deliver(now_s, channel, number, part)
            at = until
        return effects

    def _exchange(self, number: int) -> Exchange:
        def make() -> Exchange:
            others = self._presence.others
            few = None if self.n <= PEERS_MAX else partners(self.me, others - self._presence.absent)
            return Exchange(others, number, few)

        return self._meetings.of(number, make)

    def _deliver(self, now_s: float, channel: int, number: int, event: Arrived) -> list[Effect]:
        if channel == MEET:
            return self._exchange(number).step(now_s, event)
        if channel in self._crowds:
            return self._crowds[channel].step(now_s, event)
        if channel == BOARD:
            return self.board.step(now_s, event)
        lane = self._lanes.get(channel)
        if lane is None:
            return []
        machine = lane.rounds.get(number)
        if machine is None and self.n > PEERS_MAX:
            return []  # a probe from before the crew grew so large
        growth = self.growth if machine is None else machine.spec.growth
        for run in event.runs:
            if run.key.block >> BLOCK_BITS != growth:
                return self._deliver_apart(now_s, channel, number, event)
        return self._deliver_alike(now_s, lane, number, event)

    # -- Who is there

    def _hear_of(self, peer: PeerId, channel: int, number: int) -> list[Effect]:
        """Something came from a peer. What is of rounds long done shows that it lives, but is behind."""
        if channel == BOARD:
            return []  # its driver answers there though its trainer may hang
        lane = self._lanes.get(channel)
        if lane is None and peer in self.gone:
            return []  # on its way in: it only talks
        return self._presence.hear(peer) if lane is None or number >= lane.done else []

    def _miss(self, effects: list[Effect]) -> list[Effect]:
        """After a meeting: who told nothing is absent."""
        return effects + self._presence.miss(p for e in effects if isinstance(e, Met) for p in e.missing)

    def _leave(self, now_s: float, event: Left) -> list[Effect]:
        self._went(event.peer)  # others may have dealt blocks to one on its way in already
        if event.peer in self.gone:
            return []
        self._presence.leave(event.peer)
        self._rtt_s.pop(event.peer, None)
        effects: list[Effect] = [Noted("left", event.peer), *self.board.step(now_s, event)]
        for number, lane in self._lanes.items():
            if lane.active is not None:
                effects += self._route(now_s, number, lane.active, event)
        return effects + self._meetings.tell(now_s, event) + self._tell_crowds(now_s, event)
