"""Tickets as plain arrays and back: names, shapes, dtypes and contents are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.sparse.tickets import OPEN, RESTORED, Pending, Ticket
from ragtag.core.types import Bytes

State = dict[str, NDArray[Any]]


def save_ticket(pending: Pending) -> State:
    """A ticket's arrays (copies), by names that ``load_ticket`` looks for."""
    names = ("indices", "values", "starts", "state")
    return {f"ticket.{pending.ticket.number}.{name}": np.array(getattr(pending, name)) for name in names}


def load_ticket(state: Mapping[str, NDArray[Any]], ticket: Ticket, size: int) -> Pending:
    """A ticket of a vector of ``size`` values. Raises ValueError, naming what does not fit."""
    at = f"ticket.{ticket.number}."
    if ticket.fragments < 1:
        raise ValueError(f"the state's ticket {ticket.number} has {ticket.fragments} fragments")
    starts = require(state, at + "starts", np.dtype(np.int64), (ticket.fragments + 1,))
    indices = require(state, at + "indices", np.dtype(np.int64), (None,))
    n = len(indices)
    values = require(state, at + "values", np.dtype(np.float32), (n,))
    decided = require(state, at + "state", np.dtype(np.uint8), (ticket.fragments,))
    ascending = (np.diff(starts) >= 0).all() and (np.diff(indices) > 0).all()
    if not ascending or starts[0] != 0 or starts[-1] != n:
        raise ValueError(f"the state's ticket {ticket.number} has fragments or indices that do not ascend")
    if n and not 0 <= indices[0] <= indices[-1] < size:
        raise ValueError(f"the state's ticket {ticket.number} has indices outside of {size} values")
    if not np.isfinite(values).all() or (decided > RESTORED).any() or not (decided == OPEN).any():
        raise ValueError(f"the state's ticket {ticket.number} has values or decisions that cannot be")
    return Pending(ticket, indices.copy(), values.copy(), starts.copy(), decided.copy())


def text(name: str) -> Bytes:
    """A name as bytes."""
    return np.frombuffer(name.encode(), np.uint8).copy()


def as_text(array: NDArray[Any]) -> str:
    """Bytes as a name."""
    return np.asarray(array, np.uint8).tobytes().decode(errors="replace")


def require(
    state: Mapping[str, NDArray[Any]], name: str, dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """An array of a state that has this dtype and shape (``None``: any length). Raises ValueError."""
    if name not in state:
        raise ValueError(f"the state has no {name!r}: it is of something else, or of another version")
    array = np.asarray(state[name])
    fits = len(array.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        raise ValueError(f"the state's {name!r} is {array.dtype} {array.shape}, here it is {dtype} {shape}")
    return array
