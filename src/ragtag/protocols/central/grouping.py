"""Groups at a central state: peers of like speed step together, and no group waits for another.

"Balancing Stragglers Against Staleness in Distributed Deep Learning", Basu, Saxena, Panja, Verma, HiPC
2018: synchronous inside a group, asynchronous between groups. A group's barrier is at the owner of each
block. The owner holds the members' updates until all have pushed, or a deadline has passed. Then their mean,
times the group's scale (its part of the crew's samples per second), makes the block's next version, which
answers them.

Each owner derives the groups by itself, by one rule from the same figures: every update says how long its
peer's steps take, and a peer that misses a deadline takes at least as long as it was waited for. Owners may
differ for a step, or where the rule keeps the groups it had (hysteresis). Then a peer waits for the larger of
its groups; nothing else depends on their agreement.

Blocks whose barriers end differently (by a deadline, or a lost update) would hold each other up: one peer
waits here for another that waits there. So a group's steps have a clock (Lamport's, as in ``channel``): an
update says how far its peer has seen any block come, and updates held for an earlier step are closed at once.
A peer that comes after its group has gone on is added at once, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, Floats, Noted, PeerId, Timer
from ragtag.protocols.central.block import Answer, Block, Update
from ragtag.protocols.central.gate import HEADROOM, Step
from ragtag.protocols.central.owners import Owners
from ragtag.protocols.central.speeds import Grouping, Groups, Speeds
from ragtag.protocols.central.wire import ahead, clock_in, count_of, later, ticked
from ragtag.protocols.channel.averager import Opening


@dataclass(slots=True, eq=False)
class Batch:
    """What a group has given for its next step of one block.

    clock: of the group, at this step.
    since_s: when the first update came.
    total, mass: the weighted sum of updates, and the weight of each chunk.
    answers: the peers that wait for the step.
    """

    number: int
    clock: int
    since_s: float
    total: Floats
    mass: Floats
    answers: dict[PeerId, Answer] = field(default_factory=dict)

    def add(self, update: Update, answer: Answer) -> None:
        """Add an update. A second one of the same peer is more of the same, or what the first lacked."""
        weight, got = np.float32(update.weight), update.got
        self.total[got] += update.values[got] * weight
        self.mass[got if update.peer not in self.answers else got & (self.mass == 0)] += weight
        self.answers[update.peer] = answer
        self.clock = later(self.clock, clock_in(update.lead))


class GroupGate:
    """The barriers of all groups at the blocks that one peer owns: at most one batch per block and peer."""

    def __init__(self, opening: Opening, grouping: Grouping, blocks: list[Block], owners: Owners) -> None:
        self._me, self._channel, self._blocks, self._owners = opening.me, opening.number, blocks, owners
        self.speeds = Speeds(grouping, owners)
        self._barrier = Deadline(opening.channel.probe_s, headroom=HEADROOM)
        self._changes = 0
        self._noted = -1
        self._doubted: frozenset[PeerId] = frozenset()
        self._open: list[list[Batch]] = [[] for _ in blocks]
        self._late: dict[tuple[int, PeerId], tuple[int, float]] = {}
        self._numbers = 0

    @property
    def groups(self) -> Groups:
        """Which peers step together, as far as this owner has seen."""
        return self.speeds.groups

    def probed(self, probe_s: float) -> None:
        """See ``gate.Gate``."""
        self._barrier = Deadline(probe_s, headroom=HEADROOM)

    def stands_s(self, computed_s: float) -> float:
        """How long this peer's group may wait for its slowest member."""
        slowest_s = self.speeds.slowest_s(self.speeds.mates(self._me))
        self._barrier.floor_s = HEADROOM * max(computed_s, slowest_s)
        return self._barrier.budget_s()

    def pushed(self, now_s: float, peer: PeerId, number: int, step_s: float | None) -> None:
        """See ``gate.Gate``."""
        self.speeds.pushed(now_s, peer, number, step_s)

    def answered(self, now_s: float, peer: PeerId) -> None:
        """See ``gate.Gate``."""
        self.speeds.answered(now_s, peer)

    def judge(self, now_s: float, block: int, update: Update) -> Step:
        """An update of a block has come."""
        held, peer, clock = self._blocks[block], update.peer, clock_in(update.lead)
        held.judged[peer] = update.number
        self.speeds.gave(peer, update.weight)
        answers: list[tuple[int, Answer]] = []
        if not self._open[block]:
            self.speeds.look(now_s)
            answers = self._sweep(now_s)
        late_at, since_s = self._late.pop((block, peer), (-1, now_s))
        answer = Answer(peer, update.number, 0, update.base)
        if late_at >= 0 and not ahead(clock, late_at):
            if len(self.speeds.mates(peer)) > 1:
                self._barrier.late(now_s - since_s)
            alone = self._batch(now_s, held, late_at)
            alone.add(update, answer)
            return self._step(answers + self._close(now_s, block, alone))
        batch = self._of(block, peer)
        if batch is not None and ahead(clock, batch.clock):  # another block has closed this step
            answers += self._close(now_s, block, batch)
            batch = None
        timers: list[Arm] = []
        if batch is None:
            batch = self._batch(now_s, held, clock)
            self._open[block].append(batch)
            timers = [self._timer(now_s, block, batch, peer)]
        batch.add(update, answer)
        if not self._missing(block, batch):
            if len(batch.answers) > 1:
                self._barrier.completed(now_s - batch.since_s)
            return self._step(answers + self._close(now_s, block, batch))
        return self._step(answers, timers)

    def expired(self, now_s: float, block: int, timer: Timer) -> Step:
        """A batch has run into its deadline: step with what there is, and form groups anew."""
        batch = next((one for one in self._open[block] if one.number == timer.round), None)
        if batch is None or not self._blocks[block].serving:
            return Step([], [], [])
        missing = self._missing(block, batch)
        self.speeds.missed(now_s, missing)
        self.speeds.review()
        still = missing & self.speeds.waited_for(batch.answers)
        if still:
            self._barrier.missed()
        for peer in missing:
            self._late[block, peer] = batch.clock, batch.since_s
        step = self._step(self._close(now_s, block, batch) + self._sweep(now_s))
        if still and batch.clock != self._noted:  # once for all blocks of about one time
            self._noted = batch.clock
            detail = f"a step of block {block} without peers {', '.join(map(str, sorted(still)))}"
            step.notes.append(Noted("barrier ended", self._me, detail))
        return step

    def close(self, now_s: float, block: int) -> list[Answer]:
        """Step by all that is held of a block."""
        answers: list[Answer] = []
        for batch in list(self._open[block]):
            answers += [answer for _, answer in self._close(now_s, block, batch)]
        return answers

    def review(self, now_s: float, blocks: list[int]) -> Step:
        """Peers have come or gone: step where only peers that are gone were missing."""
        self.speeds.review()
        return self._step(self._sweep(now_s))

    def rearm(self, now_s: float, block: int) -> list[Arm]:
        """A block is served again: set the end of each batch."""
        return [self._timer(now_s, block, batch, min(batch.answers)) for batch in self._open[block]]

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or a new process has its number: what it gave counts, and it is not answered."""
        for block, batches in enumerate(self._open):
            self._late.pop((block, peer), None)
            for batch in batches:
                if peer in batch.answers:
                    batch.answers[peer] = batch.answers[peer]._replace(number=-1)
        self.speeds.forget(peer)

    def _step(self, answers: list[tuple[int, Answer]], timers: Iterable[Arm] = ()) -> Step:
        """A step with notes of what has changed: the groups (the owner of the first block says so), and peers
        whose speed is not believed.
        """
        notes: list[Noted] = []
        if self.speeds.changes != self._changes and self._owners[0] == self._me:
            self._changes = self.speeds.changes
            notes.append(Noted("groups", self._me, self.speeds.told()))
        if self.speeds.doubted.keys() != self._doubted:
            news = sorted(self.speeds.doubted.keys() - self._doubted)
            notes += [self._doubt(peer) for peer in news if self._says_of(peer)]
            self._doubted = frozenset(self.speeds.doubted)
        return Step(answers, [*timers], notes)

    def _says_of(self, peer: PeerId) -> bool:
        """Whether this owner is the one to say it of a peer: the first owner that is another peer."""
        owners = (self._owners[block] for block in range(len(self._blocks)))
        return next((owner for owner in owners if owner != peer), self._me) == self._me

    def _doubt(self, peer: PeerId) -> Noted:
        why = f"{self.speeds.doubted[peer]:g} s a step, far from the others': it goes alone"
        return Noted("speed not believed", peer, why)

    def _batch(self, now_s: float, held: Block, clock: int) -> Batch:
        assert held.values is not None
        self._numbers = (self._numbers + 1) & 0xFFFFFFFF
        return Batch(
            self._numbers, clock, now_s, np.zeros_like(held.values), np.zeros(len(held.values), np.float32)
        )

    def _of(self, block: int, peer: PeerId) -> Batch | None:
        """The batch to which a peer's update belongs: the one it is in, else its mates'."""
        batches = self._open[block]
        mates = self.speeds.mates(peer)
        own = next((batch for batch in batches if peer in batch.answers), None)
        return own or next((batch for batch in batches if mates & batch.answers.keys()), None)

    def _missing(self, block: int, batch: Batch) -> frozenset[PeerId]:
        """The peers that a batch waits for, and that have given to no batch of the block."""
        here = {peer for one in self._open[block] for peer in one.answers} | batch.answers.keys()
        return self.speeds.waited_for(batch.answers) - here

    def _timer(self, now_s: float, block: int, batch: Batch, peer: PeerId) -> Arm:
        self._barrier.floor_s = HEADROOM * self.speeds.slowest_s(self.speeds.mates(peer))
        return Arm(Timer(self._channel, batch.number, f"barrier/{block}"), now_s + self._barrier.budget_s())

    def _sweep(self, now_s: float) -> list[tuple[int, Answer]]:
        """Close the batches that wait for no peer any more."""
        answers: list[tuple[int, Answer]] = []
        for block, batches in enumerate(self._open):
            for batch in list(batches):
                if self._blocks[block].serving and not self._missing(block, batch):
                    answers += self._close(now_s, block, batch)
        return answers

    def _close(self, now_s: float, block: int, batch: Batch) -> list[tuple[int, Answer]]:
        """Step by the mean of a batch: its peers are answered."""
        held = self._blocks[block]
        self._open[block] = [one for one in self._open[block] if one is not batch]
        count = count_of(held.version)
        stale = {peer: max(0, count - count_of(answer.base)) for peer, answer in batch.answers.items()}
        share = min(1.0, self.speeds.share(now_s, batch.answers))
        scale = np.float32(self.speeds.grouping.scale(share, max(stale.values())))
        some = batch.mass > 0
        batch.total[some] *= (scale / batch.mass[some])[:, None]
        held.step_by(batch.total, sorted(batch.answers))
        clock = ticked(batch.clock)
        return [
            (block, answer._replace(stale=stale[peer], clock=clock))
            for peer, answer in batch.answers.items()
            if answer.number >= 0
        ]
