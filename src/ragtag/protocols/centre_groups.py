"""Groups at a central state: peers of like speed step together, and no group waits for another.

"Balancing Stragglers Against Staleness in Distributed Deep Learning", Basu, Saxena, Panja, Verma, HiPC
2018: synchronous inside a group, asynchronous between groups. A group's barrier is at the owner of each
block: what its members learned is held until all of them have pushed, or a deadline has passed; then their
mean, times the group's scale, makes the block's next version, which they are answered with.

Who goes with whom each owner derives by itself, by one rule from the same figures: every update says what
its peer's steps take, and whoever misses a deadline takes at least as long as it has been waited for. Owners
may differ for a step, or where the rule keeps to what it had before (hysteresis). Then a peer waits for the
larger of its groups; nothing else depends on their agreement.

Blocks whose barriers end differently (a deadline, a lost update) would hold each other up: a peer waits here
for one that waits there. So a group's steps have a clock (Lamport's, as in ``centre``): an update says how
far its peer has seen any block come, and what is held for an earlier step is closed at once. Who comes after
its group has gone on without it is added at once, by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, Floats, PeerId, Timer
from ragtag.protocols.centre_block import Answer, Block, Update
from ragtag.protocols.centre_owners import GONE_AFTER, Owners
from ragtag.protocols.centre_wire import ahead, clock_in, count_of, later, ticked

Groups = tuple[tuple[PeerId, ...], ...]
PACE_WINDOW = 9
"""What a peer says its steps take is the median of so many."""
PAUSE = 0.5
"""They are looked at once in so many of the middle peer's steps, and whenever somebody misses a deadline."""
NEWS = 0.02
"""Groups are looked at again once a peer's steps take longer or shorter by this share."""


class Grouping(Protocol):
    """Who goes with whom, and how much a group's update counts (``ragtag.schedules.grouping``)."""

    def groups(self, step_s: Mapping[PeerId, float], now: Groups) -> Groups:
        """The groups to go on with; who is in none goes alone. step_s: positive. Never raises."""
        ...

    def scale(self, share: float, staleness: int) -> float:
        """Of a group that is this share of the crew. Never raises."""
        ...


class Book:
    """What one owner knows of speeds, and the groups that follow. changes: how often their number changed."""

    def __init__(self, grouping: Grouping, owners: Owners) -> None:
        self.grouping, self._owners = grouping, owners
        self.groups: Groups = ()
        self.changes = 0
        self._step_s: dict[PeerId, float] = {}
        self._used_s: dict[PeerId, float] = {}
        self._overdue_s: dict[PeerId, float] = {}
        self._answered_s: dict[PeerId, float] = {}
        self._late: dict[PeerId, int] = {}
        self._turns: dict[PeerId, int] = {}
        self._slow: dict[PeerId, tuple[float, int]] = {}
        self._next_s = -math.inf
        self._told = 0
        self._mates: dict[PeerId, frozenset[PeerId]] = {}

    def pushed(self, now_s: float, peer: PeerId, number: int, step_s: float | None) -> None:
        """Something of a peer's update ``number`` has come; its steps take so long (the middle of a few).

        Who has just missed a deadline is taken to be as slow as it was then, until that middle can show it.
        """
        if self._turns.get(peer) == number:
            return
        self._turns[peer] = number
        self._late.pop(peer, None)
        took_s, turns = self._slow.pop(peer, (0.0, 0))
        if self._overdue_s.pop(peer, None) is not None:
            took_s, turns = now_s - self._answered_s[peer], PACE_WINDOW // 2 + 1
        if turns > 1:
            self._slow[peer] = took_s, turns - 1
        if step_s is not None:
            self._step_s[peer] = max(step_s, took_s)

    def answered(self, now_s: float, peer: PeerId) -> None:
        """A peer goes on."""
        self._answered_s[peer] = now_s

    def missed(self, now_s: float, peers: Iterable[PeerId]) -> None:
        """A deadline has passed without these: their steps take at least as long as they have by now."""
        for peer in peers:
            self._late[peer] = self._late.get(peer, 0) + 1
            if peer in self._answered_s:
                self._overdue_s[peer] = now_s - self._answered_s[peer]

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or has come."""
        for known in (self._step_s, self._overdue_s, self._answered_s):
            known.pop(peer, None)
        for count in (self._late, self._turns):
            count.pop(peer, None)
        self._slow.pop(peer, None)

    def step_s(self) -> dict[PeerId, float]:
        """What is known of those who live; who has not said goes as the middle does."""
        known = {peer: self._step_s[peer] for peer in sorted(self._owners.live) if peer in self._step_s}
        if not known:
            return {}
        middle_s = sorted(known.values())[len(known) // 2]
        live = sorted(self._owners.live)
        return {peer: max(known.get(peer, middle_s), self._overdue_s.get(peer, 0.0)) for peer in live}

    def slowest_s(self, peers: Iterable[PeerId]) -> float:
        """What the slowest of these is known to take; 0: nothing is known."""
        return max((self._step_s.get(peer, 0.0) for peer in peers), default=0.0)

    def look(self, now_s: float) -> None:
        """A step begins: look at who goes with whom, if some time has gone by since (it takes a while)."""
        if now_s >= self._next_s:
            self.review()
            middle_s = sorted(self._used_s.values())[len(self._used_s) // 2] if self._used_s else 0.0
            self._next_s = now_s + PAUSE * middle_s

    def review(self) -> bool:
        """Look at who goes with whom, if there is news; whether that has changed."""
        step_s, used = self.step_s(), self._used_s
        if step_s.keys() == used.keys() and all(
            abs(step_s[peer] - used[peer]) <= NEWS * used[peer] for peer in step_s
        ):
            return False
        self._used_s = step_s
        live = tuple(sorted(self._owners.live))
        found = self.grouping.groups(step_s, self.groups) if step_s else (live,)
        if found == self.groups:
            return False
        changed = len(found) != len(self.groups) or set(found) != set(self.groups)
        self.groups = found
        self._mates = {peer: frozenset(group) for group in found for peer in group}
        self.changes += len(found) != self._told
        self._told = len(found)
        return changed

    def mates(self, peer: PeerId) -> frozenset[PeerId]:
        """Those a peer steps with, itself among them; before anything is known, all."""
        if not self._mates:
            return self._owners.live | {peer}
        return self._mates.get(peer, frozenset((peer,)))

    def waited_for(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Whose updates complete a step of these: their mates, but not who is away."""
        mates = frozenset[PeerId]().union(*(self.mates(peer) for peer in peers))
        return frozenset(p for p in mates & self._owners.live if self._late.get(p, 0) < GONE_AFTER)

    def told(self) -> str:
        """The groups in words."""
        known = self.step_s()
        many = f"{len(self.groups)} groups" if len(self.groups) != 1 else "1 group"
        return f"{many}: {' + '.join(self._named(group, known) for group in self.groups)}"

    def _named(self, group: tuple[PeerId, ...], step_s: Mapping[PeerId, float]) -> str:
        slowest_s = max((step_s[peer] for peer in group if peer in step_s), default=0.0)
        return f"{' '.join(map(str, group))} ({slowest_s * 1e3:.3g} ms)"


