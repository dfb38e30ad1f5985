"""One round inside a group: reduce-scatter and all-gather among its members, numbered from 0."""

from __future__ import annotations

from dataclasses import replace

from ragtag.core.types import (
    Arrived,
    Average,
    Begin,
    Done,
    Effect,
    Expired,
    Floats,
    MessageKey,
    Noted,
    Outcome,
    PeerId,
    Run,
    Send,
    Timer,
)
from ragtag.protocols.groups.host import Roster
from ragtag.protocols.groups.machine import GroupChannel
from ragtag.protocols.rounds.base import Spec
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.reduce import scatter_gather

BLOCK_BITS = 6
"""A block's number inside a group has so many bits of a key; the group's tag has the rest."""
_BLOCKS = 1 << BLOCK_BITS


class Group:
    """The machine of ``rounds.reduce`` among a group's members, with keys and peers renamed on the way."""

    def __init__(
        self,
        me: PeerId,
        number: int,
        roster: Roster,
        channel: GroupChannel,
        repair_s: float | None,
        scratch: Floats | None = None,
    ) -> None:
        self.roster, self.tag = roster, roster.tag
        self._channel, self._number = channel, number
        self._local = {peer: i for i, peer in enumerate(roster.peers)}
        k = len(roster.peers)
        self.machine = scatter_gather(
            Spec(
                me=self._local[me],
                channel=channel.number,
                round=number,
                layout=layout_of(channel.n_chunks, k),
                # owners rotate: fixed ones weigh more in the mean where chunks are lost (RPS, algorithm 1)
                owners=tuple((j + number) % k for j in range(k)),
                members=frozenset(range(k)),
                codec=channel.codec,
                repair_s=repair_s,
                scratch=scratch,
            )
        )

    def begin(
        self, now_s: float, ask: Average, scatter_s: float, gather_s: float, answer_s: float
    ) -> list[Effect]:
        """Scatter this peer's values, and wait for all other members."""
        everyone = frozenset(range(len(self.roster.peers)))
        begin = Begin(ask.values, ask.weight, everyone, scatter_s, gather_s, answer_s=answer_s)
        return self._out(self.machine.step(now_s, begin))

    def take(self, now_s: float, run: Run) -> list[Effect]:
        """Take a run of this group (the caller has compared its tag)."""
        local = self._local.get(run.peer)
        if local is None:
            return []
        key = run.key
        inner = MessageKey(key.channel, key.round, key.stage, key.block & _BLOCKS - 1)
        moved = Run(
            local, inner, run.first, run.total, run.payload, run.weight, run.heard, run.mask, run.ended
        )
        return self._out(self.machine.step(now_s, Arrived((moved,))))

    def expire(self, now_s: float, timer: Timer) -> list[Effect]:
        """One of the group's timers has run out."""
        return self._out(self.machine.step(now_s, Expired(timer)))

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A member is gone."""
        local = self._local.get(peer)
        return [] if local is None else self._out(self.machine.passed(now_s, local))

    def owed_something(self, missed: tuple[PeerId, ...]) -> bool:
        """Whether a missed member is slow rather than dead: something came from it, and more might."""
        lesson = self.machine.lesson()
        missed_here = (self._local[peer] for peer in missed)
        return any(lesson.owed.get(at) and at not in lesson.in_vain for at in missed_here)

    def _out(self, effects: list[Effect]) -> list[Effect]:
        peers = self.roster.peers
        for i, effect in enumerate(effects):
            if isinstance(effect, Send):
                run, key = effect.run, effect.run.key
                wire = MessageKey(key.channel, key.round, key.stage, self.tag << BLOCK_BITS | key.block)
                moved = Run(
                    peers[run.peer],
                    wire,
                    run.first,
                    run.total,
                    run.payload,
                    run.weight,
                    run.heard,
                    run.mask,
                    run.ended,
                )
                effects[i] = Send(moved, effect.deadline_s, effect.first)
            elif isinstance(effect, Noted):
                effects[i] = Noted(effect.what, peers[effect.peer], effect.detail)
            elif isinstance(effect, Done):
                effects[i] = Done(self._named(effect.outcome))
        return effects

    def _named(self, outcome: Outcome) -> Outcome:
        peers = self.roster.peers
        return replace(
            outcome,
            members=peers,
            missed=tuple(sorted(peers[i] for i in outcome.missed)),
            waited_for=tuple(sorted(peers[i] for i in outcome.waited_for)),
        )
