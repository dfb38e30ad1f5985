"""Tensors as one flat table and back, without the copies that are not needed.

A bucket's tensors become one float32 table ``[n_chunks, elements]``, in their order, each at a multiple of
64 bytes, with zeros between and behind them. Where it can, a tensor *lives* in the table (``tensor.data`` is
a view with the same shape and strides): flattening is then free, and copying back is one memcpy. The others
(other dtypes, several tensors in one storage, shared memory) are copied both ways. On an accelerator the
tensors live in a flat tensor there, which crosses to pinned memory in one copy, and back in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ragtag.core.schema import fragment_chunks, offsets_of
from ragtag.core.types import Bools, Floats
from ragtag.core.wire import n_chunks
from ragtag.training.tensors.layout import (
    Part,
    crowd_of,
    form,
    overlap,
    owns_storage,
    require_plain,
    same_order,
    spec_of,
    storage_of,
    strides_of,
)


@dataclass(slots=True)
class _Slot:
    """A tensor's place: a view into the table (or its twin on an accelerator)."""

    view: torch.Tensor
    shared: bool
    exact: bool  # whether the dtype's values are float32 values, so that a copy there and back is the same
    form: tuple[object, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still is what it was when it was placed."""
        return form(tensor) == self.form and (not self.shared or tensor.data_ptr() == self.view.data_ptr())


@dataclass(slots=True)
class _Segment:
    """Consecutive values whose tensors lie on one accelerator: their twin there, and the way across."""

    host: torch.Tensor  # pinned, where the accelerator is a CUDA device
    twin: torch.Tensor
    moved: torch.cuda.Event | None = None

    def to_host(self) -> None:
        """Begin the one copy to the host; ``arrived`` waits for it."""
        if self.moved is not None:  # the last copy to the device may have run in another stream
            torch.cuda.current_stream(self.twin.device).wait_event(self.moved)
        self.host.copy_(self.twin, non_blocking=self.twin.is_cuda)
        self._mark()

    def arrived(self) -> None:
        """Wait until the values are on the host."""
        if self.moved is not None:
            self.moved.synchronize()

    def to_device(self) -> None:
        """Copy to the accelerator, in order with what is computed there next.

        The pinned memory is written to again only after the next ``arrived``, which is behind this copy.
        """
        self.twin.copy_(self.host, non_blocking=self.twin.is_cuda)
        self._mark()

    def _mark(self) -> None:
        if self.twin.is_cuda:
            if self.moved is None:
                self.moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.moved.record(torch.cuda.current_stream(self.twin.device))


class Bucket:
    """Tensors that are averaged together.

    elements: values per chunk (the codec's).
    share: let tensors live in the table.
    fragments: the table is as long as so many equal parts of whole chunks.
    Raises TypeError or ValueError, naming the tensor, for what cannot be averaged: complex, integer, sparse,
        sharded (DTensor), overlapping or not yet initialised tensors; and for no values at all.
    """

    def __init__(
        self, parts: Iterable[Part], elements: int, *, share: bool = True, fragments: int = 1
    ) -> None:
        self.parts = tuple(parts)
        self._elements, self._share, self._fragments = elements, share, fragments
        tensors = [part.find() for part in self.parts]
        for part, tensor in zip(self.parts, tensors, strict=True):
            require_plain(part, tensor)
        self.specs = tuple(spec_of(part, t) for part, t in zip(self.parts, tensors, strict=True))
        self._offsets = offsets_of(self.specs)
        if self._offsets[-1] == 0:
            raise ValueError("nothing to average: the tensors have no values")
        if fragments > (most := n_chunks(self._offsets[-1], elements)):
            raise ValueError(f"{fragments} fragments of {most} chunks of {elements} values: at most {most}")
        self._slots: list[_Slot] = []
        self._segments: list[_Segment] = []
        self._place(tensors)

    @property
    def values(self) -> Floats:
        """The table, float32 ``[n_chunks, elements]``: up to date after ``flatten``."""
        return self._values

    @property
    def flat(self) -> torch.Tensor:
        """The table as one vector on the host, float32 ``[n_chunks * elements]``."""
        return self._flat

    def shared(self, at: int) -> bool:
        """Whether the tensor of part ``at`` lives in the table."""
        return self._slots[at].shared

    def on_host(self, at: int) -> torch.Tensor:
        """Part ``at`` in the table, in its own shape; a view."""
        return self.in_table(self._values, at)

    def in_table(self, table: Floats, at: int) -> torch.Tensor:
        """The same in another table of this form."""
        spec = self.specs[at]
        flat = torch.from_numpy(table.reshape(-1))
        return flat.as_strided(spec.shape, strides_of(spec), self._offsets[at])

    def where(self, pieces: Iterable[tuple[int, int, int]]) -> Bools:
        """bool ``[n_chunks * elements]``: where in the table pieces of parts lie (number of the part, from
        which to which of its values, in its own order).
        """
        found = torch.zeros(self._flat.numel(), dtype=torch.bool, device="cpu")
        for at, start, stop in pieces:
            spec = self.specs[at]
            chosen = torch.zeros(spec.n_values, dtype=torch.bool, device="cpu")
            chosen[start:stop] = True
            place = found.as_strided(spec.shape, strides_of(spec), self._offsets[at])
            place.logical_or_(chosen.view(spec.shape))
        marked: Bools = found.numpy()
        return marked

    @torch.no_grad()
    def flatten(self) -> Floats:
        """Bring the table up to date and return it, float32 ``[n_chunks, elements]``: no copy is made of
        tensors that live in it. A tensor that was given other memory since (``p.data = ...``) moves in
        again. Raises ValueError when one has changed its shape.
        """
        tensors = [part.find() for part in self.parts]
        if not all(slot.holds(t) for slot, t in zip(self._slots, tensors, strict=True)):
            self._place_again(tensors)
        away = [(s.view, t) for s, t in zip(self._slots, tensors, strict=True) if not s.shared]
        if away:
            torch._foreach_copy_([view for view, _ in away], [t for _, t in away])
        for segment in self._segments:
            segment.to_host()
        for segment in self._segments:
            segment.arrived()
        return self._values

    @torch.no_grad()
    def restore(self, mean: Floats, averaged: Bools, row: int = 0) -> None:
        """Take ``mean`` (float32 ``[k, elements]``) over where ``averaged`` (bool ``[k]``).

        row: of the table, that ``mean`` begins with. To be called after ``flatten``, with the tensors
        unchanged since.
        """
        kept = np.flatnonzero(~averaged)
        if len(kept) == len(averaged):
            return
        _take(self._values[row : row + len(mean)], mean, averaged, kept)
        if len(averaged) < len(self._values):
            averaged = np.pad(averaged, (row, len(self._values) - row - len(averaged)))
        for segment in self._segments:
            segment.to_device()
        away: list[tuple[torch.Tensor, torch.Tensor]] = []
        home: list[torch.Tensor] = []
        for at, (part, slot) in enumerate(zip(self.parts, self._slots, strict=True)):
            tensor = part.find()
            if slot.shared:
                home.append(tensor)
            elif slot.exact or averaged.all():
                away.append((tensor, slot.view))
            else:
                fresh = self.values_in(at, averaged).to(tensor.device)
                tensor.copy_(torch.where(fresh, slot.view.to(tensor.dtype), tensor))
        if away:
            torch._foreach_copy_([t for t, _ in away], [view for _, view in away])
        increment_version(home)  # autograd cannot see that their memory was written to

    def values_in(self, at: int, chunks: Bools) -> torch.Tensor:
        """Which values of part ``at`` lie in ``chunks`` (bool ``[n_chunks]``): bool, in the part's shape."""
        spec, start = self.specs[at], self._offsets[at]
        where = np.arange(start, start + spec.n_values) // self._elements
        return torch.from_numpy(chunks[where]).as_strided(spec.shape, strides_of(spec))

    # -- Placing

    def _place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every tensor a place in a new table, and move in those that can live there."""
        chunks = fragment_chunks(self._offsets[-1], self._elements, self._fragments)
        size = self._fragments * chunks * self._elements
        pin = any(tensor.is_cuda for tensor in tensors)
        self._flat = torch.zeros(size, dtype=torch.float32, pin_memory=pin, device="cpu")
        self._values: Floats = self._flat.numpy().reshape(-1, self._elements)
        homes = self._homes(tensors)
        crowd, twins = crowd_of(tensors), Counter(tensor.data_ptr() for tensor in tensors)
        before = self._slots
        self._slots = []
        for at, tensor in enumerate(tensors):
            lived_here = at < len(before) and before[at].shared and before[at].holds(tensor)
            free = lived_here and twins[tensor.data_ptr()] == 1
            self._slots.append(self._settle(at, tensor, homes[at], crowd, free))

    def _place_again(self, tensors: Sequence[torch.Tensor]) -> None:
        """Find out what has become of tensors that are not what they were, and take them in again."""
        for part, spec, tensor in zip(self.parts, self.specs, tensors, strict=True):
            require_plain(part, tensor)
            if tuple(tensor.shape) != spec.shape:
                raise ValueError(
                    f"{part} has shape {tuple(tensor.shape)} now and had {spec.shape} when averaging began; "
                    "after changing the model, make a new optimizer on every peer"
                )
        if any(slot.view.device != t.device for slot, t in zip(self._slots, tensors, strict=True)):
            self._place(tensors)
            return
        strays = [at for at, slot in enumerate(self._slots) if not slot.holds(tensors[at])]
        for at in strays:
            if overlap(self._slots[at].view, tensors[at]):  # in its place, but turned or cut: make room
                tensors[at].data = tensors[at].detach().clone()
        crowd = crowd_of(tensors)
        for at in strays:
            slot, tensor = self._slots[at], tensors[at]
            self._slots[at] = self._settle(at, tensor, slot.view, crowd, False)

    def _settle(
        self, at: int, tensor: torch.Tensor, home: torch.Tensor, crowd: Counter[int], free: bool
    ) -> _Slot:
        """Place one tensor at ``home``'s beginning; it lives there if it has its memory to itself, or is
        ``free`` to leave it.
        """
        spec = self.specs[at]
        strides = strides_of(spec)
        alone = owns_storage(tensor) and crowd[storage_of(tensor)] == 1
        shared = self._share and same_order(tensor, strides) and (alone or free)
        view = home.as_strided(spec.shape, tensor.stride() if shared else strides, home.storage_offset())
        if shared:
            view.copy_(tensor.detach())
            tensor.data = view
        return _Slot(view, shared, tensor.dtype != torch.float64, form(tensor))

    def _homes(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each part's values are to lie: in the table, or in its twin on the tensor's device."""
        self._segments = []
        homes: list[torch.Tensor] = []
        at = 0
        while at < len(tensors):
            device, until = tensors[at].device, at + 1
            while until < len(tensors) and tensors[until].device == device:
                until += 1
            start, stop = self._offsets[at], self._offsets[until]
            base = self._flat[start:stop]
            if device.type != "cpu" and stop > start:
                self._segments.append(_Segment(base, torch.zeros_like(base, device=device)))
                base = self._segments[-1].twin
            homes += [base[self._offsets[i] - start :] for i in range(at, until)]
            at = until
        return homes


def _take(
    values: Floats, mean: Floats, averaged: Bools, kept: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> None:
    """``values[averaged] = mean[averaged]`` by a memcpy and its exceptions: three times as fast as a mask."""
    if len(kept) * 2 > len(averaged):
        values[averaged] = mean[averaged]
        return
    own = values[kept]
    np.copyto(values, mean)
    values[kept] = own
