"""A model's integers, on their way to a peer that comes, or was away."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragtag.training.tensors.layout import BUFFER, Part

EXACT = 1 << 24
"""Float32 has all integers up to this one."""


class Integers:
    """Integers and bools in buffers, as float32 among what is averaged.

    A peer that has the crew's model keeps its own. One that takes it gets the mean, rounded: where all others
    have the same, as of a table or a count of batches, it is that. What is beyond ``EXACT`` stays its own.

    buffers: the parts that hold them.
    """

    def __init__(self, buffers: Sequence[Part]) -> None:
        self._buffers = [part for part in buffers if not part.find().is_complex()]
        self._values = torch.zeros(sum(part.find().numel() for part in self._buffers), device="cpu")

    @property
    def parts(self) -> list[Part]:
        """What is averaged; nothing where there are none."""
        values = Part("integers in buffers", BUFFER, lambda: self._values)
        return [values] if len(self._values) else []

    @torch.no_grad()
    def put(self) -> None:
        """They are now what is averaged."""
        for part, values in self._each():
            values.copy_(part.find().reshape(-1))

    @torch.no_grad()
    def take(self) -> None:
        """They become what came of the average."""
        for part, values in self._each():
            own = part.find()
            come = values.round().to(own.device).view(own.shape)
            own.copy_(torch.where(come.abs() <= EXACT, come.to(own.dtype), own))

    def _each(self) -> list[tuple[Part, torch.Tensor]]:
        sizes = [part.find().numel() for part in self._buffers]
        return list(zip(self._buffers, torch.split(self._values, sizes), strict=True))
