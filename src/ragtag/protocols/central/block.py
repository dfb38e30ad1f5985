"""One block of the central state at its owner: its values, how updates are judged, and when it steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ragtag.codecs.base import Codec, finite_rows
from ragtag.core.types import Bools, Bytes, Floats, PeerId, Run
from ragtag.protocols.central.wire import count_of, version_of
from ragtag.protocols.rounds.base import spans_of
from ragtag.protocols.rounds.repair import Pause

HISTORY = 256
"""For so many versions a block remembers whose updates made them."""


class Verdict(NamedTuple):
    """An update is accepted, times ``scale``. close: step now, by the mean of all that are accepted."""

    scale: float
    close: bool


class Rule(Protocol):
    """What becomes of updates: a schedule (``ragtag.schedules.centre``), as this package sees it.

    barrier: whether a peer is answered only when the block has made its next step.
    """

    @property
    def barrier(self) -> bool:
        """Whether peers wait for the block's next step."""
        ...

    def judge(self, peer: PeerId, staleness: int, held: int, n: int) -> Verdict | None:
        """Judge a peer's update that is ``staleness`` versions old; ``None``: it is left out. Never raises.

        held: how many updates the next step would then have.
        n: peers in the crew.
        """
        ...


class Correction(Protocol):
    """Corrects a stale update when it is applied (``ragtag.optim.compensate``). Never raises."""

    def __call__(self, update: Floats, values: Floats, stale: Floats) -> Floats:
        """The corrected update.

        update: as its peer made it, from the values ``stale``.
        values: what it will be added to. All three have one shape.
        """
        ...


class Answer(NamedTuple):
    """A peer is to be sent the block.

    number: the update that this answers; -1: none any more.
    stale: how many versions old the update was.
    base: the version that it was made from.
    clock: of the peer's group (``grouping``); 0: there are no groups.
    """

    peer: PeerId
    number: int
    stale: int
    base: int
    clock: int = 0


@dataclass(slots=True)
class Update:
    """A peer's update of one block as it comes, perhaps with holes.

    got: bool ``[n_chunks]``, the chunks that have come.
    base, top: the lowest and the highest version that a chunk of it is to be added to.
    lead: how many versions further its peer has seen any block come; in groups, their clock.
    ended_s: when it ended with holes for the first time.
    asked: these were asked for.
    ready: it is judged with what has come.
    """

    peer: PeerId
    number: int
    values: Floats
    got: Bools
    weight: float = 0.0
    base: int = -1
    top: int = -1
    lead: int = 0
    ended_s: float = math.inf
    asked: Pause | None = None
    ready: bool = False

    def take(self, run: Run, codec: Codec) -> None:
        """Take a run's chunks, each once."""
        k, first = len(run.payload), run.first
        new = ~self.got[first : first + k]
        if run.mask is not None:
            new &= run.mask
        if not new.any():
            return
        for a, b in spans_of(new):
            rows = slice(first + a, first + b)
            codec.decode(run.payload[a:b], self.values[rows])
            self.got[rows] = True
        bases = run.heard[new]
        self.base = int(bases.min()) if self.base < 0 else min(self.base, int(bases.min()))
        self.top = max(self.top, int(bases.max()))
        self.weight = float(run.weight[new][0])

    @property
    def clock(self) -> int:
        """The highest count of versions that its peer has seen at any block."""
        return count_of(self.base) + self.lead

    @property
    def whole(self) -> bool:
        """Whether all chunks came."""
        return bool(self.got.all())

    @property
    def sound(self) -> bool:
        """Whether it can be added: its weight is positive and its values are finite."""
        return 0 < self.weight < np.inf and finite_rows(self.values[self.got]) is None


