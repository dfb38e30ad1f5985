"""What hooks need of DDP: names for parameters, and a place to raise from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def after_backward(call: Callable[[], None]) -> None:
    """Call it when DDP has finished the backward pass under way; to be used in the last bucket's hook.

    An error raised in a hook itself leaves the reducer half-way, and every later forward fails (torch 2.13:
    an internal assert in ``_rebuild_buckets``); a future's error loses its type. The engine's callbacks run
    in order and may queue further ones: one queued by a callback runs after DDP's own, which is queued right
    after the last hook returns. Its error leaves ``backward()`` as it is, and training can go on.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


class Names:
    """Numbers and names for parameters, in the order in which they are first seen.

    model: its names are used, and its parameters are numbered first, in its order.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._numbers: dict[int, int] = {}
        self.parameters: list[Tensor] = []  # kept, so that no other tensor gets one's id
        self.names: list[str] = []
        if model is not None:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self._add(parameter, name.replace("_orig_mod.", "").removeprefix("module."))

    def numbers(self, parameters: Iterable[Tensor]) -> tuple[int, ...]:
        """The parameters' numbers; one that was not known gets the next."""
        return tuple(self._number(parameter) for parameter in parameters)

    def _number(self, parameter: Tensor) -> int:
        number = self._numbers.get(id(parameter))
        if number is None:
            number = self._add(parameter, f"parameter {len(self.parameters)}")
        return number

    def _add(self, parameter: Tensor, name: str) -> int:
        number = self._numbers[id(parameter)] = len(self.parameters)
        self.parameters.append(parameter)
        self.names.append(name)
        return number

    def described(self, number: int) -> str:
        """For messages: a name, or a number and a shape."""
        if self.names[number].startswith("parameter "):
            return f"{self.names[number]} of shape {tuple(self.parameters[number].shape)}"
        return repr(self.names[number])
