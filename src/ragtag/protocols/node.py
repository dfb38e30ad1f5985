"""A node: one peer's part in all rounds of all channels.

It opens channels, each with the machine that its averager brings. Runs, timers and news of peers it routes to
these, to meetings and to the notice board. All of them know from one ``Crew`` which peers there are.
"""

from __future__ import annotations

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
    Posted,
    Publish,
    Role,
    Tell,
    Visits,
)
from ragtag.protocols.channel.averager import Channel, Machine, Opening
from ragtag.protocols.channel.budgets import HEADROOM
from ragtag.protocols.channel.far_rounds import CATCH_UP
from ragtag.protocols.channel.presence import GONE_AFTER, Crew
from ragtag.protocols.crew.board import BOARD, SHARES, Board
from ragtag.protocols.crew.district import partners
from ragtag.protocols.crew.meet import MEET, Meeting, Meetings
from ragtag.protocols.crew.standing import TOPIC as STANDING
from ragtag.protocols.crew.standing import elsewhere
from ragtag.protocols.rounds.asking import QUESTION

__all__ = ["CATCH_UP", "GONE_AFTER", "HEADROOM", "Channel", "Node"]


class Node:
    """The machine that a driver or a simulated world runs for one peer: it routes, no more.

    n: how many places the crew has, taken or not. It grows when a peer comes to a place beyond the last.
    founded: how many places the crew had when it began, the same on all peers. ``None``: ``n``.
    role: what this peer does. An auxiliary is asked for no average: it takes part in each round of its
        channels once something of the round comes, and ``Assisted`` tells what it has done.

    With more than ``PEERS_MAX`` places only averagers that work in groups are taken. A peer then meets a few
    others, and its notice board is that of a district (``district``).
    """

    def __init__(
        self, me: PeerId, n: int, seed: int, founded: int | None = None, role: Role = Role.TRAINER
    ) -> None:
        founded = n if founded is None else founded
        if not 1 <= n <= SEATS_MAX:
            raise ValueError(f"a crew of {n} peers: a crew has 1 to {SEATS_MAX}")
        if not 0 <= me < n:
            raise ValueError(f"peer {me} of {n}: a peer's number lies between 0 and {n - 1}")
        if not 1 <= founded <= n:
            raise ValueError(f"a crew of {n} peers that began with {founded}: crews grow, from 1 on")
        self.crew = Crew(me, n, seed, founded, role)
        self.channels: dict[int, Machine] = {}
        self.board = Board(me, n)
        self.crew.elsewhere = lambda channel: elsewhere(self.board.told(STANDING), channel)
        self._presence = self.crew.presence
        self._meetings = Meetings()
        self._room: dict[int, int] = {}

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self.crew.me

    @property
    def n(self) -> int:
        """How many places the crew has, taken or not."""
        return self.crew.n

    @property
    def founded(self) -> int:
        """How many places the crew had when it began."""
        return self.crew.founded

    @property
    def growth(self) -> int:
        """How many more blocks a vector is cut into than when the crew was founded."""
        return self.crew.growth

    @property
    def cut(self) -> int:
        """How many blocks a vector is cut into."""
        return self.crew.cut

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers that average now: this one, and those not silent for long."""
        return self.crew.live

    @property
    def auxiliary(self) -> frozenset[PeerId]:
        """The peers that only own blocks."""
        return self.crew.auxiliary

    @property
    def clients(self) -> frozenset[PeerId]:
        """The peers that average and own nothing."""
        return self.crew.clients

    @property
    def gone(self) -> frozenset[PeerId]:
        """The peers that have left."""
        return self.crew.gone

    def configure(self, number: int, channel: Channel, now_s: float = 0.0) -> None:
        """Open a channel, ready from ``now_s`` on. All peers of the crew configure it alike.

        Raises:
            ValueError: the channel has no chunks, its averager refuses it, the crew has more seats than that
                averager takes, or this peer is a client, and the averager has no owners.
        """
        if channel.n_chunks < 1:
            raise ValueError("a channel of no values: there is nothing to average")
        averager = channel.averager
        if not (self.crew.role.owns or averager.owned or averager.kind in ("central", "published")):
            raise ValueError(
                f"{averager!r} has no owners of blocks, and this peer is a client: others average what it "
                "sends. Use RPS() or AllReduce(), or start this peer as one that averages, too"
            )
        most = averager.seats_max
        if self.n > most:
            raise ValueError(f"{self.n} seats, and {averager.name!r} averages {most} at most; {LARGER_CREWS}")
        self.channels[number] = averager.open(Opening(number, channel, self.crew, now_s))
        self._room[number] = SEATS_MAX if channel.passing else most

    def probed(self, number: int, probe_s: float, now_s: float) -> None:
        """A probe has been measured: how long the channel's first round may take."""
        self.channels[number].probed(probe_s, now_s)

    @property
    def room(self) -> int:
        """How many seats the crew may have, so that each of its averagers can average them."""
        return min(self._room.values(), default=SEATS_MAX)

    def silent_rounds(self, peer: PeerId) -> int:
        """How many rounds in a row nothing has come from a peer."""
        return self._presence.silent_rounds(peer)

    def heard_lately(self, peer: PeerId) -> bool:
        """Whether a peer is here, and has not been silent when it owed a message."""
        return self._presence.heard_lately(peer)

    def awaited(self, number: int) -> frozenset[PeerId]:
        """The peers that a meeting of this number still waits for (any thread may ask)."""
        return self._meetings.awaited(number)

    def resume(self, number: int, round_: int) -> None:
        """The crew has averaged before this peer came: a channel's next round comes after ``round_``.

        This peer's first average (of each fragment) has weight 0: it takes the crew's values, and gives from
        then on.
        """
        self.channels[number].resume(round_)

    def heard_of(self, number: int) -> int:
        """The newest round of a channel from which anything has come; -1: none."""
        return self.channels[number].highest

    def newer(self, number: int) -> bool:
        """Whether others are known to be past this peer's last round of a channel, so that it can follow."""
        return self.channels[number].newer()

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Arrived):
            return self._arrived(now_s, event)
        if isinstance(event, Expired):
            if event.timer.channel == BOARD:
                return self.board.step(now_s, event)
            if event.timer.channel == MEET:
                return self._miss(self._meeting(event.timer.round).step(now_s, event))
            machine = self.channels.get(event.timer.channel)
            return [] if machine is None else machine.step(now_s, event)
        if isinstance(event, Average | Offer | Publish):
            machine = self.channels.get(event.channel)
            if machine is None:
                raise KeyError(f"channel {event.channel} is not configured; call configure() first")
            return machine.step(now_s, event)
        if isinstance(event, Tell):
            meeting = self._meeting(event.number)
            # a peer that was absent at a meeting is not waited for again, unless it is known to come
            there, presence = event.there, self._presence
            meeting.without(presence.absent if there is None else presence.others - there | self.gone)
            return meeting.step(now_s, event)
        if isinstance(event, Post):
            return self._planned(self.board.step(now_s, event))
        if isinstance(event, Measured):
            if event.rate_bytes_per_s > 0:
                self.crew.rate_bytes_per_s[event.peer] = event.rate_bytes_per_s
            self.crew.shortest_s[event.peer] = event.shortest_s
            if event.rtt_s == 0:
                return []
            self.crew.rtt_s[event.peer] = event.rtt_s
            return self.board.step(now_s, event)
        if isinstance(event, Joined):
            if event.peer >= self.room:
                why = f"seat {event.peer}, and this crew averages at most {self.room}; {LARGER_CREWS}"
                return [Noted("refused", event.peer, why)]
            self.crew.came(event.peer)
            if not event.role.gives:  # whatever is no round takes it for a visitor
                return self._presence.assist(event.peer) + self._visited(now_s, event)
            if event.peer in self._presence and event.peer not in self.gone and not event.role.owns:
                # of a peer that takes part already, its role alone is news: it is no new process
                return self._presence.joined(event.peer, event.role) + self._tell_channels(now_s, event)
            effects = self._miss(self._meetings.tell(now_s, event))
            effects += self._presence.joined(event.peer, event.role) + self._tell_channels(now_s, event)
            return effects + self.board.step(now_s, event)
        if isinstance(event, Visits):
            self._presence.visit(event.peer)
            self.crew.comes(event.peer)
            return self._visited(now_s, event)
        if isinstance(event, Left):
            return self._leave(now_s, event)
        return []

    def _visited(self, now_s: float, event: Joined | Visits) -> list[Effect]:
        visits = Visits(event.peer, event.role)
        effects = self._tell_channels(now_s, visits) + self._meetings.tell(now_s, visits)
        return effects + self.board.step(now_s, visits)

    def _tell_channels(self, now_s: float, event: Joined | Left | Visits) -> list[Effect]:
        return [effect for machine in self.channels.values() for effect in machine.step(now_s, event)]

    # -- Arrivals

    def _arrived(self, now_s: float, event: Arrived) -> list[Effect]:
        runs, presence = event.runs, self._presence
        effects: list[Effect] = []
        if len(runs) == 1 and not runs[0].key.stage & QUESTION:  # in a simulated world, mostly
            peer, key = runs[0].peer, runs[0].key
            if peer not in presence.heard:
                if peer not in presence:
                    return []  # no other peer of this crew
                effects = self._hear_of(now_s, peer, key.channel, key.round)
            more = self._deliver(now_s, key.channel, key.round, event)
            return effects + more if effects else more
        questions = [run for run in runs if run.key.stage & QUESTION and run.key.channel in self.channels]
        if questions:  # a peer that only answers may still compute: that is no sign that it takes part
            for run in questions:
                if run.peer in presence:
                    effects += self.channels[run.key.channel].step(now_s, Arrived([run]))
            rest = [run for run in runs if run not in questions]
            return effects + (self._arrived(now_s, Arrived(rest)) if rest else [])
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
                    effects += self._hear_of(now_s, run.peer, channel, number)
            effects += self._deliver(now_s, channel, number, part)
            at = until
        return effects

    def _meeting(self, number: int) -> Meeting:
        def make() -> Meeting:
            others = self._presence.others
            few = None if self.n <= PEERS_MAX else partners(self.me, others - self._presence.absent)
            return Meeting(others, number, few, self.crew.rtt_s)

        return self._meetings.of(number, make)

    def _deliver(self, now_s: float, channel: int, number: int, event: Arrived) -> list[Effect]:
        machine = self.channels.get(channel)
        if machine is not None:
            return machine.step(now_s, event)
        if channel == MEET:
            return self._meeting(number).step(now_s, event)
        return self._planned(self.board.step(now_s, event)) if channel == BOARD else []

    def _planned(self, effects: list[Effect]) -> list[Effect]:
        """After a step of the board: plans of shares that came are those of this node's channels."""
        noted: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Posted) and effect.topic == SHARES:
                try:
                    self.crew.plans.take(effect.peer, effect.blob)
                except ValueError as error:
                    noted.append(Noted("refused", effect.peer, str(error)))
        return effects + noted

    # -- Who is there

    def _hear_of(self, now_s: float, peer: PeerId, channel: int, number: int) -> list[Effect]:
        """Something came from a peer."""
        if channel == BOARD:
            return []  # its driver answers there though its trainer may hang
        machine = self.channels.get(channel)
        here = peer not in self.gone if machine is None else machine.shows(now_s, peer, number)
        return self._presence.hear(peer) if here else []

    def _miss(self, effects: list[Effect]) -> list[Effect]:
        """After a meeting: peers that told nothing are absent."""
        return effects + self._presence.miss(p for e in effects if isinstance(e, Met) for p in e.missing)

    def _leave(self, now_s: float, event: Left) -> list[Effect]:
        self.crew.went(event.peer)  # others may have given blocks to a peer on its way in already
        if event.peer in self.gone - self.auxiliary:
            return self._tell_channels(now_s, event) + self.board.step(now_s, event)
        self._presence.leave(event.peer)
        self.crew.rtt_s.pop(event.peer, None)
        self.crew.shortest_s.pop(event.peer, None)
        self.crew.rate_bytes_per_s.pop(event.peer, None)
        effects: list[Effect] = [Noted("left", event.peer), *self.board.step(now_s, event)]
        return effects + self._tell_channels(now_s, event) + self._meetings.tell(now_s, event)
