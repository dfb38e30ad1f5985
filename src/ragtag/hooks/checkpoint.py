"""The sparse hook's memory as plain tensors and back, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ragtag.hooks.plan import Memory

FORMAT = 1
_KINDS = ("residual", "velocity")


def save(step: int, skipped: int, memories: Mapping[str, Memory]) -> dict[str, Any]:
    """Tensors, numbers and texts only, so that ``torch.load(weights_only=True)`` reads it."""
    state: dict[str, Any] = {"format": FORMAT, "step": step, "skipped": skipped}
    for kind in _KINDS:
        state[kind] = {
            name: torch.from_numpy(memory[kind].copy()) for name, memory in memories.items() if kind in memory
        }
    return state


def load(state: Mapping[str, Any]) -> tuple[int, int, dict[str, Memory]]:
    """Step, skipped steps, and memories by name. Raises ValueError naming what does not fit."""
    if state.get("format") != FORMAT:
        raise ValueError(f"the state is of format {state.get('format')!r}, not {FORMAT}: of something else")
    step, skipped = state.get("step"), state.get("skipped")
    if not isinstance(step, int) or not isinstance(skipped, int) or step < -1 or skipped < 0:
        raise ValueError(f"the state is of step {step!r} with {skipped!r} skipped: these are no counts")
    memories: dict[str, Memory] = {}
    for kind in _KINDS:
        tensors = state.get(kind)
        if not isinstance(tensors, Mapping):
            raise ValueError(f"the state has no {kind!r}: it is of something else")
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.dim() != 1:
                raise ValueError(f"the state's {kind} of {name!r} is no float32 vector")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"the state's {kind} of {name!r} has values that are not finite")
            values = np.array(tensor.detach().cpu().numpy())
            memories.setdefault(str(name), {})[kind] = values
    return step, skipped, memories


def require_size(memory: Memory, described: str, size: int) -> None:
    """Raise ValueError where a memory is of another parameter."""
    for kind, values in memory.items():
        if len(values) != size:
            raise ValueError(
                f"the state's {kind} of {described} has {len(values)} values, the parameter has {size}: "
                "it was saved from another model"
            )
