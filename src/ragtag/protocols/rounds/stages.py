"""Two stages through block owners: what a reduce-scatter with all-gather and a gathering of rows share.

Stage SCATTER: every peer sends each block's owner what it has of the block. Stage GATHER: the owner sends
every peer what it made of that. A stage is over when it waits for no peer any longer (``progress``). What is
exchanged is a ``Content``: values (``reduce``) or rows (``gather``).

Where most shares have not come by the first deadline, it is likelier that this peer is early than that most
of the crew is dead. So it waits as long again, once in a round: a peer that went on alone would be early in
its next rounds, too. In a crew of two or three the others may well be dead, so they are asked meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ragtag.core.types import (
    Arm,
    Arrived,
    Audited,
    Begin,
    Bools,
    Done,
    Effect,
    Event,
    Expired,
    Floats,
    Gathered,
    Left,
    Noted,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Send,
)
from ragtag.protocols.rounds.asking import ANSWERS, QUESTION
from ragtag.protocols.rounds.base import GATHER, NACK, SCATTER, Incoming, Lesson, Spec, peers_in
from ragtag.protocols.rounds.progress import BEFORE, DONE, GATHERING, QUORUM, SCATTERING, Share, Waiting
from ragtag.protocols.rounds.repair import Repairer

APART = "apart"
"""The note on a peer that cuts the vector by other shares."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a content comes to at the end of a round (see ``Outcome``)."""

    mean: Floats
    weight: Floats
    heard: PeerSet
    averaged: Bools
    gathered: Gathered | None = None
    judged: Audited | None = None
    told: Bools | None = None


class Content(Protocol):
    """What a round of two stages exchanges. mine: the blocks that this peer owns."""

    mine: list[int]

    def owners(self) -> AbstractSet[PeerId]:
        """The other peers that own blocks."""
        ...

    def scatter(self, stages: Stages) -> Iterator[Effect]:
        """The round has begun: this peer's share of each block, to its owner."""
        ...

    def scattered_of(self, peer: PeerId, block: int) -> Incoming | None:
        """What has come of a peer's share of one of this peer's blocks; ``None``: nothing."""
        ...

    def take(
        self, stages: Stages, now_s: float, run: Run, block: int
    ) -> tuple[Incoming | None, list[Effect]]:
        """Chunks came: what has come of their message by now; ``None``: they are not taken."""
        ...

    def reduce(self, stages: Stages) -> Iterator[Effect]:
        """All shares of this peer's blocks are in: send every member what it made of them."""
        ...

    def awaited(self) -> Iterable[tuple[int, PeerId, Incoming | None]]:
        """Each block of another, its owner, and what has come of it."""
        ...

    def result(self, stages: Stages) -> Result:
        """Nothing is waited for any longer: what the round comes to."""
        ...


