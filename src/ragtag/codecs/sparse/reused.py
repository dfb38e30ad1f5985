"""A threshold reused for some rounds: add, select and clear in one pass over the residual.

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning" (Ok-Topk), PPoPP 2022, section
3.1: magnitudes change slowly, so an exact threshold serves for the next rounds too. Here it is found anew
after ``REUSED_MAX`` rounds, and at once when a count leaves 2k/3 .. 4k/3.
"""

from __future__ import annotations

import math

import numpy as np

from ragtag.codecs.sparse.selection import (
    FLOAT_MAX,
    INFINITE,
    NONE,
    PASS,
    Indices,
    Selection,
    Selector,
    State,
    at_least,
    largest,
    not_finite,
    require_finite,
    require_k,
    require_vector,
    select_at,
)
from ragtag.codecs.sparse.topk import sampled_top_k
from ragtag.core import fast
from ragtag.core.types import Floats

REUSED_MAX = 32
"""Rounds after which a threshold is found anew."""
LOW, HIGH = 2 / 3, 4 / 3


def reused_most(k: int, d: int) -> int:
    """How many entries a reused threshold selects at most."""
    return min(d, max(k, math.floor(HIGH * k)))


def reused_threshold(u: Floats, k: int, state: State, key: int = 0) -> Selection:
    """What is at least the threshold that ``state`` remembers, or the top k where that one has aged.

    state: threshold, and for how many rounds it has served (0: there is none).
    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    if not d:
        return NONE
    if _serves(state):
        least = int(np.float32(state[0]).view(np.uint32))
        found, count = at_least(u, least, reused_most(k, d))
        if _in_band(count, k, d):
            state[1] += 1
            return select_at(u, found)
    return _renew(u, k, state, key)


def add_select_clear(residual: Floats, gradient: Floats, k: int, state: State, key: int = 0) -> Selection:
    """``residual += gradient``, select from it as ``reused_threshold`` does, and set what was selected to 0.

    One read of the gradient and one read and write of the residual, while the threshold serves.

    Raises: see ``Selector``; ValueError where the sizes differ. Where the gradient has NaN or infinity, or a
        sum overflows, the residual is what it was, up to the rounding of one addition.
    """
    d = len(require_vector(residual, "the residual"))
    require_k(k, d)
    if len(require_vector(gradient, "the gradient")) != d:
        raise ValueError(f"a gradient of {len(gradient)} values for a residual of {d}")
    if not d:
        return NONE
    if not _serves(state):
        add(residual, gradient)
        return _clear(residual, _renew(residual, k, state, key))
    least = np.float32(state[0])
    found, values, count, came = _pass(residual, gradient, least, reused_most(k, d))
    if came < d:
        residual[found] = values
        residual[:came] -= gradient[:came]
        require_finite(gradient, "the gradient")
        raise not_finite(residual[came:] + gradient[came:], f"gradient plus residual, from {came} on,")
    if _in_band(count, k, d):
        state[1] += 1
        return Selection(found, values)
    residual[found] = values
    return _clear(residual, _renew(residual, k, state, key))


def add(residual: Floats, gradient: Floats) -> None:
    """``residual += gradient``, refused where the gradient is not finite. A sum that overflows saturates.

    Raises NotFinite, the residual untouched.
    """
    require_finite(gradient, "the gradient")
    with np.errstate(over="ignore"):
        residual += gradient
    if largest(residual) >= INFINITE:
        np.clip(residual, -FLOAT_MAX, FLOAT_MAX, out=residual)


def _pass(
    residual: Floats, gradient: Floats, least: np.float32, room: int
) -> tuple[Indices, Floats, int, int]:
    """Indices and values of what was selected and cleared, how many there were, and how far it came."""
    if fast.compiled():
        from ragtag.codecs.sparse import kernels

        found, values = np.empty(room, np.int64), np.empty(room, np.float32)
        count, came = kernels.add_select_clear(residual, gradient, least, found, values)
        n = min(count, room)
        return found[:n], values[:n], count, came
    chosen: list[Selection] = [NONE]
    count, left = 0, room
    total, magnitude = np.empty(PASS, np.float32), np.empty(PASS, np.float32)
    for start in range(0, len(residual), PASS):
        part = residual[start : start + PASS]
        n = len(part)
        np.add(part, gradient[start : start + n], out=total[:n])
        at = np.flatnonzero(~(np.abs(total[:n], out=magnitude[:n]) < least))
        if not np.isfinite(total[at]).all():
            return *_joined(chosen), count, start
        part[:] = total[:n]
        count += len(at)
        at = at[:left]
        left -= len(at)
        chosen.append(Selection(at + start, part[at]))
        part[at] = 0.0
    return *_joined(chosen), count, len(residual)


def _joined(parts: list[Selection]) -> tuple[Indices, Floats]:
    return np.concatenate([p.indices for p in parts]), np.concatenate([p.values for p in parts])


def _serves(state: State) -> bool:
    return bool(0 < state[1] < REUSED_MAX and state[0] > 0)


def _in_band(count: int, k: int, d: int) -> bool:
    return max(1.0, LOW * k) <= count <= reused_most(k, d)


def _renew(u: Floats, k: int, state: State, key: int) -> Selection:
    chosen = sampled_top_k(u, k, key)
    state[:] = np.abs(chosen.values).min(), 1
    return chosen


def _clear(residual: Floats, chosen: Selection) -> Selection:
    residual[chosen.indices] = 0.0
    return chosen


reused = Selector("reused threshold", lambda: np.zeros(2), reused_threshold, reused_most, add_select_clear)
"""A threshold that serves for some rounds, with everything in one pass."""
