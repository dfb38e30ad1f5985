"""A newcomer's whole way in, in virtual time: let in, seated, met, given the state, heard, in an average.

What ``CrewWorld`` leaves out is done here as ``app.join``, ``app.transport`` and ``app.state`` do it. When
each part was over stands in ``Member.phases``.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from ragtag.core import seed as random
from ragtag.core.types import Done, Effect, Event, Met, Tell
from ragtag.protocols.membership.types import Entered, MemberEffect, MemberEvent
from ragtag.protocols.node import Node
from ragtag.protocols.transfer.types import Finished, chunk_bytes_for
from ragtag.simulation.worlds.crew import CHANNEL, CrewWorld
from ragtag.simulation.worlds.members import Life
from ragtag.simulation.worlds.process import Member, index_of
from ragtag.simulation.worlds.transfer import Giver, TransferWorld

PHASES = ("let in", "seat", "greeting", "schema", "state", "heard", "average")
"""What a newcomer does one after the other; ``Member.phases`` has when each was over."""
GREETING, SCHEMA = 0, 1
"""The meetings of a crew that averages on one channel."""
DONORS_MAX = 4
"""Donors that a newcomer asks, as in ``app.state``."""
DEADLINE_S = 60.0


class NewcomerWorld(CrewWorld):
    """A crew that has met and averages; its newcomers do all that live ones do.

    state_bytes: of the state that a newcomer fetches, state_rate: bytes per second of each donor. late:
    whether it knows that it comes late, and goes on without those that answer nothing when others do.
    """

    late = True

    state_bytes = 4_000_000
    state_rate = 4e7

    def _admitted(self, member: Member, node: Node) -> None:
        if member.index < self.founders:
            super()._admitted(member, node)
            for number in (GREETING, SCHEMA):
                self._give(member, Tell(number, b"", self.now_s + DEADLINE_S))
            return
        member.node = node
        self._passed(member, "seat")
        self._give(member, Tell(GREETING, b"", self.now_s + DEADLINE_S, late=self.late))

    def _passed(self, member: Member, phase: str) -> None:
        member.phases.setdefault(phase, self.now_s)

    def _stepped(self, life: Life, event: MemberEvent, effects: list[MemberEffect]) -> None:
        member = self.members.get(life.peer)
        if member is not None and any(isinstance(effect, Entered) for effect in effects):
            self._passed(member, "let in")
        super()._stepped(life, event, effects)

    def _apply(self, member: Member, effect: Effect) -> None:
        if isinstance(effect, Met) and member.index >= self.founders:
            self._met(member, effect)
        elif isinstance(effect, Done) and effect.outcome.averaged.any():
            self._passed(member, "average")
        super()._apply(member, effect)

    def _met(self, member: Member, met: Met) -> None:
        assert member.node is not None
        self._passed(member, PHASES[2 + met.number])
        if met.number == GREETING:
            self._open(member, member.node)
            self._give(member, Tell(SCHEMA, b"", self.now_s + DEADLINE_S, late=self.late))
        else:
            took_s = self._fetch_s(member)
            self.world.at(self.now_s + took_s, lambda: self._take_part(member))

    def _take_part(self, member: Member) -> None:
        self._passed(member, "state")
        self._describe(member, replace(member.card, averaging=True))

    def _give(self, member: Member, event: Event) -> None:
        super()._give(member, event)
        node, phases = member.node, member.phases
        if node is not None and "state" in phases and "heard" not in phases and node.newer(CHANNEL):
            self._passed(member, "heard")
            self._begin(member)

    def _fetch_s(self, member: Member) -> float:
        """How long it takes to fetch the state, from some of those that average; the deadline, if in vain."""
        assert member.node is not None
        able = [s for s, h in sorted(member.roster.seats.items()) if h.live and h.card.averaging]
        able = [seat for seat in able if member.node.heard_lately(seat)] or able
        key = random.stream_key(self.seed, "donors", member.index)
        asked = [able[i] for i in random.permutation(key, len(able))[:DONORS_MAX]]
        givers = {f"{seat}": self._giver(index_of(member.reach[seat])) for seat in asked}
        chunk_bytes = chunk_bytes_for(self.state_bytes)
        world = TransferWorld(givers, total_bytes=self.state_bytes, chunk_bytes=chunk_bytes, seed=self.seed)
        return world.now_s if isinstance(world.run(DEADLINE_S), Finished) else DEADLINE_S

    def _giver(self, index: int) -> Giver:
        """How a process gives its state from now on. One that freezes is not waited for until it thaws."""
        freezes = [f for f in self.world.faults.freezes if f.peer == index and f.at_s + f.for_s > self.now_s]
        stalls_s = min((f.at_s - self.now_s for f in freezes), default=math.inf)
        done = self.members[index].outcomes
        round_s = done[-1][0] - done[-2][0] if len(done) > 1 else self.step_s
        return Giver(
            rate_bytes_per_s=self.state_rate,
            rtt_s=2 * (self.world.faults.latency_s + self.world.faults.jitter_s),
            round=done[-1][1].round + 1 if done else 0,
            round_s=round_s,
            stalls_s=stalls_s,
            silent=stalls_s <= 0,
        )
