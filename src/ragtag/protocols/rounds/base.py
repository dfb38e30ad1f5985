"""What the machines of one round share: the reception of messages, and how a round is described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.core.types import (
    WEIGHT_MAX,
    Bools,
    Bytes,
    Effect,
    Event,
    Floats,
    MessageKey,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Timer,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.rounds.layout import Layout

SCATTER, GATHER, NACK = 0, 1, 0x80
"""Stages of a message key; a request for repair carries its stage's number plus NACK."""
BLOCK_BITS = 6
"""A key's block is numbered in so many bits; above them stands the layout's ``growth`` (``Spec``)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One round, as the machines of all its peers must agree on it.

    growth: how many more blocks the vector is cut into than when the crew was founded. It travels in every
    key, so that nobody takes a block of one cut for a block of another. patience: learns from those that
    answer a question too late.
    """

    me: PeerId
    channel: int
    round: int
    layout: Layout
    owners: tuple[PeerId, ...]
    members: frozenset[PeerId]
    codec: Codec
    repair_s: float | None = None
    scratch: Floats | None = None
    growth: int = 0
    patience: Patience | None = None

    def key(self, stage: int, block: int) -> MessageKey:
        """The key of one of this round's messages."""
        return MessageKey(self.channel, self.round, stage, self.growth << BLOCK_BITS | block)

    def block(self, key: MessageKey) -> int:
        """The block that a key names; below 0, or too high: none of this layout's."""
        return key.block - (self.growth << BLOCK_BITS)

    def timer(self, name: str) -> Timer:
        """A timer of this round."""
        return Timer(self.channel, self.round, name)


NO_VALUES: Floats = np.zeros((0, 1), np.float32)
"""Of a round of rows."""


def require_rows(rows: Bytes, most: int) -> None:
    """Raises ValueError where rows cannot be offered."""
    if rows.ndim != 2 or rows.shape[1] != CHUNK_BYTES or rows.dtype != np.uint8:
        raise ValueError(f"rows of {rows.dtype} {rows.shape}; give uint8 [k, {CHUNK_BYTES}]")
    if len(rows) > most:
        raise ValueError(f"{len(rows)} rows on a channel where a peer may offer {most}")


class Patience:
    """How many times longer than is usual an answer may take here: learned from those given up too early.

    On a busy machine a driver may wait for a processor much longer than its round trips tell. An answer that
    comes after its peer was given up, and before the deadline would have, doubles the patience (as TCP backs
    off); answers in time take it back little by little.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._given_up: dict[PeerId, tuple[int, float]] = {}

    def gave_up(self, number: int, peer: PeerId, until_s: float) -> None:
        """In this round a peer did not answer; else the round would have waited for it until then."""
        self._given_up[peer] = number, until_s

    def answered(self, now_s: float, peer: PeerId, number: int) -> None:
        """A peer has answered what it was asked in a round."""
        given_up, until_s = self._given_up.get(peer, (-1, 0.0))
        if given_up != number:
            self.factor = max(1.0, _DECAY * self.factor)
            return
        del self._given_up[peer]
        if now_s < until_s:
            self.factor = min(_MOST, _GROWTH * self.factor)


_GROWTH, _DECAY, _MOST = 2.0, 0.98, 64.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a round that is over teaches of its peers.

    owed: the peers that had something to send to this one, and whether anything of it has come.
    in_vain: those for whom to wait longer would have been in vain.
    answered: those that said something after they were asked whether they are there.
    withheld: those that were heard and yet sent this owner none of the copies that it waited for. They take
    another for the owner of its blocks, since they do not hear it: to wait for them again would cost a
    deadline in each round for as long as that lasts.
    owns: whether any block was this peer's, so that the others owed it something.
    """

    owed: dict[PeerId, bool]
    in_vain: frozenset[PeerId] = frozenset()
    answered: frozenset[PeerId] = frozenset()
    withheld: frozenset[PeerId] = frozenset()
    owns: bool = True


class Round(Protocol):
    """A machine for one round; a channel routes events to it, messages of its own growth only.

    told: an owner has told already what it made of a block, so that what is sent to it now is too late.
    """

    spec: Spec
    outcome: Outcome | None
    told: bool

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        ...

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer was heard in a later round: it is done with this one."""
        ...

    def asked_from_next(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer asks in the next round, where it lacks this one: nothing of this round comes any more."""
        ...

    def goes_elsewhere(self, question: Run) -> bool:
        """Whether what a peer asks for goes to another, since this peer deals the blocks otherwise."""
        ...

    def lesson(self) -> Lesson:
        """What it teaches, once it is over."""
        ...


