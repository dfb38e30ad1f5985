"""What the machines of one round share: how a round is described, and how its messages are received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from ragtag.protocols.rounds.hadamard import Hadamard
from ragtag.protocols.rounds.layout import Layout
from ragtag.protocols.rounds.robust import RobustMean

SCATTER, GATHER, NACK = 0, 1, 0x80
"""Stages of a message key. A request for repair has its stage's number plus NACK."""
BLOCK_BITS = 6
"""A block's number has so many bits of a key; above them stands the layout's ``growth`` (``Spec``)."""
BY_SHARES = 64
"""The growth of a cut by shares. No crew grows so far; names of blocks go on from there, up to 16 bits."""
_ROUNDING = 1e-6
"""Of a thousand chunks .999 is 999, in binary fractions, too."""


class Reordering:
    """How long a channel's peers wait for chunks that were overtaken, in windows (RFC 8985, section 6.2)."""

    PERSISTS = 16
    """After so many rounds without a chunk that came twice the window is as at first."""

    def __init__(self) -> None:
        self.windows = 1
        self._persists = 0

    def twice(self) -> None:
        """Chunks came twice that were asked for: they had been overtaken, and were not lost."""
        self.windows += 1
        self._persists = self.PERSISTS

    def over(self) -> None:
        """A round is over."""
        self._persists -= 1
        if self._persists <= 0:
            self.windows = 1


@dataclass(frozen=True, slots=True)
class Spec:
    """One round, as the machines of all its peers must agree on it.

    owners: the owner of each block.
    members: the peers of the round, this one among them.
    repair_s: how long to wait before lost chunks are asked for again; ``None``: they are not.
    enough: the share of a message's chunks to which it is repaired.
    reordering: how long to wait for chunks that were overtaken, as learned so far.
    scratch: memory for the mean (``scratch_of``).
    growth: how many more blocks the vector is cut into than when the crew was founded. It travels in every
        key, so that no peer takes a block of one cut for a block of another. ``BY_SHARES``: it is cut by
        shares.
    shares: which the cut follows, by peer, so peers may differ in it for a round (``channel.shares``); empty:
        blocks are of one size.
    patience: learns from peers that answer a question too late.
    guard: how owners reduce shares of which some may be lies; ``None``: by their weighted mean.
    live: how many peers this one knows to live, which a guard must know.
    quorum: how many peers' values make an average, at least; 0: any.
    spread: how the table is transformed before it is exchanged, and back; ``None``: it is not.
    auxiliary: the members that only own blocks: they give nothing to the round, and get no averages.
    """

    me: PeerId
    channel: int
    round: int
    layout: Layout
    owners: tuple[PeerId, ...]
    members: frozenset[PeerId]
    codec: Codec
    repair_s: float | None = None
    enough: float = 1.0
    reordering: Reordering = field(default_factory=Reordering)
    scratch: Floats | None = None
    growth: int = 0
    patience: Patience | None = None
    guard: RobustMean | None = None
    live: int = 0
    quorum: int = 0
    spread: Hadamard | None = None
    auxiliary: frozenset[PeerId] = frozenset()
    shares: tuple[int, ...] = ()

    @property
    def gives(self) -> bool:
        """Whether this peer's values are part of the round, and its averages are for this peer, too."""
        return self.me not in self.auxiliary

    def is_in(self, incoming: Incoming) -> bool:
        """Whether all of a message is there that is waited for: it has ended, and enough of it has come.

        What is still on its way for the first time is waited for, however small a share is enough.
        """
        enough = 0.0 if self.repair_s is None else self.enough
        return incoming.ended and incoming.left <= (1.0 - enough) * incoming.total + _ROUNDING

    def key(self, stage: int, block: int) -> MessageKey:
        """The key of one of this round's messages."""
        name = (self.growth << BLOCK_BITS) + self.layout.names[block]
        return MessageKey(self.channel, self.round, stage, name)

    def block(self, key: MessageKey) -> int:
        """The block that a key names. Below 0 or too high: the key is of another layout."""
        return self.layout.number(key.block - (self.growth << BLOCK_BITS))

    def cut_apart(self, key: MessageKey, total: int = 0) -> bool:
        """Whether a message is of a cut by other shares, or by some where this one is by none.

        total: its chunks; 0: not known.
        """
        if self.growth != BY_SHARES:
            return key.block >> BLOCK_BITS >= BY_SHARES
        block = self.block(key)
        return not 0 <= block < len(self.owners) or total not in (0, self.layout.sizes[block])

    def timer(self, name: str) -> Timer:
        """A timer of this round."""
        return Timer(self.channel, self.round, name)


