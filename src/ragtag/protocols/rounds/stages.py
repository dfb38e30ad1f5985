"""Two stages through block owners: what a reduce-scatter with all-gather and a gathering of rows share.

Stage SCATTER: every peer sends each block's owner what it has of the block. Stage GATHER: the owner sends
every peer what it made of that. A stage is over when all messages that are waited for have closed (all chunks
are there, or the marked last datagram shows that the rest will not come), or at its deadline.

Where most have not come by the first deadline, this peer is early, or was slow to listen, rather than most
of the crew dead: the first time it waits once more as long. One that went on alone would be early in its next
round, too, and in the one after that. That one or two others, where there are no more, are dead is not so
unlikely: they are asked meanwhile whether they are there.

Where only a few are missing, they are asked for: see ``awaiting``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from ragtag.core.types import Arm, Arrived, Begin, Effect, Event, Expired, Left, Outcome, PeerId, Run, Send
from ragtag.protocols.rounds.awaiting import GATHERING, SCATTERING, WAITING, Awaiting, Entry
from ragtag.protocols.rounds.base import GATHER, SCATTER, Incoming, Spec
from ragtag.protocols.rounds.hail import ANSWERS, HAIL
from ragtag.protocols.rounds.repair import Repairer

WITNESSES = 2
"""Owners that must have gone on without a peer: one may have had bad luck (a mark overtook data)."""


class Stages(Awaiting):
    """One round on one peer; runs may come before ``Begin`` (faster peers start earlier).

    mine: the blocks that this peer owns. repair: asks again for what is missing while time remains.
    """

    def __init__(self, spec: Spec, mine: list[int], repair: Repairer | None) -> None:
        super().__init__(spec)
        self.outcome: Outcome | None = None
        self._mine, self._repair = mine, repair
        self._elsewhere: set[Entry] = set()
        """Shares that will not come: their senders take others for the blocks' owners."""
        self._came: set[PeerId] = set()
        self._told = False
        self._gave: set[PeerId] = set()
        self._reduced: dict[PeerId, int] = {}

    # -- What a kind of round does

    @abstractmethod
    def _owners(self) -> Collection[PeerId]:
        """The other peers that own blocks."""

    @abstractmethod
    def _scatter(self) -> Iterator[Effect]:
        """The round has begun: this peer's share of each block, to its owner."""

    @abstractmethod
    def _scattered_of(self, peer: PeerId, block: int) -> Incoming | None:
        """What has come so far of a peer's share of one of this peer's blocks."""

    @abstractmethod
    def _take(self, now_s: float, run: Run) -> list[Effect]:
        """Something came."""

    @abstractmethod
    def _reduce(self) -> Iterator[Effect]:
        """What came of this peer's blocks is in: what becomes of it, to every member."""

    @abstractmethod
    def _awaited(self) -> Iterable[tuple[int, PeerId, Incoming | None]]:
        """Others' blocks, their owners, and what has come so far."""

    @abstractmethod
    def _finish(self, now_s: float) -> list[Effect]:
        """All that is waited for is in."""

    # -- Looking

    def withheld(self) -> frozenset[PeerId]:
        """Heard, and waited for, but of what they owe this owner nothing came."""
        if not self._mine or self._state == WAITING:
            return frozenset()
        return frozenset((set(self._waited_for) & self._came) - self._gave)

    def too_late(self) -> bool:
        """Whether an owner has told already what it made of a block."""
        return self._told

    @property
    def owns(self) -> bool:
        """Whether any block is this peer's, so that the others owe it something."""
        return bool(self._mine)

    def owed(self) -> dict[PeerId, bool]:
        """All peers owe an owner their share; others are owed what owners send."""
        owing = self._others() if self._mine else sorted(self._owners())
        return {peer: peer in self._came for peer in owing}

    # -- Events

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        if isinstance(event, Arrived):
            effects: list[Effect] = []
            for run in event.runs:
                self._here.add(run.peer)
                if run.key.stage in ANSWERS:
                    self._answers(run)
                else:
                    self._speaks(run.peer)
                    effects += self._take(now_s, run)
            return effects if self._open else effects + self._advance(now_s)
        if isinstance(event, Begin):
            return self._begin(now_s, event)
        if isinstance(event, Expired):
            return self._expire(now_s, event.timer.name)
        if isinstance(event, Left):
            return self.passed(now_s, event.peer)
        return []

    def never_sends(self, run: Run) -> bool:
        """Whether what a peer asks for goes elsewhere, since this peer deals the blocks otherwise."""
        stage, block = run.key.stage ^ HAIL, self.spec.block(run.key)
        if self._state == WAITING or not 0 <= block < len(self.spec.owners):
            return False
        return self.spec.owners[block] != (run.peer if stage == SCATTER else self.spec.me)

    def _begin(self, now_s: float, begin: Begin) -> list[Effect]:
        spec = self.spec
        self._state, self._begun, self._started_s = SCATTERING, begin, now_s
        self._waiting = set(begin.waiting) & spec.members - {spec.me}
        self._waited_for = tuple(sorted(self._waiting))
        self._scatter_until_s = now_s + begin.scatter_s
        self._round_until_s = self._scatter_until_s + begin.gather_s
        self._grace_s = begin.grace_s
        effects: list[Effect] = list(self._scatter())
        # of whom all withheld their copies in its last round was away until then, and they know of it now
        giving = self._waiting - begin.withheld or self._waiting
        for block in self._mine:
            for peer in giving:
                self._wait_for(peer, SCATTER, block, self._scattered_of(peer, block))
        effects.append(Arm(spec.timer("scatter"), self._scatter_until_s))
        if self._repair is not None:
            effects += self._repair.again(now_s, self._round_until_s)
        return effects + (self._count_open(now_s) if self._open else self._advance(now_s))

    def _turn(self) -> list[tuple[int, PeerId]]:
        """Blocks with their owners, starting behind oneself, so that not all send to one peer at first."""
        me, n = self.spec.me, max(self.spec.members) + 1
        return sorted(enumerate(self.spec.owners), key=lambda entry: (entry[1] - me) % n)

    # -- Arrivals

    def _close(self, now_s: float, run: Run, incoming: Incoming, entry: Entry) -> list[Effect]:
        """A run was taken: whether its message is over."""
        if self._repair is not None and incoming.ended and incoming.left:
            return self._ask(now_s, run, incoming, self._repair)
        if not incoming.closed:
            return []
        if entry in self._open:
            self._open.discard(entry)
            if self._state == SCATTERING and not self._open:
                self._last = run.peer
        return self._look_around(now_s)

    def _ask(self, now_s: float, run: Run, incoming: Incoming, repair: Repairer) -> list[Effect]:
        """A message ended with holes: ask for them now, or once the round has begun here."""
        if self._state in (SCATTERING, GATHERING):
            return repair.ask(now_s, incoming, run.peer, run.key, self._round_until_s)
        if self._state == WAITING:
            repair.later(incoming, run.peer, run.key)
        return []

    def _go_on_without(self, run: Run) -> None:
        """Most owners have reduced without a peer: it gave nothing, so wait no longer for it either.

        Each peer's deadline comes from its own measurements. By this rule what counts is the middle one of
        the crew: a peer that would wait much longer does not hold up those that have gone on.
        """
        if run.peer not in self._reduced:
            self._reduced[run.peer] = int(np.bitwise_or.reduce(run.heard))
        if 2 * len(self._reduced) < len(self._waiting):
            return
        for peer in {entry[0] for entry in self._open}:
            others = self._waiting - {peer}
            without = sum(not self._reduced.get(other, -1) >> peer & 1 for other in others)
            if without >= WITNESSES and 2 * without > len(others):
                self._open = {entry for entry in self._open if entry[0] != peer}
                self._missed.add(peer)
                self._expired = True
                self._last = peer

    def _owns_it_too(self, now_s: float, run: Run, block: int) -> list[Effect]:
        """A peer tells what it made of one of this peer's blocks, so its own share has gone into that.

        The two see each other differently (one may not hear the other). Waiting for the share would take
        until the deadline; and a peer that owns all blocks, and so sends nothing before, would be heard only
        when the round is over for others: too late to be taken for one that is there, in later rounds too.
        """
        share = (run.peer, SCATTER, block)
        self._came.add(run.peer)
        self._elsewhere.add(share)
        self._open.discard(share)
        return self._look_around(now_s)

    # -- From stage to stage

    def _advance(self, now_s: float) -> list[Effect]:
        if self._open or self._state not in (SCATTERING, GATHERING):
            return []
        return self._turn_over(now_s) if self._state == SCATTERING else self._finish(now_s)

    def _turn_over(self, now_s: float) -> list[Effect]:
        """From the first stage to the second."""
        self._state, self._reduced_s = GATHERING, now_s
        # an owner may reduce as late as its scatter deadline: what it sends then is in time
        self._round_until_s = max(now_s, self._scatter_until_s) + self._begun.gather_s
        effects: list[Effect] = list(self._reduce())
        silent = self._missed - self._came - self.in_vain
        for block, owner, incoming in self._awaited():
            if owner in self._waiting and owner not in silent:
                self._wait_for(owner, GATHER, block, incoming)
        effects.append(Arm(self.spec.timer("gather"), self._round_until_s))
        return effects + (self._count_open(now_s) if self._open else self._advance(now_s))

    def _expire(self, now_s: float, name: str) -> list[Effect]:
        if name == "repair":
            return self._repair_again(now_s)
        asking = self._asking(now_s, name)
        if asking is not None:
            return asking
        due = (name == "scatter" and self._state == SCATTERING) or (
            name == "gather" and self._state == GATHERING
        )
        if not due:
            return []
        overdue = {peer for peer, _, _ in self._open}
        if self._state == SCATTERING and self._grace_s > 0 and 2 * len(overdue) > len(self._waited_for):
            return self._wait_more(now_s)
        return self._miss(now_s, set(self._open))

    def _wait_more(self, now_s: float) -> list[Effect]:
        """Most are missing: once, wait longer, from now on where this peer has slept through its deadline."""
        more_s = max(0.0, now_s - self._scatter_until_s) + self._grace_s
        self._scatter_until_s += more_s
        self._round_until_s += more_s
        self._grace_s = 0.0
        effects: list[Effect] = [Arm(self.spec.timer("scatter"), self._scatter_until_s)]
        if len(self._waited_for) > 2:
            return effects
        self._few = 0
        effects += self._ask_whether_here(self._scatter_until_s)
        return effects + self._arm_hail(now_s, 1, self._answer_wait_s())

    def _repair_again(self, now_s: float) -> list[Effect]:
        if self._repair is None or self._state not in (SCATTERING, GATHERING):
            return []
        return self._repair.again(now_s, self._round_until_s)

    # -- Small change

    def _send(self, run: Run, deadline_s: float) -> Send:
        return Send(run if self._repair is None else self._repair.remember(run), deadline_s)

    def _others(self) -> list[PeerId]:
        spec = self.spec
        n = max(spec.members) + 1
        return sorted(spec.members - {spec.me}, key=lambda peer: (peer - spec.me) % n)

    def _wait_for(self, peer: PeerId, stage: int, block: int, incoming: Incoming | None) -> None:
        if (peer, stage, block) in self._elsewhere:
            return
        if incoming is None or not incoming.closed or (self._repair is not None and incoming.left):
            self._open.add((peer, stage, block))
