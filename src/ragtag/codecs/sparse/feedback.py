"""Error feedback that survives loss: what was not delivered is sent later.

u = gradient + residual; C(u) is sent; residual = u - C(u) as its receiver decodes it, so rounding is fed back
too. Seide et al. 2014; Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD", ICML 2019. Here
what was sent stays *pending* until it is known whether it is in the round's aggregate, by fragments:

    sum of gradients = committed + pending + residual

(with ``decay`` below 1 and where a cap takes something away, less that). Whether a fragment was delivered is
decided for the round, the same for all members, never by one hop. Never for weights: for gradients, or for
differences to an anchor that all have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.sparse.checkpoint import State, as_text, load_ticket, require, save_ticket, text
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.residual import Residual, energy_of
from ragtag.codecs.sparse.reused import add
from ragtag.codecs.sparse.selection import Selection
from ragtag.codecs.sparse.tickets import COMMITTED, RESTORED, Pending, Ticket, TicketError
from ragtag.codecs.sparse.wire import Format, decode, encode
from ragtag.core.seed import stream_key
from ragtag.core.types import Bools, Bytes, Floats, PeerId

TICKETS_MAX = 16
"""Rounds that may be undecided at once."""


class Prepared(NamedTuple):
    """A selection, encoded.

    chunks: uint8 ``[fragments, 1088]``, to be sent.
    ticket: to say later what became of them.
    """

    chunks: Bytes
    ticket: Ticket


class Measured(NamedTuple):
    """For the trace. captured: the share of the last u's energy that was sent; norms are Euclidean."""

    entries: int
    density: float
    bytes: int
    dense_bytes: int
    captured: float
    residual_norm: float
    gradient_norm: float
    forgotten_norm: float


