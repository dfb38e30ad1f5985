"""The inner optimizer's part of a snapshot: as plain data, and back into an optimizer like it.

Beyond PyTorch's own load_state_dict: names are compared, the state keeps the dtype that it had
(load_state_dict casts it to the parameter's: NAdam's float32 product would become bfloat16) and lies in
memory as the parameter does, as a fresh optimizer's would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragtag.training.state.tree import copy_tree
from ragtag.training.tensors.modules import parameters_of

_HOW = ("foreach", "fused", "capturable")
"""Flags of a group that say how a step is computed and on which machine: each peer's own."""

_OPTIONAL = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""What may be in a group on one side only: PyTorch's schedulers add it, or it names parameters."""


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A state_dict that fits an optimizer, and the state by parameter as it was saved."""

    state_dict: dict[str, Any]
    by_parameter: list[tuple[torch.Tensor, dict[Any, Any]]]


def capture_optimizer(inner: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's state as plain data, see ``Snapshot.optimizer``. names: its parameters', in their order.

    Raises TypeError, naming the place, for state that is no plain data.
    """
    saved = inner.state_dict()
    more = saved.keys() - {"state", "param_groups"}
    if more:
        kind = type(inner).__qualname__
        raise TypeError(
            f"{kind}'s state_dict has {sorted(map(str, more))} beside state and param_groups; unknown"
        )
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    return {
        "class": type(inner).__qualname__,
        "defaults": sorted(inner.defaults),
        "names": _names_by_group(inner, names),
        "param_groups": [copy_tree(g, f"parameter group {at}") for at, g in enumerate(groups)],
        "state": {
            key: copy_tree(value, f"optimizer state of {names[key] if type(key) is int else key!r}")
            for key, value in saved["state"].items()
        },
    }


def fit_optimizer(saved: Mapping[str, Any], inner: torch.optim.Optimizer, names: Sequence[str]) -> _Fitted:
    """Prepare what ``capture_optimizer`` made for an optimizer, which is not changed.

    Raises ValueError, naming it, at the first thing that does not fit.
    """
    kind = type(inner).__qualname__
    if saved["class"] != kind:
        raise ValueError(f"the optimizer is {kind} here and {saved['class']} in the snapshot")
    _require_same("option", saved["defaults"], sorted(inner.defaults))
    _require_same_groups(saved["names"], _names_by_group(inner, names))
    own = inner.state_dict()["param_groups"]
    groups = [_group(at, *both) for at, both in enumerate(zip(saved["param_groups"], own, strict=True))]
    parameters = parameters_of(inner.param_groups)
    state: dict[Any, Any] = {}
    by_parameter: list[tuple[torch.Tensor, dict[Any, Any]]] = []
    for key, value in saved["state"].items():
        if type(key) is not int:
            state[key] = copy_tree(value, str(key))
            continue
        if not 0 <= key < len(parameters):
            raise ValueError(
                f"the snapshot has optimizer state of parameter {key}; there are {len(parameters)}"
            )
        parameter = parameters[key]
        _require_same_state(names[key], value, inner.state.get(parameter, {}))
        state[key] = {k: _like(v, parameter) for k, v in value.items()}
        by_parameter.append((parameter, value))
    return _Fitted({"state": state, "param_groups": groups}, by_parameter)


def load_optimizer(fitted: _Fitted, inner: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that ``fit_optimizer`` prepared for it."""
    inner.load_state_dict(fitted.state_dict)
    for parameter, saved in fitted.by_parameter:
        loaded = inner.state[parameter]
        for key, value in saved.items():
            now = loaded.get(key)
            if isinstance(value, str):  # load_state_dict takes a string for a list of characters
                loaded[key] = value
            if key == "step" or not isinstance(value, torch.Tensor) or not isinstance(now, torch.Tensor):
                continue
            if now.dtype != value.dtype:
                loaded[key] = _like(value, parameter).to(now.device)


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A copy; of a tensor of the parameter's shape, lying in memory as the parameter does."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=value.dtype, device="cpu").copy_(value)
    return copy_tree(value, "optimizer state")


def _group(at: int, saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    _require_same(
        f"parameter group {at}'s option",
        [key for key in saved if key in own or key not in _OPTIONAL],
        [key for key in own if key in saved or key not in _OPTIONAL],
    )
    kept = {key: value for key, value in own.items() if key in _HOW or key not in saved}
    group: dict[str, Any] = copy_tree(saved, f"parameter group {at}") | kept
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key] = group[key].to(value.device)
    return group


def _require_same(what: str, saved: Sequence[str], here: Sequence[str]) -> None:
    for name in here:
        if name not in saved:
            raise ValueError(f"{what} {name!r} is in this optimizer and not in the snapshot")
    for name in saved:
        if name not in here:
            raise ValueError(f"{what} {name!r} is in the snapshot and not in this optimizer")


def _require_same_groups(saved: list[list[str]], here: list[list[str]]) -> None:
    for number, (theirs, mine) in enumerate(zip(saved, here, strict=False)):
        for at in range(max(len(theirs), len(mine))):
            a, b = (repr(own[at]) if at < len(own) else "none" for own in (mine, theirs))
            if a != b:
                raise ValueError(
                    f"parameter {at} of the optimizer's group {number} is {a} here and {b} in the snapshot"
                )
    if len(saved) != len(here):
        raise ValueError(
            f"the optimizer has {len(here)} groups of parameters here and {len(saved)} in the snapshot"
        )


def _require_same_state(name: str, saved: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    """A parameter's state; where there is none yet, or none was saved, nothing is known to be wrong."""
    if not saved or not here:
        return
    _require_same(f"optimizer state of {name!r}:", list(saved), list(here))
    for key, value in saved.items():
        now = here[key]
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.shape != now.shape:
            a, b = tuple(now.shape), tuple(value.shape)
            raise ValueError(
                f"optimizer state {key!r} of {name!r} has shape {a} here and {b} in the snapshot"
            )


def _names_by_group(inner: torch.optim.Optimizer, names: Sequence[str]) -> list[list[str]]:
    known = {id(p): name for p, name in zip(parameters_of(inner.param_groups), names, strict=True)}
    return [[known[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
