"""One peer's copy of what is averaged: a bucket, and the channel it is averaged on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ragtag.codecs.base import Codec
from ragtag.core.schema import Schema
from ragtag.core.types import Floats, Outcome, PeerId
from ragtag.protocols.method import Method
from ragtag.training.averager import Transport
from ragtag.training.bucket import Bucket
from ragtag.training.checks import require_finite, require_weight
from ragtag.training.tensors import Part


class Replica:
    """Averages its parts with the crew, in place.

    content: what the parts are ("models", "gradients"). Raises SchemaMismatch, naming the first tensor
    that differs, when another peer averages something else on this channel.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        transport: Transport,
        method: Method,
        codec: Codec,
        *,
        channel: int = 0,
        content: str = "models",
    ) -> None:
        self.bucket = Bucket(parts, codec.elements)
        self.schema = Schema(self.bucket.specs, codec.name, method.name, content)
        self.after: Callable[[Outcome], Floats] | None = None
        """Makes of an outcome the table to go on with (``None``: the mean)."""
        self._transport, self._channel = transport, channel
        transport.configure(channel, self.schema, method, codec)

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round, from flattening to copying back. Where no average came the own values stay.

        aside: peers that the round does not wait for.

        Raises NotFinite, naming the tensor, before anything is sent, when a value is NaN or infinite.
        """
        values = self.bucket.flatten()
        require_finite(self.bucket)
        weight = require_weight(weight)
        outcome = self._transport.start(self._channel, values, weight, deadline_s, aside).wait()
        table = outcome.mean if self.after is None else self.after(outcome)
        self.bucket.restore(table, outcome.averaged)
        return outcome
