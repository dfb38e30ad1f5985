"""The blocks of a central state that one peer owns: it takes updates, judges and answers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, Effect, Floats, MessageKey, Noted, PeerId, Run, Send, Timer
from ragtag.protocols.central import wire
from ragtag.protocols.central.block import Answer, Correction, Rule, Update
from ragtag.protocols.central.copies import Copies
from ragtag.protocols.central.gate import Gate, RuleGate, Step
from ragtag.protocols.central.grouping import GroupGate
from ragtag.protocols.central.owners import Owners
from ragtag.protocols.central.rebuild import Rebuilder, Rebuilt, rebuilt_notes
from ragtag.protocols.central.speeds import Grouping
from ragtag.protocols.channel.averager import Opening
from ragtag.protocols.rounds.base import BLOCK_BITS
from ragtag.protocols.rounds.layout import Layout
from ragtag.protocols.rounds.repair import Pause, request, requested


class BlockServer:
    """One peer as an owner. Its tables are bounded by blocks times peers.

    patience_s: how long a block may be on its way.
    grouping: peers step in groups, in place of the rule's barrier.
    correction: of stale updates. Then an owner keeps what it sent each peer last, in all about one model's
        worth more.
    """

    def __init__(
        self,
        opening: Opening,
        rule: Rule,
        layout: Layout,
        owners: Owners,
        patience_s: Callable[[], float],
        grouping: Grouping | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.me, self._channel, self._codec = opening.me, opening.number, opening.channel.codec
        self._rule, self._layout, self._owners, self._patience_s = rule, layout, owners, patience_s
        self.copies = Copies(opening.me, opening.number, opening.channel.codec, layout)
        self._blocks = self.copies.blocks
        self._computed_s = 0.0
        self._updates: dict[tuple[int, PeerId], Update] = {}
        self._pulls: dict[tuple[int, PeerId], int] = {}
        self._answered: dict[tuple[int, PeerId], Answer] = {}
        self._own: list[tuple[int, Answer]] = []
        self._unfounded: dict[int, Rebuilt] = {}
        self._told: dict[PeerId, int] = {}  # the newest turn in which a peer was told to wait
        self._rtts_s, self._rtt_s = opening.crew.rtt_s, opening.channel.rtt_s
        self._answer = Deadline(opening.channel.rtt_s, floor_s=opening.channel.rtt_s)
        self._correction = correction
        self.gate: Gate = (
            RuleGate(opening, rule, self._blocks, owners)
            if grouping is None
            else GroupGate(opening, grouping, self._blocks, owners)
        )
        self._rebuilder = Rebuilder(
            opening.me, opening.number, opening.channel.codec, layout, owners, self.copies.newest,
            self._answer, patience_s,
        )  # fmt: skip

    def probed(self, probe_s: float) -> None:
        """One exchange of the whole vector takes this long."""
        self.gate.probed(probe_s)

    # -- What the peer itself does

    def begins(self, values: Floats, computed_s: float) -> None:
        """A turn of this peer begins with these values, after so long a time of computing."""
        self.copies.values, self._computed_s = values, computed_s

    def rtt_s(self, peer: PeerId) -> float:
        """A round trip to a peer with its margin: so long until lost chunks are asked for again."""
        return self._rtts_s.get(peer, self._rtt_s)

    def floor_s(self) -> float:
        """The shortest deadline of a turn: an answer's, and a barrier's."""
        return self._answer.budget_s() + self.gate.stands_s(self._computed_s)

    def push_own(
        self,
        now_s: float,
        block: int,
        number: int,
        weight: float,
        learned: Floats,
        lead: int,
        step_s: float | None = None,
    ) -> list[Effect]:
        """This peer's own update of a block that it owns. step_s: how long its steps take."""
        bases = self.copies.versions[self._layout.spans[block]]
        got = np.ones(self._layout.sizes[block], np.bool_)
        update = Update(self.me, number, learned, got, weight, int(bases.min()), int(bases.max()), lead)
        self._updates[block, self.me] = update
        self.gate.pushed(now_s, self.me, number, step_s)
        return self._ready(now_s, block, update)

    def pull(self, now_s: float, block: int, peer: PeerId, number: int, known: int) -> list[Effect]:
        """A peer wants the block as it is. known: the version that it has."""
        if self._owners[block] != self.me:
            return self._instead(now_s, block, peer, number)
        if self._blocks[block].serving and known <= self._blocks[block].version:
            return self._send(now_s, block, Answer(peer, number, 0, 0))
        self._pulls[block, peer] = number
        self._look(block, known)
        return self._hold(now_s, peer, number)

    def take_own(self) -> list[tuple[int, Answer]]:
        """The answers for this peer itself since the last call."""
        own, self._own = self._own, []
        return own

    # -- Messages

    def take(self, now_s: float, run: Run, block: int, stage: int) -> list[Effect]:
        """A message to an owner, or about copies. The caller has checked its shape."""
        peer, number = run.peer, run.key.round
        if stage == wire.PUSH:
            return self._push(now_s, run, block)
        if stage == wire.TELL:
            return self._rebuilder.told(now_s, run)
        if stage == wire.COPY:
            return self._rebuilder.copied(now_s, run, block)
        if stage == wire.HOLD:
            return []
        blob = wire.blob_of(run)
        if blob is None:
            return []
        if stage == wire.PULL:
            return self.pull(now_s, block, peer, number, wire.decode_pull(blob))
        if stage == wire.FETCH:
            return self._out(now_s, self.copies.copy(block, peer, number))
        return self._tell(now_s, peer, number, wire.decode_ask(blob, self._layout.n_blocks))

    def lacks(self, now_s: float, run: Run, block: int, stage: int) -> list[Effect]:
        """A peer lacks chunks of what was sent to it."""
        asked = requested(run, self._layout.sizes[block])
        if not asked.any():
            return []
        if stage == wire.COPY:
            return self._out(now_s, self.copies.copy(block, run.peer, run.key.round, asked))
        answer = self._answered.get((block, run.peer))
        if stage != wire.STATE or answer is None or answer.number != run.key.round:
            return []
        if not self._blocks[block].serving:
            return self._instead(now_s, block, run.peer, answer.number)
        return self._out(now_s, self.copies.state(block, answer, asked))

    def _push(self, now_s: float, run: Run, block: int) -> list[Effect]:
        peer, number, name = run.peer, run.key.round, (block, run.peer)
        if number <= self._blocks[block].judged.get(peer, -1):
            return []
        bases, step_s = wire.without_pace(run.heard)
        self.gate.pushed(now_s, peer, number, step_s)
        run = replace(run, heard=bases)
        update = self._updates.get(name)
        if update is None or update.number < number:
            shape = (self._layout.sizes[block], self._codec.elements)
            update = Update(peer, number, np.zeros(shape, np.float32), np.zeros(shape[0], np.bool_))
            update.lead = run.key.block >> BLOCK_BITS if self._rule.barrier else 0
            self._updates[name] = update
        if (
            update.number > number
            or update.ready
            or wire.count_of(int(max(run.heard, default=0))) > wire.BELIEVED
        ):
            return []
        if len(run.payload):
            update.take(run, self._codec)
        if update.whole:
            return self._ready(now_s, block, update)
        if not run.ended:
            return []
        update.asked = Pause.begun(now_s, self.rtt_s(peer))
        return self._mend(now_s, block, update, update.asked)

    def _mend(self, now_s: float, block: int, update: Update, asked: Pause) -> list[Effect]:
        """An update has ended with holes: ask for them, or judge it with what came in all the time it has."""
        update.ended_s = min(update.ended_s, now_s)
        if now_s >= update.ended_s + self._patience_s():
            return self._ready(now_s, block, update)
        lacking = request(update.peer, self._key(update.number, wire.PUSH, block), ~update.got)
        timer = Timer(self._channel, update.number, f"hole/{block}/{update.peer}")
        return [Send(lacking, now_s + self._patience_s()), Arm(timer, self._mends_s(update, asked))]

    def _mends_s(self, update: Update, asked: Pause) -> float:
        """When an update with holes is looked at again."""
        return min(asked.due_s, update.ended_s + self._patience_s())

    def _tell(self, now_s: float, peer: PeerId, number: int, blocks: list[int]) -> list[Effect]:
        """Say which versions this peer has. Blocks that the asker rather owns it closes and gives up."""
        effects: list[Effect] = []
        mine = []
        for block in blocks:
            held = self._blocks[block]
            if held.serving and self._owners.outranks(peer, self.me, block):
                effects += self._yield(now_s, block)
            elif held.serving:
                mine.append(block)
        told = wire.Holdings({block: self.copies.newest(block)[0] for block in blocks}, frozenset(mine))
        run = wire.small(peer, self._key(number, wire.TELL, 0), wire.encode_holdings(told))
        return effects + self._out(now_s, run)

    # -- Updates

    def _ready(self, now_s: float, block: int, update: Update) -> list[Effect]:
        """All that will come of an update is here: judge it."""
        update.ready = True
        held, peer = self._blocks[block], update.peer
        if self._owners[block] != self.me:
            del self._updates[block, peer]
            return self._instead(now_s, block, peer, update.number)
        if not held.serving or update.base > held.version:
            self._look(block, update.base)
            return self._hold(now_s, peer, update.number)
        del self._updates[block, peer]
        if not update.sound:
            held.judged[peer] = update.number
            refused = Noted("update refused", peer, f"block {block}: not finite, or nothing of it came")
            return [refused, *self._send(now_s, block, Answer(peer, update.number, 0, update.base))]
        if self._correction is not None:
            held.correct(update, self._correction)
        step = self.gate.judge(now_s, block, update)
        own = (block, peer, update.number)
        if all((at, answer.peer, answer.number) != own for at, answer in step.answers):
            return self._stepped(now_s, step, self._hold(now_s, peer, update.number))
        return self._stepped(now_s, step)

    def _stepped(self, now_s: float, step: Step, more: Sequence[Effect] = ()) -> list[Effect]:
        effects: list[Effect] = []
        for block, answer in step.answers:
            effects += self._send(now_s, block, answer)
        return [*effects, *more, *step.timers, *step.notes]

    def _send_all(self, now_s: float, block: int, answers: list[Answer]) -> list[Effect]:
        return [effect for answer in answers for effect in self._send(now_s, block, answer)]

    def _send(self, now_s: float, block: int, answer: Answer) -> list[Effect]:
        """Answer with the block as it is."""
        self.gate.answered(now_s, answer.peer)
        if self._correction is not None:
            self._blocks[block].give(answer.peer)
        if answer.peer == self.me:
            self._own.append((block, answer))
            return []
        self._answered[block, answer.peer] = answer
        return self._out(now_s, self.copies.state(block, answer))

    def _instead(self, now_s: float, block: int, peer: PeerId, number: int) -> list[Effect]:
        """Another peer owns the block: the asker, which does not know, gets a copy; its update is lost."""
        return [] if peer == self.me else self._out(now_s, self.copies.instead(block, peer, number))

    def _hold(self, now_s: float, peer: PeerId, number: int) -> list[Effect]:
        """A peer is not answered yet: tell it, once in a turn, that its owner lives."""
        if peer == self.me or self._told.get(peer) == number:
            return []
        self._told[peer] = number
        return self._out(now_s, wire.small(peer, self._key(number, wire.HOLD, 0), b""))

    def _out(self, now_s: float, run: Run | None) -> list[Effect]:
        return [] if run is None else [Send(run, now_s + self._patience_s())]

    # -- Who owns what

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or a new process has its number."""
        self._told.pop(peer, None)
        self.gate.forget(peer)
        for block, held in enumerate(self._blocks):
            held.forget(peer)
            self._updates.pop((block, peer), None)
            self._pulls.pop((block, peer), None)
            self._answered.pop((block, peer), None)

    def left(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Nothing more comes from a peer: no search waits for it."""
        return self._rebuilder.left(now_s, peer)

    def review(self, now_s: float) -> list[Effect]:
        """Peers have come or gone: give up blocks that another owns now, and wait for none that is gone."""
        effects: list[Effect] = []
        served = []
        for block, held in enumerate(self._blocks):
            if self._owners[block] != self.me:
                if held.serving:
                    effects += self._yield(now_s, block)
                self._rebuilder.stop(block)
                self._unfounded.pop(block, None)
                effects += self._turn_away(now_s, block)
            elif held.serving:
                served.append(block)
        return effects + self._stepped(now_s, self.gate.review(now_s, served))

    def _yield(self, now_s: float, block: int) -> list[Effect]:
        """Serve a block no longer. Its last version has all updates that were accepted."""
        effects = self._send_all(now_s, block, self.gate.close(now_s, block))
        self._blocks[block].serving = False
        return effects

    def _turn_away(self, now_s: float, block: int) -> list[Effect]:
        """Another peer owns the block: peers that wait for it here get this one's copy."""
        waiting = {name: n for name, n in self._pulls.items() if name[0] == block}
        waiting |= {name: u.number for name, u in self._updates.items() if name[0] == block and u.ready}
        effects: list[Effect] = []
        for name in sorted(waiting):
            self._pulls.pop(name, None)
            self._updates.pop(name, None)
            effects += self._instead(now_s, block, name[1], waiting[name])
        return effects

    # -- Looking for the newest copy

    def _look(self, block: int, above: int = 0) -> None:
        self._blocks[block].serving = False
        if block not in self._unfounded and all(found.block != block for found in self._rebuilder.found):
            self._rebuilder.seek(block, above)

    def turned(self, now_s: float) -> list[Effect]:
        """At the end of each step: ask for wanted blocks, and serve those that were found."""
        effects = self._rebuilder.ask(now_s)
        found, self._rebuilder.found = self._rebuilder.found, []
        if self.copies.values is not None and self._unfounded:
            found += self._unfounded.values()
            self._unfounded = {}
        rebuilt = []
        for one in found:
            values = self._filled(one)
            if self._owners[one.block] != self.me:
                effects += self._turn_away(now_s, one.block)
            elif values is None:  # no peer has the block: it waits until this one begins its first turn
                self._unfounded[one.block] = one
            else:
                self._blocks[one.block].adopt(values, one.above)
                effects += self._serve(now_s, one.block)
                rebuilt.append(one)
        return effects + rebuilt_notes(self.me, rebuilt) + (self.turned(now_s) if rebuilt else [])

    def _filled(self, found: Rebuilt) -> Floats | None:
        """The values that were found, with this peer's own where none were; ``None``: there are none."""
        own = self.copies.values
        if found.got.all() or own is None:
            return found.values if found.got.all() else None
        values = found.values.copy()
        values[~found.got] = own[self._layout.spans[found.block]][~found.got]
        return values

    def _serve(self, now_s: float, block: int) -> list[Effect]:
        """The block has its newest values again: answer the peers that waited."""
        effects: list[Effect] = []
        for name in sorted(name for name in self._pulls if name[0] == block):
            effects += self._send(now_s, block, Answer(name[1], self._pulls.pop(name), 0, 0))
        effects += self.gate.rearm(now_s, block)
        for name in sorted(name for name in self._updates if name[0] == block):
            if name in self._updates and self._updates[name].ready:
                effects += self._ready(now_s, block, self._updates[name])
        return effects

    # -- Time

    def expired(self, now_s: float, timer: Timer) -> list[Effect]:
        """One of the server's timers has run out."""
        kind, _, rest = timer.name.partition("/")
        if kind == "barrier":
            return self._stepped(now_s, self.gate.expired(now_s, int(rest), timer))
        if kind != "hole":
            return self._rebuilder.expired(now_s, timer)
        block, peer = map(int, rest.split("/"))
        update = self._updates.get((block, peer))
        asked = None if update is None else update.asked
        if update is None or asked is None or update.ready or update.number != timer.round:
            return []
        if self._mends_s(update, asked) > now_s:  # asked for since
            return []
        asked.again(now_s)
        return self._mend(now_s, block, update, asked)

    def _key(self, number: int, stage: int, block: int) -> MessageKey:
        return MessageKey(self._channel, number, stage, block)
