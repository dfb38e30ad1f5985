"""How long each part of a peer's way into its crew took, for the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EARLY_MAX = 256
"""Phases that wait for somebody to write them."""


class Phases:
    """Told when a phase is over, it tells whoever writes: when (``time.monotonic``), which, how long it took.

    let in: to be believed by a member. seat: to have one. greeting, schema: meetings. state: to have the
    crew's. heard: to hear of a newer round. average: from then on to the first average with others.
    """

    def __init__(self) -> None:
        self._early: list[tuple[float, str, float]] = []
        self._write: Callable[[float, str, float], None] | None = None

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A phase, from here to the end of the block; one that fails is not told."""
        began_s = time.monotonic()
        yield
        self.over(name, time.monotonic() - began_s)

    def over(self, name: str, took_s: float) -> None:
        """A phase ends now."""
        if self._write is not None:
            self._write(time.monotonic(), name, took_s)
        elif len(self._early) < EARLY_MAX:
            self._early.append((time.monotonic(), name, took_s))

    def to(self, write: Callable[[float, str, float], None]) -> None:
        """Tell these and those to come to ``write``."""
        self._write = write
        early, self._early = self._early, []
        for phase in early:
            write(*phase)