NO_VALUES: Floats = np.zeros((0, 1), np.float32)
"""The values of a round in which rows are gathered."""


def require_rows(rows: Bytes, most: int) -> None:
    """Check rows that a peer offers. Raises ValueError: their form is wrong, or there are too many."""
    if rows.ndim != 2 or rows.shape[1] != CHUNK_BYTES or rows.dtype != np.uint8:
        raise ValueError(f"rows of {rows.dtype} {rows.shape}; give uint8 [k, {CHUNK_BYTES}]")
    if len(rows) > most:
        raise ValueError(f"{len(rows)} rows on a channel where a peer may offer {most}")


class Patience:
    """How many times longer than usual an answer may take: learned from peers that were given up too early.

    On a busy machine a driver may wait for a processor much longer than its round trips tell. An answer that
    comes after its peer was given up, yet before the deadline, doubles the patience (as TCP backs off).
    Answers in time take it back little by little.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._given_up: dict[PeerId, tuple[int, float]] = {}

    def gave_up(self, number: int, peer: PeerId, until_s: float) -> None:
        """In round ``number`` a peer did not answer. The round would have waited for it until ``until_s``."""
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
    in_vain: peers whose messages would not have come with more time.
    answered: peers that said something after they were asked whether they are there.
    unanswered: peers that said nothing when they were asked.
    withheld: peers that were heard and yet sent this owner none of the copies that it waited for. They do not
        hear this owner and take another for it, so waiting again would cost a deadline in each round.
    owns: whether any block was this peer's, so that the others owed it something.
    came_s: how long after each stage's beginning the last share that was waited for came (0: none did).
    """

    owed: dict[PeerId, bool]
    in_vain: frozenset[PeerId] = frozenset()
    answered: frozenset[PeerId] = frozenset()
    unanswered: frozenset[PeerId] = frozenset()
    withheld: frozenset[PeerId] = frozenset()
    owns: bool = True
    came_s: tuple[float, float] | None = None


class Round(Protocol):
    """A machine for one round. Its channel routes events to it, and messages of its own growth only.

    told: owners have sent their averages already, half of the others or more: what they are sent now comes
        too late.
    """

    spec: Spec
    outcome: Outcome | None

    @property
    def told(self) -> bool:
        """See above."""
        ...

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        ...

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer was heard in a later round: it sends nothing of this one any more."""
        ...

    def asked_from_next(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer asks this one for a message of the next round: it sends nothing of this round any more."""
        ...

    def is_left(self) -> bool:
        """Where most are in a later round: whether they have gone on without this peer."""
        ...

    def goes_elsewhere(self, question: Run) -> bool:
        """Whether what a peer asks for goes to another, since this peer assigns the blocks otherwise."""
        ...

    def apart(self, now_s: float, peer: PeerId) -> list[Effect]:
        """A peer cuts the vector by other shares: nothing of it can be taken in this round."""
        ...

    def lesson(self) -> Lesson:
        """What the round teaches, once it is over."""
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
    """Which chunks of one message from one peer have come. Each counts once.

    left: how many have not.
    closed: nothing more will come: all is there, or the rest was lost.
    ended: it was closed once. What was lost may have been asked for since then.
    reached: how far it has come: the number after the highest chunk that is there.
    twice: how many chunks came that were there already.
    """

    __slots__ = ("_got", "closed", "ended", "left", "reached", "total", "twice")

    def __init__(self, total: int) -> None:
        self._got: Bools | None = None  # made when needed: a message of one chunk never does
        self.left = self.total = total
        self.closed = self.ended = total == 0
        self.reached = self.twice = 0

    def fresh(self, run: Run) -> Sequence[tuple[int, int]]:
        """Mark a run's chunks as come: the spans ``[a, b)`` of its rows that are new."""
        k = len(run.payload)
        if run.ended:
            self.closed = self.ended = True
        if k == 0 or self.left == 0:
            return ()
        first, mask = run.first, run.mask
        if self.total == 1:
            if mask is not None and not mask[0]:
                return ()
            self.reached = 1
            self._less(1)
            return _ONE
        if first + k > self.reached:
            ahead = k if mask is None else k - int(mask[::-1].argmax()) if mask.any() else 0
            self.reached = max(self.reached, first + ahead)
        if self._got is None:
            self._got = np.zeros(self.total, np.bool_)
        before = self._got[first : first + k]
        if not before.any():
            if mask is None:
                before[:] = True
                self._less(k)
                return ((0, k),)
            new = mask
            before[:] = mask
        else:
            new = ~before if mask is None else mask & ~before
            before |= new
        spans = spans_of(new)
        came = sum(b - a for a, b in spans)
        self.twice += (k if mask is None else int(np.count_nonzero(mask))) - came
        self._less(came)
        return spans

    def _less(self, came: int) -> None:
        self.left -= came
        if not self.left:
            self.closed = self.ended = True

    @property
    def overtaken(self) -> bool:
        """Whether chunks are missing although later ones have come."""
        return self.reached > self.total - self.left

    def missing(self) -> Bools:
        """bool ``[total]``: the chunks that have not come."""
        if self._got is None:
            return np.full(self.total, self.left > 0)
        return ~self._got


