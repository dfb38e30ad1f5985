"""How updates of blocks become steps at their owner: a gate.

The gate here has one barrier for all peers, or none. ``grouping.GroupGate`` has one for each group.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, Noted, PeerId, Timer
from ragtag.protocols.central.block import Answer, Block, Rule, Update
from ragtag.protocols.central.owners import GONE_AFTER, Owners
from ragtag.protocols.central.wire import count_of
from ragtag.protocols.channel.averager import Opening

HEADROOM = 1.5
"""A barrier waits this many times as long as nine in ten did, or as this peer computed in its last turn."""


class Step(NamedTuple):
    """What follows from an event: answers with their blocks, timers, and notes of what happened."""

    answers: list[tuple[int, Answer]]
    timers: list[Arm]
    notes: list[Noted]


class Gate(Protocol):
    """Holds updates until their block steps. The blocks of all calls but ``close`` are served here."""

    @property
    def groups(self) -> tuple[tuple[PeerId, ...], ...]:
        """Which peers step together; empty where there are no groups."""
        ...

    def probed(self, probe_s: float) -> None:
        """One exchange of the whole vector takes this long."""
        ...

    def stands_s(self, computed_s: float) -> float:
        """How long a barrier may hold this peer, which has computed so long; 0: there is no barrier."""
        ...

    def pushed(self, now_s: float, peer: PeerId, number: int, step_s: float | None) -> None:
        """Something of a peer's update ``number`` has come. step_s: how long its steps take."""
        ...

    def answered(self, now_s: float, peer: PeerId) -> None:
        """A peer has been answered."""
        ...

    def judge(self, now_s: float, block: int, update: Update) -> Step:
        """An update of a block has come."""
        ...

    def review(self, now_s: float, blocks: list[int]) -> Step:
        """Peers have come or gone. blocks: those served here."""
        ...

    def close(self, now_s: float, block: int) -> list[Answer]:
        """Step by all updates that are held of a block."""
        ...

    def rearm(self, now_s: float, block: int) -> list[Arm]:
        """A block is served (again): set the end of its barriers."""
        ...

    def expired(self, now_s: float, block: int, timer: Timer) -> Step:
        """A barrier of a block has run into its deadline."""
        ...

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or a new process has its number."""
        ...


class RuleGate:
    """One rule judges all updates. Where it has a barrier, all blocks count their versions as one clock."""

    def __init__(self, opening: Opening, rule: Rule, blocks: list[Block], owners: Owners) -> None:
        self._me, self._channel, self._rule = opening.me, opening.number, rule
        self._blocks, self._owners = blocks, owners
        self._barrier = Deadline(opening.channel.probe_s, headroom=HEADROOM)
        self._computed_s = 0.0
        self._noted = -1

    @property
    def groups(self) -> tuple[tuple[PeerId, ...], ...]:
        """There are none."""
        return ()

    def probed(self, probe_s: float) -> None:
        """One exchange of the whole vector takes this long."""
        self._barrier = Deadline(probe_s, headroom=HEADROOM)

    def stands_s(self, computed_s: float) -> float:
        """See ``Gate``."""
        self._computed_s = computed_s
        return self._budget_s() if self._rule.barrier else 0.0

    def pushed(self, now_s: float, peer: PeerId, number: int, step_s: float | None) -> None:
        """Nothing: speeds do not matter here."""

    def answered(self, now_s: float, peer: PeerId) -> None:
        """Nothing, as for ``pushed``."""

    def judge(self, now_s: float, block: int, update: Update) -> Step:
        """An update of a block has come."""
        held, barrier = self._blocks[block], self._rule.barrier
        answers = held.catch_up(update.clock) if barrier else []
        fresh, count, since_s = not held.accepted, count_of(held.version), held.since_s
        if barrier and held.expired_s is not None and update.clock < count:
            self._barrier.late(now_s - held.expired_s)  # the update came after its barrier had ended
            held.expired_s = None
        answers += held.judge(now_s, update, self._rule, self._expected(block, update.peer))
        if barrier and count_of(held.version) > count and not fresh:
            self._barrier.completed(now_s - since_s)
        timers = self.rearm(now_s, block) if fresh else []
        return Step([(block, answer) for answer in answers], timers, [])

    def review(self, now_s: float, blocks: list[int]) -> Step:
        """Step where only peers that are gone were missing."""
        over = [
            block
            for block in blocks
            if self._rule.barrier and self._blocks[block].over(self._rule, self._expected(block))
        ]
        return Step([(block, answer) for block in over for answer in self._blocks[block].close()], [], [])

    def close(self, now_s: float, block: int) -> list[Answer]:
        """Step by all that is held of a block."""
        return self._blocks[block].close()

    def rearm(self, now_s: float, block: int) -> list[Arm]:
        """Set the end of the barrier, where there is one."""
        held = self._blocks[block]
        if not self._rule.barrier or not held.accepted:
            return []
        count = count_of(held.version) & 0xFFFFFFFF
        return [Arm(Timer(self._channel, count, f"barrier/{block}"), now_s + self._budget_s())]

    def expired(self, now_s: float, block: int, timer: Timer) -> Step:
        """A barrier has run into its deadline: step with what is accepted."""
        held = self._blocks[block]
        if not held.serving or not held.accepted or count_of(held.version) & 0xFFFFFFFF != timer.round:
            return Step([], [], [])
        missing = sorted(self._owners.live - set(held.accepted))
        for peer in missing:
            held.missed_steps[peer] = held.missed_steps.get(peer, 0) + 1
        self._barrier.missed()
        held.expired_s = held.since_s
        answers = [(block, answer) for answer in held.close()]
        if count_of(held.version) <= self._noted:  # once for all blocks of about one time
            return Step(answers, [], [])
        self._noted = count_of(held.version)
        detail = f"version {self._noted} of block {block} without peers {', '.join(map(str, missing))}"
        return Step(answers, [], [Noted("barrier ended", self._me, detail)])

    def forget(self, peer: PeerId) -> None:
        """Nothing: blocks forget by themselves."""

    def _budget_s(self) -> float:
        self._barrier.floor_s = HEADROOM * self._computed_s
        return self._barrier.budget_s()

    def _expected(self, block: int, *gives: PeerId) -> int:
        """Of how many peers a step is: those that come and, though they are gone, those that have given.

        gives: peers that give now.
        """
        held = self._blocks[block]
        come = {peer for peer in self._owners.live if held.missed_steps.get(peer, 0) < GONE_AFTER}
        return max(1, len(come.union(held.accepted, gives)))
