"""A newcomer's whole way in, in virtual time: it is let in, has a seat, meets the others, fetches the state,
is heard, and is in an average.

It uses the machines of a live peer (``protocols.crew.joining``) over ``CrewWorld``'s lines. ``Member.phases``
says when each phase was over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Arm, Done, Effect, Event, Expired, Left, Met, Start, Tell
from ragtag.core.wire import VERSION
from ragtag.protocols.crew.joining import (
    GREETING,
    PHASES,
    ChannelEffect,
    ChannelEvent,
    ChannelWay,
    Differs,
    Fetching,
    Heard,
    Hello,
    In,
    IsOpen,
    JoiningEffect,
    Newer,
    PhaseOver,
    StateHere,
    TakesPart,
)
from ragtag.protocols.node import Node
from ragtag.protocols.transfer.types import Finished, chunk_bytes_for
from ragtag.simulation.worlds.crew import CHANNEL, DEADLINE_S, RAGTAG, CrewWorld
from ragtag.simulation.worlds.process import Member, index_of
from ragtag.simulation.worlds.transfer import SimulatedDonor, TransferWorld

__all__ = ["DEADLINE_S", "PHASES", "NewcomerWorld"]
DONORS_MAX = 4
"""How many donors a newcomer asks, as in ``app.crew.state``."""


class NewcomerWorld(CrewWorld):
    """A crew that has met and averages. Its newcomers do all that live ones do.

    late: a newcomer knows that it comes late, and goes on without peers that do not answer.
    state_bytes: the size of the state that a newcomer fetches.
    state_rate: bytes per second of each donor.
    """

    late = True

    state_bytes = 4_000_000
    state_rate = 4e7

    def _admitted(self, member: Member, node: Node) -> None:
        member.node = node
        if member.index < self.founders:
            super()._admitted(member, node)
            hello = msgspec.json.encode(Hello(RAGTAG, VERSION, self.founders, self.seed))
            for number, blob in ((GREETING, hello), (CHANNEL, self.schema(member).encode())):
                self._give(member, Tell(number, blob, self.now_s + DEADLINE_S))

    def schema(self, member: Member) -> Schema:
        """The schema of what a process averages."""
        values = TensorSpec("values", (member.values.size,), "float32")
        return Schema((values,), fp32.name, self.method.name)

    # -- The way in

    def _do(self, member: Member, effect: JoiningEffect) -> None:
        if isinstance(effect, In):
            assert member.node is not None
            self._open(member, member.node)
            schema = self.schema(member)
            chunks = schema.n_chunks(fp32.elements)
            member.opening = ChannelWay(member.seat, CHANNEL, schema, chunks, DEADLINE_S, late=True)
            self._open_step(member, Start())
        elif isinstance(effect, Tell | Left):
            self._tell(member, effect)
        else:
            super()._do(member, effect)

    def _tell(self, member: Member, event: Tell | Left) -> None:
        if isinstance(event, Tell):
            event = Tell(event.number, event.blob, event.deadline_s, event.late and self.late, event.there)
        self._give(member, event)

    def _open_step(self, member: Member, event: ChannelEvent) -> None:
        if member.opening is not None and member.node is not None:
            for effect in member.opening.step(self.now_s, event):
                self._do_opening(member, member.node, effect)

    def _do_opening(self, member: Member, node: Node, effect: ChannelEffect) -> None:
        if isinstance(effect, Tell | Left):
            self._tell(member, effect)
        elif isinstance(effect, IsOpen):
            node.probed(CHANNEL, effect.probe_s, self.now_s)
            self._open_step(member, Fetching())
            self._open_at(self.now_s + self._fetch_s(member), member, StateHere())
        elif isinstance(effect, TakesPart):
            node.resume(CHANNEL, effect.round)
            self._describe(member, replace(member.card, averaging=True))
        elif isinstance(effect, PhaseOver):
            member.phases.setdefault(effect.phase, self.now_s)
            if effect.phase == "heard":
                self._begin(member)
        elif isinstance(effect, Differs):
            member.failed = effect.why
        elif isinstance(effect, Arm):
            self._open_at(effect.at_s, member, Expired(effect.timer))

    def _open_at(self, at_s: float, member: Member, event: ChannelEvent) -> None:
        self._at(at_s, member, lambda: self._open_step(member, event))

    def _apply(self, member: Member, effect: Effect) -> None:
        if isinstance(effect, Met) and member.node is not None and member.joining is not None:
            node = member.node
            if effect.number == GREETING:
                self._join(member, Heard(effect, node.n, node.gone, self.rtt_s))
            else:
                self._open_step(member, Heard(effect, node.n, node.gone, self.rtt_s, node.heard_of(CHANNEL)))
        elif isinstance(effect, Done):
            self._open_step(member, effect)
        super()._apply(member, effect)

    def _step(self, index: int) -> Callable[[Event | Callable[[], object]], None]:
        take = super()._step(index)

        def take_and_look(given: Event | Callable[[], object]) -> None:
            take(given)
            member = self.members[index]
            if callable(given):  # events that the call gives to the node come here themselves
                return
            if member.node is not None and CHANNEL in member.node.channels and member.node.newer(CHANNEL):
                self._open_step(member, Newer())

        return take_and_look

    def _fetch_s(self, member: Member) -> float:
        """How long a newcomer takes to fetch the state from peers that average; in vain: the deadline."""
        assert member.node is not None
        able = [s for s, h in sorted(member.roster.seats.items()) if h.live and h.card.averaging]
        able = [seat for seat in able if member.node.heard_lately(seat)] or able
        key = random.stream_key(self.seed, "donors", member.index)
        asked = [able[i] for i in random.permutation(key, len(able))[:DONORS_MAX]]
        donors = {f"{seat}": self._donor(index_of(member.reach[seat])) for seat in asked}
        chunk_bytes = chunk_bytes_for(self.state_bytes)
        world = TransferWorld(donors, total_bytes=self.state_bytes, chunk_bytes=chunk_bytes, seed=self.seed)
        return world.now_s if isinstance(world.run(DEADLINE_S), Finished) else DEADLINE_S

    def _donor(self, index: int) -> SimulatedDonor:
        """How a process gives its state from now on. One that freezes stalls, and does not go on."""
        freezes = [f for f in self.world.faults.freezes if f.peer == index and f.at_s + f.for_s > self.now_s]
        stalls_s = min((f.at_s - self.now_s for f in freezes), default=math.inf)
        done = self.members[index].outcomes
        round_s = done[-1][0] - done[-2][0] if len(done) > 1 else self.step_s
        return SimulatedDonor(
            rate_bytes_per_s=self.state_rate,
            rtt_s=2 * (self.world.faults.latency_s + self.world.faults.jitter_s),
            round=done[-1][1].round + 1 if done else 0,
            round_s=round_s,
            stalls_s=stalls_s,
            silent=stalls_s <= 0,
        )
