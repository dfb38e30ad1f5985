"""What a stage of a round waits for, and when it waits no longer: deadlines, and asking who is there.

An entry is a message that is waited for: who sends it, in which stage, and of which block.

Where only a few are missing, they are asked for (``hail``), again and again. Who does not answer in the time
that the second stage usually takes is frozen, dead or cut off, and is waited for no longer; who does may
compute, or wait itself, until the deadline. What comes no more, as the one says that would send it, is
waited for no longer either, where it does not come meanwhile; and no deadline grows by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from ragtag.core.types import Arm, Begin, Effect, PeerId, Run, Send
from ragtag.protocols.rounds.base import GATHER, SCATTER, Spec
from ragtag.protocols.rounds.hail import NEVER, hail

Entry = tuple[PeerId, int, int]
WAITING, SCATTERING, GATHERING, DONE = range(4)
_NONE = "", ""
_HAILS = _NONE, ("hail scatter", "answer scatter"), ("hail gather", "answer gather"), _NONE
"""Timers, by the state in which they mean something: to ask, and to see who has answered."""


class Awaiting(ABC):
    """What a round waits for."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._state = WAITING
        self._begun: Begin
        self._scatter_until_s = self._round_until_s = 0.0
        self._open: set[Entry] = set()
        self._waiting: set[PeerId] = set()
        self._missed: set[PeerId] = set()
        self._expired = False
        self._last = -1
        self._few = 0
        self._here: set[PeerId] = set()
        self._never: set[Entry] = set()
        """What comes no more, as those say who would have sent it; and nothing of them came since."""
        self.in_vain: set[PeerId] = set()
        """Those for whom to wait longer would have been in vain."""
        self.given_up: dict[PeerId, float] = {}
        """Who did not answer, and until when the round would have waited for it."""

    @abstractmethod
    def _advance(self, now_s: float) -> list[Effect]:
        """Go on to the next stage, if nothing is waited for."""

    def answered(self) -> frozenset[PeerId]:
        """Who has said something in this round (since it was asked whether it is there), if only that."""
        return frozenset(self._here)

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Wait no more for a peer: what has not come from it was lost."""
        self._open = {entry for entry in self._open if entry[0] != peer}
        self._waiting -= {peer}
        return self._advance(now_s) if not self._open else self._look_around(now_s)

    def asked_from_next(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer asks in the next round, where it lacks this one: nothing of this round comes any more.

        It is believed the second time: what it sent before may still be on a slow line.
        """
        lacks = self._open_of(peer)
        if lacks and lacks <= self._never:
            return self._give_up(now_s, lacks)
        self._never |= lacks
        return []

    def _answers(self, run: Run) -> None:
        """A peer has answered what it was asked."""
        if run.key.stage == NEVER:
            stage = SCATTER if self._state == SCATTERING else GATHER
            self._never |= self._open & {(run.peer, stage, self.spec.block(run.key))}

    def _speaks(self, peer: PeerId) -> None:
        """Something of this round has come after all."""
        if self._never:
            self._never -= self._open_of(peer)

    def _open_of(self, peer: PeerId) -> set[Entry]:
        return {entry for entry in self._open if entry[0] == peer}

    def _miss(self, now_s: float, entries: set[Entry]) -> list[Effect]:
        """Wait for these no longer."""
        peers = {peer for peer, _, _ in entries}
        self._expired = True
        self._missed |= peers
        if self._state == SCATTERING and peers:
            self._last = min(peers)
        self._open -= entries
        return self._advance(now_s)

    def _give_up(self, now_s: float, entries: set[Entry]) -> list[Effect]:
        """These would not come in any time."""
        self.in_vain |= {peer for peer, _, _ in entries}
        return self._miss(now_s, entries)

    # -- Asking

    def _asking(self, now_s: float, name: str) -> list[Effect] | None:
        """A timer has run out; ``None``: it is none of these."""
        ask, answer = _HAILS[self._state]
        if name == ask:
            return self._hail(now_s)
        return self._unanswered(now_s) if name == answer else None

    def _count_open(self, now_s: float) -> list[Effect]:
        """A stage begins: less than half of what is waited for now, or what one peer owes, is little."""
        of = Counter(peer for peer, _, _ in self._open)
        self._few = max(len(self._open) // 2, *of.values())
        return self._look_around(now_s)

    def _look_around(self, now_s: float) -> list[Effect]:
        """Only a few are missing: unless they come soon, they are asked whether they are there."""
        if not 0 < len(self._open) <= self._few:
            return []
        self._few = 0  # from here on, by timers
        return self._arm_hail(now_s, 0, self._begun.gather_s)

    def _arm_hail(self, now_s: float, which: int, wait_s: float) -> list[Effect]:
        until_s = self._scatter_until_s if self._state == SCATTERING else self._round_until_s
        if now_s + wait_s >= until_s:
            return []
        return [Arm(self.spec.timer(_HAILS[self._state][which]), now_s + wait_s)]

    def _hail(self, now_s: float) -> list[Effect]:
        wait_s = self._answer_wait_s()
        arm = self._arm_hail(now_s, 1, wait_s)
        return [*self._ask_whether_here(now_s + wait_s), *arm] if arm else []

    def _answer_wait_s(self) -> float:
        return max(self._begun.gather_s, self._begun.answer_s)

    def _ask_whether_here(self, until_s: float) -> list[Effect]:
        self._here -= {peer for peer, _, _ in self._open}
        self._never -= self._open
        spec = self.spec
        return [
            Send(hail(peer, spec.key(stage, block)), until_s) for peer, stage, block in sorted(self._open)
        ]

    def _unanswered(self, now_s: float) -> list[Effect]:
        """Who has not answered is not there; the others are asked again later, but for what comes no more."""
        state = self._state
        until_s = self._scatter_until_s if state == SCATTERING else self._round_until_s
        silent = {entry for entry in self._open if entry[0] not in self._here}
        self.given_up.update({peer: until_s for peer, _, _ in silent})
        effects = self._miss(now_s, silent) if silent else []
        never = self._open & self._never
        if never and self._state == state:
            effects += self._give_up(now_s, never)
        return effects + (self._arm_hail(now_s, 0, self._begun.gather_s) if self._state == state else [])
