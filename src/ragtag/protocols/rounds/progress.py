"""Whom a round waits for, and when it waits no longer: one ``Progress`` for each peer.

In each of its two stages a round waits for *shares*: messages, named by stage and block, that a peer owes. A
peer is waited for exactly while it owes one. There are seven ways (``Why``) in which that ends, each through
``Waiting._release``, and ``MEANS`` says what follows:

| why | how it is seen | missed | would more time help | owes again in GATHER |
|---|---|---|---|---|
| IN | all chunks came, or the end marker shows that the rest will not | no | - | yes |
| PASSED | it was heard in a later round, or has left | no | - | no |
| ELSEWHERE | it sent its own average of this peer's block: its share went into that | no | - | yes |
| LATE | the stage's deadline has passed | yes | if anything of it came | if anything came |
| OUTVOTED | the averages of most owners, and of two at least, are without it | yes | as LATE | as LATE |
| SILENT | asked whether it is there, it did not answer | yes | as LATE | as LATE |
| NEVER | it says that the share comes no more, or asks twice in the next round | yes | no | yes |

Where only a few shares are missing their peers are asked (``asking``), again and again. A peer that does not
answer in the time that the second stage usually takes is frozen, dead or cut off. One that answers may
compute, or wait itself, until the deadline. A peer that has ended the round, or assigns the blocks otherwise,
says so. Unless its share comes in the time for an answer, it is waited for no longer, and no deadline grows
by that.

The reason for each rule is in docs/protocols.md. ``benchmarks/waiting_rules.py`` leaves each out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter

import numpy as np

from ragtag.core.types import Arm, Begin, Effect, PeerId, PeerSet, Run, Send
from ragtag.protocols.rounds.asking import NEVER, question
from ragtag.protocols.rounds.base import GATHER, SCATTER, Spec

BEFORE, SCATTERING, GATHERING, DONE = range(4)
"""Where this peer is in the round."""
WITNESSES = 2
"""How many owners, at least, must have gone on without a peer. In a crew of three one owner is most of the
others, and its line alone may have lost the share that is still on its way here."""
Share = tuple[int, int]
"""A message that a peer owes: its stage and block."""
_peer = itemgetter(0)
_NONE = "", ""
_TIMERS = _NONE, ("ask scatter", "answer scatter"), ("ask gather", "answer gather"), _NONE
"""Timers, by the stage to which they belong: to ask, and to see which peers have answered."""


class Why(Enum):
    """Why a peer is waited for no longer (see the table above)."""

    IN = "in"
    PASSED = "passed"
    ELSEWHERE = "elsewhere"
    LATE = "late"
    OUTVOTED = "outvoted"
    SILENT = "silent"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What follows from a ``Why``.

    missed: the outcome names the peer.
    vain: more time would not have helped.
    """

    missed: bool = False
    vain: bool = False


MEANS = {
    Why.IN: Meaning(),
    Why.PASSED: Meaning(),
    Why.ELSEWHERE: Meaning(),
    Why.LATE: Meaning(missed=True),
    Why.OUTVOTED: Meaning(missed=True),
    Why.SILENT: Meaning(missed=True),
    Why.NEVER: Meaning(missed=True, vain=True),
}


@dataclass(slots=True)
class Progress:
    """One peer in one round, as another sees it.

    awaited: the round waits for it, and it was not seen in a later one. Once false it stays so.
    owes: the shares that are waited for now.
    came: something of this round has come from it.
    gave: one of its copies has come.
    answered: it has said something since it was asked whether it is there.
    never: of the shares that it owes, those of which it says that they come no more. Empty once something
        comes from it after all.
    elsewhere: blocks of this peer whose shares it sends to another.
    contributors: the peers in its averages, a bit each; -1: none of them has come yet.
    missed: see ``Meaning``.
    vain: see ``Meaning``.
    """

    awaited: bool = False
    owes: set[Share] = field(default_factory=set)
    came: bool = False
    gave: bool = False
    answered: bool = False
    never: frozenset[Share] = frozenset()
    elsewhere: frozenset[int] = frozenset()
    contributors: int = -1
    missed: bool = False
    vain: bool = False


class _Peers(dict[PeerId, Progress]):
    """Each peer's progress, made when it is first asked for."""

    def __missing__(self, peer: PeerId) -> Progress:
        progress = self[peer] = Progress()
        return progress


