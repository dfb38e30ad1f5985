"""One DDP bucket's values: which go sparsely with error feedback, which densely, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from ragtag.codecs.sparse.feedback import ErrorFeedback, Prepared
from ragtag.codecs.sparse.indices import COUNT_MAX, HEADER_BYTES
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.wire import HEADER
from ragtag.core.seed import stream_key
from ragtag.core.types import Floats
from ragtag.hooks import message as wire
from ragtag.hooks.message import Head

Memory = dict[str, Floats]
"""What is remembered of one parameter: "residual" and "velocity", where there are, float32 ``[numel]``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's place in its bucket, ``start`` to ``stop``, and where it begins among its kind."""

    number: int
    start: int
    stop: int
    at: int
    sparse: bool

    @property
    def size(self) -> int:
        """How many values it has."""
        return self.stop - self.start


@dataclass(slots=True)
class Last:
    """What the last step came to: for the statistics."""

    entries: int = 0
    returned: int = 0
    message_bytes: int = 0
    energy: float = 0.0


class Plan:
    """How one bucket is sent.

    numbers, sizes: of its parameters, in its order.
    dense_below: a parameter of fewer values goes densely.
    memories: what was remembered of parameters before DDP dealt its buckets anew (taken out of it).
    """

    def __init__(
        self,
        numbers: Sequence[int],
        sizes: Sequence[int],
        options: Options,
        *,
        dense_below: int,
        rank: int,
        seed: int,
        memories: dict[int, Memory],
    ) -> None:
        self.numbers, self.options = tuple(numbers), options
        self.pieces = _pieces(numbers, sizes, dense_below)
        self.n_values = sum(sizes)
        self.n_sparse = sum(piece.size for piece in self.pieces if piece.sparse)
        self.n_dense = self.n_values - self.n_sparse
        key = stream_key(seed, "bucket", self.numbers[0]) >> 1
        self.feedback = ErrorFeedback(self.n_sparse, options, peer=rank & 0xFFFF, seed=key)
        self.rank = rank
        self.velocity = np.zeros(self.n_dense if options.momentum else 0, np.float32)
        self.room = 0
        self.prepared: Prepared | None = None
        self.fragments = 0
        self.last = Last()
        self._remember(memories)

    # -- A step

    def gather(self, flat: Floats, sparse: bool) -> Floats:
        """The values of one kind, in one piece (no copy where the bucket has only that kind)."""
        if (self.n_sparse if sparse else self.n_dense) == self.n_values:
            return flat
        parts = [flat[piece.start : piece.stop] for piece in self.pieces if piece.sparse == sparse]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def scatter(self, sparse: Floats, dense: Floats) -> Floats:
        """The bucket from its kinds."""
        if self.n_sparse == self.n_values:
            return sparse
        flat = np.empty(self.n_values, np.float32)
        for piece in self.pieces:
            source = sparse if piece.sparse else dense
            flat[piece.start : piece.stop] = source[piece.at : piece.at + piece.size]
        return flat

    def prepare(self, flat: Floats, step: int) -> wire.Fitted:
        """Add the gradient to the residual and take out what is sent. Raises NotFinite."""
        if self.n_sparse == 0:
            return wire.Fitted(0, np.zeros(0, np.uint8), 0)
        self.prepared = self.feedback.prepare(self.gather(flat, sparse=True), step)
        fitted = wire.fit(self.prepared.chunks, self.room)
        self.fragments = fitted.fragments
        return fitted

    def first_room(self, step: int) -> int:
        """Bytes for the first message."""
        if self.n_sparse == 0:
            return 0
        k = self.options.density.k(self.n_sparse, step)
        return wire.first_room(k, self.n_sparse, self.options.values)

    @property
    def returned(self) -> int:
        """Entries of this step that did not fit, and go back."""
        if self.prepared is None or self.fragments == self.prepared.ticket.fragments:
            return 0
        late = self.prepared.chunks[self.fragments :, :HEADER_BYTES].view(HEADER)[:, 0]
        return int((late["count"] & COUNT_MAX).sum())

    def next_room(self, heads: Sequence[Head], step: int) -> int:
        """Bytes for the next message: an eighth more than the largest wanted now.

        A selector by threshold may find little in one step and much in the next: there, no less than k take.
        """
        room = wire.round_up(max(head.wanted for head in heads) * 9 / 8)
        k = self.options.density.k(self.n_sparse, step + 1)
        exact = self.n_sparse == 0 or self.options.selector.most(k, self.n_sparse) == k
        return room if exact else max(room, self.first_room(step + 1))

    def settle(self, *, delivered: bool) -> None:
        """The step is over: commit what was sent, and roll back the rest (all of it where nothing counts)."""
        prepared, self.prepared = self.prepared, None
        if prepared is None or not prepared.ticket.fragments:
            return
        done = np.arange(prepared.ticket.fragments) < (self.fragments if delivered else 0)
        self.feedback.settle(prepared.ticket, done)

    def dense_average(self, mean: Floats) -> Floats:
        """What the optimizer is given of the small tensors: their mean, or the velocity it is summed in."""
        if not self.options.momentum:
            return mean
        self.velocity *= np.float32(self.options.momentum)
        self.velocity += mean
        return self.velocity

    def fault_of(self, flat: Floats, step: int) -> Head | None:
        """A head that names the first parameter whose gradient is not finite."""
        if np.isfinite(torch.from_numpy(flat).sum().item()):
            return None
        for piece in self.pieces:
            part = flat[piece.start : piece.stop]
            nans, infinite = int(np.isnan(part).sum()), int(np.isinf(part).sum())
            if nans or infinite:
                return Head(step, 0, 0, wire.GRADIENT, piece.number, nans, infinite, piece.size)
        return None

    # -- What is remembered

    def memories(self) -> dict[int, Memory]:
        """What is remembered, by parameter; what is under way counts as not sent."""
        state = self.feedback.state_dict()
        residual = state["residual"] + self.feedback.pending()
        found: dict[int, Memory] = {}
        for piece in self.pieces:
            span = slice(piece.at, piece.at + piece.size)
            memory: Memory = {"residual": residual[span].copy()} if piece.sparse else {}
            if self.options.momentum:
                memory["velocity"] = (state["velocity"] if piece.sparse else self.velocity)[span].copy()
            found[piece.number] = memory
        return found

    def _remember(self, memories: dict[int, Memory]) -> None:
        state = self.feedback.state_dict()
        for piece in self.pieces:
            memory = memories.pop(piece.number, {})
            span = slice(piece.at, piece.at + piece.size)
            if piece.sparse and "residual" in memory:
                state["residual"][span] = memory["residual"]
            if self.options.momentum and "velocity" in memory:
                (state["velocity"] if piece.sparse else self.velocity)[span] = memory["velocity"]
        self.feedback.load_state_dict(state)


@dataclass(slots=True)
class UnderWay:
    """A bucket whose messages travel.

    waits: the collectives.
    table: uint8 ``[ranks, bytes]``.
    """

    plan: Plan
    waits: list[Any]
    table: Tensor
    dense: Tensor
    buffer: Tensor
    future: Future[Tensor]


def _pieces(numbers: Sequence[int], sizes: Sequence[int], dense_below: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    start, at = 0, {True: 0, False: 0}
    for number, size in zip(numbers, sizes, strict=True):
        sparse = size >= dense_below
        pieces.append(Piece(number, start, start + size, at[sparse], sparse))
        start, at[sparse] = start + size, at[sparse] + size
    return tuple(pieces)