def whole_message(peer: PeerId, key: MessageKey, payload: Bytes, weight: Floats, heard: PeerSet) -> Run:
    """A run that is a whole message, its end marked."""
    return Run(peer, key, 0, len(payload), payload, weight, heard, None, True)


def blob_message(peer: PeerId, key: MessageKey, blob: bytes) -> Run:
    """A message of one chunk with no values in it."""
    payload = np.frombuffer(blob.ljust(CHUNK_BYTES, b"\0"), np.uint8)[None, :]
    return whole_message(peer, key, payload, np.zeros(1, np.float32), np.zeros(1, np.uint64))


UNSOUND = "not finite"
"""The note on a peer whose values, or a sum with them, cannot be averaged."""
_WEIGHT_MOST = int(np.float32(WEIGHT_MAX).view(np.uint32))


def sound(codec: Codec, run: Run) -> Bools | None:
    """Which chunks of an arrived run may count in a mean, bool ``[k]``; ``None``: all.

    A sound chunk has finite values (``codecs.base.finite_rows``) and a weight between 0 and ``WEIGHT_MAX``.
    The weight's bits are compared as an integer: a larger number has larger bits, and negative numbers,
    infinity and NaN have the largest. A chunk that is not sound has come, and counts for nothing.
    """
    if not len(run.payload):
        return None
    weights = run.weight.view(np.uint32)
    heaviest = weights.item() if len(weights) == 1 else weights.max()  # most messages of a small model
    finite = codec.finite(run.payload)
    if heaviest <= _WEIGHT_MOST:
        return finite
    fit: Bools = weights <= _WEIGHT_MOST
    return fit if finite is None else finite & fit


def within(spans: Sequence[tuple[int, int]], good: Bools) -> list[tuple[int, int]]:
    """The parts of spans in which a bool array is True."""
    return [(a + c, a + d) for a, b in spans for c, d in spans_of(good[a:b])]


def scratch_of(spec: Spec) -> Floats:
    """Memory for a round's mean, float32 ``[n_chunks, elements]``, its contents undefined."""
    shape = (spec.layout.n_chunks, spec.codec.elements)
    return np.empty(shape, np.float32) if spec.scratch is None else spec.scratch


def bit(peer: PeerId) -> np.uint64:
    """The contributor set of one peer."""
    return np.uint64(1 << peer)


def peers_in(mask: int) -> list[PeerId]:
    """The peers of a contributor set, in their order."""
    return [peer for peer in range(mask.bit_length()) if mask >> peer & 1]
