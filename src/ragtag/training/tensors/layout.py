"""How a tensor lies in memory, and whether it can be averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from ragtag.core.schema import TensorSpec

BUFFER = "buffer"
"""The kind of a part that a model's forwards may change, and no step."""
GRADIENT = "gradient of"
"""The kind of a part that is no tensor of the model, and that a step is taken by."""
PRESENT = "list"
"""The kind of the part that says which gradients there are."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a bucket.

    name: as in the model.
    kind: what it is ("parameter", "buffer", "gradient of"), for messages.
    find: the tensor as it is now (a module may have replaced its buffer).
    dtype: what peers must agree on where it is not the tensor's own (a float32 sum stands in for gradients of
        another dtype).
    """

    name: str
    kind: str
    find: Callable[[], torch.Tensor]
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def form(tensor: torch.Tensor) -> tuple[object, ...]:
    """What must stay the same for a tensor to stay in its place."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def require_plain(part: Part, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError, naming the part, for a tensor that cannot be averaged."""
    if is_lazy(tensor):
        raise ValueError(f"{part} has no shape yet: run the model once on a batch before averaging begins")
    if type(tensor.data) is not torch.Tensor:
        kind = type(tensor.data).__name__
        raise TypeError(f"{part} is a {kind}; only whole, plain tensors are averaged")
    if tensor.layout != torch.strided:
        raise TypeError(f"{part} is sparse ({tensor.layout}); use dense tensors (sparse=False)")
    dtype = part.dtype or tensor.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"{part} is {dtype}; only floating-point tensors are averaged")
    if tensor.device.type == "meta":
        raise ValueError(f"{part} is on the meta device and has no values yet")
    if _overlaps_itself(tensor):
        raise ValueError(f"{part} overlaps itself in memory (an expanded tensor); make it contiguous")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor, of whatever type, has all its values here, each in a place of its own."""
    if is_lazy(tensor) or type(tensor.data) is not torch.Tensor:
        return False
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return False
    return not _overlaps_itself(tensor)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def spec_of(part: Part, tensor: torch.Tensor) -> TensorSpec:
    """What peers must agree on."""
    dtype = str(part.dtype or tensor.dtype).removeprefix("torch.")
    return TensorSpec(part.name, tuple(tensor.shape), dtype, memory_order(tensor))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from slowest to fastest; empty when row by row, or when there are gaps in memory."""
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    order = sorted(dims, key=tensor.stride, reverse=True)
    step = 1
    for d in reversed(order):
        if tensor.stride(d) != step:
            return ()
        step *= tensor.shape[d]
    return () if order == dims else tuple(order)


def strides_of(spec: TensorSpec) -> tuple[int, ...]:
    """The strides of a tensor without gaps in the order that was agreed."""
    dims = [d for d in range(len(spec.shape)) if spec.shape[d] > 1]
    strides = [1] * len(spec.shape)
    step = 1
    for d in reversed(spec.order or dims):
        strides[d] = step
        step *= spec.shape[d]
    return tuple(strides)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor lies in; tensors that share memory have one."""
    return tensor.untyped_storage().data_ptr()


def crowd_of(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """How many of the tensors lie in each storage."""
    return Counter(storage_of(tensor) for tensor in tensors)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory: whether their spans of it meet."""
    (a_from, a_until), (b_from, b_until) = _span(a), _span(b)
    return a_from < b_until and b_from < a_until


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def same_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies in memory as these strides say (a dimension of size 1 has none)."""
    return all(n <= 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def owns_storage(tensor: torch.Tensor) -> bool:
    """Whether a float32 tensor has its storage to itself: no view, nor shared between processes."""
    if tensor.dtype != torch.float32 or tensor.numel() == 0:
        return False
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.is_shared():
        return False
    return storage.nbytes() == tensor.numel() * tensor.element_size()
