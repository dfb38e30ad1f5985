"""Whom a round waits for, and when it waits no longer.

In each of its two stages a round waits for *shares*: messages, named by stage and block, that a peer owes. A
peer is waited for exactly while it owes one. There are eight ways (``Why``) in which that ends, each through
``Waiting._release``, and each says what follows:

| why | how it is seen | missed | would more time help | owes again in GATHER |
|---|---|---|---|---|
| IN | all chunks came, or the end marker shows that the rest will not | no | - | yes |
| PASSED | it was heard in a later round, or has left | no | - | no |
| ELSEWHERE | it sent its own average of this peer's block: its share went into that | no | - | yes |
| LATE | the stage's deadline has passed | yes | if anything of it came | if anything came |
| ENOUGH | a quorum is there, and another share would not pay for the wait | yes | as LATE | as LATE |
| OUTVOTED | the averages of most owners, and of two at least, are without it | yes | as LATE | as LATE |
| SILENT | asked whether it is there, it did not answer | yes | as LATE | as LATE |
| NEVER | it says that the share comes no more, or asks twice in the next round | yes | no | not in a probe |

Where only a few shares are missing their peers are asked (``asking``), again and again; where most are, later
and more seldom, as a peer that is early would else ask all others in each round. A peer that does not answer
in the time that the second stage usually takes is frozen, dead or cut off; where nobody does, this peer is.
One that answers may compute, or wait itself, until the deadline. A peer that has ended the round, or assigns
the blocks otherwise, says so. Unless its share comes in the time for an answer, it is waited for no longer,
and no deadline grows by that.

A quorum (``Spec.quorum``) ends SCATTER before its deadline. With k peers there, of which this owner is one,
one more in the average makes up for the wait of all k if it comes within 1/k of the time since the round
before began: (k + 1) / (T + w) > k / T. So long is the grace, counted anew from each share that comes. Where
the trainer goes on until the deadline T is infinite: no wait costs anything, and there is no grace.

A peer that cuts the vector by other shares (``Waiting.apart``) owes nothing that could be taken. That is
``NEVER``, for the whole round.

The reason for each rule is in docs/protocols.md. ``benchmarks/waiting_rules.py`` leaves each out in turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from enum import Enum

import numpy as np

from ragtag.core.types import Arm, Begin, Effect, PeerId, PeerSet, Run, Send
from ragtag.protocols.rounds.asking import NEVER, question
from ragtag.protocols.rounds.base import GATHER, SCATTER, Spec

QUORUM = "quorum"
"""The timer of the grace after a quorum."""
BEFORE, SCATTERING, GATHERING, DONE = range(4)
"""Where this peer is in the round."""
WITNESSES = 2
"""How many owners, at least, must have gone on without a peer. In a crew of three one owner is most of the
others, and its line alone may have lost the share that is still on its way here."""
Share = tuple[PeerId, int, int]
"""A message that a peer owes: the peer, and the message's stage and block."""
_ASKING = -1
"""So few shares are never missing: timers ask for them already."""
_NONE = "", ""
_TIMERS = _NONE, ("ask scatter", "answer scatter"), ("ask gather", "answer gather"), _NONE
"""Timers, by the stage to which they belong: to ask, and to see which peers have answered."""


class Why(Enum):
    """Why a peer is waited for no longer (see the table above).

    missed: the outcome names the peer.
    vain: more time would not have helped.
    """

    IN = "in", False, False
    PASSED = "passed", False, False
    ELSEWHERE = "elsewhere", False, False
    LATE = "late", True, False
    ENOUGH = "enough", True, False
    OUTVOTED = "outvoted", True, False
    SILENT = "silent", True, False
    NEVER = "never", True, True

    def __init__(self, _: str, missed: bool, vain: bool) -> None:
        self.missed, self.vain = missed, vain


