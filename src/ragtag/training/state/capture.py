"""A peer's training state: taken from a model and its optimizer, and given back to ones like them.

What a snapshot holds: all parameters (frozen ones too) and all buffers that the model's own state_dict would
hold, integers among them; extra state of modules; the inner optimizer's state and groups; anchor and momentum
of outer steps (``outer=``); how many steps were taken; and whatever else is named in ``extra`` (schedulers, a
GradScaler, moving averages, a sampler; ``compression_state`` for sparse averages).

What it does not hold: buffers that PyTorch calls not persistent (tables that are computed again; caches grow
on each peer as they like), gradients (nor what ``average="gradients"`` has gathered since the last average:
take snapshots right after one), and the state of random number generators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ragtag.training.exchange.outer import require_outer_state
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.state.optimizer_state import capture_optimizer, fit_optimizer, load_optimizer
from ragtag.training.state.snapshot import Snapshot, require_optimizer
from ragtag.training.state.tree import copy_tensor, copy_tree
from ragtag.training.tensors.modules import clean_name, name_parameters, parameters_of

__all__ = ["Snapshot", "Stateful", "capture", "restore"]


class Stateful(Protocol):
    """What can be part of a snapshot beside model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: None, bools, numbers, strings, tensors, and lists, tuples and dicts of these."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""
        ...


_NOTHING: Mapping[str, Stateful] = MappingProxyType({})


def capture(
    averaged: AveragedModel,
    extra: Mapping[str, Stateful] = _NOTHING,
    *,
    model: nn.Module | None = None,
    round: int | None = None,
    before: int = 0,
    beside: Sequence[AveragedModel] = (),
) -> Snapshot:
    """Copy a peer's training state to the host; to be called between steps. The copies are the caller's: they
    may be turned into bytes in another thread.

    extra: more objects with state_dict and load_state_dict, by name.
    model: whose parameters these are; needed only where the optimizer was made without and the model has not
        run yet.
    round: the crew's round; by default that of the optimizer's last average (0: none yet).
    before: rounds of the training before this run.
    beside: optimizers whose snapshots have their models already: what is in them is left out here.
    Raises TypeError, naming the place, for state that is no plain data (a function, an object), and
        RuntimeError when the model is not known yet.
    """
    for name, holder in extra.items():
        _require_stateful(name, holder)
    modules = _modules(averaged, model)
    progress = averaged.progress
    last = averaged.outcome.round if averaged.outcome is not None else 0
    return Snapshot(
        step=progress[0],
        round=last if round is None else round,
        since=progress[1],
        model={n: copy_tensor(t, repr(n)) for n, t in _tensors(averaged, modules, beside).items()},
        optimizer=capture_optimizer(averaged.inner, name_parameters(averaged.inner.param_groups, modules)),
        modules={
            name: copy_tree(module.get_extra_state(), f"extra state of {name!r}")
            for name, module in _with_extra_state(modules).items()
        },
        extra={name: copy_tree(holder.state_dict(), f"extra {name!r}") for name, holder in extra.items()},
        outer=copy_tree(averaged.outer_state, "outer momentum"),
        before=before,
    )


def restore(
    snapshot: Snapshot,
    averaged: AveragedModel,
    extra: Mapping[str, Stateful] = _NOTHING,
    *,
    model: nn.Module | None = None,
    beside: Sequence[AveragedModel] = (),
) -> None:
    """Put a snapshot's state into a model, its optimizer and ``extra``, in the memory where they live.

    All is compared first: on ValueError, which names the first tensor, group or name that differs, nothing
    has changed. (Only an object's own load_state_dict may still raise; those of ``extra`` come last.) How an
    optimizer computes (its flags foreach, fused, capturable) stays as it is here. Schedulers are to be made
    before: making one changes learning rates. Outer momentum where the snapshot has none, as one of a crew
    without, begins anew from the next average; where it is not used here, it is passed over. beside: as for
    ``capture``.
    """
    modules = _modules(averaged, model)
    targets = _tensors(averaged, modules, beside)
    _require_same_tensors(snapshot.model, targets)
    stateful_modules = _with_extra_state(modules)
    _require_same_names("extra state of module", snapshot.modules, stateful_modules)
    names = name_parameters(averaged.inner.param_groups, modules)
    state = fit_optimizer(snapshot.optimizer, averaged.inner, names)
    _require_same_names("extra", snapshot.extra, extra)
    own = zip(names, parameters_of(averaged.inner.param_groups), strict=True)
    require_outer_state(snapshot.outer, {name: parameter.shape for name, parameter in own})
    for name, holder in extra.items():
        _require_stateful(name, holder)
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(snapshot.model[name])  # in place: a bucket's table sees it, autograd too
    for name, module in stateful_modules.items():
        module.set_extra_state(copy_tree(snapshot.modules[name], name))
    load_optimizer(state, averaged.inner)
    averaged.resume_at(snapshot.step, snapshot.since)
    averaged.outer_state = snapshot.outer
    for name, holder in extra.items():
        holder.load_state_dict(copy_tree(snapshot.extra[name], name))


