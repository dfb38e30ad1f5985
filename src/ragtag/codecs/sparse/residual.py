"""What is kept of gradients until it is sent: sums, their decay, and caps on age and norm."""

from __future__ import annotations

import math

import numpy as np

from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.reused import add
from ragtag.codecs.sparse.selection import PASS, require_finite, require_vector
from ragtag.core.types import Floats

_NORM_MEMORY = 0.9


class Residual:
    """One peer's residual, and the velocities where momentum is corrected for.

    size: of the vector. Raises ValueError for a size below 0.
    """

    def __init__(self, size: int, options: Options) -> None:
        if size < 0:
            raise ValueError(f"a vector of {size} values")
        self.size, self.options = size, options
        self.residual: Floats = np.zeros(size, np.float32)
        self._velocity = np.zeros(size if options.momentum else 0, np.float32)
        self._round, self._undelivered = -1, 0
        self._gradient_norm = self._forgotten = 0.0
        self._last = (0, 0, 0.0)  # entries, bytes and energy that were sent last

    @property
    def round(self) -> int:
        """The last one prepared; -1: none yet."""
        return self._round

    def hold(self, gradient: Floats, round_: int) -> None:
        """Add a gradient and select nothing: all of it is kept, for ``release`` or a later round.

        Raises NotFinite, TypeError, ValueError: see ``prepare``.
        """
        self._require(gradient, round_)
        add(self.residual, self._to_add(gradient))
        self._round, self._undelivered, self._last = round_, self._undelivered + 1, (0, 0, 0.0)

    def release(self) -> Floats:
        """All that is kept, float32 ``[size]``, to be sent whole; nothing is kept then.

        Velocities stay: they are forgotten where a selection was sent in their place, which is not so here.
        """
        whole = self.residual.copy()
        self.residual[:] = 0.0
        self._undelivered = 0
        return whole

    def keep(self, values: Floats) -> None:
        """Of what was released (float32 ``[size]``): this was not delivered, and is kept again."""
        with np.errstate(over="ignore"):
            self.residual += values

    # -- What a gradient adds

    def _require(self, gradient: Floats, round_: int) -> None:
        if len(require_vector(gradient, "the gradient")) != self.size:
            raise ValueError(f"a gradient of {len(gradient)} values for a residual of {self.size}")
        if round_ <= self._round:
            raise ValueError(f"round {round_} after round {self._round}: each round is prepared once")

    def _to_add(self, gradient: Floats) -> Floats:
        """The gradient, or the velocity that it makes; the residual decays. Raises NotFinite before that."""
        options = self.options
        if options.momentum or options.decay < 1 or options.norm_max is not None or self._stale:
            require_finite(gradient, "the gradient")  # before anything is changed
        if options.momentum:
            self._velocity *= np.float32(options.momentum)
            add(self._velocity, gradient)
            gradient = self._velocity
        self._forget(gradient)
        return gradient

    def _forget(self, gradient: Floats) -> None:
        """Decay, and the caps on age and norm."""
        options, left = self.options, self.options.decay
        if options.age_max_rounds is not None and self._stale:
            left *= 1 - 1 / (options.age_max_rounds + 1)
        if options.norm_max is not None:
            norm = math.sqrt(energy_of(gradient))
            before = self._gradient_norm
            self._gradient_norm = _NORM_MEMORY * before + (1 - _NORM_MEMORY) * norm if before else norm
            most, now = options.norm_max * self._gradient_norm, left * math.sqrt(energy_of(self.residual))
            left *= min(1.0, most / now) if now else 1.0
        if left < options.decay:
            self._forgotten += (options.decay - left) * math.sqrt(energy_of(self.residual))
        if left < 1:
            self.residual *= np.float32(left)

    @property
    def _stale(self) -> bool:
        most = self.options.age_max_rounds
        return most is not None and self._undelivered > most


def energy_of(values: Floats) -> float:
    """The squared norm, in float64."""
    total = 0.0
    for start in range(0, len(values), PASS):
        part = values[start : start + PASS].astype(np.float64)
        total += float(part @ part)
    return total
