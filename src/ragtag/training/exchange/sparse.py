"""A replica that sends selections: gradients, or differences to an anchor that all peers have.

A round: select, encode, offer (``protocols.rounds.gather``), add what came. Decoding and adding happen here,
in the trainer's thread. What the owners of this peer's fragments have taken in is committed, the rest goes
back into the residual; both follow from the rows that come back, in this round or a later one. Of a block
that never came, what had been sent is taken for delivered where its owner was heard of (others have added it,
and twice is worse than not at all), and goes back where nothing came of it.

Of models the *difference to the anchor* is sent, never weights; the mean of the differences (through an outer
optimiser, where one is given) moves the anchor, and the model is set to it: what was not sent stays in the
residual (SparseLoCo, Sarfi et al. 2025).

Where sending all would take less time a round is sent whole, the residual with it (``bypass``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ragtag.codecs.dense import fp32
from ragtag.codecs.sparse.checkpoint import State
from ragtag.codecs.sparse.feedback import ErrorFeedback
from ragtag.codecs.sparse.gather import add_rows, whole_mark, whole_marks
from ragtag.codecs.sparse.tickets import Ticket
from ragtag.core import fast
from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema
from ragtag.core.types import Bools, Bytes, Floats, Gathered, Noted, Outcome, PeerId
from ragtag.core.wire import CHUNK_BYTES
from ragtag.optim.outer import Nesterov
from ragtag.protocols.rounds.base import UNSOUND
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.rps import rps_repair
from ragtag.training.align.late import Late
from ragtag.training.align.rows import Came
from ragtag.training.exchange.bypass import Bypass, delivered
from ragtag.training.exchange.compress import Compression, TopK
from ragtag.training.exchange.dense import Replica
from ragtag.training.exchange.sent import Undecided
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.finite import Leaps, require_weight
from ragtag.training.tensors.layout import PRESENT, Part
from ragtag.training.transport import Pending, Transport

_WARM = 1 << 17  # values: enough to be selected from as millions are
SHARED = ("anchor", "outer momentum")
"""Of ``state_dict``, what all peers have alike; the rest is each peer's own."""


class Begun(NamedTuple):
    """A round under way, and the ticket of what was sent (``None``: nothing)."""

    pending: Pending
    ticket: Ticket | None
    weight: float = 1.0
    deadline_s: float | None = None
    at_s: float = 0.0


