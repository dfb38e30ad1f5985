"""Selective repair: what is missing of a message is asked for again, while it is under way and after its end.

A request is a message of its own. Each of its chunks carries a bitmap of missing chunks (1,088 bytes name
8,704 of them) and decodes alone, so a lost part of a request costs only that part. Requests of a round are
numbered, in the place of contributors, so that of several copies one is answered.

- *Under way.* A message's chunks leave in order. So where later ones have come, what is missing was lost, or
  was overtaken and comes yet. It is asked for once it has been missing for a window that follows from the
  round trip, and grows where chunks come twice (RACK, RFC 8985, section 6.2). Such a request is one copy of
  the bitmap's parts that name any: what it does not bring is asked for anew. Its answer ends no message.
- *After the end* all that is missing is asked for in COPIES copies, since a lost request costs a round trip
  now. The answer's end marker shows what was lost of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import Arm, Bools, Effect, MessageKey, PeerId, Run, Send, Timer
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.base import NACK, Incoming, Spec

BITS = CHUNK_BYTES * 8
COPIES = 3
STRIDE = 64
"""So many chunks come between two requests of one message under way: then these take a 64th of its line."""
_QUARTER = 0.25
"""The window for what was overtaken, as a share of a round trip (RFC 8985, section 6.2, step 4)."""
_HEADROOM = 1.5
"""An answer may take so many times as long as the last one."""
_GRANULARITY_S = 1e-3
"""The shortest pause (RFC 6298, 2.3: the clock's granularity). Without it, a round trip of no time would ask
without end."""


def request(peer: PeerId, key: MessageKey, missing: Bools, number: int = 0, copies: int = COPIES) -> Run:
    """Ask ``peer`` for the missing chunks (bool ``[total]``) of the message ``key``.

    number: the request's. copies: how often the bitmap goes in one message; one copy has its parts that name
    any chunk, and ends nothing.
    """
    k = -(-len(missing) // BITS)
    bits = np.zeros(k * BITS, np.bool_)
    bits[: len(missing)] = missing
    parts = np.packbits(bits).reshape(k, CHUNK_BYTES)
    mask: Bools | None = np.any(parts, axis=1) if copies == 1 else None
    payload = np.tile(parts, (copies, 1))
    ask = key._replace(stage=key.stage | NACK)
    n = len(payload)
    numbers = np.full(n, number, np.uint64)
    return Run(peer, ask, 0, n, payload, np.zeros(n, np.float32), numbers, mask, ended=mask is None)


def requested(run: Run, total: int) -> Bools:
    """Which chunks of a message of ``total`` a request asks for: bool ``[total]``."""
    k = -(-total // BITS)
    asked = np.zeros(k * BITS, np.bool_)
    for i, row in enumerate(run.payload):
        if run.mask is None or run.mask[i]:
            at = (run.first + i) % k * BITS
            asked[at : at + BITS] |= np.unpackbits(np.ascontiguousarray(row)).view(np.bool_)
    return asked[:total]


@dataclass(slots=True)
class Pause:
    """Until a message is asked for again: a round trip, and twice as long each time that nothing comes.

    at_s: when it was asked for last.
    wait_s: how long from then.
    """

    at_s: float
    wait_s: float

    @classmethod
    def begun(cls, now_s: float, rtt_s: float) -> Pause:
        """A message is asked for the first time, or something of it came."""
        return cls(now_s, max(_GRANULARITY_S, rtt_s))

    @classmethod
    def over(cls, wait_s: float) -> Pause:
        """A message is to be asked for at once, and again after ``wait_s``."""
        return cls(-math.inf, 0.5 * wait_s)

    @property
    def due_s(self) -> float:
        """When it is asked for again."""
        return self.at_s + self.wait_s

    def again(self, now_s: float) -> None:
        """It is asked for again, and nothing has come."""
        self.at_s, self.wait_s = now_s, 2.0 * self.wait_s


class Alarm:
    """One timer for all pauses: it runs out when the first of them is due.

    A timer cannot be taken back. So it is set where it would run out too late, and may run out too soon.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._at_s = math.inf

    def set(self, now_s: float, pauses: Iterable[Pause]) -> list[Effect]:
        """Have it run out when the first of these is due."""
        due_s = min((pause.due_s for pause in pauses), default=math.inf)
        if due_s >= self._at_s:
            return []
        self._at_s = due_s
        return [Arm(self._timer, max(now_s, due_s))]

    def rang(self) -> None:
        """It has run out."""
        self._at_s = math.inf


class Repairer:
    """Keeps what was sent, answers requests, and asks for what others' messages lack.

    After its end a message with holes is asked for at once, and again whenever a measured round trip has
    passed without progress: then the request or all that it asked for was lost. The pause doubles each time,
    so a peer that dies costs a few datagrams. A round trip as measured does not tell how long chunks take on
    a slow line: so the pause follows from how long answers took in this round, too, and where one came only
    after several requests, as long as since the first (Karn and Partridge, SIGCOMM 1987). End markers are
    repeated until they are answered.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._sent: dict[tuple[PeerId, MessageKey], Run] = {}
        self._pause_s = max(_GRANULARITY_S, spec.repair_s or 0.0)
        self._floor_s = self._pause_s
        self._alarm = Alarm(spec.timer("repair"))
        self._asked: dict[tuple[PeerId, MessageKey], _Asked] = {}
        self._looks: dict[tuple[PeerId, MessageKey], _Look] = {}
        self._requests = 0
        self._answered: dict[tuple[PeerId, MessageKey], NDArray[np.uint64]] = {}
        """The last request that was answered, for each part of a message's bitmap."""

    # -- What this peer sent

    def remember(self, run: Run) -> Run:
        """Keep a whole message for repairs until the round is forgotten."""
        self._sent[run.peer, run.key] = run
        return run

    def forget(self, stage: int) -> None:
        """Forget what was sent in a stage."""
        self._sent = {name: run for name, run in self._sent.items() if name[1].stage != stage}

    def answer(self, run: Run, deadline_s: float) -> list[Effect]:
        """Send again what a request asks for, where this peer has sent it before; once for all its copies."""
        key = run.key._replace(stage=run.key.stage & ~NACK)
        whole = self._sent.get((run.peer, key))
        if whole is None or len(run.payload) == 0:
            return []
        k = -(-whole.total // BITS)
        if run.total not in (k, COPIES * k):
            return []
        answered = self._answered.setdefault((run.peer, key), np.zeros(k, np.uint64))
        parts = (run.first + np.arange(len(run.payload))) % k
        new = run.heard > answered[parts]
        if run.mask is not None:
            new &= run.mask
        np.maximum.at(answered, parts[new], run.heard[new])
        asked = requested(replace(run, mask=new), whole.total)
        if not asked.any():
            return []
        again = replace(whole, mask=asked, ended=run.total != k)
        return [Send(again, deadline_s, first=True)]

    # -- What others sent

    def under_way(
        self, now_s: float, incoming: Incoming, peer: PeerId, key: MessageKey, deadline_s: float
    ) -> list[Effect]:
        """Chunks came of a message that has not ended: ask for what they have overtaken, once it is time."""
        if not incoming.overtaken:
            return []
        look = self._looks.get((peer, key))
        if look is None:
            self._looks[peer, key] = _Look(now_s, incoming, np.full(incoming.total, -math.inf))
            return []
        if now_s < look.at_s + self._window_s or incoming.reached < look.reached + STRIDE:
            return []
        if incoming.twice > look.twice:
            self._spec.reordering.twice()
        lacking = incoming.missing()
        lacking[look.reached :] = False
        lacking &= look.asked_s <= now_s - self._pause_s
        look.see(now_s, incoming)
        if not lacking.any():
            return []
        look.asked_s[lacking] = now_s
        return [Send(self._request(peer, key, lacking, copies=1), deadline_s, first=True)]

    @property
    def _window_s(self) -> float:
        windows = self._spec.reordering.windows
        return max(_GRANULARITY_S, min(1.0, windows * _QUARTER) * self._pause_s)

    def ask(
        self, now_s: float, incoming: Incoming, peer: PeerId, key: MessageKey, deadline_s: float
    ) -> list[Effect]:
        """Ask for the holes of a message that has ended. It is open again until its next end marker."""
        pause = Pause.begun(now_s, self._pause_s)
        asked = self._asked[peer, key] = _Asked(incoming, incoming.left, pause, now_s)
        return [self._ask(asked, peer, key, deadline_s), *self._alarm.set(now_s, [pause])]

    def later(self, incoming: Incoming, peer: PeerId, key: MessageKey) -> None:
        """Remember to ask for the holes of a message that ended before this peer began the round."""
        incoming.closed = False
        self._asked[peer, key] = _Asked(incoming, incoming.left, Pause.over(self._pause_s), -math.inf, asks=0)

    def came(self, now_s: float, peer: PeerId, key: MessageKey) -> None:
        """Chunks of a message came: has it been asked for, and how long did they take?"""
        asked = self._asked.get((peer, key))
        if asked is None or asked.incoming.left == asked.left:
            return
        if asked.asks:
            took_s = (now_s - asked.first_s) * (_HEADROOM if asked.asks == 1 else 1.0)
            self._pause_s = max(self._floor_s, took_s)
        asked.left, asked.asks, asked.first_s = asked.incoming.left, 0, now_s
        asked.pause = Pause.begun(now_s, self._pause_s)

    def enough(self, stage: int) -> None:
        """What others sent in a stage is of no use any more."""
        self._asked = {name: asked for name, asked in self._asked.items() if name[1].stage != stage}

    def again(self, now_s: float, deadline_s: float) -> list[Effect]:
        """The timer has run out, or the round begins: ask again where nothing has come for a pause."""
        self._alarm.rang()
        effects: list[Effect] = []
        for (peer, key), asked in list(self._asked.items()):
            if self._spec.is_in(asked.incoming):
                del self._asked[peer, key]
            elif now_s >= asked.pause.due_s:
                asked.first_s = asked.first_s if asked.asks else now_s
                asked.asks += 1
                asked.pause.again(now_s)
                effects.append(self._ask(asked, peer, key, deadline_s))
        return [*effects, *self._alarm.set(now_s, (asked.pause for asked in self._asked.values()))]

    def _ask(self, asked: _Asked, peer: PeerId, key: MessageKey, deadline_s: float) -> Send:
        asked.incoming.closed = False
        return Send(self._request(peer, key, asked.incoming.missing()), deadline_s, first=True)

    def _request(self, peer: PeerId, key: MessageKey, lacking: Bools, copies: int = COPIES) -> Run:
        self._requests += 1
        return request(peer, key, lacking, self._requests, copies)


@dataclass(slots=True)
class _Asked:
    """A message that was asked for.

    left: the chunks that are missing.
    pause: since it was asked for last, or something of it came.
    first_s: when it was asked for first since something came.
    asks: how often it was asked for since something came.
    """

    incoming: Incoming
    left: int
    pause: Pause
    first_s: float
    asks: int = 1


class _Look:
    """How far a message under way had come when it was last looked at, and when each chunk was asked for."""

    __slots__ = ("asked_s", "at_s", "reached", "twice")

    def __init__(self, now_s: float, incoming: Incoming, asked_s: NDArray[np.float64]) -> None:
        self.asked_s = asked_s
        self.see(now_s, incoming)

    def see(self, now_s: float, incoming: Incoming) -> None:
        """Look at it now."""
        self.at_s, self.reached, self.twice = now_s, incoming.reached, incoming.twice