class Stages:
    """One round on one peer. Runs may come before ``Begin``, from faster peers.

    tellers: the peers that have sent averages.
    repair: asks again for what is missing while time remains.
    repair_after: for so many times as long as a round may take, it does so after the round's end, too.
    """

    def __init__(
        self, spec: Spec, content: Content, repair: Repairer | None, repair_after: float = 0.0
    ) -> None:
        self.spec, self.content = spec, content
        self.outcome: Outcome | None = None
        self.tellers = set[PeerId]()
        owners = content.owners() | ({spec.me} if content.mine else set())
        self.waiting = Waiting(spec, frozenset(owners))
        self._elsewhere: dict[int, int] = {}
        """Whose shares went into what others made of this peer's blocks, a bit each, by the block."""
        self._repair, self._repair_after, self._repair_after_until_s = repair, repair_after, 0.0
        self._started_s = self._reduced_s = 0.0

    # -- What a channel asks

    @property
    def told(self) -> bool:
        """Whether half of the other owners, or more, have sent their averages.

        One that is ahead of all others sends its own, too, and they are not late for that.
        """
        return bool(self.tellers) and 2 * len(self.tellers) >= len(self.content.owners())

    def lesson(self) -> Lesson:
        """See ``Lesson``. All peers owe an owner their shares; owners alone owe the other peers."""
        waiting, owns = self.waiting, bool(self.content.mine)
        owing = self.others() if owns else []
        if self.spec.gives:
            owing += sorted(self.content.owners() - set(owing))
        here = waiting.came.intersection(waiting.waited_for) - waiting.gave - waiting.apart
        return Lesson(
            owed={peer: peer in waiting.came for peer in owing},
            in_vain=frozenset(waiting.vain),
            answered=frozenset(waiting.answered),
            unanswered=frozenset(waiting.silent),
            withheld=frozenset(here) if owns and waiting.stage != BEFORE else frozenset(),
            owns=owns,
            came_s=(
                max(0.0, waiting.came_at_s[0] - self._started_s),
                max(0.0, waiting.came_at_s[1] - self._reduced_s),
            ),
        )

    def is_left(self) -> bool:
        """Where most are in a later round: whether they have gone on without this peer.

        Either it has averages to send still, without which they ended the round; or nothing of it has come.
        """
        owes = self.waiting.stage == SCATTERING and bool(self.content.mine)
        return self.waiting.stage != DONE and (owes or not self.waiting.came)

    def goes_elsewhere(self, question: Run) -> bool:
        """Whether what a peer asks for goes to another, since this peer assigns the blocks otherwise."""
        stage, block = question.key.stage ^ QUESTION, self.spec.block(question.key)
        if self.waiting.stage == BEFORE or not 0 <= block < len(self.spec.owners):
            return self.waiting.stage != BEFORE and self.spec.cut_apart(question.key)
        return self.spec.owners[block] != (question.peer if stage == SCATTER else self.spec.me)

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Wait for a peer no longer: what has not come from it was lost."""
        self.waiting.passed(peer)
        return self.waiting.look_around(now_s) if self.waiting.owed else self._advance(now_s)

    def asked_from_next(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer asks this one for a message of the next round: it sends nothing of this round any more."""
        return self._advance(now_s) if self.waiting.asked_from_next(peer) else []

    def apart(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer cuts the vector by other shares: nothing of it can be taken in this round."""
        waiting = self.waiting
        if peer in waiting.apart:
            return []
        waiting.came.add(peer)
        waiting.cuts_apart(peer)
        effects: list[Effect] = [Noted(APART, peer, f"in round {self.spec.round}: it goes by other shares")]
        return effects + (waiting.look_around(now_s) if waiting.owed else self._advance(now_s))

    # -- Events

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        if isinstance(event, Arrived):
            effects: list[Effect] = []
            for run in event.runs:
                if run.key.stage in ANSWERS:
                    self.waiting.answers(run)
                else:
                    self.waiting.spoke(run.peer)
                    effects += self._take(now_s, run)
            return effects if self.waiting.owed else effects + self._advance(now_s)
        if isinstance(event, Begin):
            return self._begin(now_s, event)
        if isinstance(event, Expired):
            return self._expire(now_s, event.timer.name)
        if isinstance(event, Left):
            return self.passed(now_s, event.peer)
        return []

    def _begin(self, now_s: float, begin: Begin) -> list[Effect]:
        waiting = self.waiting
        self._started_s = now_s
        giving = waiting.begin(now_s, begin)
        effects: list[Effect] = list(self.content.scatter(self)) if self.spec.gives else []
        for block in self.content.mine:
            for peer in giving:
                self._wait_for((peer, SCATTER, block), self.content.scattered_of(peer, block))
        effects.append(Arm(self.spec.timer("scatter"), waiting.until_s))
        if self._repair is not None:
            effects += self._repair.again(now_s, waiting.round_until_s)
        effects += waiting.enough(now_s)
        return effects + (waiting.count(now_s) if waiting.owed else self._advance(now_s))

    def _expire(self, now_s: float, name: str) -> list[Effect]:
        waiting, stage = self.waiting, self.waiting.stage
        if name == "repair":
            return self._repair_again(now_s)
        if name == QUORUM:
            waiting.grace_over(now_s)
            return self._advance(now_s)
        asked = waiting.asks(now_s, name)
        if asked is not None:
            return asked
        if waiting.unanswered(now_s, name):
            effects = self._advance(now_s)
            return effects + waiting.ask_again(now_s) if waiting.stage == stage else effects
        if (name, stage) not in (("scatter", SCATTERING), ("gather", GATHERING)):
            return []
        more = waiting.wants_more(now_s)
        if more is not None:
            return more
        waiting.overdue()
        return self._advance(now_s)

    # -- Arrivals

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        spec, waiting, stage, block = self.spec, self.waiting, run.key.stage, self.spec.block(run.key)
        if run.peer not in spec.members or run.peer == spec.me:
            return []
        if not stage & NACK and spec.cut_apart(run.key, run.total):
            return self.apart(now_s, run.peer)
        if not 0 <= block < len(spec.owners):
            return []
        if stage & NACK:
            if self._repair is None or waiting.stage == BEFORE:
                return []
            return self._repair.answer(run, now_s + waiting.begun.gather_s)  # the other may have begun later
        if stage == SCATTER:
            waiting.gave.add(run.peer)
            weight = run.weight if run.mask is None else run.weight[run.mask]
            if spec.quorum and (weight > 0).any():
                waiting.counted.add(run.peer)
        incoming, effects = self.content.take(self, now_s, run, block)
        if stage == GATHER and self._elsewhere and self.told:
            for mine, roll in self._elsewhere.items():
                for peer in peers_in(roll):
                    waiting.elsewhere(peer, mine)
        if incoming is None:
            return effects
        waiting.came.add(run.peer)
        if stage == GATHER and waiting.stage == SCATTERING and waiting.owed and len(run.heard):
            waiting.outvoted(run.peer, run.heard)
        if self._repair is not None:
            self._repair.came(now_s, run.peer, run.key)
        if spec.is_in(incoming):
            waiting.closed(now_s, (run.peer, stage, block))
            effects += waiting.look_around(now_s)
            effects += waiting.enough(now_s)
        elif self._repair is not None and (incoming.closed or incoming.overtaken):
            effects += self._ask(now_s, run, incoming, self._repair)
        return effects

    def owns_it_too(self, now_s: float, run: Run, block: int) -> list[Effect]:
        """A peer sends what it made of one of this peer's blocks, so its own share has gone into that. So
        have those of all that it names: that is believed of a round that is over for others.

        The two disagree on the owner (one may not hear the other). Waiting for the share would take until the
        deadline. A peer that owns all blocks sends nothing before it reduces, so it would be heard only when
        the round is over for others, in later rounds too, and would not be taken for living.
        """
        self.waiting.came.add(run.peer)
        self.waiting.elsewhere(run.peer, block)
        roll = int(np.bitwise_or.reduce(run.heard, initial=np.uint64(0)))
        self._elsewhere[block] = self._elsewhere.get(block, 0) | roll
        return self.waiting.look_around(now_s)

    def _ask(self, now_s: float, run: Run, incoming: Incoming, repair: Repairer) -> list[Effect]:
        """A message has holes, or ended with some: ask for them now, or once the round has begun here."""
        if self.waiting.stage == BEFORE:
            if incoming.closed:
                repair.later(incoming, run.peer, run.key)
            return []
        until_s = self._repair_until_s(now_s)
        if until_s is None:
            return []
        ask = repair.ask if incoming.closed else repair.under_way
        return ask(now_s, incoming, run.peer, run.key, until_s)

    def _repair_again(self, now_s: float) -> list[Effect]:
        until_s = self._repair_until_s(now_s)
        return [] if self._repair is None or until_s is None else self._repair.again(now_s, until_s)

    def _repair_until_s(self, now_s: float) -> float | None:
        """Until when it is of use to ask for missing chunks; ``None``: it is of no use."""
        if self.waiting.stage == DONE:
            return self._repair_after_until_s if now_s < self._repair_after_until_s else None
        return None if self.waiting.stage == BEFORE else self.waiting.round_until_s

    # -- From stage to stage

    def _advance(self, now_s: float) -> list[Effect]:
        waiting = self.waiting
        if waiting.owed or waiting.stage not in (SCATTERING, GATHERING):
            return []
        return self._turn_over(now_s) if waiting.stage == SCATTERING else self._finish(now_s)

    def _turn_over(self, now_s: float) -> list[Effect]:
        """From the first stage to the second."""
        waiting, self._reduced_s = self.waiting, now_s
        waiting.turn_over(now_s)
        if self._repair is not None:
            self._repair.enough(SCATTER)
        effects: list[Effect] = list(self.content.reduce(self))
        for block, owner, incoming in self.content.awaited() if self.spec.gives else ():
            self._wait_for((owner, GATHER, block), incoming)
        effects.append(Arm(self.spec.timer("gather"), waiting.until_s))
        return effects + (waiting.count(now_s) if waiting.owed else self._advance(now_s))

    def _finish(self, now_s: float) -> list[Effect]:
        self.waiting.stage = DONE
        self._repair_after_until_s = now_s + self.repair_after_s
        if self._repair is not None:
            self._repair.forget(
                SCATTER
            )  # all owners have reduced, or time is up: the trainer may change its values
        result = self.content.result(self)
        self.outcome = Outcome(
            channel=self.spec.channel,
            round=self.spec.round,
            mean=result.mean,
            weight=result.weight,
            heard=result.heard,
            averaged=result.averaged,
            missed=self.waiting.missed(),
            waited_for=self.waiting.waited_for,
            started_s=self._started_s,
            scatter_s=self._reduced_s - self._started_s,
            gather_s=now_s - self._reduced_s,
            total_s=now_s - self._started_s,
            expired=self.waiting.expired,
            last=self.waiting.last,
            gathered=result.gathered,
            judged=result.judged,
            told=result.told,
        )
        return [Done(self.outcome)]

    # -- What a content asks

    @property
    def begun(self) -> Begin:
        """What this peer gives to the round."""
        return self.waiting.begun

    @property
    def repair_after_s(self) -> float:
        """For how long after its end a round's averages or rows are sent and asked for."""
        return self._repair_after * (self.begun.scatter_s + self.begun.gather_s)

    @property
    def shares_until_s(self) -> float:
        """Until when this peer's shares may leave: as long as others' may come, where it knows how long that
        is. A peer that owns nothing sees none come, and has no such measure.
        """
        return self.waiting.until_s if self.content.mine else self.waiting.round_until_s

    def send(self, run: Run, deadline_s: float) -> Send:
        """Send a message, and keep it for repairs."""
        if self._repair is not None:
            self._repair.remember(run)
        return Send(run, deadline_s)

    def turn(self) -> list[tuple[int, PeerId]]:
        """Blocks with their owners, the next peers' first, so that not all send to one peer at once."""
        me, n = self.spec.me, max(self.spec.members) + 1
        return sorted(enumerate(self.spec.owners), key=lambda entry: (entry[1] - me) % n)

    def others(self) -> list[PeerId]:
        """All other members that give, in the same order."""
        me, n = self.spec.me, max(self.spec.members) + 1
        return sorted(self.spec.members - self.spec.auxiliary - {me}, key=lambda peer: (peer - me) % n)

    def _wait_for(self, share: Share, incoming: Incoming | None) -> None:
        self.waiting.owe(share, incoming is not None and self.spec.is_in(incoming))
