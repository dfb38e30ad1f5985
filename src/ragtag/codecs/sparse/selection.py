"""What a selection of a vector's entries is, what selects, and what is refused before anything is touched.

A *selector* is a value: a name, a fresh state, and a function that picks about ``k`` entries of a float32
vector. All agree on one order: larger magnitudes first, among equal ones the lower index first. So an exact
selection is one set, whatever path computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.core import fast
from ragtag.core.errors import NotFinite
from ragtag.core.types import Floats

Bits = NDArray[np.uint32]
Indices = NDArray[np.int64]
State = NDArray[np.float64]

SIGNLESS = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
FLOAT_MAX = float(np.finfo(np.float32).max)
PASS = 1 << 17
"""Elements per pass: what numpy writes in between stays in the cache."""
EXCESS_MAX = 64
"""A selection by threshold alone is cut to its largest entries beyond this many times k."""


class Selection(NamedTuple):
    """Entries of a vector that are to be sent.

    indices: int64 ``[n]``, ascending, each once.
    values: float32 ``[n]``, the vector's values there.
    """

    indices: Indices
    values: Floats


class Selector(NamedTuple):
    """How entries are chosen.

    init: a fresh state, float64 ``[m]`` (``m`` may be 0): what a selector remembers between rounds.
    select: ``(u, k, state, key) -> Selection``. ``u`` is float32 ``[d]`` and is not changed, ``state`` may
        be; ``key`` names the round's random stream (``ragtag.core.seed``). For ``d`` of 1 or more it gives at
        least one entry and at most ``most(k, d)``; for ``d`` of 0, none.
    most: the bound on how many entries there are.
    fused: ``(residual, gradient, k, state, key)``: add, select and set what was selected to 0, in one pass.

    ``select`` raises NotFinite (the vector has NaN or infinity), TypeError (it is not a float32 array) or
    ValueError (it is not one-dimensional and contiguous, or ``k`` is below 1 or above ``d``).
    """

    name: str
    init: Callable[[], State]
    select: Callable[[Floats, int, State, int], Selection]
    most: Callable[[int, int], int]
    fused: Callable[[Floats, Floats, int, State, int], Selection] | None = None


def stateless() -> State:
    """The state of a selector that remembers nothing."""
    return np.zeros(0)


def exactly(k: int, d: int) -> int:
    """``most`` of a selector that always chooses k."""
    return k


def bounded(k: int, d: int) -> int:
    """``most`` of a selector by threshold alone."""
    return min(EXCESS_MAX * k, d)


NONE = Selection(np.zeros(0, np.int64), np.zeros(0, np.float32))


def require_vector(u: Any, what: str = "the vector") -> Floats:
    """``u`` itself, if it is a float32 vector in one piece. Raises TypeError or ValueError."""
    if not isinstance(u, np.ndarray):
        raise TypeError(f"{what} is a {type(u).__name__}; give a numpy array of float32 (tensor.numpy())")
    if u.dtype.kind == "c":
        raise TypeError(f"{what} is {u.dtype}; complex values have no order. Give its real view as float32")
    if u.dtype != np.float32:
        advice = "only floating-point values are sparsified" if u.dtype.kind in "iub" else "convert it first"
        raise TypeError(f"{what} is {u.dtype}, not float32: {advice}")
    if u.ndim != 1 or not u.flags.c_contiguous:
        raise ValueError(f"{what} has shape {u.shape}, strides {u.strides}; flatten it (one contiguous axis)")
    return u


def require_k(k: int, d: int) -> None:
    """``k`` lies between 1 and ``d`` (an empty vector takes any k of 1 or more: nothing is selected)."""
    if k < 1:
        raise ValueError(f"k is {k}: at least 1 entry must be selected")
    if d and k > d:
        raise ValueError(f"k is {k}, and the vector has {d} entries: give at most {d}, or a ratio")


def magnitudes(u: Floats, at: Indices | slice = slice(None)) -> Bits:
    """|u| at some places as bits, which order as the magnitudes do."""
    return np.asarray(u.view(np.uint32)[at] & SIGNLESS)


def require_finite(u: Floats, what: str = "the vector") -> None:
    """Look at each value once. Raises NotFinite."""
    if largest(u) >= INFINITE:
        raise not_finite(u, what)


def not_finite(u: Floats, what: str = "the vector") -> NotFinite:
    """The error for a vector in which a value was seen that is not finite."""
    nans, infinite, first = 0, 0, -1
    for start in range(0, len(u), PASS):
        part = u[start : start + PASS]
        bad = ~np.isfinite(part)
        if bad.any():
            first = start + int(bad.argmax()) if first < 0 else first
            nans += int(np.isnan(part).sum())
            infinite += int(np.isinf(part).sum())
    return NotFinite(
        f"{what} has {nans} NaN and {infinite} infinite of {len(u)} values, the first at {first}. "
        "Nothing was sent and the residual is as it was. Lower the learning rate or clip gradients"
    )


def largest(u: Floats) -> int:
    """The largest magnitude in ``u``, as bits (0 for an empty vector): one read, no temporary of its size."""
    bits = u.view(np.uint32)
    if fast.compiled():
        from ragtag.codecs.sparse import kernels

        return int(kernels.largest(bits))
    top, buffer = 0, np.empty(min(PASS, len(u)), np.uint32)
    for start in range(0, len(u), PASS):
        part = bits[start : start + PASS]
        top = max(top, int(np.bitwise_and(part, SIGNLESS, out=buffer[: len(part)]).max()))
    return top


def at_least(u: Floats, least: int, room: int | None = None) -> tuple[Indices, int]:
    """The indices of what is at least ``least`` (bits) in magnitude, ascending; and how many there are.

    room: give up beyond so many; the indices are then incomplete, and the count says so.
    Raises NotFinite where NaN or infinity is among them (each is above every finite threshold).
    """
    room = len(u) if room is None else min(room, len(u))
    if fast.compiled():
        from ragtag.codecs.sparse import kernels

        out = np.empty(room, np.int64)
        count = int(kernels.collect(u.view(np.uint32), np.uint32(least), out))
        found = out[: min(count, room)]
    else:
        found, count = _at_least(u.view(np.uint32), np.uint32(least), room)
    if count > room:
        require_finite(u)
    elif len(found) and int(magnitudes(u, found).max()) >= INFINITE:
        raise not_finite(u)
    return found, count


def _at_least(bits: Bits, least: np.uint32, room: int) -> tuple[Indices, int]:
    buffer, mask = np.empty(min(PASS, len(bits)), np.uint32), np.empty(min(PASS, len(bits)), np.bool_)
    parts, count = [np.zeros(0, np.int64)], 0
    for start in range(0, len(bits), PASS):
        n = min(PASS, len(bits) - start)
        np.bitwise_and(bits[start : start + n], SIGNLESS, out=buffer[:n])
        found = np.flatnonzero(np.greater_equal(buffer[:n], least, out=mask[:n]))
        count += len(found)
        if count <= room:
            found += start
            parts.append(found)
    return np.concatenate(parts), count


def select_at(u: Floats, indices: Indices) -> Selection:
    """The selection of these entries."""
    return Selection(indices, u[indices])


def largest_of(u: Floats, candidates: Indices, k: int) -> Selection:
    """The k largest of the candidates (ascending indices, at least k of them), exactly."""
    if len(candidates) == k:
        return select_at(u, candidates)
    bits = magnitudes(u, candidates)
    last = np.partition(bits, len(bits) - k)[len(bits) - k]
    above = bits > last
    ties = np.flatnonzero(bits == last)[: k - int(above.sum())]
    above[ties] = True
    return select_at(u, candidates[above])