@dataclass(slots=True)
class Block:
    """A block at a peer that owns it, owned it, or may come to own it.

    values: the owner's, a new array for each version; ``None``: this peer never owned it.
    serving: this peer is its owner and has the newest values.
    judged: the newest update of each peer that was judged.
    missed_steps: for how many steps in a row each peer was missing at a barrier.
    since_s: when the first accepted update came.
    expired_s: the same of the last step whose barrier ran into its deadline.
    given: where stale updates are corrected, the version that each peer was sent last, and its values (w_bak
        in Zheng et al., ICML 2017).
    accepted: the peers whose updates the next step takes.
    """

    me: PeerId
    values: Floats | None = None
    version: int = 0
    serving: bool = False
    judged: dict[PeerId, int] = field(default_factory=dict)
    missed_steps: dict[PeerId, int] = field(default_factory=dict)
    since_s: float = 0.0
    expired_s: float | None = None
    given: dict[PeerId, tuple[int, Floats]] = field(default_factory=dict)
    accepted: list[PeerId] = field(default_factory=list)
    _waiting: dict[PeerId, Answer] = field(default_factory=dict)
    _total: Floats | None = None
    _mass: Floats | None = None
    _history: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _payload: Bytes | None = None

    def judge(self, now_s: float, update: Update, rule: Rule, n: int) -> list[Answer]:
        """Judge an update that has come: which peers are to be answered now."""
        stale = max(0, count_of(self.version) - (update.clock if rule.barrier else count_of(update.base)))
        answer = Answer(update.peer, update.number, stale, update.base)
        self.judged[update.peer] = update.number
        self.missed_steps.pop(update.peer, None)
        if rule.barrier and update.peer in self.accepted:  # it did not wait: more of the same update
            self._add(update, 1.0, mass=False)
            self._waiting[update.peer] = answer
            return []
        verdict = rule.judge(update.peer, stale, len(self.accepted) + 1, n)
        if verdict is None:
            return [answer]
        if not self.accepted:
            self.since_s = now_s
        self._add(update, verdict.scale)
        self.accepted.append(update.peer)
        self._waiting[update.peer] = answer
        if verdict.close:
            return self.close()
        return [] if rule.barrier else [self._waiting.pop(update.peer)]

    def give(self, peer: PeerId) -> None:
        """A peer is sent the block as it is, and will make its next update from that."""
        if self.values is not None:
            self.given[peer] = self.version, self.values

    def correct(self, update: Update, correction: Correction) -> None:
        """Correct an update where the values that it was made from are known for sure."""
        version, stale = self.given.get(update.peer, (-1, None))
        if stale is None or self.values is None or not update.base == update.top == version != self.version:
            return
        got = update.got
        corrected = correction(update.values[got], self.values[got], stale[got])
        if finite_rows(corrected) is None:
            values = update.values.copy()
            values[got] = corrected
            update.values = values

    def step_by(self, learned: Floats, made_by: list[PeerId]) -> None:
        """Make the next version: add what these peers learned."""
        assert self.values is not None
        self._set(self._plus(learned), count_of(self.version) + 1, made_by)

    def catch_up(self, clock: int) -> list[Answer]:
        """Other blocks have had ``clock`` versions: step with what is accepted, and count on from there."""
        if clock <= count_of(self.version) or self.values is None:
            return []
        answers = self.close()
        if clock > count_of(self.version):
            self._set(self.values, clock, ())
        return answers

    def over(self, rule: Rule, n: int) -> bool:
        """Whether the accepted updates make a step in a crew of now ``n``."""
        if not self.accepted:
            return False
        verdict = rule.judge(self.accepted[-1], 0, len(self.accepted), n)
        return verdict is not None and verdict.close

    def close(self) -> list[Answer]:
        """Step by the mean of the accepted updates: the peers that waited are to be answered."""
        answers, self._waiting = list(self._waiting.values()), {}
        if self.accepted and self.values is not None:
            assert self._total is not None and self._mass is not None
            some = self._mass > 0
            self._total[some] /= self._mass[some, None]
            self._set(self._plus(self._total), count_of(self.version) + 1, self.accepted)
            self.accepted, self._total, self._mass = [], None, None
        return answers

    def adopt(self, values: Floats, above: int) -> None:
        """Go on from these values, with a version above ``above``. Accepted updates will be added to them."""
        self._set(values, count_of(max(above, self.version)) + 1, ())
        self.serving = True

    def contributors(self, answer: Answer) -> int:
        """The peers (a bit each) whose updates came into the block since the version of the answer's."""
        base, bits = count_of(answer.base), 0
        for count, who in reversed(self._history):
            if count <= base:
                break
            bits |= who
        return bits | (1 << answer.peer if answer.peer in self.accepted else 0)

    def payload(self, codec: Codec) -> Bytes:
        """The block as it travels, never changed."""
        if self._payload is None:
            assert self.values is not None
            self._payload = codec.encode(self.values)
        return self._payload

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or a new process has its number."""
        self.judged.pop(peer, None)
        self.missed_steps.pop(peer, None)
        self.given.pop(peer, None)
        self._waiting.pop(peer, None)

    def _add(self, update: Update, scale: float, mass: bool = True) -> None:
        if self._total is None or self._mass is None:
            self._total = np.zeros_like(update.values)
            self._mass = np.zeros(len(update.values), np.float32)
        weight = np.float32(update.weight)
        got = update.got
        with np.errstate(over="ignore", invalid="ignore"):
            self._total[got] += update.values[got] * np.float32(weight * np.float32(scale))
        self._mass[got if mass else got & (self._mass == 0)] += weight

    def _plus(self, learned: Floats) -> Floats:
        """The values with an update added. A chunk that would not be finite stays as it is."""
        assert self.values is not None
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.values + learned
        finite = finite_rows(values)
        if finite is not None:
            values[~finite] = self.values[~finite]
        return values

    def _set(self, values: Floats, count: int, made_by: list[PeerId] | tuple[()]) -> None:
        self.values, self.version = values, version_of(count, self.me)
        self._history.append((count, sum(1 << peer for peer in set(made_by))))
        self._payload = None