class Waiting:
    """Whom one round waits for, in the stage that it is in.

    owners: the peers that own a block in which there is something.
    until_s: this stage's deadline.
    owed: the shares that are waited for now.
    came: the peers from which something of this round has come.
    gave: those of which a copy has come.
    counted: where there is a quorum, those of which one has come that counts in an average: it has a weight.
    answered: those that have said something since they were asked whether they are there.
    silent: those that did not answer in time.
    vain: those that it went on without, and for which more time would not have helped (see ``Why``).
    never: the owed shares that will not come, as their peers say. It is as if a peer had not said so once
        something comes from it after all.
    apart: those that cut the vector by other shares: they owe nothing that could be taken.
    expired: a stage ended without a share.
    last: the peer whose share ended the first stage, or the lowest of those without which it ended.
    came_at_s: when, in each stage, the last share came that was waited for.
    waited_for: the peers whose shares the round waited for when it began. Auxiliaries give none, so they are
        waited for as owners only: in GATHER, by peers that give.
    """

    def __init__(self, spec: Spec, owners: frozenset[PeerId]) -> None:
        self._spec, self._owners = spec, owners
        self.stage = BEFORE
        self.begun: Begin
        self.until_s = 0.0
        self.owed: set[Share] = set()
        self.came: set[PeerId] = set()
        self.gave: set[PeerId] = set()
        self.counted: set[PeerId] = set()
        self.answered: set[PeerId] = set()
        self.silent: set[PeerId] = set()
        self.vain: set[PeerId] = set()
        self.never: set[Share] = set()
        self.apart: set[PeerId] = set()
        self.expired = False
        self.last = -1
        self.came_at_s = [-math.inf, -math.inf]
        self.waited_for: tuple[PeerId, ...] = ()
        self._missed: set[PeerId] = set()
        self._awaited: set[PeerId] = set()
        """The peers that it waits for, without those that were seen in a later round."""
        self._elsewhere: set[tuple[PeerId, int]] = set()
        """Peers, and blocks of this one whose shares they send to another."""
        self._told: dict[PeerId, int] = {}
        """The contributors to an owner's average, a bit each, by the owner."""
        self._of: Counter[PeerId] = Counter()
        """How many shares this stage waits for, those that are in among them, by the peer."""
        self._few = _ASKING
        self._pause_s = math.inf
        """How long it waits before it asks, or asks again."""
        self._next = "", math.inf
        """The timer that runs: to ask, or until answers are in. Those that it replaces run out unheeded."""
        self._grace_s = 0.0
        self._began_s = self._enough_s = math.inf

    # -- Stages

    def begin(self, now_s: float, begin: Begin) -> list[PeerId]:
        """The round begins: which peers owe this owner their copies.

        A peer that withheld its copies in the last round takes another for the owner, and owes none. An owner
        from which all withheld theirs was away itself. They know of it by now, so all of them owe.
        """
        self.stage, self.begun, self._grace_s = SCATTERING, begin, begin.grace_s
        self._began_s = now_s
        part = self._spec.members - self._spec.auxiliary | self._owners
        self._awaited = set(begin.waiting & part - {self._spec.me})
        self.waited_for = tuple(sorted(self._awaited - self._spec.auxiliary))
        self.until_s = now_s + begin.scatter_s
        return [peer for peer in self.waited_for if peer not in begin.withheld] or list(self.waited_for)

    def turn_over(self, now_s: float) -> None:
        """The second stage begins. Its budget counts from the first one's deadline, as another owner may
        reduce as late as that. Where a peer was silent others find that out later by up to a question and its
        answer, as each asks at times of its own.
        """
        others_s = self._usual_s + self._answer_s if self.silent else 0.0
        self.stage, self.until_s = GATHERING, max(now_s, self.until_s) + self.begun.gather_s + others_s
        self._of.clear()

    def owe(self, share: Share, is_in: bool = False) -> None:
        """Wait for a share, unless it is in, goes to another owner, or its peer is past the round."""
        peer, stage, block = share
        if is_in:
            self._of[peer] += 1
            return
        if peer in self.apart:
            self._missed.add(peer)
            self.vain.add(peer)
            return
        if stage == SCATTER:
            if (peer, block) in self._elsewhere:
                return
        elif peer not in self._awaited or self._is_silent(peer):
            return
        self._of[peer] += 1
        self.owed.add(share)

    def _is_silent(self, peer: PeerId) -> bool:
        """Whether it was waited for in the first stage in vain: nothing will come in the second either.

        One that said ``NEVER`` may take another for a block's owner; not in a probe, so there it is past it.
        """
        ended = self.begun.met or peer not in self.vain
        return peer in self._missed and peer not in self.came and ended

    # -- Ways in which waiting ends

    def closed(self, now_s: float, share: Share) -> None:
        """``IN``: a share has come, or what has not come of it was lost."""
        if share in self.owed:
            self._release((share,), Why.IN)
            self.came_at_s[share[1] == GATHER] = now_s
            if self.stage == SCATTERING and not self.owed:
                self.last = share[0]

    def elsewhere(self, peer: PeerId, block: int) -> None:
        """``ELSEWHERE``: a peer's share of a block went to another that it takes for the owner."""
        self._elsewhere.add((peer, block))
        share = peer, SCATTER, block
        if share in self.owed:
            self._release((share,), Why.ELSEWHERE)

    def passed(self, peer: PeerId) -> None:
        """``PASSED``: nothing of this round comes from a peer any more, and what has not come was lost."""
        self._awaited.discard(peer)
        self._release(self._owed_by(peer), Why.PASSED)

    def cuts_apart(self, peer: PeerId) -> None:
        """``NEVER``: a peer cuts the vector by other shares."""
        self.apart.add(peer)
        owed = self._owed_by(peer)
        if owed:
            self._miss(owed, Why.NEVER)

    def overdue(self) -> None:
        """``LATE``: the stage's deadline has passed."""
        self._miss(set(self.owed), Why.LATE)

    def enough(self, now_s: float) -> list[Effect]:
        """A share came: where a quorum is there, wait for one more while that pays."""
        if not self._spec.quorum or self.stage != SCATTERING or not self.owed:
            return []
        there = self._there()
        if there < self._spec.quorum:
            return []
        self._enough_s = now_s + (self.begun.cycle_s + now_s - self._began_s) / there
        late = self._enough_s >= self.until_s
        return [] if late else [Arm(self._spec.timer(QUORUM), self._enough_s)]

    def grace_over(self, now_s: float) -> None:
        """``ENOUGH``: no share came while the wait for it would have paid."""
        if self.stage == SCATTERING and now_s >= self._enough_s:
            self._miss(set(self.owed), Why.ENOUGH)

    def _there(self) -> int:
        """How many peers have given this owner copies that count in its averages, itself among them."""
        return int(self.begun.weight > 0) + len(self.counted - _peers(self.owed))

    def outvoted(self, told_by: PeerId, heard: PeerSet) -> None:
        """``OUTVOTED``: an owner has sent an average, with its contributors. Wait for no peer that most lack.

        Each peer's deadline comes from its own measurements. This rule makes the middle one count: a peer
        that would wait much longer goes on with those that did.
        """
        told, awaited = self._told, self._awaited & self._owners
        told[told_by] = told.get(told_by, 0) | int(np.bitwise_or.reduce(heard))
        if 2 * len(told) < len(awaited):
            return
        for peer in sorted(_peers(self.owed)):
            others = awaited - {peer}
            without = sum(not told[other] >> peer & 1 for other in others if other in told)
            if without >= WITNESSES and 2 * without > len(others):
                self._release(self._owed_by(peer), Why.OUTVOTED)
                self.expired, self.last = True, peer

    def asked_from_next(self, peer: PeerId) -> bool:
        """``NEVER``, the second time: a peer asks this one for a message of the next round. Whether it is
        waited for no longer.
        """
        owed = self._owed_by(peer)
        if owed and owed <= self.never:
            self._miss(owed, Why.NEVER)
            return True
        self.never |= owed
        return False

    def _release(self, shares: Collection[Share], why: Why) -> None:
        """Wait for these shares no longer."""
        self.owed.difference_update(shares)
        if self.never:
            self.never.difference_update(shares)
        if why.missed:
            self._missed |= _peers(shares)
        if why.vain:
            self.vain |= _peers(shares)

    def _miss(self, shares: Collection[Share], why: Why) -> None:
        """The stage goes on without these shares."""
        assert why.missed
        self.expired = True
        if self.stage == SCATTERING and shares:
            self.last = min(_peers(shares))
        self._release(shares, why)

    def _owed_by(self, peer: PeerId) -> set[Share]:
        return {share for share in self.owed if share[0] == peer}

    # -- What comes

    def spoke(self, peer: PeerId) -> None:
        """Something of this round came from a peer."""
        self.answered.add(peer)
        if self.never:
            self.never -= self._owed_by(peer)

    def answers(self, run: Run) -> None:
        """A peer has answered what it was asked."""
        self.answered.add(run.peer)
        if run.key.stage == NEVER:
            stage = SCATTER if self.stage == SCATTERING else GATHER
            self.never |= self.owed & {(run.peer, stage, self._spec.block(run.key))}

    # -- Asking

    def count(self, now_s: float) -> list[Effect]:
        """A stage begins: few shares are half of all that it waits for, or as many as one peer owes.

        Those that are in count among them: they show that this peer is not early. Where more are missing this
        peer is early, or cut off: it asks after as long as it is early usually, or in GATHER as others need
        to find out that a peer is silent.
        """
        self._few = max(self._of.total() // 2, *self._of.values())
        early = self.stage == SCATTERING
        self._pause_s = self.begun.usual_scatter_s if early else self._usual_s + self._answer_s
        effects = self.look_around(now_s)
        return effects if self._few == _ASKING else self._arm(now_s, 0, self._pause_s)

    def look_around(self, now_s: float) -> list[Effect]:
        """Where only few shares are missing: ask their peers whether they are there, after a while."""
        if not self.owed or len(self.owed) > self._few:
            return []
        self._few, self._pause_s = _ASKING, self._usual_s
        return self._arm(now_s, 0, self._pause_s)

    def wants_more(self, now_s: float) -> list[Effect] | None:
        """Most peers' shares are missing at the first deadline, or a quorum is: wait as long again, once.
        ``None``: the stage ends.

        The time counts from now on where this peer slept through its deadline. Those that are missing are
        asked meanwhile: this peer may be early, or most be out of reach. A peer that owns nothing has its
        first deadline in the second stage, and waits for owners alone. An owner may have learned, as no
        other, that a peer comes late, and wait for it.
        """
        owns = self._spec.me in self._owners
        awaited = self.waited_for if owns else self._awaited & self._owners
        few = 2 * len(_peers(self.owed)) > len(awaited)
        if self._spec.quorum and owns:
            few = self._there() < self._spec.quorum
        if self.stage != (SCATTERING if owns else GATHERING) or self._grace_s <= 0 or not few:
            return None
        self.until_s += max(0.0, now_s - self.until_s) + self._grace_s
        self._grace_s = 0.0
        effects: list[Effect] = [Arm(self._spec.timer("scatter" if owns else "gather"), self.until_s)]
        self._few, self._pause_s = _ASKING, self._usual_s
        effects += self._ask(self.until_s)
        return effects + self._arm(now_s, 1, self._answer_s)

    def asks(self, now_s: float, name: str) -> list[Effect] | None:
        """The timer to ask has run out; ``None``: ``name`` is another timer, or one of the other stage."""
        if name != _TIMERS[self.stage][0]:
            return None
        if not self._is_due(now_s, name):
            return []
        arm = self._arm(now_s, 1, self._answer_s)
        return [*self._ask(now_s + self._answer_s), *arm] if arm else []

    def unanswered(self, now_s: float, name: str) -> bool:
        """``SILENT``, ``NEVER``: the time for answers is over. ``False``: ``name`` is another timer."""
        if name != _TIMERS[self.stage][1] or not self._is_due(now_s, name):
            return False
        silent = {share for share in self.owed if share[0] not in self.answered}
        never = self.never - silent
        self.silent |= _peers(silent)
        for peer in _peers(silent):
            if self._spec.patience is not None:
                self._spec.patience.gave_up(self._spec.round, peer, self.until_s)
        for lost, why in ((silent, Why.SILENT), (never, Why.NEVER)):
            if lost:
                self._miss(lost, why)
        return True

    def ask_again(self, now_s: float) -> list[Effect]:
        """Peers that answered, and still owe a share, are asked once more after as long, or twice as long
        where most do: a fast peer among slow ones would else ask all of them all the time.
        """
        if self._few != _ASKING:
            self._pause_s *= 2.0
        return self._arm(now_s, 0, self._pause_s)

    @property
    def _usual_s(self) -> float:
        return min(self.begun.usual_gather_s, self.begun.gather_s)

    @property
    def _answer_s(self) -> float:
        return max(self._usual_s, self.begun.answer_s)

    def _arm(self, now_s: float, which: int, wait_s: float) -> list[Effect]:
        name, at_s = _TIMERS[self.stage][which], now_s + wait_s
        if at_s >= self.until_s:
            return []
        self._next = name, at_s
        return [Arm(self._spec.timer(name), at_s)]

    def _is_due(self, now_s: float, name: str) -> bool:
        due, at_s = self._next
        return name == due and now_s >= at_s

    def _ask(self, until_s: float) -> list[Effect]:
        self.answered -= _peers(self.owed)
        self.never.clear()
        asked = sorted(self.owed)
        return [Send(question(peer, self._spec.key(stage, block)), until_s) for peer, stage, block in asked]

    # -- Looking

    @property
    def round_until_s(self) -> float:
        """The deadline of the round, as far as this stage knows it."""
        return self.until_s + self.begun.gather_s if self.stage == SCATTERING else self.until_s

    def missed(self) -> tuple[PeerId, ...]:
        """The peers that the round went on without."""
        return tuple(sorted(self._missed))


def _peers(shares: Collection[Share]) -> set[PeerId]:
    """Whose shares these are."""
    return {share[0] for share in shares}
