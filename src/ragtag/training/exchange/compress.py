"""How a crew's optimizer sends less: the largest entries of what is averaged, the rest later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from ragtag.codecs.base import Codec
from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.pack import Values
from ragtag.codecs.sparse.selection import Selector
from ragtag.codecs.sparse.selectors import selector_named

_ROW_BYTES = 1064  # of a row, behind header and rounding
_INDEX_BYTES = 6  # of an entry's index, at most: far more than any takes on average
_VALUE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "2bit": 0.25}


@dataclass(frozen=True, slots=True)
class TopK:
    """Send a share of the entries, the largest in magnitude, and keep the rest for later (error feedback).

    ratio: the share.
    selection: "sampled" (the k largest, found fast), "exact", "random", "chunked", "gaussian-k",
        "gaussian-k-strict", "dgc", "sidco", "reused", or a Selector.
    values: how they travel: "int8" (a scale per 256), "2bit" (a sign and one of two magnitudes per 256),
        "bf16" or "fp32". What rounding takes away is fed back, too.
    momentum_correction: above 0, velocities are summed in place of gradients, and forgotten where they were
        sent (Lin et al., ICLR 2018, sections 3.1-3.2); the optimizer itself then takes no momentum.
    warm_up: rounds in which the share falls from a quarter to ``ratio`` (section 3.3).
    decay: what is left of the residual from round to round (SparseLoCo: .95).
    resync: after every so many rounds the models are averaged densely, buffers with them (only then): what a
        peer could not get of some round, because it was away, is made good. 0: never.
    bypass: "auto": rounds are sent whole, as fp32, while that takes less time than selecting, coding and
        sending, by what all peers measure (see ``bypass``). False: never.

    The same on all peers, or they refuse each other. Raises ValueError for what cannot be. As SparseLoCo
    (Sarfi et al. 2025) does with local steps (``every=...``) and an outer optimizer (``ragtag.Outer()``):
    ``TopK(.02, selection="chunked", values="2bit", decay=.95)``.
    """

    ratio: float = 0.001
    selection: str | Selector = "sampled"
    values: Values = "int8"
    momentum_correction: float = 0.0
    warm_up: int = 0
    decay: float = 1.0
    resync: int = 1000
    bypass: Literal["auto", False] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float):
            raise ValueError(f"ratio is {self.ratio!r}; it is a share of the entries, above 0 and at most 1")
        self.options()
        if self.resync < 0:
            raise ValueError(f"resync is {self.resync}; it is a number of rounds, or 0: never")
        if self.bypass not in ("auto", False):
            raise ValueError(f'bypass is {self.bypass!r}; it is "auto", or False: never')

    def options(self) -> Options:
        """As error feedback takes them."""
        given = self.selection
        selector = given if isinstance(given, Selector) else selector_named(given)
        return Options(
            density=Density(self.ratio, warm_up_rounds=self.warm_up),
            selector=selector,
            values=self.values,
            decay=self.decay,
            momentum=self.momentum_correction,
        )

    @property
    def name(self) -> str:
        """All that peers must agree on, in words: it is compared when they meet."""
        parts = [f"{self.options().selector.name} of {self.ratio:g}", self.values]
        for what, value, usual in (
            ("warm-up", self.warm_up, 0),
            ("momentum correction", self.momentum_correction, 0.0),
            ("decay", self.decay, 1.0),
            ("resync", self.resync, 1000),
            ("bypass", self.bypass, "auto"),
        ):
            if value != usual:
                parts.append(f"{what} {value}")
        return ", ".join(parts)

    def rows_most(self, d: int) -> int:
        """How many rows a peer may offer for a vector of ``d`` values: a bound, far above what is usual."""
        options = self.options()
        entries = options.selector.most(options.density.k(d, 0), d)
        return 2 + math.ceil(entries * (_VALUE_BYTES[self.values] + _INDEX_BYTES) / _ROW_BYTES)

    def codec(self, n_values: int, d: int) -> Codec:
        """What a channel is told: a name, and so many elements to a chunk that there is one for each row.

        n_values: of the channel's schema.
        d: of the vector that they are part of.
        """
        elements = max(1, n_values // self.rows_most(d))
        return Codec(self.name, elements, _no_chunks, _no_chunks, _no_chunks, exact=False)


class Compression(NamedTuple):
    """What sending less came to in a round: for the trace.

    entries, density, bytes, dense_bytes, captured, residual_norm: see ``codecs.sparse.feedback.Measured``.
    committed, restored: fragments of this peer that were decided in this round, by what became of them.
    late: rows of earlier rounds that came with this one.
    given_up: blocks of which some never came.
    refused: rows that were not good, or twice there.
    dense: whether the round was sent whole.
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
    dense: bool = False


def _no_chunks(*arguments: object) -> NoReturn:
    raise RuntimeError("rows of a selection are not averaged chunk by chunk")
