"""Asking a peer whether it is there at all: its node answers at once, though its trainer may still compute.

A round that lacks only a few peers' messages asks those. Who answers gets its whole deadline; who does not is
frozen, dead or cut off, and is waited for no longer. So a peer that froze costs the others two measured
budgets of a stage in which little is computed, rather than the deadline that the slowest trainer needs.

Both messages are one chunk with no values in it, of the round in question. The end mark of either says as
much as its chunk, and is repeated until it is answered: loss makes nobody look dead.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragtag.core.types import MessageKey, PeerId, Run, Send
from ragtag.protocols.base import told

HAIL, HERE = 0x40, 0x41
"""Stages of a message key: the question, and the answer."""
ANSWER = 2.0
"""An answer may take so many round trips, each with its margin: what was lost once is repeated after one."""
_GROWTH, _DECAY, _MOST = 2.0, 0.98, 64.0


class Patience:
    """How many times longer than ``ANSWER`` an answer may take here: learned from those given up too early.

    On a busy machine a driver may wait for a processor much longer than its round trips tell. An answer that
    comes after its peer was given up, and before the deadline would have, doubles the patience (as TCP backs
    off); answers in time take it back little by little.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._given_up: dict[PeerId, tuple[int, float]] = {}

    def gave_up(self, number: int, until_s: Mapping[PeerId, float]) -> None:
        """In this round these did not answer; else the round would have waited for them until then."""
        for peer, at_s in until_s.items():
            self._given_up[peer] = number, at_s

    def answered(self, now_s: float, peer: PeerId, number: int) -> None:
        """A peer has answered what it was asked in a round."""
        given_up, until_s = self._given_up.get(peer, (-1, 0.0))
        if given_up != number:
            self.factor = max(1.0, _DECAY * self.factor)
            return
        del self._given_up[peer]
        if now_s < until_s:
            self.factor = min(_MOST, _GROWTH * self.factor)


def hail(peer: PeerId, key: MessageKey) -> Run:
    """Ask a peer. key: of any message of the round."""
    return told(peer, key._replace(stage=HAIL), b"")


def here(now_s: float, run: Run, rtt_s: float) -> Send:
    """The answer to a question."""
    return Send(told(run.peer, run.key._replace(stage=HERE), b""), now_s + ANSWER * rtt_s)
