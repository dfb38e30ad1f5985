"""What the machines of the way in (``protocols.crew.joining``) tell: how long each part took, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragtag.protocols.crew.joining import PhaseOver, Say

EARLY_MAX = 256
"""Phases that wait for somebody to write them."""

_log = logging.getLogger("ragtag")


class Phases:
    """Keeps what it is told of phases (``joining.PHASES``) until there is a trace to write it to.

    Of each: when it ended (``time.monotonic``), its name, and how long it took.
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

    def told(self, effect: object) -> bool:
        """Write down what a machine says; whether the effect was of that kind."""
        if isinstance(effect, PhaseOver):
            self.over(effect.phase, effect.took_s)
        elif isinstance(effect, Say):
            _log.log(logging.WARNING if effect.warning else logging.INFO, "%s", effect.text)
        else:
            return False
        return True

    def to(self, write: Callable[[float, str, float], None]) -> None:
        """Tell these and those to come to ``write``."""
        self._write = write
        early, self._early = self._early, []
        for phase in early:
            write(*phase)
