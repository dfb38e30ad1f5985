"""A model and its optimizer's state cut into units that are compared, given and taken as a whole."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ragtag.core.types import Floats
from ragtag.training.tensors.layout import Part

VALUES_MIN = UNITS_MAX = 264
"""A unit has so many parameters at least (the last one fewer), and there are so many units at most: a row
has room for that many digests, and so many values.
"""


class Form(NamedTuple):
    """What a unit's values are: ``tag`` says it in 32 bits; of ``total`` values the first are parameters."""

    tag: int
    parameters: int
    total: int


@dataclass(slots=True)
class Look:
    """Tensors as they were found on the host, kept as long as nothing has changed."""

    _found: dict[int, tuple[torch.Tensor, Floats]] = field(default_factory=dict)

    def at(self, tensor: torch.Tensor) -> Floats:
        """A tensor's values in its own order (not memory's), float32; a view where they lie so."""
        found = self._found.get(id(tensor))
        if found is None:
            flat = tensor.detach().reshape(-1).to("cpu", torch.float32).numpy()
            found = self._found[id(tensor)] = tensor, flat
        return found[1]


class _Segment(NamedTuple):
    name: str
    tensor: torch.Tensor
    start: int
    stop: int


class Units:
    """Unit ``u`` has the parameters' values ``u * each`` to ``(u + 1) * each``, all parameters in one line;
    and of an optimizer's state what belongs to these: tensors of a parameter's shape, at the same places, and
    single numbers in tensors (Adam's ``step``) where the parameter begins. So parameters, momentum and second
    moments of a place are never of two peers.

    State is looked for anew each time: optimizers make it in their first step, and for what had a gradient.
    parts: the parameters.
    state: an optimizer's, of a parameter.
    """

    def __init__(self, parts: Sequence[Part], state: Callable[[torch.Tensor], dict[str, object]]) -> None:
        self._parts, self._state = parts, state
        sizes = [part.find().numel() for part in parts]
        self._starts = np.cumsum([0, *sizes])
        self.n_values = int(self._starts[-1])
        """Of all parameters."""
        self.each = max(VALUES_MIN, math.ceil(self.n_values / UNITS_MAX))
        self.n = math.ceil(self.n_values / self.each)
        """How many units there are."""

    def digest(self, unit: int, look: Look) -> int:
        """32 bits of a unit's values and of what they are: others are the same but for one case in 2^32."""
        own, more = self._segments(unit)
        crc = _form(own, more).tag
        for segment in own + more:
            crc = zlib.crc32(look.at(segment.tensor)[segment.start : segment.stop].data, crc)
        return crc

    def values(self, unit: int, look: Look) -> tuple[Form, Floats]:
        """A copy of a unit's values, parameters first."""
        own, more = self._segments(unit)
        values = [look.at(segment.tensor)[segment.start : segment.stop] for segment in own + more]
        return _form(own, more), np.concatenate(values)

    def form(self, unit: int) -> Form:
        """How many values a unit has here, how many are parameters, and the tag of its layout."""
        return _form(*self._segments(unit))

    @torch.no_grad()
    def put(self, unit: int, tag: int, values: Floats) -> tuple[float, float] | None:
        """Set a unit's values. Where the giver's optimizer has other state, the parameters alone are taken.

        Returns the squared norms of the parameters' change, and of what they were; ``None``: they do not fit,
        or were the same, and nothing was written.
        """
        own, more = self._segments(unit)
        form = _form(own, more)
        if len(values) < form.parameters or (tag == form.tag and len(values) != form.total):
            return None
        look = Look()
        taken = own + more if tag == form.tag else own
        before = np.concatenate([look.at(s.tensor)[s.start : s.stop] for s in taken])
        fresh = values[: len(before)]
        if fresh.tobytes() == before.tobytes():
            return None
        at = 0
        for segment in taken:
            length = segment.stop - segment.start
            _write(segment, fresh[at : at + length])
            at += length
        was = before[: form.parameters].astype(np.float64)
        return float(((fresh[: form.parameters] - was) ** 2).sum()), float((was**2).sum())

    def pieces(self, unit: int) -> list[tuple[int, int, int]]:
        """Its parameters, by number, each from where to where in its own order."""
        start, stop = unit * self.each, min((unit + 1) * self.each, self.n_values)
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        pieces = []
        for at in range(first, len(self._parts)):
            begin, end = int(self._starts[at]), int(self._starts[at + 1])
            if begin >= stop:
                break
            if end > begin:
                pieces.append((at, max(start, begin) - begin, min(stop, end) - begin))
        return pieces

    def _segments(self, unit: int) -> tuple[list[_Segment], list[_Segment]]:
        """The parameters' pieces, and those of their state."""
        own, more = [], []
        for at, start, stop in self.pieces(unit):
            part = self._parts[at]
            parameter = part.find()
            own.append(_Segment(part.name, parameter, start, stop))
            slots = self._state(parameter)
            for key in sorted(key for key in slots if isinstance(key, str)):
                slot, name = slots[key], f"{part.name} {key}"
                if not isinstance(slot, torch.Tensor) or not slot.is_floating_point():
                    continue
                if slot.shape == parameter.shape:
                    more.append(_Segment(name, slot, start, stop))
                elif slot.numel() == 1 and start == 0:
                    more.append(_Segment(name, slot, 0, 1))
        return own, more


def _form(own: Sequence[_Segment], more: Sequence[_Segment]) -> Form:
    tag = 0
    for segment in (*own, *more):
        tag = zlib.crc32(f"{segment.name} {segment.start} {segment.stop};".encode(), tag)
    parameters, state = (sum(s.stop - s.start for s in segments) for segments in (own, more))
    return Form(tag, parameters, parameters + state)


def _write(segment: _Segment, values: Floats) -> None:
    tensor = segment.tensor.detach()  # shares memory, and the count of changes that autograd keeps
    fresh = torch.from_numpy(values.copy())
    if tensor.is_contiguous():
        tensor.view(-1)[segment.start : segment.stop].copy_(fresh)
        return
    flat = tensor.reshape(-1).clone()
    flat[segment.start : segment.stop] = fresh.to(flat.device, flat.dtype)
    tensor.copy_(flat.view(tensor.shape))