class Waiting:
    """Whom one round waits for, in the stage that it is in.

    of: each peer's progress.
    until_s: this stage's deadline.
    lacking: how many shares are waited for.
    expired: a stage ended without a share.
    last: the peer whose share ended the first stage, or the lowest of those without which it ended.
    waited_for: the peers that the round waited for when it began.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.stage = BEFORE
        self.begun: Begin
        self.until_s = 0.0
        self.lacking = 0
        self.expired = False
        self.last = -1
        self.waited_for: tuple[PeerId, ...] = ()
        self.of = _Peers()
        self._few = 0
        self._grace_s = 0.0

    # -- Stages

    def begin(self, now_s: float, begin: Begin) -> list[PeerId]:
        """The round begins: which peers owe this owner their copies.

        A peer that withheld its copies in the last round takes another for the owner, and owes none. An owner
        from which all withheld theirs was away itself. They know of it by now, so all of them owe.
        """
        self.stage, self.begun, self._grace_s = SCATTERING, begin, begin.grace_s
        awaited = begin.waiting & self._spec.members - {self._spec.me}
        self.waited_for = tuple(sorted(awaited))
        for peer in self.waited_for:
            self.of[peer].awaited = True
        self.until_s = now_s + begin.scatter_s
        return [peer for peer in self.waited_for if peer not in begin.withheld] or list(self.waited_for)

    def turn_over(self, now_s: float) -> None:
        """The second stage begins. Its budget counts from the first one's deadline, as another owner may
        reduce as late as that.
        """
        self.stage, self.until_s = GATHERING, max(now_s, self.until_s) + self.begun.gather_s

    def owe(self, peer: PeerId, share: Share) -> None:
        """Wait for a share from now on, unless it goes to another owner, or its peer is past the round."""
        progress = self.of[peer]
        if share[0] == SCATTER:
            if share[1] in progress.elsewhere:
                return
        elif not progress.awaited or self._is_silent(progress):
            return
        progress.owes.add(share)
        self.lacking += 1

    @staticmethod
    def _is_silent(progress: Progress) -> bool:
        """Whether it was waited for in the first stage in vain: nothing will come in the second either."""
        return progress.missed and not progress.came and not progress.vain

    # -- Ways in which waiting ends

    def closed(self, peer: PeerId, share: Share) -> None:
        """``IN``: a share has come, or what has not come of it was lost."""
        progress = self.of[peer]
        if share in progress.owes:
            self._release(progress, {share}, Why.IN)
            if self.stage == SCATTERING and not self.lacking:
                self.last = peer

    def elsewhere(self, peer: PeerId, block: int) -> None:
        """``ELSEWHERE``: a peer's share of a block went to another that it takes for the owner."""
        progress = self.of[peer]
        progress.elsewhere |= {block}
        if (SCATTER, block) in progress.owes:
            self._release(progress, {(SCATTER, block)}, Why.ELSEWHERE)

    def passed(self, peer: PeerId) -> None:
        """``PASSED``: nothing of this round comes from a peer any more, and what has not come was lost."""
        progress = self.of[peer]
        progress.awaited = False
        self._release(progress, set(progress.owes), Why.PASSED)

    def overdue(self) -> None:
        """``LATE``: the stage's deadline has passed."""
        self._miss([(peer, set(p.owes), Why.LATE) for peer, p in self._open()])

    def outvoted(self, told_by: PeerId, heard: PeerSet) -> None:
        """``OUTVOTED``: an owner has sent an average, with its contributors. Wait for no peer that most lack.

        Each peer's deadline comes from its own measurements. This rule makes the middle one count: a peer
        that would wait much longer goes on with those that did.
        """
        teller = self.of[told_by]
        if teller.contributors < 0:
            teller.contributors = int(np.bitwise_or.reduce(heard))
        told = [p.contributors for p in self.of.values() if p.contributors >= 0]
        awaited = [p for p in self.of.values() if p.awaited]
        if 2 * len(told) < len(awaited):
            return
        for peer, progress in sorted(self._open(), key=_peer):
            others = [p for p in awaited if p is not progress]
            without = sum(p.contributors >= 0 and not p.contributors >> peer & 1 for p in others)
            if without >= WITNESSES and 2 * without > len(others):
                self._release(progress, set(progress.owes), Why.OUTVOTED)
                self.expired, self.last = True, peer

    def asked_from_next(self, peer: PeerId) -> bool:
        """``NEVER``, the second time: a peer asks this one for a message of the next round. Whether it is
        waited for no longer.
        """
        progress = self.of[peer]
        if progress.owes and progress.owes <= progress.never:
            self._miss([(peer, set(progress.owes), Why.NEVER)])
            return True
        progress.never |= progress.owes
        return False

    def _release(self, progress: Progress, shares: set[Share], why: Why) -> None:
        """Wait for these shares no longer."""
        progress.owes -= shares
        progress.never -= shares
        self.lacking -= len(shares)
        progress.missed |= MEANS[why].missed
        progress.vain |= MEANS[why].vain

    def _miss(self, lost: list[tuple[PeerId, set[Share], Why]]) -> None:
        """The stage goes on without these shares."""
        self.expired = True
        for _, shares, why in lost:
            assert shares and MEANS[why].missed
        if self.stage == SCATTERING and lost:
            self.last = min(peer for peer, _, _ in lost)
        for peer, shares, why in lost:
            self._release(self.of[peer], shares, why)

    def _open(self) -> list[tuple[PeerId, Progress]]:
        return [(peer, progress) for peer, progress in self.of.items() if progress.owes]

    # -- What comes

    def spoke(self, peer: PeerId) -> Progress:
        """Something of this round came from a peer."""
        progress = self.of[peer]
        progress.answered = True
        if progress.never:
            progress.never = frozenset()
        return progress

    def answers(self, run: Run) -> None:
        """A peer has answered what it was asked."""
        progress = self.of[run.peer]
        progress.answered = True
        if run.key.stage == NEVER:
            stage = SCATTER if self.stage == SCATTERING else GATHER
            progress.never |= progress.owes & {(stage, self._spec.block(run.key))}

    # -- Asking

    def count(self, now_s: float) -> list[Effect]:
        """A stage begins: few shares are half of those waited for now, or as many as one peer owes."""
        self._few = max(self.lacking // 2, *(len(progress.owes) for _, progress in self._open()))
        return self.look_around(now_s)

    def look_around(self, now_s: float) -> list[Effect]:
        """Where only few shares are missing: ask their peers whether they are there, after a while."""
        if not 0 < self.lacking <= self._few:
            return []
        self._few = 0  # from here on timers ask
        return self._arm(now_s, 0, self.begun.gather_s)

    def wants_more(self, now_s: float) -> list[Effect] | None:
        """Most peers' shares are missing at the first deadline: wait as long again, once. ``None``: the stage
        ends.

        The time counts from now on where this peer slept through its deadline. One or two others are asked
        meanwhile.
        """
        overdue = len(self._open())
        if self.stage != SCATTERING or self._grace_s <= 0 or 2 * overdue <= len(self.waited_for):
            return None
        self.until_s += max(0.0, now_s - self.until_s) + self._grace_s
        self._grace_s = 0.0
        effects: list[Effect] = [Arm(self._spec.timer("scatter"), self.until_s)]
        if len(self.waited_for) > 2:
            return effects
        self._few = 0
        effects += self._ask(self.until_s)
        return effects + self._arm(now_s, 1, self._answer_s)

    def asks(self, now_s: float, name: str) -> list[Effect] | None:
        """The timer to ask has run out; ``None``: ``name`` is another timer, or one of the other stage."""
        if name != _TIMERS[self.stage][0]:
            return None
        arm = self._arm(now_s, 1, self._answer_s)
        return [*self._ask(now_s + self._answer_s), *arm] if arm else []

    def unanswered(self, name: str) -> bool:
        """``SILENT``, ``NEVER``: the time for answers is over. ``False``: ``name`` is another timer."""
        if name != _TIMERS[self.stage][1]:
            return False
        silent = [(peer, set(p.owes), Why.SILENT) for peer, p in self._open() if not p.answered]
        for peer, _, _ in silent:
            if self._spec.patience is not None:
                self._spec.patience.gave_up(self._spec.round, peer, self.until_s)
        never = [(peer, set(p.never), Why.NEVER) for peer, p in self._open() if p.answered and p.never]
        for lost in (silent, never):
            if lost:
                self._miss(lost)
        return True

    def ask_again(self, now_s: float) -> list[Effect]:
        """Peers that answered, and still owe a share, are asked once more after a budget of GATHER."""
        return self._arm(now_s, 0, self.begun.gather_s)

    @property
    def _answer_s(self) -> float:
        return max(self.begun.gather_s, self.begun.answer_s)

    def _arm(self, now_s: float, which: int, wait_s: float) -> list[Effect]:
        if now_s + wait_s >= self.until_s:
            return []
        return [Arm(self._spec.timer(_TIMERS[self.stage][which]), now_s + wait_s)]

    def _ask(self, until_s: float) -> list[Effect]:
        asked: list[Effect] = []
        for peer, progress in sorted(self._open(), key=_peer):
            progress.answered = False
            progress.never = frozenset()
            for stage, block in sorted(progress.owes):
                asked.append(Send(question(peer, self._spec.key(stage, block)), until_s))
        return asked

    # -- Looking

    @property
    def round_until_s(self) -> float:
        """The deadline of the round, as far as this stage knows it."""
        return self.until_s + self.begun.gather_s if self.stage == SCATTERING else self.until_s

    def missed(self) -> tuple[PeerId, ...]:
        """The peers that the round went on without."""
        return tuple(sorted(peer for peer, progress in self.of.items() if progress.missed))
