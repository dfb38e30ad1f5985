"""A whole crew in virtual time: membership, seats, and rounds in groups, peers that come, crash and leave.

A peer comes in by the machine of a live one (``protocols.crew.joining``) until it has a node. Then it
averages its values again and again. Membership's datagrams are carried as bytes (``members``), those of
rounds as runs (``link``). Each process has an index of its own, as in ``Faults``. The index is not its seat,
which other processes may have before and after it. A peer that loses its seat comes again as another process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Faults
from ragtag.core.types import (
    SEATS_MAX,
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Joined,
    Noted,
    PeerId,
    Send,
)
from ragtag.core.wire import VERSION
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.district import partners
from ragtag.protocols.crew.joining import (
    Anew,
    Describes,
    Ends,
    Enters,
    Joining,
    JoiningEffect,
    JoiningEvent,
    Looked,
    Make,
    PhaseOver,
    Unseat,
    node_of,
)
from ragtag.protocols.membership.roster import (
    NO_SEAT,
    Card,
    Reach,
    Roster,
    RosterEffect,
    Unseated,
    encode_card,
)
from ragtag.protocols.membership.types import Changed, Describe, Limits, MemberEffect, MemberEvent
from ragtag.protocols.node import Channel, Node
from ragtag.simulation.link import Link
from ragtag.simulation.loop import Port
from ragtag.simulation.worlds.members import Life, MemberWorld, address_of
from ragtag.simulation.worlds.process import Member, epoch_of, index_of, run_of

CHANNEL = 1
NAME, RAGTAG = "simulated", "0"
"""The crew's name, and its peers' version of Ragtag."""
DEADLINE_S = 60.0
"""How long a peer that comes in waits for others."""


class CrewWorld:
    """A crew whose ``founders`` start at once, each with a seat. Others ``come``.

    step_s: from the end of a round to the beginning of the next.
    peers_max: processes in all.
    asks: processes at whose places founders ask, beside each other's: their token names these.
    """

    def __init__(
        self,
        founders: int,
        method: Averager,
        faults: Faults,
        seed: int,
        *,
        n_chunks: int = 1,
        step_s: float = 0.1,
        peers_max: int = SEATS_MAX,
        limits: Limits | None = None,
        asks: frozenset[int] = frozenset(),
    ) -> None:
        self.founders, self.method, self.seed = founders, method, seed
        self.step_s, self._n_chunks = step_s, n_chunks
        self.world = MemberWorld(faults, seed, limits=limits)
        self.world.on_step = self._stepped
        self.members: dict[int, Member] = {}
        self._ports = [Port(self._step(index)) for index in range(peers_max)]
        """Of each process. It is given events for its node, or calls."""
        for crash in faults.crashes:
            port = self._ports[crash.peer]
            port.ends_s = min(crash.at_s, port.ends_s)
        for freeze in faults.freezes:
            self.world.loop.freeze(self._ports[freeze.peer], freeze.at_s, freeze.for_s)
        self.link = Link(faults, seed, self._ports, self._post, self.world.loop.at)
        everyone = frozenset(range(founders))
        for index in range(founders):
            member = self._start(index, partners(index, everyone - {index}) | asks, index)
            member.inside = set(everyone - {index})
            member.reach = {other: epoch_of(other) for other in member.inside}
            self._admitted(member, Node(index, founders, seed))

    # -- What a test does

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.world.now_s

    @property
    def rtt_s(self) -> float:
        """How long a round trip may take, as a live peer would have measured it."""
        return 4 * (self.world.faults.latency_s + self.world.faults.jitter_s)

    def come(self, index: int, entries: tuple[int, ...]) -> None:
        """Start a process that looks for a seat. index: a new one."""
        self._come(index, entries, Joining(NAME, RAGTAG, DEADLINE_S))

    def _come(self, index: int, entries: tuple[int, ...], joining: Joining) -> None:
        member = self._start(index, frozenset(entries), NO_SEAT)
        member.joining = joining
        self._join(member, Enters(member.roster, member.card, tuple(map(address_of, entries))))

    def crash(self, index: int) -> None:
        """A process ends without a word."""
        self._ports[index].ends_s = self.now_s
        self.world.crash(index)

    def leave(self, index: int) -> None:
        """A process tells that it goes, and ends."""
        self._ports[index].ends_s = self.now_s
        self.world.leave(index)

    def run(self, until_s: float) -> None:
        """Let time pass."""
        self.world.run(until_s)

    def running(self) -> list[Member]:
        """The processes that run and average."""
        return [
            m for i, m in self.members.items() if self._ports[i].ends_s > self.now_s and m.node is not None
        ]

    def agreed(self) -> bool:
        """Whether all running processes see the same peers in the same seats, and average with just these."""
        running = self.running()
        seats = {m.seat: m.life.machine.me.name for m in running}
        if len(seats) < len(running):
            return False
        for member in running:
            assert member.node is not None
            view = {seat: held.name for seat, held in member.roster.seats.items() if held.live}
            if view | {member.seat: seats[member.seat]} != seats or member.node.live != seats.keys():
                return False
        return True

    def spread(self) -> float:
        """The variance of the running peers' values about their mean, averaged over elements."""
        table = np.stack([member.values for member in self.running()]).astype(np.float64)
        return float(table.var(axis=0).mean())

    # -- Starting

    def _start(self, index: int, entries: frozenset[int], seat: PeerId) -> Member:
        life = self.world.start(index, tuple(sorted(entries)))
        me = life.machine.me
        founder = seat >= 0
        card = Card(
            *(VERSION, seat, 0, epoch_of(index), founder, *address_of(index), 0),
            *(self.founders if founder else 1, self.seed, self.method.seats_max),
        )
        draws = random.generator(self.seed, "crew", index).standard_normal((self._n_chunks, fp32.elements))
        member = Member(index, entries, life, Roster(me.name, me.epoch), card, draws.astype(np.float32))
        self.members[index] = member
        self._describe(member, card)
        return member

    def _describe(self, member: Member, card: Card) -> None:
        member.card = card
        member.roster.claim(card)
        if self._ports[member.index].ends_s > self.now_s:
            self.world.tell(member.life, Describe(encode_card(card)))

    def _admitted(self, member: Member, node: Node) -> None:
        """A process has a seat and averages at once. Here it meets no others, and fetches no state."""
        member.node, member.joining = node, None
        if not member.card.averaging:
            self._describe(member, replace(member.card, averaging=True))
        self._open(member, node)
        if member.index >= self.founders:
            node.resume(CHANNEL, -1)
        self._begin(member)

    def _open(self, member: Member, node: Node) -> None:
        """Open the channel."""
        rtt_s = self.rtt_s
        node.configure(CHANNEL, Channel(self.method, fp32, self._n_chunks, 2 * rtt_s, rtt_s), self.now_s)

    def _begin(self, member: Member) -> None:
        """A process averages from now on, after a random part of a step."""
        offset = random.uniform(random.stream_key(self.seed, "offset", member.index), 0)
        self._average_at(self.now_s + offset * self.step_s, member)

    def _average_at(self, at_s: float, member: Member) -> None:
        self._at(at_s, member, lambda: self._give(member, Average(CHANNEL, member.values, 1.0)))

    # -- Membership, and what a node learns from it

    def _stepped(self, life: Life, event: MemberEvent, effects: list[MemberEffect]) -> None:
        member = self.members.get(life.peer)
        if member is None or member.life is not life:
            return
        for effect in effects:
            if isinstance(effect, Changed):
                for told in member.roster.changed(effect.member, effect.was):
                    self._take(member, told)
        self._look(member)

    def _take(self, member: Member, told: RosterEffect) -> None:
        """Take what follows from a change of membership."""
        if isinstance(told, Reach):
            if member.reach.get(told.peer) != told.epoch:
                member.inside.discard(told.peer)
            member.reach[told.peer] = told.epoch
        elif isinstance(told, Unseated):
            if member.node is not None:
                member.unseated = told.reason
                self._unseat(member)
        elif isinstance(told, Noted):
            if told.what != "takes part" or told.peer not in member.inside:
                member.notes.append((self.now_s, told))
        else:
            known = told.peer in member.inside
            (member.inside.add if isinstance(told, Joined) else member.inside.discard)(told.peer)
            if member.node is not None and not (known and isinstance(told, Joined)):
                self._give(member, told)

    def _unseat(self, member: Member) -> None:
        """A process has lost its seat: it comes again as another, on the same way in if that is not over."""
        joining = member.joining
        if joining is not None and not joining.over:
            self._join(member, Unseat(member.unseated))
        else:
            self._again(member, Joining(NAME, RAGTAG, DEADLINE_S))

    def _again(self, member: Member, joining: Joining) -> None:
        member.node = None
        self.crash(member.index)
        self._come(1 + max(self.members), tuple(member.entries), joining)

    # -- The way in

    def _look(self, member: Member) -> None:
        """Tell a process's way in how membership stands."""
        machine, failure = member.life.machine, member.life.failed or ""
        if member.joining is None or not member.joining.looks:
            return
        inside, n = machine.entered, len(machine.live())
        self._join(member, Looked(inside, machine.over, failure, machine.period_s, n, machine.whole))

    def _join(self, member: Member, event: JoiningEvent) -> None:
        if member.joining is None or self._ports[member.index].ends_s <= self.now_s:
            return
        for effect in member.joining.step(self.now_s, event):
            self._do(member, effect)

    def _do(self, member: Member, effect: JoiningEffect) -> None:
        """Carry out an effect of the way in. ``Knock`` was done when the process started."""
        if isinstance(effect, Describes):
            self._describe(member, effect.card)
        elif isinstance(effect, Make):
            self._make(member, effect)
        elif isinstance(effect, Anew):
            assert member.joining is not None
            self._again(member, member.joining)
        elif isinstance(effect, Ends):
            member.failed = effect.why
        elif isinstance(effect, PhaseOver):
            member.phases.setdefault(effect.phase, self.now_s)
        elif isinstance(effect, Arm):
            self._join_at(effect.at_s, member, Expired(effect.timer))

    def _join_at(self, at_s: float, member: Member, event: Expired) -> None:
        def expire() -> None:
            self._join(member, event)
            self._look(member)

        self._at(at_s, member, expire)

    def _make(self, member: Member, made: Make) -> None:
        held = member.roster.seats
        live = {peer: holder for peer, holder in held.items() if holder.live}
        member.inside = {peer for peer, holder in live.items() if holder.card.averaging}
        member.reach = {peer: holder.card.epoch for peer, holder in live.items()}
        self._admitted(member, node_of(made.card, made.n, member.roster))

    # -- Rounds

    def _post(self, at_s: float, dest: int, event: Event) -> None:
        """A run comes from a process. It is taken if membership has told of that process in its seat."""

        def arrive() -> None:
            member = self.members[dest]
            assert isinstance(event, Arrived)
            (run,) = event.runs
            source = self.members[run.peer]
            if member.reach.get(source.seat) == source.card.epoch:
                self._give(member, Arrived((run_of(run, source.seat),)))

        self.world.loop.post(at_s, self._ports[dest], arrive)

    def _at(self, at_s: float, member: Member, call: Callable[[], object]) -> None:
        """Do something in a process."""
        self.world.loop.post(at_s, self._ports[member.index], call)

    def _give(self, member: Member, event: Event) -> None:
        self.world.loop.give(self._ports[member.index], event)

    def _step(self, index: int) -> Callable[[Event | Callable[[], object]], None]:
        def take(given: Event | Callable[[], object]) -> None:
            if callable(given):
                given()
                return
            member = self.members[index]
            for effect in [] if member.node is None else member.node.step(self.now_s, given):
                self._apply(member, effect)

        return take

    def _apply(self, member: Member, effect: Effect) -> None:
        now_s = self.now_s
        if isinstance(effect, Send):
            epoch = member.reach.get(effect.run.peer)
            if epoch is not None:
                moved = Send(run_of(effect.run, index_of(epoch)), effect.deadline_s)
                self.link.send(now_s, member.index, [moved])
        elif isinstance(effect, Arm):
            self.world.loop.post(max(now_s, effect.at_s), self._ports[member.index], Expired(effect.timer))
        elif isinstance(effect, Noted):
            member.notes.append((now_s, effect))
        elif isinstance(effect, Done):
            member.outcomes.append((now_s, effect.outcome))
            member.values = effect.outcome.mean.copy()
            self._average_at(now_s + self.step_s, member)
