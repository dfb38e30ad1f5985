"""A replica that sends selections: gradients, or differences to an anchor that all peers have.

A round: select, encode, offer (``protocols.gather``), add what came. Decoding and adding happen here, in the
trainer's thread. What the owners of this peer's fragments have taken in is committed, the rest goes back into
the residual; both follow from the rows that come back, in this round or a later one. Of a block that never
came, what had been sent is taken for delivered where its owner was heard of (others have added it, and twice
is worse than not at all), and goes back where nothing came of it.

Of models the *difference to the anchor* is sent, never weights; the mean of the differences (through an outer
optimiser, where one is given) moves the anchor, and the model is set to it: what was not sent stays in the
residual (SparseLoCo, Sarfi et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ragtag.codecs import fast
from ragtag.codecs.checkpoint import State
from ragtag.codecs.dense import fp32
from ragtag.codecs.feedback import ErrorFeedback
from ragtag.codecs.gather import add_rows
from ragtag.codecs.tickets import Ticket
from ragtag.core.schema import Schema
from ragtag.core.types import Bools, Floats, Gathered, Outcome, PeerId
from ragtag.core.wire import CHUNK_BYTES
from ragtag.optim.outer import Nesterov
from ragtag.protocols.gather import gather
from ragtag.protocols.rps import rps_repair
from ragtag.training.averager import Pending, Transport
from ragtag.training.bucket import Bucket
from ragtag.training.checks import require_finite, require_weight
from ragtag.training.compress import TopK
from ragtag.training.replica import Replica
from ragtag.training.tensors import Part

_WARM = 1 << 17  # values: enough to be selected from as millions are
RESYNC = 64
"""So far above its own is the channel on which a sparse optimizer averages models densely."""


class Compression(NamedTuple):
    """What sending less came to in a round: for the trace.

    entries, density, bytes, dense_bytes, captured, residual_norm: see ``codecs.feedback.Measured``.
    committed, restored: fragments of this peer that were decided in this round, by what became of them.
    late: rows of earlier rounds that came with this one; given_up: blocks of which some never came.
    refused: rows that were not good, or twice there.
    """

    entries: int
    density: float
    bytes: int
    dense_bytes: int
    captured: float
    residual_norm: float
    committed: int
    restored: int
    late: int
    given_up: int
    refused: int


class Begun(NamedTuple):
    """A round under way, and the ticket of what was sent (``None``: nothing)."""

    pending: Pending
    ticket: Ticket | None


@dataclass(slots=True)
class _Sent:
    """A round's ticket: which of its fragments are undecided, and of which blocks anything came."""

    ticket: Ticket
    open: Bools
    block: NDArray[np.int64]
    none: Bools


