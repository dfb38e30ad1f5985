"""How loops are compiled, by numba; imported where ``ragtag.core.fast`` says that it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def compile_(function: _F) -> _F:
    """Compiled at its first call, and kept on disk where numba finds a place to write to."""
    njit: Any = numba.njit
    try:
        made: _F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no place to write to
        made = njit(nogil=True)(function)
    return made
