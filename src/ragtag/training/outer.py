"""Outer momentum live: what an average moved the model by is a gradient of an outer optimizer (DiLoCo)."""

from __future__ import annotations

import numpy as np

from ragtag.core.types import Floats, Outcome
from ragtag.optim.outer import Nesterov


class OuterSteps:
    """One peer's outer optimizer, on the table that is averaged.

    parameters: how many of the table's first values belong to parameters; what follows (buffers) takes the
    average as it is.

    The first average is taken as it is and becomes the anchor, so peers need not have begun alike. Where no
    average came, values, anchor and momentum stay, and the next average there is of two rounds' steps. Peers
    then differ in anchor and momentum; with DiLoCo's .7 and .9 that shrinks by half with each average that
    comes (the largest eigenvalue of the map of both is .52).
    """

    def __init__(self, rule: Nesterov, parameters: int) -> None:
        self._rule, self._parameters = rule, parameters
        self._anchor: Floats | None = None
        self._momentum: Floats | None = None

    def forget(self) -> None:
        """The model has come from elsewhere: begin anew from the next average."""
        self._anchor = self._momentum = None

    def __call__(self, outcome: Outcome) -> Floats:
        """The table to go on with, float32 ``[n_chunks, elements]``. Raises ValueError: it is not finite."""
        mean = outcome.mean
        if self._anchor is None or self._momentum is None or self._anchor.shape != mean.shape:
            self._anchor = mean.copy()
            self._momentum = np.zeros_like(mean)
            return mean
        came = outcome.averaged
        if came.all():
            after, grown = self._rule.update(self._anchor, mean, self._momentum)
            self._anchor, self._momentum = self._with_buffers(after, mean), grown
            return self._anchor
        after, grown = self._rule.update(self._anchor[came], mean[came], self._momentum[came])
        table = mean.copy()
        table[came] = after
        table = self._with_buffers(table, mean)
        self._anchor[came], self._momentum[came] = table[came], grown
        return table

    def _with_buffers(self, table: Floats, mean: Floats) -> Floats:
        table.reshape(-1)[self._parameters :] = mean.reshape(-1)[self._parameters :]
        return table
