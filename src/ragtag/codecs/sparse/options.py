"""How error feedback sends: what a user sets, the same on all peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.pack import Values
from ragtag.codecs.sparse.selection import Selector
from ragtag.codecs.sparse.topk import sampled
from ragtag.codecs.sparse.wire import Format


@dataclass(frozen=True, slots=True)
class Options:
    """How error feedback sends.

    decay: what is left of the residual from round to round (SparseLoCo: .95).
    momentum: above 0, velocities are summed in place of gradients, and forgotten where sent (momentum
        correction and factor masking: Lin et al., "Deep gradient compression", ICLR 2018, sections 3.1-3.2).
    age_max_rounds: while nothing was delivered for longer, the residual loses a share of 1/age_max_rounds per
        round: what a dead link restores when it comes back is about as old as that, no older.
    norm_max: the residual's norm stays below so many times the gradients' (running mean); None: no cap.

    Raises ValueError for what cannot be.
    """

    density: Density = field(default_factory=Density)
    selector: Selector = sampled
    values: Values = "int8"
    indices: Literal["auto", "rice", "blocks"] = "auto"
    decay: float = 1.0
    momentum: float = 0.0
    age_max_rounds: int | None = 1000
    norm_max: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"a decay of {self.decay}: give what is left of the residual, above 0, at most 1"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"a momentum of {self.momentum}: give 0 (none) or more, below 1")
        if self.age_max_rounds is not None and self.age_max_rounds < 1:
            raise ValueError(f"an age of {self.age_max_rounds} rounds: give 1 or more, or None")
        if self.norm_max is not None and not self.norm_max > 0:
            raise ValueError(f"a norm of {self.norm_max} times the gradients': give more than 0, or None")
        Format(1, 1, self.values, self.indices)