class Further:
    """A further optimizer's state as a part of the first one's snapshot: what several optimizers train
    belongs together. ``beside``: the optimizers before it, whose models are not copied again.
    """

    def __init__(self, averaged: AveragedModel, beside: Sequence[AveragedModel]) -> None:
        self._averaged, self._beside = averaged, tuple(beside)

    def state_dict(self) -> dict[str, Any]:
        """What ``capture`` takes of it, as plain data."""
        own = capture(self._averaged, beside=self._beside)
        return {name: getattr(own, name) for name in _PARTS}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Put it in place.

        Raises ValueError, naming the first tensor, group or name that differs; nothing has changed then.
        """
        try:
            counts = [state.get(name) for name in ("step", "round", "since")]
            trees = [state.get(name) for name in ("model", "optimizer", "modules", "outer")]
            if any(type(n) is not int or n < 0 for n in counts) or any(type(t) is not dict for t in trees):
                raise ValueError("its state has other parts than it should")
            require_optimizer(state["optimizer"])
            restore(Snapshot(**{name: state[name] for name in _PARTS}), self._averaged, beside=self._beside)
        except ValueError as error:
            raise ValueError(f"optimizer {self._averaged.name!r}: {error}") from None


_PARTS = ("step", "round", "since", "model", "optimizer", "modules", "outer")


# -- What there is


def _modules(averaged: AveragedModel, model: nn.Module | None) -> Sequence[nn.Module]:
    """The models whose parameters the optimizer has. Raises RuntimeError where they are not known."""
    modules = averaged.modules if model is None else (model,)
    wanted = parameters_of(averaged.inner.param_groups)
    owned = {id(p) for module in modules for p in module.parameters()}
    if averaged.modules_known or all(id(p) in owned for p in wanted):
        return modules
    if model is not None:
        missing = sum(id(p) not in owned for p in wanted)
        raise ValueError(f"{missing} of the optimizer's {len(wanted)} parameters are not in the model given")
    raise RuntimeError(
        "which model the optimizer's parameters belong to is not known before it has run once: give "
        "model=... here, or where the crew's optimizer is made"
    )


def _tensors(
    averaged: AveragedModel, modules: Sequence[nn.Module], beside: Sequence[AveragedModel] = ()
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each once; in the model's order, then what is in none.

    What one of ``beside`` has is left out.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for other in beside:
        seen |= {id(tensor) for tensor in _tensors(other, _modules(other, None)).values()}
    for at, root in enumerate(modules):
        for prefix, module in root.named_modules():
            lasting = module._buffers.keys() - module._non_persistent_buffers_set
            inside = [
                *module._parameters.items(),
                *((k, b) for k, b in module._buffers.items() if k in lasting),
            ]
            for key, tensor in inside:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[clean_name(f"{prefix}.{key}" if prefix else key, at, modules)] = tensor
    names = name_parameters(averaged.inner.param_groups, modules)
    own = zip(names, parameters_of(averaged.inner.param_groups), strict=True)
    found |= {name: parameter for name, parameter in own if id(parameter) not in seen}
    lazy = next((name for name, tensor in found.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise RuntimeError(f"{lazy!r} has no shape yet: run the model once on a batch first")
    return found


def _with_extra_state(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Modules that have state beside tensors, by name."""
    plain = nn.Module.get_extra_state
    return {
        clean_name(prefix, at, modules): module
        for at, root in enumerate(modules)
        for prefix, module in root.named_modules()
        if type(module).get_extra_state is not plain
    }


# -- What must be alike


def _require_same_tensors(saved: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in here.items():
        other = saved.get(name)
        if other is None:
            raise ValueError(f"{name!r} {_form(tensor)} is in this model and not in the snapshot")
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise ValueError(f"{name!r} is {_form(tensor)} here and {_form(other)} in the snapshot")
    for name, other in saved.items():
        if name not in here:
            raise ValueError(f"{name!r} {_form(other)} is in the snapshot and not in this model")


def _require_same_names(what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for name in here:
        if name not in saved:
            raise ValueError(f"{what} {name!r} is not in the snapshot (it has {sorted(saved) or 'none'})")
    for name in saved:
        if name not in here:
            raise ValueError(
                f"{what} {name!r} is in the snapshot and not here (given are {sorted(here) or 'none'})"
            )


def _require_stateful(name: str, holder: object) -> None:
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(holder, method, None)):
            raise TypeError(f"extra {name!r} is a {type(holder).__qualname__}, which has no {method}()")


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
