"""Outer momentum live: what an average moved the model by is a gradient of an outer optimizer (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ragtag.core.schema import TensorSpec, offsets_of
from ragtag.core.types import Floats, Outcome
from ragtag.optim.outer import Nesterov
from ragtag.training.tensors import strides_of

_PARTS = ("anchor", "momentum")


class OuterSteps:
    """One peer's outer optimizer, on the table that is averaged.

    specs: of the parameters, which come first in the table; what follows (buffers) takes the average as it
    is. shape: the table's, ``(n_chunks, elements)``.

    The first average is taken as it is and becomes the anchor, so peers need not have begun alike. Where no
    average came, values, anchor and momentum stay, and the next average there is of two rounds' steps. Peers
    then differ in anchor and momentum; with DiLoCo's .7 and .9 that shrinks by half with each average that
    comes (the largest eigenvalue of the map of both is .52).
    """

    def __init__(self, rule: Nesterov, specs: Sequence[TensorSpec], shape: tuple[int, int]) -> None:
        self._rule, self._specs, self._shape = rule, tuple(specs), shape
        *self._offsets, self._parameters = offsets_of(self._specs)
        self.forget()

    def forget(self) -> None:
        """The model has come from elsewhere: begin anew from the next average."""
        self._begun = False
        self._anchor: Floats = np.zeros((0, self._shape[1]), np.float32)
        self._momentum: Floats = self._anchor

    def __call__(self, outcome: Outcome) -> Floats:
        """The table to go on with, float32 ``[n_chunks, elements]``. Raises ValueError: it is not finite."""
        mean, came = outcome.mean, outcome.averaged
        if not self._begun:
            self._anchor, self._momentum, self._begun = mean.copy(), np.zeros_like(mean), True
            return mean
        if came.all():
            after, self._momentum = self._rule.update(self._anchor, mean, self._momentum)
            self._anchor = self._with_buffers(after, mean)
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

    # -- What is kept

    def state_dict(self) -> dict[str, Any]:
        """``anchor`` and ``momentum``: copies, float32, by the parameters' names in their shapes, whatever
        the codec. Empty before the first average.
        """
        if not self._begun:
            return {}
        tables = self._anchor, self._momentum
        return {part: self._tensors(table) for part, table in zip(_PARTS, tables, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave; of an empty one, begin anew.

        Raises ValueError, naming it, at the first parameter that does not fit; nothing has changed then.
        """
        if not state:
            self.forget()
            return
        require_outer_state(state, {spec.name: spec.shape for spec in self._specs})
        self._anchor, self._momentum = (self._table(state[part]) for part in _PARTS)
        self._begun = True

    def _tensors(self, table: Floats) -> dict[str, torch.Tensor]:
        return {
            spec.name: view.clone(memory_format=torch.contiguous_format)
            for spec, view in zip(self._specs, self._views(table), strict=True)
        }

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> Floats:
        table = np.zeros(self._shape, np.float32)
        for spec, view in zip(self._specs, self._views(table), strict=True):
            view.copy_(tensors[spec.name])
        return table

    def _views(self, table: Floats) -> list[torch.Tensor]:
        """The parameters' places in a table, in their shapes."""
        flat = torch.from_numpy(table.reshape(-1))
        return [
            flat.as_strided(spec.shape, strides_of(spec), at)
            for spec, at in zip(self._specs, self._offsets, strict=True)
        ]


def require_outer_state(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError, naming what differs first, where a state is not of parameters of these shapes."""
    if not state:
        return
    if set(state) != set(_PARTS):
        raise ValueError(f"the outer momentum's state has {sorted(state)}; it has {list(_PARTS)}")
    for part in _PARTS:
        saved = state[part]
        for name, shape in shapes.items():
            tensor = saved.get(name) if isinstance(saved, Mapping) else None
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"the outer momentum's {part} of {name!r} is missing")
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"the outer momentum's {part} of {name!r} is {tuple(tensor.shape)} {tensor.dtype}; "
                    f"it must be {tuple(shape)} float32"
                )
        more = next((name for name in saved if name not in shapes), None)
        if more is not None:
            raise ValueError(f"the outer momentum's {part} has {more!r}, which is no parameter here")