class SparseReplica:
    """Averages its parts with the crew in place, by selections.

    parts: what is averaged. content: "gradients" or "models". whole: what ``resync`` averages densely.
    Raises SchemaMismatch, naming ratio and selection, or the first tensor, where another peer differs.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        transport: Transport,
        compress: TopK,
        *,
        channel: int = 0,
        content: str = "gradients",
        whole: Iterable[Part] = (),
        outer: Nesterov | None = None,
        seed: int = 0,
    ) -> None:
        self._outer, self._me = outer, transport.me
        self.bucket = Bucket((part for part in parts if part.kind != "list"), fp32.elements)
        self._flat: Floats = self.bucket.values.reshape(-1)
        d = len(self._flat)
        self.compress, self._transport, self._channel = compress, transport, channel
        self._models = content.startswith("models")
        self.schema = Schema(self.bucket.specs, compress.name, gather.name, content)
        self.feedback = ErrorFeedback(d, compress.options(), peer=transport.me, seed=seed)
        self._anchor: Floats = np.zeros(d if self._models else 0, np.float32)
        self._momentum = np.zeros_like(self._anchor)
        self._mean = np.zeros(d, np.float32)
        self._sent: dict[int, _Sent] = {}
        self.compression: Compression | None = None
        _warm(compress)
        transport.configure(channel, self.schema, gather, compress.codec(self.schema.n_values, d))
        self._whole: Replica | None = None
        if compress.resync:
            self._whole = Replica(whole, transport, rps_repair, fp32, channel=channel + RESYNC)

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round. Raises NotFinite, naming the tensor, before anything is sent or the residual changed."""
        return self.end(self.begin(weight, deadline_s, aside), weight, deadline_s)

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Begun:
        """The first half of ``average``: select, and send. Nothing may change until ``end``."""
        if self._me != self._transport.me:  # joined anew, in another place: nobody tells of what was sent
            self._me = self.feedback.peer = self._transport.me
            self.feedback.members_changed()
            self._sent.clear()
        self._flat = self.bucket.flatten().reshape(-1)
        require_finite(self.bucket)
        if require_weight(weight) == 0:  # who has no weight in this round sends nothing either
            none = np.zeros((0, CHUNK_BYTES), np.uint8)
            return Begun(self._transport.offer(self._channel, none, 0.0, deadline_s, aside), None)
        chunks, ticket = self.feedback.prepare(self._difference(), self.feedback.round + 1)
        try:
            return Begun(self._transport.offer(self._channel, chunks, weight, deadline_s, aside), ticket)
        except BaseException:
            self.feedback.rollback(ticket)
            raise

    def end(self, begun: Begun, weight: float = 1.0, deadline_s: float | None = None) -> Outcome:
        """The second half: wait, add up what came, and take it over."""
        outcome = self._wait(begun)
        assert outcome.gathered is not None
        self._take(outcome.round, outcome.gathered)
        self.bucket.restore(self._moved().reshape(self.bucket.values.shape), _all(self.bucket))
        if self._whole is not None and outcome.round % self.compress.resync == 0:
            self._average_densely(weight, deadline_s)
        return outcome

    def anchor_here(self) -> None:
        """The model, as it is now, is what all peers have."""
        if self._models:
            self._flat = self.bucket.flatten().reshape(-1)
            self._anchor[:] = self._flat

    def _difference(self) -> Floats:
        return self._flat - self._anchor if self._models else self._flat

    def _moved(self) -> Floats:
        """What the bucket's parts become: the mean, or the anchor that it has moved."""
        if not self._models:
            return self._mean
        if self._outer is None:
            self._anchor += self._mean
        else:
            average = self._anchor + self._mean
            self._anchor, self._momentum = self._outer.update(self._anchor, average, self._momentum)
        return self._anchor

    def _wait(self, begun: Begun) -> Outcome:
        ticket = begun.ticket
        try:
            outcome = begun.pending.wait()
        except BaseException:
            if ticket is not None:
                self.feedback.rollback(ticket)
            raise
        if ticket is not None and outcome.gathered is not None:
            n, k = len(outcome.gathered.whole), ticket.fragments
            block = (self._transport.me + np.arange(k)) % n
            self._sent[outcome.round] = _Sent(ticket, np.ones(k, np.bool_), block, np.ones(n, np.bool_))
        return outcome

    # -- What came

    def _take(self, number: int, gathered: Gathered) -> None:
        """Sum up what came, and decide the tickets by it."""
        self._mean[:] = 0.0
        committed = restored = refused = late = 0
        for round_, part in [(number, gathered), *gathered.late]:
            added = add_rows(self._mean, part.rows, part.factor, self.compress.values)
            refused += len(added.refused)
            late += len(part.rows) if round_ != number else 0
            mine = added.fragment[added.sender == self._transport.me]
            counts = self._decide(round_, mine, part)
            committed, restored = committed + counts[0], restored + counts[1]
        for round_, block in gathered.given_up:
            counts = self._give_up(round_, block)
            committed, restored = committed + counts[0], restored + counts[1]
        now = self.feedback.measure()
        self.compression = Compression(
            entries=now.entries,
            density=now.density,
            bytes=now.bytes,
            dense_bytes=now.dense_bytes,
            captured=now.captured,
            residual_norm=now.residual_norm,
            committed=committed,
            restored=restored,
            late=late,
            given_up=len(gathered.given_up),
            refused=refused,
        )

    def _decide(self, round_: int, mine: NDArray[np.int64], part: Gathered) -> tuple[int, int]:
        sent = self._sent.get(round_)
        if sent is None:
            return 0, 0
        sent.none &= part.none
        there = np.zeros(len(sent.open), np.bool_)
        there[mine[mine < len(there)]] = True
        there &= sent.open
        return self._settle(round_, sent, there, sent.open & ~there & part.whole[sent.block])

    def _give_up(self, round_: int, block: int) -> tuple[int, int]:
        sent = self._sent.get(round_)
        if sent is None:
            return 0, 0
        these = sent.open & (sent.block == block)
        none = np.zeros_like(these)
        return self._settle(round_, sent, *((none, these) if sent.none[block] else (these, none)))

    def _settle(self, round_: int, sent: _Sent, there: Bools, not_there: Bools) -> tuple[int, int]:
        if there.any():
            self.feedback.commit(sent.ticket, there)
        if not_there.any():
            self.feedback.rollback(sent.ticket, not_there)
        sent.open &= ~(there | not_there)
        if not sent.open.any():
            del self._sent[round_]
        return int(there.sum()), int(not_there.sum())

    def _average_densely(self, weight: float, deadline_s: float | None) -> None:
        assert self._whole is not None
        self._whole.average(weight, deadline_s)
        self.anchor_here()

    # -- Checkpoints

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Residual, velocity, what is undecided, and the anchor: tensors by name."""
        state: State = self.feedback.state_dict()
        state |= {"anchor": self._anchor.copy(), "outer momentum": self._momentum.copy()}
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave; what was undecided goes back into the residual.

        Raises ValueError naming what does not fit; then nothing has changed.
        """
        arrays: State = {name: np.asarray(tensor) for name, tensor in state.items()}
        for name, own in (("anchor", self._anchor), ("outer momentum", self._momentum)):
            if name not in arrays or arrays[name].shape != own.shape or arrays[name].dtype != own.dtype:
                raise ValueError(f"the state's {name} is none of {own.shape} {own.dtype}")
        self.feedback.load_state_dict(arrays)
        self.feedback.members_changed()
        self._sent.clear()
        self._anchor[:], self._momentum[:] = arrays["anchor"], arrays["outer momentum"]


def _all(bucket: Bucket) -> Bools:
    return np.ones(len(bucket.values), np.bool_)


def _warm(compress: TopK) -> None:
    """Have loops compiled before the peers meet: in the first round others would wait for it."""
    if fast.compiled():
        vector = np.arange(_WARM, dtype=np.float32)
        rows = ErrorFeedback(_WARM, compress.options()).prepare(vector, 0).chunks
        add_rows(vector, rows, np.ones(len(rows), np.float32), compress.values)
