"""Outer momentum live: what an average moved the model by is a gradient of an outer optimizer (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ragtag.core.schema import TensorSpec, offsets_of
from ragtag.core.types import Floats, Outcome
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.training.exchange.base import Layer
from ragtag.training.exchange.dense import Replica
from ragtag.training.tensors.layout import strides_of

_PARTS = ("anchor", "momentum")


class OuterSteps:
    """One peer's outer optimizer, on the table that is averaged.

    specs: of the parameters, which come first in the table; what follows (buffers) takes the average as it
        is.
    shape: the table's, ``(rows, elements)``.
    fragments: equal parts of it, of which each round steps one.

    The first average (of each fragment) is taken as it is and becomes the anchor, so peers need not have
    begun alike. Where no average came, values, anchor and momentum stay, and the next average there is of two
    rounds' steps. Peers then differ in anchor and momentum; with DiLoCo's .7 and .9 that shrinks by half with
    each average that comes (the largest eigenvalue of the map of both is .52).
    """

    def __init__(
        self, rule: Nesterov, specs: Sequence[TensorSpec], shape: tuple[int, ...], fragments: int = 1
    ) -> None:
        self._rule, self._specs, self._shape, self._fragments = rule, tuple(specs), shape, fragments
        *self._offsets, self._parameters = offsets_of(self._specs)
        self.forget()

    def forget(self) -> None:
        """The model has come from elsewhere: begin anew from the next average."""
        self._begun = [False] * self._fragments
        self._anchor: Floats | None = None
        self._momentum: Floats | None = None

    def __call__(self, outcome: Outcome) -> Floats:
        """The fragment to go on with, float32 ``[n_chunks, elements]``. Raises ValueError: not finite."""
        mean, came = outcome.mean, outcome.averaged
        if self._anchor is None or self._momentum is None:
            self._anchor, self._momentum = (
                np.zeros(self._shape, np.float32),
                np.zeros(self._shape, np.float32),
            )
        at = outcome.round % self._fragments
        rows = slice(at * len(mean), (at + 1) * len(mean))
        anchor, momentum = self._anchor[rows], self._momentum[rows]
        if not self._begun[at]:
            self._begun[at] = True
            np.copyto(anchor, mean)
            return mean
        buffers = max(0, self._parameters - rows.start * self._shape[1])
        if came.all():
            after, momentum[:] = self._rule.update(anchor, mean, momentum)
            after.reshape(-1)[buffers:] = mean.reshape(-1)[buffers:]
            anchor[:] = after
            return after
        after, grown = self._rule.update(anchor[came], mean[came], momentum[came])
        table = mean.copy()
        table[came] = after
        table.reshape(-1)[buffers:] = mean.reshape(-1)[buffers:]
        anchor[came], momentum[came] = table[came], grown
        return table

    # -- What is kept

    def state_dict(self) -> dict[str, Any]:
        """``anchor`` and ``momentum``: copies, float32, by the parameters' names in their shapes, whatever
        the codec; ``begun``: which fragments have them. Empty before the first average.
        """
        if self._anchor is None or self._momentum is None:
            return {}
        anchor, momentum = self._tensors(self._anchor), self._tensors(self._momentum)
        return {"begun": list(self._begun), "anchor": anchor, "momentum": momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave; of an empty one, begin anew, and so of one with another number of
        fragments of which some had not been averaged yet.

        Raises ValueError, naming it, at the first parameter that does not fit; nothing has changed then.
        """
        require_outer_state(state, {spec.name: spec.shape for spec in self._specs})
        self.forget()
        begun = state.get("begun", [])
        if len(begun) == self._fragments or (begun and all(begun)):
            self._anchor, self._momentum = (self._table(state[part]) for part in _PARTS)
            self._begun = list(begun) if len(begun) == self._fragments else [True] * self._fragments

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


class Outer(Layer):
    """Outer steps around a dense exchange: what it averages moves the model by the outer optimizer's step."""

    def __init__(self, inner: Replica, asked: Streaming, n_parameters: int) -> None:
        super().__init__(inner)
        shape, specs = inner.bucket.values.shape, inner.schema.tensors[:n_parameters]
        self.steps = OuterSteps(asked.rule, specs, shape, asked.fragments)
        inner.after, inner.kept_share = self.steps, asked.kept

    def forget(self) -> None:
        """Anchor and momentum are of another model."""
        self.steps.forget()
        self.inner.forget()

    def state_dict(self) -> dict[str, Any]:
        """Under "outer": see ``OuterSteps.state_dict``; left out where there is none yet."""
        own = self.steps.state_dict()
        return {**self.inner.state_dict(), **({"outer": own} if own else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, naming it, at the first parameter that does not fit."""
        if "outer" in state:
            self.steps.load_state_dict(state["outer"])
        self.inner.load_state_dict(state)


def require_outer_state(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError, naming what differs first, where a state is not of parameters of these shapes."""
    if not state:
        return
    if set(state) != {*_PARTS, "begun"}:
        raise ValueError(f"the outer momentum's state has {sorted(state)}; it has {[*_PARTS, 'begun']}")
    begun = state["begun"]
    if not isinstance(begun, list) or not all(type(of) is bool for of in begun):
        raise ValueError("which fragments the outer momentum's state has is no list of bools")
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
