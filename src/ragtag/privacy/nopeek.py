"""NoPeek: a loss that asks a layer's output to tell little of the samples that went in.

    loss = a1 dCor(X, Z) + a2 task loss

Vepakomma, Gupta, Dubey, Raskar, "Reducing leakage in distributed deep learning for sensitive health data"
(2019): X is a batch, Z what a layer makes of it, which leaves for a server (split learning) or is published.
It needs neither: it is a term of a loss, so any loop with any optimizer takes it, a crew's too.

    nopeek = ragtag.privacy.NoPeek(weight=1.0)                       # with what the loop has at hand
    loss = nopeek(criterion(head(z), y), x, z)

    nopeek = ragtag.privacy.NoPeek(model, "features", weight=1.0)    # or with what hooks see
    loss = nopeek(criterion(model(x), y))

Codes may shrink without changing dCor, and its gradient grows as they do. Where training does not settle,
clip the gradients of the layers that make them, and let a large weight have more epochs.

**What it does not stop.** dCor is one number over distances between samples. It falls, too, where some
samples' codes move far out and all others stay as telling as before; so a decoder is the measure of what
Z tells, and on samples that were not trained on, as dCor is lower on those that were. It protects no
single sample for certain (that is differential privacy). Gradients of a federated model's first layer
give samples away as before, and in split learning gradients tell labels. A server that sends larger
gradients than its task's takes the weight of NoPeek away, and one that trains the cut for its own ends is
not stopped at all (feature-space hijacking, as ``privacy.hijacking`` does it). US patent 11,481,635 covers
this loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ragtag.core.errors import Error
from ragtag.privacy.correlation import ROWS, distance_correlation


class NoPass(Error, RuntimeError):
    """NoPeek is asked for a loss, and the model's layer has not run since the last one."""


class NoPeek:
    """Adds ``weight`` times the distance correlation of a batch with its codes to a loss.

    model: whose layer is watched, by hooks; ``None``: samples and codes are given with each loss.
    layer: the layer's name, as ``model.named_modules()`` has it; its output, a tensor ``[batch, ...]``, is Z.
        X is the first argument of ``model``. Passes without gradients (evaluation) do not count. Of several
        passes before one loss the last counts, and so of a layer that runs several times in a pass.
    weight: a1, 0 or more. With 0 nothing is computed.
    task_weight: a2.
    rows: see ``distance_correlation``.

    Raises:
        ValueError: a weight is negative or not finite, one of model and layer is missing, or the model has no
            such layer.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        layer: str | None = None,
        *,
        weight: float,
        task_weight: float = 1.0,
        rows: int = ROWS,
    ) -> None:
        for name, given in (("weight", weight), ("task_weight", task_weight)):
            if not (math.isfinite(given) and given >= 0):
                raise ValueError(f"NoPeek: {name} is {given}; it must be 0 or more")
        if (model is None) != (layer is None):
            raise ValueError("NoPeek: give a model and the name of its layer, or neither")
        self.weight, self.task_weight, self._rows = weight, task_weight, rows
        self._watched = model is not None
        self._x: Tensor | None = None
        self._z: Tensor | None = None
        self._last: Tensor | None = None
        self._hooks: list[Any] = []
        if model is not None and layer is not None:
            layers = dict(model.named_modules())
            if layer not in layers:
                names = ", ".join(name for name in list(layers)[1:9])
                raise ValueError(f"NoPeek: the model has no layer {layer!r}; it has {names}, ...")
            self._hooks = [
                model.register_forward_pre_hook(self._begin),
                layers[layer].register_forward_hook(self._end),
            ]

    def __call__(self, task: Tensor, x: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        """The whole loss, a scalar.

        task: the task's loss, a scalar.
        x, z: the batch ``[n, ...]`` and its codes ``[n, ...]``, where no model is watched.

        Raises:
            NoPass: the layer has not run, with gradients, since the last loss.
            ValueError: ``x`` and ``z`` are missing, or given though a model is watched; or they have fewer
                than two samples, or not as many of both (``distance_correlation``).
        """
        if self._watched != (x is None) or self._watched != (z is None):
            said = "takes x and z from the model's pass" if self._watched else "needs x and z"
            raise ValueError(
                f"NoPeek: it {said}, as it was made {'with' if self._watched else 'without'} one"
            )
        if self._watched:
            x, z = self._x, self._z
            self._x = self._z = None
            if x is None or z is None:
                raise NoPass(
                    "NoPeek: the watched layer has not run since the last loss, or without gradients; call "
                    "nopeek(loss) once after each pass through the model"
                )
        if self.weight == 0:
            return self.task_weight * task
        assert x is not None and z is not None
        correlation = distance_correlation(x, z, rows=self._rows)
        self._last = correlation.detach()
        return self.task_weight * task + self.weight * correlation

    @property
    def training_dcor(self) -> float | None:
        """dCor of the last batch, which was trained on: to watch training by, and lower than that of other
        samples. ``None``: there was no batch, or the weight is 0.
        """
        return None if self._last is None else float(self._last)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._z = None
            if not given or not isinstance(given[0], Tensor):
                raise TypeError(
                    "NoPeek: the model's first argument must be the batch, a tensor given by position; use "
                    "NoPeek(weight=...) and give x and z otherwise"
                )
            self._x = given[0]

    def _end(self, layer: nn.Module, given: Any, made: Any) -> None:
        if torch.is_grad_enabled():
            if not isinstance(made, Tensor):
                raise TypeError(f"NoPeek: the watched layer makes a {type(made).__name__}, not a tensor")
            self._z = made


def watched_layer(model: nn.Module) -> str | None:
    """The name in ``model`` of a layer whose output some ``NoPeek`` watches; ``None``: there is none."""
    for name, layer in model.named_modules():
        if any(isinstance(getattr(hook, "__self__", None), NoPeek) for hook in layer._forward_hooks.values()):
            return str(name)
    return None