_ONE = ((0, 1),)


def spans_of(mask: Bools) -> list[tuple[int, int]]:
    """The spans ``[a, b)`` in which a bool array is True."""
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    if mask[0]:
        edges.insert(0, 0)
    if mask[-1]:
        edges.append(len(mask))
    return list(zip(edges[::2], edges[1::2], strict=True))


class Incoming:
    """What has come of one message from one peer: each chunk counts once."""

    __slots__ = ("_got", "ended", "left", "total")

    def __init__(self, total: int) -> None:
        self._got: Bools | None = None  # made when needed: a message of one chunk never does
        self.left = self.total = total
        self.ended = total == 0

    @property
    def closed(self) -> bool:
        """Whether nothing more is to come: all is there, or the rest was lost."""
        return self.ended or self.left == 0

    def fresh(self, run: Run) -> Sequence[tuple[int, int]]:
        """Mark a run's chunks as come: the spans ``[a, b)`` of its rows that are new."""
        k = len(run.payload)
        if run.ended:
            self.ended = True
        if k == 0 or self.left == 0:
            return ()
        first, mask = run.first, run.mask
        if self.total == 1:
            if mask is not None and not mask[0]:
                return ()
            self.left = 0
            return _ONE
        if self._got is None:
            self._got = np.zeros(self.total, np.bool_)
        before = self._got[first : first + k]
        if not before.any():
            if mask is None:
                before[:] = True
                self.left -= k
                return ((0, k),)
            new = mask
            before[:] = mask
        else:
            new = ~before if mask is None else mask & ~before
            before |= new
        spans = spans_of(new)
        self.left -= sum(b - a for a, b in spans)
        return spans

    def missing(self) -> Bools:
        """bool ``[total]``: what has not come."""
        if self._got is None:
            return np.full(self.total, self.left > 0)
        return ~self._got


def whole(peer: PeerId, key: MessageKey, payload: Bytes, weight: Floats, heard: PeerSet) -> Run:
    """A run that is a whole message."""
    return Run(peer, key, 0, len(payload), payload, weight, heard, ended=True)


def told(peer: PeerId, key: MessageKey, blob: bytes) -> Run:
    """A message of one chunk with no values in it."""
    payload = np.frombuffer(blob.ljust(CHUNK_BYTES, b"\0"), np.uint8)[None, :]
    return whole(peer, key, payload, np.zeros(1, np.float32), np.zeros(1, np.uint64))


UNSOUND = "not finite"
"""What is noted of a peer whose values, or their sum, cannot be averaged."""
_WEIGHT_MOST = np.float32(WEIGHT_MAX).view(np.uint32)


def sound(codec: Codec, run: Run) -> Bools | None:
    """Which chunks of an arrived run may count in a mean, bool ``[k]``; ``None``: all.

    Its values are finite (see ``codecs.base.finite_rows``), and its weight lies between 0 and
    ``WEIGHT_MAX`` (so says one look at its bits: the
    larger number has the larger ones, and negative numbers, infinity and NaN have larger ones than all). What
    is not sound has come, and counts for nothing.
    """
    if not len(run.payload):
        return None
    fit: Bools = run.weight.view(np.uint32) <= _WEIGHT_MOST
    finite = codec.finite(run.payload)
    if finite is None:
        return None if fit.all() else fit
    return finite & fit


def within(spans: Sequence[tuple[int, int]], good: Bools) -> list[tuple[int, int]]:
    """The parts of spans in which a bool array is True."""
    return [(a + c, a + d) for a, b in spans for c, d in spans_of(good[a:b])]


def scratch_of(spec: Spec) -> Floats:
    """Memory for a round's mean, float32 ``[n_chunks, elements]``; what is in it means nothing."""
    shape = (spec.layout.n_chunks, spec.codec.elements)
    return np.empty(shape, np.float32) if spec.scratch is None else spec.scratch


def bit(peer: PeerId) -> np.uint64:
    """The contributor set of one peer."""
    return np.uint64(1 << peer)


def peers_in(mask: int) -> list[PeerId]:
    """The peers of a contributor set, in their order."""
    return [peer for peer in range(mask.bit_length()) if mask >> peer & 1]