@dataclass(slots=True, eq=False)
class Batch:
    """What a group has given of its next step of one block: the sum by weight, and who waits for the step."""

    number: int
    clock: int
    since_s: float
    total: Floats
    mass: Floats
    kept: dict[PeerId, Answer] = field(default_factory=dict)

    def add(self, update: Update, answer: Answer) -> None:
        """One more; the same peer's again is more of the same update."""
        weight, got = np.float32(update.weight), update.got
        self.total[got] += update.values[got] * weight
        if update.peer not in self.kept:
            self.mass[got] += weight
        self.kept[update.peer] = answer
        self.clock = later(self.clock, clock_in(update.lead))


class Step(NamedTuple):
    """What comes of an event: whom to answer with which block, and timers."""

    answers: list[tuple[int, Answer]]
    timers: list[Arm]


class Barriers:
    """The barriers of all groups in the blocks that one peer owns. At most one batch per block and peer."""

    def __init__(
        self, channel: int, blocks: list[Block], book: Book, owners: Owners, barrier: Deadline
    ) -> None:
        self._channel, self._blocks, self._book, self._owners = channel, blocks, book, owners
        self._barrier = barrier
        self._open: list[list[Batch]] = [[] for _ in blocks]
        self._late: dict[tuple[int, PeerId], tuple[int, float]] = {}
        self._numbers = 0

    def probed(self, barrier: Deadline) -> None:
        """Where deadlines begin."""
        self._barrier = barrier

    def judge(self, now_s: float, block: int, update: Update) -> Step:
        """An update of a block has come."""
        held, peer, clock = self._blocks[block], update.peer, clock_in(update.lead)
        held.judged[peer] = update.number
        answers: list[tuple[int, Answer]] = []
        if not self._open[block]:
            self._book.look(now_s)
            answers = self._sweep(now_s)
        late_at, since_s = self._late.pop((block, peer), (-1, now_s))
        answer = Answer(peer, update.number, 0, update.base)
        if late_at >= 0 and not ahead(clock, late_at):
            if len(self._book.mates(peer)) > 1:
                self._barrier.late(now_s - since_s)
            alone = self._batch(now_s, held, late_at)
            alone.add(update, answer)
            return Step(answers + self._close(now_s, block, alone), [])
        batch = self._of(block, peer)
        if batch is not None and ahead(clock, batch.clock):  # it has been closed in another block
            answers += self._close(now_s, block, batch)
            batch = None
        timers: list[Arm] = []
        if batch is None:
            batch = self._batch(now_s, held, clock)
            self._open[block].append(batch)
            timers = [self._timer(now_s, block, batch, peer)]
        batch.add(update, answer)
        if not self._missing(block, batch):
            if len(batch.kept) > 1:
                self._barrier.completed(now_s - batch.since_s)
            return Step(answers + self._close(now_s, block, batch), [])
        return Step(answers, timers)

    def expired(self, now_s: float, block: int, number: int) -> tuple[Step, tuple[PeerId, ...]]:
        """A batch has waited for long enough; also: who was missing and is still waited for next time."""
        batch = next((one for one in self._open[block] if one.number == number), None)
        if batch is None or not self._blocks[block].serving:
            return Step([], []), ()
        missing = self._missing(block, batch)
        self._book.missed(now_s, missing)
        self._book.review()
        still = missing & self._book.waited_for(batch.kept)
        if still:
            self._barrier.missed()
        for peer in missing:
            self._late[block, peer] = batch.clock, batch.since_s
        answers = self._close(now_s, block, batch)
        return Step(answers + self._sweep(now_s), []), tuple(sorted(still))

    def close(self, now_s: float, block: int) -> list[Answer]:
        """Step by all that is held of a block."""
        answers: list[Answer] = []
        for batch in list(self._open[block]):
            answers += [answer for _, answer in self._close(now_s, block, batch)]
        return answers

    def review(self, now_s: float) -> Step:
        """Who is there has changed: nobody waits for who is gone."""
        self._book.review()
        return Step(self._sweep(now_s), [])

    def rearm(self, now_s: float, block: int) -> list[Arm]:
        """A block is served again: what it holds has an end."""
        return [self._timer(now_s, block, batch, min(batch.kept)) for batch in self._open[block]]

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or has come: what it gave counts, it is not answered."""
        for block, batches in enumerate(self._open):
            self._late.pop((block, peer), None)
            for batch in batches:
                if peer in batch.kept and not self._is_me(block, peer):
                    batch.kept[peer] = batch.kept[peer]._replace(number=-1)
        self._book.forget(peer)

    def _is_me(self, block: int, peer: PeerId) -> bool:
        return self._blocks[block].me == peer

    def _batch(self, now_s: float, held: Block, clock: int) -> Batch:
        assert held.values is not None
        self._numbers = (self._numbers + 1) & 0xFFFFFFFF
        return Batch(
            self._numbers, clock, now_s, np.zeros_like(held.values), np.zeros(len(held.values), np.float32)
        )

    def _of(self, block: int, peer: PeerId) -> Batch | None:
        """The batch that a peer's update belongs to: its own, else its mates'."""
        batches = self._open[block]
        mates = self._book.mates(peer)
        own = next((batch for batch in batches if peer in batch.kept), None)
        return own or next((batch for batch in batches if mates & batch.kept.keys()), None)

    def _missing(self, block: int, batch: Batch) -> frozenset[PeerId]:
        """Who is waited for, and has given to no batch of the block."""
        here = {peer for one in self._open[block] for peer in one.kept} | batch.kept.keys()
        return self._book.waited_for(batch.kept) - here

    def _timer(self, now_s: float, block: int, batch: Batch, peer: PeerId) -> Arm:
        self._barrier.floor_s = self._barrier.headroom * self._book.slowest_s(self._book.mates(peer))
        return Arm(Timer(self._channel, batch.number, f"group/{block}"), now_s + self._barrier.budget_s())

    def _sweep(self, now_s: float) -> list[tuple[int, Answer]]:
        """Close what waits for nobody any more."""
        answers: list[tuple[int, Answer]] = []
        for block, batches in enumerate(self._open):
            for batch in list(batches):
                if self._blocks[block].serving and not self._missing(block, batch):
                    answers += self._close(now_s, block, batch)
        return answers

    def _close(self, now_s: float, block: int, batch: Batch) -> list[tuple[int, Answer]]:
        """Step by the mean of what is held; whose it is goes on."""
        held = self._blocks[block]
        self._open[block] = [one for one in self._open[block] if one is not batch]
        count = count_of(held.version)
        stale = {peer: max(0, count - count_of(answer.base)) for peer, answer in batch.kept.items()}
        share = min(1.0, len(batch.kept) / max(1, len(self._owners.live)))
        scale = np.float32(self._book.grouping.scale(share, max(stale.values())))
        some = batch.mass > 0
        batch.total[some] *= (scale / batch.mass[some])[:, None]
        held.step_by(batch.total, sorted(batch.kept))
        clock = ticked(batch.clock)
        return [
            (block, answer._replace(stale=stale[peer], clock=clock))
            for peer, answer in batch.kept.items()
            if answer.number >= 0
        ]
