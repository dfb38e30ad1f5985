"""Gradients as one table for Ragtag's transport: filled bucket by bucket, whatever DDP's buckets are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragtag.codecs.base import Codec
from ragtag.core.schema import Schema
from ragtag.core.types import Floats
from ragtag.training.tensors.layout import Part, require_plain, spec_of


class Table:
    """Places for the gradients of these parameters, float32 ``[n_chunks, elements]``.

    Buckets hold gradients in their parameters' order of memory, and so does the table. Raises TypeError or
    ValueError, naming the parameter, for what cannot be averaged.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], codec: Codec, method: str) -> None:
        self.parts = [
            Part(name, "gradient of", lambda p=parameter: p)  # type: ignore[misc]
            for name, parameter in zip(names, parameters, strict=True)
        ]
        for part in self.parts:
            require_plain(part, part.find())
        specs = tuple(spec_of(part, part.find()) for part in self.parts)
        self.schema = Schema(specs, codec.name, method, "gradients")
        self._sizes = [spec.n_values for spec in specs]
        self._flat = torch.zeros(self.schema.n_chunks(codec.elements) * codec.elements, device="cpu")
        self.values: Floats = self._flat.numpy().reshape(-1, codec.elements)

    def put(self, numbers: Sequence[int], bucket: Tensor) -> None:
        """Copy a bucket, the gradients of these parameters one after the other, into the table."""
        pieces = torch.split(bucket, [self._sizes[number] for number in numbers])
        for number, piece in zip(numbers, pieces, strict=True):
            self._place(self._flat, number).copy_(piece)

    def take(self, mean: Floats, numbers: Sequence[int], bucket: Tensor) -> None:
        """Copy a bucket out of ``mean``, which is laid out as ``values``."""
        flat = torch.from_numpy(mean.reshape(-1))
        pieces = torch.split(bucket, [self._sizes[number] for number in numbers])
        for number, piece in zip(numbers, pieces, strict=True):
            piece.copy_(self._place(flat, number))

    def fault(self) -> str | None:
        """Which gradient is not finite, in words."""
        if bool(torch.isfinite(self._flat.sum())):
            return None
        for number, part in enumerate(self.parts):
            values = self._place(self._flat, number)
            nans, infinite = int(values.isnan().sum()), int(values.isinf().sum())
            if nans or infinite:
                return f"{part} has {nans} NaN and {infinite} infinite of {values.numel()} values"
        return None

    def _place(self, flat: Tensor, number: int) -> Tensor:
        start = self.schema.offsets[number]
        return flat[start : start + self._sizes[number]]
