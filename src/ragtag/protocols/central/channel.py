"""A central state without a master: peers push updates to it, and any of them can rebuild it.

The state is a vector in blocks (``layout``), and each block has an owner among the live peers (``owners``).
An ``Average`` is one turn of a peer. To each block's owner the peer pushes an update: the difference of its
values to those that its last turn ended with, and the version that they came from. The owner judges the
update by a rule (``block.Rule``: a schedule). What it accepts makes the block's next version. It answers with
the block's newest values, which are the outcome's mean, and the peer goes on from these. Versions differ by
block, and so does staleness: the owner's count, less the base's.

- A first turn, and one of weight 0, only takes. A block that no peer has is founded on its owner's values.
- A rule with a barrier answers when a version closes. At a deadline learned from earlier ones it closes with
  what it has. A peer that misses it twice in a row does not count until it comes again. Blocks then count
  their versions as one clock (Lamport's): an update says how far its peer has seen any block come, and a
  block that is behind closes at once and goes on from there. Else blocks out of step would hold each other
  up.
- An owner may lack the newest values: it has just come to own the block, or it sees an update of a newer
  version. Then it asks all peers what they have, and goes on from the newest copy (``rebuild``), as each peer
  keeps the values that it last took. So the loss of an owner costs what no peer had taken yet, mostly one
  turn.
- Each update counts at most once: an owner remembers the newest of each peer, and no update goes to a second
  owner. How much of an update a dead owner had passed on is unknown, so its peer takes the block anew
  instead.
- A peer never takes an older version of a block than it has: versions (``wire``) are in one order.
- Where no answer comes by the deadline a peer keeps its own values, and measures its next update from them.

A server for parameters: "Scaling Distributed Machine Learning with the Parameter Server", Li et al., OSDI
2014; here the workers are the servers. Rules name their own sources. An owner's machine answers, not its
trainer, so a peer that computes for long holds up no other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Joined,
    Left,
    MessageKey,
    Noted,
    Offer,
    PeerId,
    Run,
    Send,
    Timer,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.central import wire
from ragtag.protocols.central.block import Correction, Rule
from ragtag.protocols.central.owners import GONE_AFTER, Owners
from ragtag.protocols.central.server import BlockServer
from ragtag.protocols.central.speeds import PACE_WINDOW, Grouping
from ragtag.protocols.central.turn import Turn, new_turn
from ragtag.protocols.channel.averager import Averager, Opening
from ragtag.protocols.rounds.base import BLOCK_BITS, NACK
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.repair import BITS, COPIES, Pause, request, requested

HEADROOM = 3.0
"""A turn may take this many times as long as nine in ten recent ones: one that is cut short loses answers."""
NUMBER_MAX = 0xFFFFFFFF
"""Numbers of turns travel in 32 bits."""


class CentreNode:
    """One peer's part in the central state: its own turns. A ``BlockServer`` has the blocks that it owns."""

    def __init__(
        self,
        opening: Opening,
        rule: Rule,
        grouping: Grouping | None = None,
        correction: Correction | None = None,
    ) -> None:
        channel, crew = opening.channel, opening.crew
        if channel.fragments > 1:
            raise ValueError("a central state has a version for each block: no fragments")
        self.me, self._channel, self._codec = crew.me, opening.number, channel.codec
        self._shape = (channel.n_chunks, channel.codec.elements)
        self._row_bytes = channel.codec.encode(np.zeros((1, self._shape[1]), np.float32)).shape[1]
        self.layout = layout_of(channel.n_chunks, min(wire.BLOCKS_MAX, channel.n_chunks))
        self.owners = Owners(crew.me, crew.seed, self.layout.n_blocks, opening.peers, crew.clients)
        self._newcomer = False
        self.done = self.highest = -1
        self.active: int | None = None
        self._turn: Turn | None = None
        self._anchor: Floats | None = None  # the last turn's mean: updates are measured from it
        self._rule = rule
        self._ended_s: float | None = None
        self._late: tuple[int, float] = (-1, 0.0)  # the last turn that met its deadline, and its start
        self._changes = self.owners.changes
        self._took = Deadline(channel.probe_s, headroom=HEADROOM)
        self.server = BlockServer(
            opening, rule, self.layout, self.owners, self._patience_s, grouping, correction
        )
        self._grouped = grouping is not None
        self._clock = 0
        self._computed_s: deque[float] = deque(maxlen=PACE_WINDOW)

    # -- What a node asks of it

    def probed(self, probe_s: float, now_s: float = 0.0) -> None:
        """One exchange of the whole vector takes this long: deadlines begin from that."""
        self._took = Deadline(probe_s, headroom=HEADROOM)
        self.server.probed(probe_s)

    def resume(self, round_: int) -> None:
        """The next turn comes after ``round_``, and only takes."""
        self._newcomer = True
        self.done = max(self.done, round_)

    def newer(self) -> bool:
        """Yes: whether the state has gone on shows in a turn."""
        return True

    def shows(self, now_s: float, peer: PeerId, number: int) -> bool:
        """Whether the sender takes part: a peer that has left, or is on its way in, does not."""
        return peer in self.owners

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event and say what to do."""
        effects: list[Effect] = []
        if isinstance(event, Arrived):
            for run in event.runs:
                effects += self._arrived(now_s, run)
        elif isinstance(event, Expired):
            effects += self._expired(now_s, event.timer)
        elif isinstance(event, Average):
            ask = replace(event, weight=0.0) if self._newcomer else event
            self._newcomer = False
            effects += self._average(now_s, ask)
        elif isinstance(event, Offer):
            raise ValueError(f"channel {event.channel} is a central state; rows are gathered by all at once")
        elif isinstance(event, Joined):
            self.owners.joined(event.peer, event.role.owns)
            self.server.forget(event.peer)
        elif isinstance(event, Left) and event.peer != self.me:
            self.owners.left(event.peer)
            self.server.forget(event.peer)
            effects += self.server.left(now_s, event.peer)
        if self.owners.changes != self._changes:
            self._changes = self.owners.changes
            effects += self.server.review(now_s)
            effects += self._land(now_s)
            effects += self._again(now_s)
        return effects + self._land(now_s)

    def _land(self, now_s: float) -> list[Effect]:
        """Take the server's answers to this peer itself. A turn ends once all its blocks are answered."""
        effects, turn = self.server.turned(now_s), self._turn
        for block, answer in self.server.take_own():
            if turn is not None and turn.open.get(block) == self.me and answer.number == turn.number:
                held = self.server.copies.blocks[block]
                assert held.values is not None
                turn.land(self.layout.spans[block], held.values, held.version, held.contributors(answer))
                self._clock = wire.later(self._clock, answer.clock)
                turn.close(block, answer.stale)
        return effects + (self._finish(now_s, expired=False) if turn is not None and not turn.open else [])

    # -- A turn

    def _average(self, now_s: float, ask: Average) -> list[Effect]:
        if self._turn is not None:
            raise RuntimeError(f"turn {self.active} is not done yet; one at a time")
        if ask.channel != self._channel:
            raise KeyError(f"channel {ask.channel} is not this machine's, which is {self._channel}")
        given = ask.values
        if given.shape != self._shape or given.dtype != np.float32 or not given.flags.c_contiguous:
            raise ValueError(
                f"values of shape {given.shape}, {given.dtype}; give contiguous float32 of {self._shape}"
            )
        number = self.done + 1
        if number > NUMBER_MAX:
            raise RuntimeError(f"channel {self._channel} has had {number} turns, as many as can be numbered")
        self.active = self.highest = number
        computed_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        self.server.begins(given, computed_s)
        if self._grouped and computed_s > 0:
            self._computed_s.append(computed_s)
        step_s = median_low(self._computed_s) if self._computed_s else None
        turn = self._turn = new_turn(number, ask, now_s, now_s + self._budget_s(ask.deadline_s))
        known = self.server.copies.versions
        learned = None if self._anchor is None or ask.weight <= 0 else given - self._anchor
        effects: list[Effect] = []
        lead = self._lead()
        for block in self._in_turn():
            span = self.layout.spans[block]
            owner = turn.open[block] = self.owners[block]
            if learned is None or not known[span].all():
                effects += self._pull(now_s, turn, block, owner)
            elif owner == self.me:
                effects += self.server.push_own(
                    now_s, block, number, ask.weight, learned[span], lead[block], step_s
                )
            else:
                effects.append(self._push(turn, block, owner, learned[span], lead[block], step_s))
        return [*effects, Arm(Timer(self._channel, number, "turn"), turn.until_s)]

    def _budget_s(self, at_most_s: float | None) -> float:
        self._took.floor_s = self.server.floor_s()
        budget_s = self._took.budget_s()
        return budget_s if at_most_s is None else min(budget_s, at_most_s)

    def _patience_s(self) -> float:
        """How long a block may be on its way."""
        return self._took.budget_s()

    def _lead(self) -> list[int]:
        """What an update says above its block's number.

        Where a barrier makes versions one clock: how many the block is behind the furthest. Where peers step
        in groups: their clock.
        """
        if self._grouped:
            return [self._clock] * self.layout.n_blocks
        versions = self.server.copies.versions
        counts = [wire.count_of(int(versions[span].min())) for span in self.layout.spans]
        return [min(wire.LEAD_MAX, max(counts) - count) if self._rule.barrier else 0 for count in counts]

    def _in_turn(self) -> list[int]:
        """The blocks, those of the next peers first, so that not all send to one owner at once."""
        blocks = self.layout.n_blocks
        return sorted(range(blocks), key=lambda block: ((self.owners[block] - self.me) % 64, block))

    def _push(
        self, turn: Turn, block: int, owner: PeerId, learned: Floats, lead: int, step_s: float | None
    ) -> Send:
        span, size = self.layout.spans[block], self.layout.sizes[block]
        key = MessageKey(self._channel, turn.number, wire.PUSH, lead << BLOCK_BITS | block)
        weight = np.full(size, turn.ask.weight, np.float32)
        bases = wire.with_pace(self.server.copies.versions[span].astype(np.uint64), step_s)
        turn.owners.add(owner)
        run = turn.sent[block] = Run(
            owner, key, 0, size, self._codec.encode(learned), weight, bases, ended=True
        )
        return Send(run, turn.until_s)

    def _pull(self, now_s: float, turn: Turn, block: int, owner: PeerId) -> list[Effect]:
        turn.pulled.add(block)
        known = int(self.server.copies.versions[self.layout.spans[block]].max())
        if owner == self.me:
            return self.server.pull(now_s, block, self.me, turn.number, known)
        turn.owners.add(owner)
        key = MessageKey(self._channel, turn.number, wire.PULL, block)
        return [Send(wire.small(owner, key, wire.encode_pull(known)), max(now_s, turn.until_s))]

    def _again(self, now_s: float) -> list[Effect]:
        """Owners have changed in mid-turn: take these blocks from their new owners.

        The update is not sent again: it may be in the copies that the next owner finds.
        """
        turn = self._turn
        if turn is None:
            return []
        effects: list[Effect] = []
        gone = {b for b, owner in turn.open.items() if owner not in self.owners}
        for block in sorted(
            gone | {b for b, owner in turn.open.items() if owner == self.me != self.owners[b]}
        ):
            owner = turn.open[block] = self.owners[block]
            turn.sent.pop(block, None)
            effects += self._pull(now_s, turn, block, owner)
        return effects

    # -- Arrivals

    def _arrived(self, now_s: float, run: Run) -> list[Effect]:
        key = run.key
        if run.peer == self.me or key.channel != self._channel or run.peer not in self.owners:
            return []
        effects: list[Effect] = []
        was = self.owners.heard(run.peer)
        if was >= GONE_AFTER:
            effects.append(Noted("owner heard again", run.peer, f"after {was} silent turn{'s' * (was > 1)}"))
        if self._turn is not None:
            self._turn.came.add(run.peer)
        block, stage = wire.block_of(key), key.stage & ~NACK
        if block >= self.layout.n_blocks or stage > wire.HOLD:
            return effects
        size = self.layout.sizes[block]
        if key.stage & NACK:
            fits = run.total == COPIES * -(-size // BITS) and run.payload.shape[1] == CHUNK_BYTES
            if fits and stage == wire.PUSH:
                return effects + self._resend(now_s, run, block)
            return effects + (self.server.lacks(now_s, run, block, stage) if fits else [])
        if stage in (wire.PUSH, wire.STATE, wire.COPY):
            rows = len(run.payload)
            if (
                run.total != size
                or run.first + rows > size
                or (rows and run.payload.shape[1] != self._row_bytes)
            ):
                return effects
        if stage == wire.STATE:
            return effects + self._state(now_s, run, block)
        return effects + self.server.take(now_s, run, block, stage)

    def _resend(self, now_s: float, run: Run, block: int) -> list[Effect]:
        """An owner lacks chunks of this peer's update."""
        turn = self._turn
        sent = None if turn is None else turn.sent.get(block)
        if turn is None or sent is None or sent.peer != run.peer or run.key.round != turn.number:
            return []
        asked = requested(run, sent.total)
        again = Run(
            sent.peer, sent.key, 0, sent.total, sent.payload, sent.weight, sent.heard, mask=asked, ended=True
        )
        return [Send(again, max(now_s, turn.until_s))] if asked.any() else []  # after a freeze it may be late

    def _state(self, now_s: float, run: Run, block: int) -> list[Effect]:
        """An owner's answer has come."""
        turn = self._turn
        here = np.arange(len(run.payload)) if run.mask is None else np.flatnonzero(run.mask)
        number, stale, clock = wire.echoed(float(run.weight[here[0]])) if len(here) else (-1, 0, 0)
        if (
            self._late[0] >= 0
            and number == self._late[0] & 0xFF
            and (turn is None or turn.number & 0xFF != number)
        ):
            self._took.late(now_s - self._late[1])
            self._late = (-1, 0.0)
        if turn is None or turn.open.get(block) != run.peer:
            return []
        span = self.layout.spans[block]
        if wire.count_of(wire.state_version(run.key)) > wire.BELIEVED:
            return []
        if len(here) and number == turn.number & 0xFF:
            turn.store(run, span.start + run.first, self.server.copies.versions, self._codec)
            if not turn.left[span].any():
                turn.close(block, stale)
                self._clock = wire.later(self._clock, clock)
                return []
        if not run.ended:
            return []
        turn.asked[block] = Pause.begun(now_s, self.server.rtt_s(run.peer))
        return [self._lacking(now_s, turn, block), *turn.alarm.set(now_s, turn.asked.values())]

    def _lacking(self, now_s: float, turn: Turn, block: int) -> Send:
        key = MessageKey(self._channel, turn.number, wire.STATE, block)
        return Send(
            request(turn.open[block], key, turn.left[self.layout.spans[block]]), max(now_s, turn.until_s)
        )

    # -- Time

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        turn = self._turn
        if timer.name not in ("turn", "repair"):
            return self.server.expired(now_s, timer)
        if turn is None or timer.round != turn.number:
            return []
        if timer.name == "turn":
            return self._finish(now_s, expired=True)
        turn.alarm.rang()
        effects: list[Effect] = []
        for block, pause in turn.asked.items():
            if pause.due_s <= now_s:
                pause.again(now_s)
                effects.append(self._lacking(now_s, turn, block))
        return effects + turn.alarm.set(now_s, turn.asked.values())

    def _finish(self, now_s: float, expired: bool) -> list[Effect]:
        turn = self._turn
        assert turn is not None
        effects: list[Effect] = []
        outcome = turn.outcome(self.me, self._channel, now_s, expired)
        missed = set(outcome.missed)
        if expired:
            self._late = turn.number, turn.started_s
            if turn.came & missed:  # a silent owner lengthens no deadline
                self._took.missed()
            for peer in sorted(missed - turn.came):
                if self.owners.silent(peer) == 1:
                    blocks = sum(owner == peer for owner in turn.open.values())
                    effects.append(
                        Noted(
                            "owner silent",
                            peer,
                            f"{blocks} block{'s keep' if blocks > 1 else ' keeps'} own values",
                        )
                    )
        elif turn.owners:
            self._took.completed(now_s - turn.started_s)
        self.server.copies.took(turn.mean, turn.got, turn.versions)
        self._anchor, self._turn, self._ended_s = turn.mean, None, now_s
        self.done, self.active = turn.number, None
        return [*effects, Done(replace(outcome, groups=self.server.gate.groups))]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Makes each peer's part in a central state, under a rule. See ``BlockServer`` for the fields."""

    rule: Rule
    grouping: Grouping | None = None
    correction: Correction | None = None

    def __call__(self, opening: Opening) -> CentreNode:
        """One peer's part."""
        return CentreNode(opening, self.rule, self.grouping, self.correction)


def centre(
    name: str, rule: Rule, grouping: Grouping | None = None, correction: Correction | None = None
) -> Averager:
    """An averager whose peers share a central state, under a rule.

    name: says which rule; the same on all peers.
    grouping: peers step in groups (``grouping``). Then the rule has a barrier, and is not asked.
    correction: of stale updates.
    """
    return Averager(
        f"centre: {name}", Sharing(rule, grouping, correction), "central", written=f"Centre({name})"
    )
