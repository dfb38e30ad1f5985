"""Whether loops may run compiled: numba, when it is installed (``pip install ragtag[fast]``).

Everything works without it, in numpy, with the same results. Modules of such loops are imported at their
first use only: numba's import takes half a second, and most of what Ragtag does needs none of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar

_plain: ContextVar[bool] = ContextVar("plain", default=False)


def available() -> bool:
    """Whether numba is installed."""
    return _AVAILABLE


def compiled() -> bool:
    """Whether loops run compiled here and now."""
    return _AVAILABLE and not _plain.get()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, nothing runs compiled: for comparing the two."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def _find() -> bool:
    try:
        return importlib.util.find_spec("numba") is not None
    except ValueError:  # sys.modules["numba"] is None: someone has ruled it out
        return False


_AVAILABLE = _find()
