"""Selective repair: chunks that are missing when their message has ended are asked for again.

A request is a message of its own. Each of its chunks carries a bitmap of missing chunks (1,088 bytes name
8,704 of them) and decodes alone, so a lost part of a request costs only that part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ragtag.core.types import Arm, Bools, Effect, MessageKey, PeerId, Run, Send
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.base import NACK, Incoming, Spec

BITS = CHUNK_BYTES * 8
COPIES = 3
_DOUBLINGS_MAX = 3
_GRANULARITY_S = 1e-3
"""The shortest pause (RFC 6298, 2.3: the clock's granularity). Without it, a round trip of no time would ask
without end."""


def request(peer: PeerId, key: MessageKey, missing: Bools) -> Run:
    """Ask ``peer`` for the missing chunks (bool ``[total]``) of the message ``key``.

    The bitmap goes COPIES times in one message, since a lost request costs a round trip.
    """
    k = -(-len(missing) // BITS)
    bits = np.zeros(k * BITS, np.bool_)
    bits[: len(missing)] = missing
    payload = np.tile(np.packbits(bits).reshape(k, CHUNK_BYTES), (COPIES, 1))
    ask = key._replace(stage=key.stage | NACK)
    n = len(payload)
    return Run(peer, ask, 0, n, payload, np.zeros(n, np.float32), np.zeros(n, np.uint64), ended=True)


def requested(run: Run, total: int) -> Bools:
    """Which chunks of a message of ``total`` a request asks for: bool ``[total]``."""
    k = -(-total // BITS)
    asked = np.zeros(k * BITS, np.bool_)
    for i, row in enumerate(run.payload):
        if run.mask is None or run.mask[i]:
            at = (run.first + i) % k * BITS
            asked[at : at + BITS] |= np.unpackbits(np.ascontiguousarray(row)).view(np.bool_)
    return asked[:total]


class Repairer:
    """Keeps what was sent, answers requests, and asks for what others' messages lack.

    A message that ended with holes is asked for at once, and again whenever a measured round trip has passed
    without progress: then the request or all that it asked for was lost. The pause doubles each time, so a
    peer that dies costs a few datagrams. A message that has not ended is still under way and not asked for,
    since end markers are repeated until they are answered.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._sent: dict[tuple[PeerId, MessageKey], Run] = {}
        self._pause_s = max(_GRANULARITY_S, spec.repair_s or 0.0)
        self._doublings = 0
        self._armed = False
        self._asked: dict[tuple[PeerId, MessageKey], _Asked] = {}

    def remember(self, run: Run) -> Run:
        """Keep a whole message for repairs until the round is forgotten."""
        self._sent[run.peer, run.key] = run
        return run

    def forget(self, stage: int) -> None:
        """Forget what was sent in a stage."""
        self._sent = {name: run for name, run in self._sent.items() if name[1].stage != stage}

    def answer(self, run: Run, deadline_s: float) -> list[Effect]:
        """Send again what a request asks for, where this peer has sent it before."""
        key = run.key._replace(stage=run.key.stage & ~NACK)
        whole = self._sent.get((run.peer, key))
        if whole is None or run.total != COPIES * -(-whole.total // BITS) or len(run.payload) == 0:
            return []
        asked = requested(run, whole.total)
        if not asked.any():
            return []
        again = Run(
            run.peer, key, 0, whole.total, whole.payload, whole.weight, whole.heard, mask=asked, ended=True
        )
        return [Send(again, deadline_s)]

    def ask(
        self, now_s: float, incoming: Incoming, peer: PeerId, key: MessageKey, deadline_s: float
    ) -> list[Effect]:
        """Ask for the holes of a message that has ended. It is open again until its next end marker."""
        incoming.closed = False
        self._asked[peer, key] = _Asked(incoming, incoming.left, now_s)
        effects: list[Effect] = [Send(request(peer, key, incoming.missing()), deadline_s)]
        return effects if self._armed else [*effects, self._arm(now_s)]

    def later(self, incoming: Incoming, peer: PeerId, key: MessageKey) -> None:
        """Remember to ask for the holes of a message that ended before this peer began the round."""
        incoming.closed = False
        self._asked[peer, key] = _Asked(incoming, incoming.left, -math.inf)

    def again(self, now_s: float, deadline_s: float) -> list[Effect]:
        """The timer has run out, or the round begins: ask again where nothing has come for a pause."""
        self._armed = True  # a timer is set below if anything is still asked for
        effects: list[Effect] = []
        for (peer, key), asked in list(self._asked.items()):
            if asked.incoming.left == 0:
                del self._asked[peer, key]
            elif asked.incoming.left < asked.left:
                self._asked[peer, key] = _Asked(asked.incoming, asked.incoming.left, now_s)
            elif now_s >= asked.at_s + self._pause_s:
                effects += self.ask(now_s, asked.incoming, peer, key, deadline_s)
        self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX) if effects else 0
        self._armed = False
        return [*effects, self._arm(now_s)] if self._asked else effects

    def _arm(self, now_s: float) -> Arm:
        self._armed = True
        return Arm(self._spec.timer("repair"), now_s + self._pause_s * 2**self._doublings)


@dataclass(slots=True)
class _Asked:
    """A message that was asked for. left: the chunks that were missing then. at_s: when that was."""

    incoming: Incoming
    left: int
    at_s: float
