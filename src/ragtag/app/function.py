"""A function of a user's that a command calls: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragtag.core.errors import Error


class NoFunction(Error, ValueError):
    """A text names no function that can be had; the message says why."""


@contextmanager
def function_of(text: str) -> Iterator[Callable[[], Any]]:
    """The function that a text names. What is beside its file, or in this folder, can be imported meanwhile.

    Raises:
        FileNotFoundError: there is no such file.
        NoFunction: the text names none, or its module or file has none of that name.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise NoFunction("write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"there is no script {file}")
    folder = str(Path.cwd() if file is None else file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        try:
            found = vars(importlib.import_module(place)) if file is None else runpy.run_path(str(file))
        except ImportError as error:
            raise NoFunction(str(error)) from error
        if not callable(function := found.get(name)):
            raise NoFunction(f"{place} has no function {name!r}")
        yield function
    finally:
        sys.path.remove(folder)
