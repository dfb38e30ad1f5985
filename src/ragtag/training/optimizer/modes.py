"""What an optimizer averages: models after the local step, or gradients before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ragtag.core.types import Outcome
from ragtag.training.tensors.finite import require_weight
from ragtag.training.tensors.layout import GRADIENT, PRESENT, Part
from ragtag.training.tensors.modules import parameters_of

Closure = Callable[[], float]


class Mode(Protocol):
    """What happens around an average."""

    content: str

    def parts(self, names: Sequence[str], buffers: Sequence[Part]) -> list[Part]:
        """What is averaged: a part for each of the parameters, in order, and maybe the buffers."""
        ...

    def local(self, closure: Closure | None, skipped: bool) -> float | None:
        """A local step; ``skipped``: its gradients overflowed. Returns the closure's loss."""
        ...

    def offer(self, weight: float) -> float:
        """Make ready what is averaged; return the weight that it has."""
        ...

    def take(self, outcome: Outcome) -> None:
        """A round's average has come and is in the parts: use it."""
        ...

    def forget(self) -> None:
        """Another state was restored: what was gathered before belongs to none."""
        ...

    def aside(self) -> Callable[[], None]:
        """An average that steps did not wait for is to be taken: what they have gathered since is put aside.
        Returns what puts it back.
        """
        ...


class Models:
    """Take the inner optimizer's step, then average parameters and buffers."""

    content = "models"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def parts(self, names: Sequence[str], buffers: Sequence[Part]) -> list[Part]:
        """The parameters, then the buffers."""
        parameters = parameters_of(self._inner.param_groups)
        own = [Part(name, "parameter", _Same(p)) for name, p in zip(names, parameters, strict=True)]
        return [*own, *buffers]

    def local(self, closure: Closure | None, skipped: bool) -> float | None:
        """The inner optimizer's step."""
        return None if skipped else _step(self._inner, closure)

    def offer(self, weight: float) -> float:
        """Parameters need nothing."""
        return weight

    def take(self, outcome: Outcome) -> None:
        """Nothing is left to do."""

    def forget(self) -> None:
        """Nothing is gathered."""

    def aside(self) -> Callable[[], None]:
        """Nothing is gathered."""
        return lambda: None


class Gradients:
    """Gather gradients, average them, and take the inner optimizer's step with the average.

    With k steps between averages the gradients of k steps are gathered (their mean is what this peer
    offers) and the inner step is taken once, so that all replicas take the same steps: k peers' batches
    of b act as one batch. A parameter without gradient counts as zeros, as a batch without influence on
    it would; one that no peer has a gradient for stays without, and the inner optimizer passes it over.

    weigh: how much a step's gradient counts among those gathered, asked after each; what is offered then has
        the weight of all of them, times the one given. ``None``: each counts the same, and all of them have
        the weight given.
    batch: how much the last step's gradient counted.
    """

    content = "gradients"

    def __init__(self, inner: torch.optim.Optimizer, weigh: Callable[[], float] | None = None) -> None:
        self._inner, self._weigh = inner, weigh
        self.batch = 0.0
        self._parameters: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._present = torch.zeros(0, device="cpu")
        self._gathered = 0.0

    def parts(self, names: Sequence[str], buffers: Sequence[Part]) -> list[Part]:
        """The gradients, which of them there are (a 1 or 0 each), then the buffers."""
        self._begin()
        own = [
            Part(name, GRADIENT, _Same(total), parameter.dtype)
            for name, total, parameter in zip(names, self._sums, self._parameters, strict=True)
        ]
        return [*own, Part("(gradients present)", PRESENT, _Same(self._present)), *buffers]

    def local(self, closure: Closure | None, skipped: bool) -> float | None:
        """Gather the gradients of one step; nothing is changed by them yet."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        self.batch = 1.0 if self._weigh is None else require_weight(self._weigh())
        if not skipped and self.batch > 0:
            self._gather()
        return loss

    @torch.no_grad()
    def offer(self, weight: float) -> float:
        """The mean of what was gathered; nothing usable has no weight."""
        gathered, self._gathered = self._gathered, 0.0
        if gathered == 0:
            torch._foreach_zero_([*self._sums, self._present])
            return 0.0
        if gathered != 1:
            torch._foreach_div_(self._sums, gathered)
        return weight if self._weigh is None else weight * gathered

    def take(self, outcome: Outcome) -> None:
        """Take the inner step with the average."""
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Hand what the parts hold out as ``.grad`` and take the inner step, unless no peer had any."""
        present = self._present.tolist()
        for parameter, total, share in zip(self._parameters, self._sums, present, strict=True):
            if share == 0.0 and not bool(total.any()):  # the chunk that says so may have been lost
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(total)
            else:
                parameter.grad.copy_(total)
        if any(parameter.grad is not None for parameter in self._parameters):
            self._inner.step()

    def forget(self) -> None:
        """Begin to gather anew."""
        self._gathered = 0.0

    @torch.no_grad()
    def aside(self) -> Callable[[], None]:
        """The sums so far, where there are any."""
        gathered, self._gathered = self._gathered, 0.0
        if gathered == 0:
            return lambda: None
        kept = [total.clone() for total in (*self._sums, self._present)]

        def back() -> None:
            self._gathered = gathered
            torch._foreach_copy_([*self._sums, self._present], kept)

        return back

    @torch.no_grad()
    def clear(self) -> None:
        """Have nothing to offer. Which gradients there were the last time stays known."""
        self._begin()
        self._gathered = 0.0
        torch._foreach_zero_(self._sums)

    def _begin(self) -> None:
        if self._sums:
            return
        self._parameters = parameters_of(self._inner.param_groups)
        self._sums = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in self._parameters]
        self._present = torch.zeros(len(self._parameters), device="cpu")

    @torch.no_grad()
    def _gather(self) -> None:
        first = self._gathered == 0
        if first:
            self._present.zero_()
        for at, (parameter, total) in enumerate(zip(self._parameters, self._sums, strict=True)):
            if total.device != parameter.device:  # the model was moved
                total.data = total.data.to(parameter.device)
            gradient = parameter.grad
            if gradient is None:
                if first:
                    total.zero_()
                continue
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"the gradient of parameter {at} {tuple(parameter.shape)} is sparse; to average "
                    "gradients make it dense (sparse=False), or average models"
                )
            self._present[at] = 1.0
            if not first:
                total.add_(gradient, alpha=self.batch)
                continue
            total.copy_(gradient)
            if self.batch != 1:
                total.mul_(self.batch)
        self._gathered += self.batch


class _Same:
    """Finds a tensor that is never replaced."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self._tensor


def _step(inner: torch.optim.Optimizer, closure: Closure | None) -> float | None:
    step: Callable[..., float | None] = inner.step
    return step() if closure is None else step(closure)