class SparseReplica:
    """Averages its parts with the crew in place, by selections.

    parts: what is averaged.
    name: of the channel.
    content: "gradients" or "models".
    whole: what ``resync`` averages densely.
    note: told when the selection is by-passed, and when no longer.
    Raises SchemaMismatch, naming ratio and selection, or the first tensor, where another peer differs.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        transport: Transport,
        compress: TopK,
        *,
        name: str,
        content: str,
        whole: Iterable[Part],
        outer: Nesterov | None,
        seed: int,
        note: Callable[[Noted], None] | None,
    ) -> None:
        self._outer, self._me = outer, transport.me
        self.bucket = Bucket((part for part in parts if part.kind != PRESENT), fp32.elements)
        self._flat: Floats = self.bucket.values.reshape(-1)
        d = len(self._flat)
        self.compress, self._transport, self._channel = compress, transport, channel_of(name)
        self._models = content.startswith("models")
        self.schema = Schema(self.bucket.specs, compress.name, gather.name, content)
        self.feedback = ErrorFeedback(d, compress.options(), peer=transport.me, seed=seed)
        self._anchor: Floats = np.zeros(d if self._models else 0, np.float32)
        self._momentum = np.zeros_like(self._anchor) if outer is not None else np.zeros(0, np.float32)
        self._mean = np.zeros(d, np.float32)
        self._sent = Undecided(self.feedback)
        self._leaps = Leaps()
        self._note = note
        self.late = Late()
        """What of earlier rounds may still come."""
        self._finish: Callable[[], None] = lambda: None
        self.compression: Compression | None = None
        _warm(compress)
        transport.configure(self._channel, self.schema, gather, compress.codec(self.schema.n_values, d))
        self._whole: Replica | None = None
        if compress.resync:
            self._whole = Replica(whole, transport, rps_repair, fp32, name=f"{name}/models")
        self._bypass: Bypass | None = None
        if compress.bypass:
            measured, selection = bool(compress.resync), compress.name
            self._bypass = Bypass(
                transport, name, self.schema, selection=selection, measured=measured, note=note
            )
        self.anchor_here()

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round. Raises NotFinite, naming the tensor, before anything is sent or the residual changed."""
        return self.end(self.begin(weight, deadline_s, aside))

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Begun:
        """The first half of ``average``: select, and send. Nothing may change until ``end``."""
        at_s = self._transport.now_s()
        if self._me != self._transport.me:  # joined anew, in another place: nobody tells of what was sent
            self._me = self.feedback.peer = self._transport.me
            self.feedback.members_changed()
            self._sent.clear()
        self._flat = self.bucket.flatten().reshape(-1)
        self._leaps.require_finite(self.bucket)
        if require_weight(weight) == 0:  # a peer without weight in this round sends nothing
            none = np.zeros((0, CHUNK_BYTES), np.uint8)
            pending = self._transport.offer(self._channel, none, 0.0, deadline_s, aside)
            return Begun(pending, None, weight, deadline_s)
        chunks, ticket = self._chosen(self.feedback.round + 1)
        try:
            pending = self._transport.offer(self._channel, chunks, weight, deadline_s, aside)
            return Begun(pending, ticket, weight, deadline_s, at_s)
        except BaseException:
            if ticket is not None:
                self.feedback.rollback(ticket)
            raise

    def _chosen(self, number: int) -> tuple[Bytes, Ticket | None]:
        """What is offered: a selection, or in its place that all is to be sent."""
        difference = self._difference()
        if self._bypass is not None and self._bypass.wanted:
            self.feedback.hold(difference, number)
            return whole_mark(self._transport.me, number), None
        began_s = self._transport.now_s()
        prepared = self.feedback.prepare(difference, number)
        if self._bypass is not None:
            self._bypass.selected(self._transport.now_s() - began_s, prepared.chunks.size)
        return prepared

    def end(self, begun: Begun) -> Outcome:
        """The second half: wait, add up what came, and take it over."""
        outcome, weight, deadline_s = self._wait(begun), begun.weight, begun.deadline_s
        assert outcome.gathered is not None
        self._finish()
        self._take(outcome.round, outcome.gathered)
        dense = self._bypass is not None and self._send_whole(outcome, weight, deadline_s)
        self._tell_time(begun, outcome, dense)
        self._leaps.took(outcome, self._mean)
        self.bucket.restore(self._moved().reshape(self.bucket.values.shape), _all(self.bucket))
        if self._whole is not None and outcome.round % self.compress.resync == 0:
            self._average_densely(outcome.round // self.compress.resync, weight, deadline_s)
            dense = True
        if self._bypass is not None:
            self._bypass.ended(outcome.round, dense)
        return outcome

    def keep(self, finish: Callable[[], None]) -> None:
        """Replicas will be compared: keep the last rounds' rows. finish: called when a round is over, before
        its rows are added, to take over what a comparison came to.
        """
        self.late.keeps, self._finish = True, finish

    def came(self) -> Came | None:
        """Which rows of the last rounds are in this replica: see ``Late.came``."""
        return self.late.came()

    def replaced(self, round_: int, pieces: Iterable[tuple[int, int, int]], came: Came) -> None:
        """After the round that is over these pieces of parts (see ``Bucket.where``) were taken from a replica
        that had these rows: see ``Late.replaced``.
        """
        self.late.replaced(round_, self.bucket.where(pieces), came)

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
            self._sent.add(outcome.round, ticket, self._transport.me, len(outcome.gathered.whole))
        return outcome

    # -- What came

    def _take(self, number: int, gathered: Gathered) -> None:
        """Sum up what came, and decide the tickets by it."""
        self._mean[:] = 0.0
        committed = restored = refused = late = 0
        unsound = set[PeerId]()
        began_s = self._transport.now_s()
        for round_, part in [(number, gathered), *gathered.late]:
            fragments = ~whole_marks(part.rows)
            rows, factor = part.rows, part.factor
            if not fragments.all():
                rows, factor = rows[fragments], factor[fragments]
            added = self.late.add(self._mean, round_, rows, factor, self.compress.values)
            refused += len(added.refused)
            unsound |= added.unsound
            late += len(rows) if round_ != number else 0
            mine = added.fragment[added.sender == self._transport.me]
            counts = self._sent.decide(round_, mine, part)
            committed, restored = committed + counts[0], restored + counts[1]
        self.late.add_again(self._mean, self.compress.values)
        if self._note is not None:
            for peer in sorted(unsound):
                self._note(Noted(UNSOUND, peer, f"in round {number}: it counts for nothing"))
        self._leave_out_overflow(number)
        self.late.saw(number, gathered)
        for round_, block in gathered.given_up:
            counts = self._sent.give_up(round_, block)
            committed, restored = committed + counts[0], restored + counts[1]
        if self._bypass is not None and len(gathered.rows) and not whole_marks(gathered.rows).any():
            self._bypass.added(self._transport.now_s() - began_s)
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

    def _leave_out_overflow(self, number: int) -> None:
        """Rows are finite, each: what their sum is not counts for nothing, on all replicas alike."""
        if math.isfinite(np.einsum("i->", self._mean)):
            return
        wrong = ~np.isfinite(self._mean)
        self._mean[wrong] = 0.0
        if wrong.any() and self._note is not None:
            many = int(wrong.sum())
            self._note(Noted(UNSOUND, -1, f"the sum of round {number} has {many} values that are not finite"))

    # -- What is sent whole

    def _send_whole(self, outcome: Outcome, weight: float, deadline_s: float | None) -> bool:
        """Send all that was not selected, if the crew is for it; whether it was."""
        assert self._bypass is not None
        assert outcome.gathered is not None
        whole, counted = self._bypass.agreed(outcome.gathered)
        if not whole:
            return False
        weight = weight if counted else 0.0
        values = self.feedback.release()
        if self._rehearses(outcome.round):
            self._rehearse(values)
        try:
            came = self._bypass.average(values, weight, deadline_s)
        except BaseException:
            self.feedback.keep(values)
            raise
        into, kept = delivered(came, self._transport.me, weight)
        total, table = self._mean.reshape(came.mean.shape), values.reshape(came.mean.shape)
        if into.all() and not kept.any():  # as mostly, and twice as fast
            total += came.mean
            table.fill(0.0)
        else:
            np.add(total, came.mean, out=total, where=into[:, None])
            table[~kept] = 0.0
        self.feedback.keep(values)
        if self.compression is not None:
            self.compression = self.compression._replace(
                entries=len(values),
                density=1.0,
                bytes=self._bypass.message_bytes,
                captured=1.0,
                residual_norm=self.feedback.measure().residual_norm,
                dense=True,
            )
        return True

    def _tell_time(self, begun: Begun, outcome: Outcome, dense: bool) -> None:
        """How long the round took, where it was one like others: see ``Bypass.took``."""
        bypass = self._bypass
        if bypass is None or begun.at_s == 0 or outcome.expired or outcome.round == 0:
            return  # in the first round much is done once
        if not (dense and bypass.posts_after(outcome.round)):  # that may have been one with a rehearsal
            bypass.took(dense, self._transport.now_s() - begun.at_s)

    def _rehearses(self, round_: int) -> bool:
        """Whether what selecting takes is to be measured without a round: where none has told that yet, or
        while ever fewer entries are selected. (A round tells more: its peers select at the same time.)
        """
        bypass = self._bypass
        if bypass is None or not bypass.posts_after(round_):
            return False
        return not bypass.tried or self.feedback.round < self.compress.warm_up

    def _rehearse(self, values: Floats) -> None:
        """What selecting from these would take now: nothing comes of it."""
        assert self._bypass is not None
        twin, scratch = self.feedback.twin(), np.zeros_like(self._mean)
        for fresh in (twin.residual, scratch):
            fresh.fill(0.0)  # memory is given out when it is first written to
        began_s = self._transport.now_s()
        rows = twin.prepare(values, self.feedback.round + 1).chunks
        self._bypass.selected(self._transport.now_s() - began_s, rows.size)
        began_s = self._transport.now_s()
        for _ in self._transport.live:
            add_rows(scratch, rows, np.ones(len(rows), np.float32), self.compress.values)
        self._bypass.added(self._transport.now_s() - began_s)

    def _average_densely(self, number: int, weight: float, deadline_s: float | None) -> None:
        assert self._whole is not None
        # by the round's number: a peer that was away from some would else wait in one that is long over
        outcome = self._whole.average(weight, deadline_s, number=number)
        if self._bypass is not None:
            self._bypass.sent_whole(self._whole.bucket.values.nbytes, outcome)
        self.anchor_here()

    # -- As an exchange

    @property
    def kept(self) -> bool:
        """What was not sent, or came nowhere, is in the residual: that is no loss of a whole turn."""
        return False

    def stepped(self, outcome: Outcome) -> None:
        """Nothing is left to do."""

    def forget(self) -> None:
        """The model has come from elsewhere: differences are to what it is now."""
        self.anchor_here()

    # -- Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Under "feedback": ``tensors``."""
        return {"feedback": self.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave, if anything. Raises ValueError, as ``load_tensors``."""
        if state.get("feedback"):
            self.load_tensors(state["feedback"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Residual, velocity, what is undecided, and the anchor: tensors by name."""
        state: State = self.feedback.state_dict()
        state |= {"anchor": self._anchor.copy(), "outer momentum": self._momentum.copy()}
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def load_tensors(self, state: Mapping[str, Any]) -> None:
        """Take up what ``tensors`` gave: all of it, or what is shared or this peer's own alone. What was
        undecided goes back into the residual.

        Raises ValueError naming what does not fit; then nothing has changed.
        """
        arrays: State = {name: np.asarray(tensor) for name, tensor in state.items()}
        shared = {name: arrays.pop(name) for name in SHARED if name in arrays}
        for name, own in zip(SHARED, (self._anchor, self._momentum), strict=True):
            given = shared.get(name, own)
            if given.shape != own.shape or given.dtype != own.dtype:
                raise ValueError(
                    f"the state's {name} is {given.shape} {given.dtype}, here it is {own.shape} {own.dtype}"
                )
            if not np.isfinite(given).all():
                raise ValueError(f"the state's {name} has values that are not finite")
        if arrays:
            self.feedback.load_state_dict(arrays)
            self.feedback.members_changed()
            self._sent.clear()
        self._anchor[:] = shared.get("anchor", self._anchor)
        self._momentum[:] = shared.get("outer momentum", self._momentum)


def _all(bucket: Bucket) -> Bools:
    return np.ones(len(bucket.values), np.bool_)


def _warm(compress: TopK) -> None:
    """Have loops compiled before the peers meet: in the first round others would wait for it."""
    if fast.compiled():
        vector = np.arange(_WARM, dtype=np.float32)
        rows = ErrorFeedback(_WARM, compress.options()).prepare(vector, 0).chunks
        add_rows(vector, rows, np.ones(len(rows), np.float32), compress.values)
