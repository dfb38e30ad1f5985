"""One peer's copy of what is averaged: a bucket, and the channel it is averaged on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import numpy as np
import torch

from ragtag.codecs.base import Codec
from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema
from ragtag.core.types import Bools, Floats, OpenedTogether, Outcome, PeerId
from ragtag.protocols.channel.averager import Averager
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.finite import Leaps, require_weight
from ragtag.training.tensors.layout import BUFFER, GRADIENT, PRESENT, Part
from ragtag.training.transport import Pending, Transport

_GIVEN = frozenset((GRADIENT, PRESENT))
"""Kinds of parts that are as they were sent when an average that nothing waited for is taken over."""


class Corrections:
    """How often each buffer was corrected by averages that local steps did not wait for.

    Several optimizers of one model may average its buffers. What one has corrected since another one sent it
    is not to be corrected again: replicas would be as far apart as before, on the other side.
    """

    def __init__(self) -> None:
        self._times = Counter[Callable[[], torch.Tensor]]()

    def times(self, buffers: Iterable[Part]) -> list[int]:
        """Of each of these."""
        return [self._times[buffer.find] for buffer in buffers]

    def add(self, buffers: Iterable[Part]) -> None:
        """These were corrected once more."""
        self._times.update(buffer.find for buffer in buffers)


class Replica:
    """Averages its parts with the crew, in place.

    name: of the channel.
    content: what the parts are ("models", "gradients").
    fragments: equal parts of the table, of which each round averages one, in turn.
    share: let tensors live in the table (``Bucket``).
    corrects: given where an average that local steps did not wait for corrects what they came to: values
        become the average, and what has changed since they were sent (computation and communication
        decoupled: CoCoD-SGD, Shen et al., IJCAI 2019, equation 4). Gradients that were sent come back before:
        what has been gathered since is of the next average. One for all exchanges of a peer.
    carries: whether gradients of which nobody may have an average go into the next one that has a weight: as
        much as they counted for before. So what the samples of a crew with a target batch say of an owner's
        chunks comes a step later where that owner dies, and is not lost.
    together: as for ``Transport.configure``.
    Raises SchemaMismatch, naming the first tensor that differs, when another peer averages something else on
        this channel.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        transport: Transport,
        method: Averager,
        codec: Codec,
        *,
        name: str = "model",
        content: str = "models",
        fragments: int = 1,
        share: bool = True,
        corrects: Corrections | None = None,
        carries: bool = False,
        together: OpenedTogether | None = None,
    ) -> None:
        self.bucket = Bucket(parts, codec.elements, fragments=fragments, share=share)
        self.schema = Schema(self.bucket.specs, codec.name, method.name, content, fragments)
        self.after: Callable[[Outcome], Floats] | None = None
        """Makes of an outcome the table to go on with (``None``: the mean)."""
        self.kept_share = 0.0
        """How much is kept of what values became while a round was under way; the rest is the average's."""
        self._sent: Floats | None = None
        self._corrects, self._carries = corrects, carries
        self._buffers = [part for part in self.bucket.parts if part.kind == BUFFER]
        self._times: list[int] = []  # that they had been corrected when they were sent
        self._weight = 0.0
        self._carried: list[tuple[Part, torch.Tensor]] = []
        """Sums of gradients, each times its weight, that wait for the next average."""
        self._leaps = Leaps()
        self._transport, self._channel = transport, channel_of(name)
        transport.configure(self._channel, self.schema, method, codec, together=together)

    @property
    def channel(self) -> int:
        """The number of the channel that it is averaged on."""
        return self._channel

    def average(
        self,
        weight: float = 1.0,
        deadline_s: float | None = None,
        aside: frozenset[PeerId] = frozenset(),
        due: int = -1,
        number: int = -1,
    ) -> Outcome:
        """One round, from flattening to copying back. Where no average came the own values stay.

        aside: peers that the round does not wait for.
        due: the round that is due, where this peer can tell.
        number: of the round, where the caller numbers all.

        Raises NotFinite, naming the tensor, before anything is sent, when a value is NaN or infinite.
        """
        return self._take(
            self._start(self._flatten(weight), weight, deadline_s, aside, due, number=number).wait()
        )

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Pending:
        """The first half of ``average``: what is sent are copies, so that local steps may go on meanwhile."""
        values = self._flatten(weight)
        if self._sent is None or self._sent.shape != values.shape:
            self._sent = np.empty_like(values)
        np.copyto(self._sent, values)
        if self._corrects is not None:
            self._times = self._corrects.times(self._buffers)
        return self._start(self._sent, weight, deadline_s, aside)

    def end(self, begun: Pending) -> Outcome:
        """The second half: ``kept_share`` of what values have become meanwhile, the rest of the average; or,
        where this ``corrects``, the average and all that has changed meanwhile.
        """
        outcome = begun.wait()
        if self._corrects is not None and self._sent is not None:
            return self._correct(outcome, self._sent, self._corrects)
        self.bucket.flatten()
        return self._take(outcome, self.kept_share)

    @torch.no_grad()
    def _correct(self, outcome: Outcome, sent: Floats, corrections: Corrections) -> Outcome:
        moved = any(part.kind not in _GIVEN for part in self.bucket.parts)
        if moved or not outcome.averaged.all():
            self._bring_back(sent)
        self.bucket.flatten()
        times = zip(corrections.times(self._buffers), self._times, strict=True)
        first = [now == before for now, before in times]
        corrections.add(compress(self._buffers, first))
        others = [
            buffer.find() for buffer, is_first in zip(self._buffers, first, strict=True) if not is_first
        ]
        kept = [buffer.clone() for buffer in others]
        self._take(outcome, sent=sent if moved else None)
        for buffer, own in zip(others, kept, strict=True):
            buffer.copy_(own)
        return outcome

    def _bring_back(self, sent: Floats) -> None:
        """Gradients, and the list of those that there are, are again what was sent; buffers stay."""
        for at, part in enumerate(self.bucket.parts):
            if part.kind in _GIVEN:
                part.find().copy_(self.bucket.in_table(sent, at))

    @property
    def kept(self) -> bool:
        """Nothing is kept: where an average came without this peer's values, they are overwritten."""
        return False

    def stepped(self, outcome: Outcome) -> None:
        """Nothing is left to do."""

    def forget(self) -> None:
        """What is carried is of another state."""
        self._carried = []

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept beyond the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is taken; what is carried is of another state."""
        self._carried = []

    def _flatten(self, weight: float) -> Floats:
        if weight > 0:
            for part, summed in self._carried:
                tensor = part.find()
                tensor.add_(summed.to(tensor.device), alpha=1.0 / weight)
            self._carried = []
        values = self.bucket.flatten()
        self._leaps.require_finite(self.bucket)
        return values

    def _start(
        self,
        values: Floats,
        weight: float,
        deadline_s: float | None,
        aside: frozenset[PeerId],
        due: int = -1,
        number: int = -1,
    ) -> Pending:
        self._weight = require_weight(weight)
        return self._transport.start(self._channel, values, self._weight, deadline_s, aside, due, number)

    def _take(self, outcome: Outcome, kept: float = 0.0, sent: Floats | None = None) -> Outcome:
        table = outcome.mean if self.after is None else self.after(outcome)
        row = outcome.round % self.schema.fragments * len(table)
        own = self.bucket.values[row : row + len(table)]
        if sent is not None:  # in place: another table as large as the model takes longer to get than to fill
            np.subtract(own, sent, out=sent)
            table = np.add(sent, table, out=sent)
        if kept:
            table = np.float32(kept) * own + np.float32(1.0 - kept) * table
        self.bucket.restore(table, outcome.averaged, row)
        if outcome.told is not None and not outcome.told.all():
            self._pass_over(np.pad(~outcome.told, (row, len(self.bucket.values) - row - len(table))))
        self._leaps.took(outcome, outcome.mean)
        return outcome

    def _pass_over(self, untold: Bools) -> None:
        """Of chunks (bool ``[n_chunks]``) of whose averages nobody may have one, gradients become 0.

        Each peer would step by its own there, and replicas would part by a step of all of them. What one
        peer lost, and others have, is another case: its own gradient is the best that it knows of theirs.
        """
        for at, part in enumerate(self.bucket.parts):
            if part.kind == GRADIENT:
                tensor = part.find()
                there = self.bucket.values_in(at, untold).to(tensor.device)
                if self._carries and self._weight > 0:
                    # as float32: in float16 times a number of samples it would be infinite
                    self._carried.append((part, (tensor.float() * self._weight).masked_fill_(~there, 0.0)))
                tensor.masked_fill_(there, 0.0)
