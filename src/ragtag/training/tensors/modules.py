"""Which tensors are averaged, and what they are called: an optimizer's parameters, a model's buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ragtag.optim.names import plain_name
from ragtag.training.tensors.layout import BUFFER, Part, is_plain


def parameters_of(groups: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """An optimizer's parameters in their order, each once."""
    return list(dict.fromkeys(p for group in groups for p in group["params"]))


def name_parameters(groups: Sequence[dict[str, Any]], modules: Sequence[torch.nn.Module]) -> list[str]:
    """The names of ``parameters_of(groups)``: a model's own where one of the modules has them."""
    known: dict[int, str] = {}
    for at, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            known.setdefault(id(parameter), clean_name(name, at, modules))
    for number, group in enumerate(groups):
        for at, parameter in enumerate(group["params"]):
            known.setdefault(id(parameter), f"parameter {at} of group {number}")
    return [known[id(parameter)] for parameter in parameters_of(groups)]


def buffer_parts(modules: Sequence[torch.nn.Module]) -> tuple[list[Part], list[str]]:
    """The buffers to average, and the names of floating-point buffers that are left out.

    Averaged are floating-point buffers that a state_dict holds (BatchNorm's statistics). Left out are
    integers (num_batches_tracked), what is not persistent (tables that are computed again), and buffers
    with infinities in them (masks, ranges that nothing has been seen of yet).
    """
    parts: list[Part] = []
    left_out: list[str] = []
    for part, buffer, lasting in _buffers(modules):
        if not buffer.is_floating_point():
            continue
        if lasting and not bool(buffer.isinf().any()):
            parts.append(part)
        else:
            left_out.append(part.name)
    return parts, left_out


def fixed_parts(
    averaged: Iterable[torch.Tensor],
    modules: Sequence[torch.nn.Module],
    *,
    trainable: bool = False,
    buffers: bool = False,
) -> list[Part]:
    """What models have beside what is averaged, that is to be the same on all peers: parameters that need no
    gradient; with ``trainable`` also those that do; and, with ``buffers``, the integers and bools that a
    state_dict holds.

    averaged: the parameters that optimizers have.

    Left out is what has no values of its own here: tensors on the meta device, lazy, sparse, sharded,
    quantized or expanded ones.
    """
    parts = [
        Part(name, "parameter", lambda p=parameter: p)  # type: ignore[misc]
        for name, parameter in parameters_beside(averaged, modules)
        if (trainable or not parameter.requires_grad) and is_plain(parameter)
    ]
    return parts + counter_parts(modules) if buffers else parts


def counter_parts(modules: Sequence[torch.nn.Module]) -> list[Part]:
    """The integers and bools in buffers that a state_dict holds, such as BatchNorm's num_batches_tracked."""
    return [
        part
        for part, buffer, lasting in _buffers(modules)
        if lasting and not buffer.is_floating_point() and is_plain(buffer)
    ]


def parameters_beside(
    averaged: Iterable[torch.Tensor], modules: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The models' parameters that are not among these, by name, each once."""
    seen = {id(parameter) for parameter in averaged}
    for at, root in enumerate(modules):
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield clean_name(name, at, modules), parameter


def _buffers(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[Part, torch.Tensor, bool]]:
    """Each buffer once, as a part and as it is now, and whether a state_dict holds it."""
    seen: set[int] = set()
    for at, root in enumerate(modules):
        for prefix, module in root.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                name = clean_name(f"{prefix}.{key}" if prefix else key, at, modules)
                lasting = key not in module._non_persistent_buffers_set
                yield Part(name, BUFFER, _BufferOf(module, key, name)), buffer, lasting


@dataclass(frozen=True, slots=True)
class _BufferOf:
    """Finds a module's buffer, which the module may replace at any time. Equal to another one that does."""

    module: torch.nn.Module
    key: str
    name: str = field(compare=False)

    def __call__(self) -> torch.Tensor:
        buffer = self.module._buffers.get(self.key)
        if buffer is None:
            raise RuntimeError(f"buffer {self.name!r} was averaged before, and is gone from the model now")
        return buffer


def clean_name(name: str, at: int, modules: Sequence[torch.nn.Module]) -> str:
    """A name without what wrappers add; numbered when there is more than one module."""
    name = plain_name(name, modules[at])
    return f"{at}.{name}" if len(modules) > 1 else name


class Watch:
    """Finds the module that owns an optimizer's parameters, by looking at what is called in training.

    A hook before every module's forward, until a module comes by that owns all the parameters; as a
    module is called before those inside it, that is the outermost. Where no single one owns them all,
    the outermost that own some are kept, at most ``modules_max``.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], modules_max: int = 64) -> None:
        self.modules: list[torch.nn.Module] = []
        self._wanted = {id(parameter) for parameter in parameters}
        self._seen: WeakSet[torch.nn.Module] = WeakSet()
        self._modules_max = modules_max
        self.hook = register_module_forward_pre_hook(self._look)

    def end(self) -> None:
        """Look no further."""
        self.hook.remove()

    def _look(self, module: torch.nn.Module, _inputs: object) -> None:
        if module in self._seen:
            return
        inside = set(module.modules())
        self._seen.update(inside)
        owned = self._wanted & {id(parameter) for parameter in module.parameters()}
        if not owned:
            return
        self.modules = [root for root in self.modules if root not in inside]
        if len(owned) == len(self._wanted):
            self.modules = [module]
            self.end()
        elif len(self.modules) < self._modules_max:
            self.modules.append(module)