class ErrorFeedback(Residual):
    """One peer's residual and what it has under way.

    size: of the vector.
    peer: the sender.
    seed: of the selectors' random streams.
    """

    def __init__(self, size: int, options: Options | None = None, *, peer: PeerId = 0, seed: int = 0) -> None:
        super().__init__(size, Options() if options is None else options)
        self.peer, self._seed = peer, seed
        self._state = self.options.selector.init()
        self._open: dict[int, Pending] = {}
        self._next = 0

    # -- A round

    def form(self, round_: int) -> Format:
        """What all peers send in a round: receivers need it too."""
        k = self.options.density.k(self.size, round_)
        return Format(self.size, k, self.options.values, self.options.indices)

    def prepare(self, gradient: Floats, round_: int) -> Prepared:
        """Add a gradient (float32 ``[size]``), take what is to be sent out of the residual, and encode it.

        Raises:
            NotFinite: NaN or infinity in it; nothing was sent, the residual is what it was.
            TypeError, ValueError: it is not such a vector, or ``round_`` is not after the last one.
            TicketError: ``TICKETS_MAX`` rounds are undecided.
        """
        self._require(gradient, round_)
        if len(self._open) >= TICKETS_MAX:
            raise TicketError(
                f"{len(self._open)} rounds are undecided, the oldest is {self._oldest()}: commit or roll back"
            )
        form = self.form(round_)
        chosen = self._take(gradient, form, round_)
        try:
            sent = encode(chosen, form, round_, self.peer)
        except ValueError:
            self.residual[chosen.indices] = chosen.values
            raise
        values = decode(sent.chunks, form).values  # as receivers have them
        self.residual[chosen.indices] = chosen.values - values
        energy = float(np.dot(chosen.values.astype(np.float64), chosen.values))
        self._last = (len(values), sent.chunks.size, energy)
        self._round, self._undelivered = round_, self._undelivered + 1
        ticket = Ticket(self._next, round_, len(sent.chunks))
        self._next += 1
        if ticket.fragments:
            state = np.zeros(ticket.fragments, np.uint8)
            self._open[ticket.number] = Pending(ticket, chosen.indices, values, sent.starts, state)
        return Prepared(sent.chunks, ticket)

    def twin(self) -> ErrorFeedback:
        """One with the same options and selector's state that keeps nothing: to try a round on."""
        twin = ErrorFeedback(self.size, self.options, peer=self.peer, seed=self._seed)
        twin._state[:], twin._round = self._state, self._round
        return twin

    def commit(self, ticket: Ticket, fragments: Iterable[int] | Bools | None = None) -> None:
        """These fragments (indices or a bitmap; None: all that are open) are in the round's aggregate.

        Raises TicketError: one of them was decided before; then none is changed.
        """
        pending = self._pending(ticket)
        indices, _ = pending.decide(fragments, COMMITTED)
        if len(indices):
            self._undelivered = 0
        self._drop(pending)

    def rollback(self, ticket: Ticket, fragments: Iterable[int] | Bools | None = None) -> None:
        """These fragments are not in the round's aggregate: back into the residual.

        Raises TicketError: one of them was decided before; then none is changed.
        """
        pending = self._pending(ticket)
        indices, values = pending.decide(fragments, RESTORED)
        self.residual[indices] += values
        self._drop(pending)

    def settle(self, ticket: Ticket, delivered: Bools) -> None:
        """Commit what was delivered (bool ``[fragments]``), roll back the rest. Raises TicketError."""
        if not ticket.fragments:
            return
        self.commit(ticket, delivered)
        if not np.asarray(delivered).all():
            self.rollback(ticket, ~delivered)

    def members_changed(self) -> None:
        """Others decide rounds from now on: what is undecided goes back into the residual.

        A residual is in units of this peer's gradients, so it serves for a crew of any size; a new peer
        begins with none, and what one that left had not delivered is lost with it.
        """
        for pending in list(self._open.values()):
            self.rollback(pending.ticket)

    def pending(self) -> Floats:
        """float32 ``[size]``: what is sent and undecided."""
        total = np.zeros(self.size, np.float32)
        for pending in self._open.values():
            indices, values = pending.open_entries()
            total[indices] += values
        return total

    def tickets(self) -> list[Ticket]:
        """The rounds that are undecided, oldest first: after a restart, these are to be decided."""
        return [pending.ticket for pending in self._open.values()]

    def measure(self) -> Measured:
        """Figures for the trace; reads the residual once."""
        entries, n_bytes, energy = self._last
        left = energy_of(self.residual)
        return Measured(
            entries=entries,
            density=entries / self.size if self.size else 0.0,
            bytes=n_bytes,
            dense_bytes=4 * self.size,
            captured=energy / (energy + left) if energy + left else 1.0,
            residual_norm=math.sqrt(left),
            gradient_norm=self._gradient_norm,
            forgotten_norm=self._forgotten,
        )

    # -- Parts of a round

    def _take(self, gradient: Floats, form: Format, round_: int) -> Selection:
        """Add the gradient to the residual and select; what is selected may still be in the residual."""
        options, key = self.options, stream_key(self._seed, "top-k", self.peer, round_)
        gradient = self._to_add(gradient)
        if options.selector.fused is not None:
            chosen = options.selector.fused(self.residual, gradient, form.k, self._state, key)
        else:
            add(self.residual, gradient)
            chosen = options.selector.select(self.residual, form.k, self._state, key)
        if options.momentum:
            self._velocity[chosen.indices] = 0.0
        return chosen

    def _pending(self, ticket: Ticket) -> Pending:
        pending = self._open.get(ticket.number)
        if not ticket.fragments:
            none = np.zeros(1, np.int64)
            return Pending(ticket, none[:0], np.zeros(0, np.float32), none, np.zeros(0, np.uint8))
        if pending is None or pending.ticket != ticket:
            raise TicketError(
                f"round {ticket.round} has been decided already, or was never prepared here: a late arrival "
                "must be dropped, or it counts twice"
            )
        return pending

    def _drop(self, pending: Pending) -> None:
        if pending.over:
            self._open.pop(pending.ticket.number, None)

    def _oldest(self) -> int:
        return next(iter(self._open.values())).ticket.round

    # -- Checkpoints

    def state_dict(self) -> State:
        """Everything as contiguous arrays with plain names, as safetensors and ``numpy.savez`` take them."""
        state: State = {
            "residual": self.residual.copy(),
            "velocity": self._velocity.copy(),
            "selector": self._state.copy(),
            "selector_name": text(self.options.selector.name),
            "counters": np.array([self._next, self._round, self._undelivered, *self._last[:2]], np.int64),
            "norms": np.array([self._gradient_norm, self._forgotten, self._last[2]], np.float64),
            "tickets": np.array(
                [[p.ticket.number, p.ticket.round, p.ticket.fragments] for p in self._open.values()], np.int64
            ).reshape(-1, 3),
        }
        for pending in self._open.values():
            state |= save_ticket(pending)
        return state

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take up what ``state_dict`` gave. Raises ValueError naming what does not fit."""
        own = {name: (a.shape, a.dtype) for name, a in self._bare().items()}
        for name, (shape, dtype) in own.items():
            require(state, name, dtype, shape)
        theirs = as_text(state["selector_name"])
        if theirs != self.options.selector.name:
            raise ValueError(
                f"the state is of selector {theirs!r}, here it is {self.options.selector.name!r}"
            )
        table = require(state, "tickets", np.dtype(np.int64), (None, 3))
        opened = {}
        for number, round_, fragments in table.tolist():
            opened[number] = load_ticket(state, Ticket(number, round_, fragments), self.size)
        if not np.isfinite(state["residual"]).all() or not np.isfinite(state["velocity"]).all():
            raise ValueError("the state's residual or velocity has values that are not finite")
        self.residual[:] = state["residual"]
        self._velocity[:] = state["velocity"]
        self._state[:] = state["selector"]
        self._next, self._round, self._undelivered, entries, n_bytes = state["counters"].tolist()
        self._gradient_norm, self._forgotten, energy = state["norms"].tolist()
        self._last = (entries, n_bytes, energy)
        self._open = opened

    def _bare(self) -> State:
        """The arrays whose shapes are known beforehand."""
        names = ("residual", "velocity", "selector", "counters", "norms")
        state = self.state_dict()
        return {name: state[name] for name in names}
