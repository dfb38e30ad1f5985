"""How much a peer counts in a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ragtag.training.tensors.finite import require_weight

Weight = Callable[[], float]


class BySamples:
    """The number of samples since the last call. samples: how many there were since the start."""

    def __init__(self, samples: Callable[[], int]) -> None:
        self._samples = samples
        self._last = 0
        self._weighed = 0

    def __call__(self) -> float:
        """Raises RuntimeError: nobody has told of any sample yet."""
        now, last = self._samples(), self._last
        if now <= 0:
            raise RuntimeError(
                'weight="samples", and nobody has told how many there were: iterate over crew.split(loader), '
                "call crew.log_step(loss, samples) before optimizer.step(), or give weight=32"
            )
        self._last = now
        if now > last:
            self._weighed = now - last
            return float(self._weighed)
        return float(self._weighed)  # two averages in a row, or told after the step: as much as last time


def weight_of(
    weight: float | Callable[[], float] | Literal["samples"], samples: Callable[[], int] | None
) -> Weight:
    """A weight as a function.

    Raises TypeError: it is none. ValueError: no mean takes it, or it is by samples, and there is nobody to
    ask for them.
    """
    if isinstance(weight, str):
        if weight != "samples":
            raise ValueError(f'weight is {weight!r}; it is a number, a function, or "samples"')
        if samples is None:
            raise ValueError('weight="samples" needs samples=, a function that returns how many there were')
        return BySamples(samples)
    if callable(weight):
        return weight
    if not isinstance(weight, int | float):
        raise TypeError(f'weight is {weight!r}; it is a number, a function, or "samples"')
    number = require_weight(weight)
    return lambda: number
