"""What a schedule is: it looks at how far this peer has come and says what to do next. It is pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this peer has come when it is about to decide.

    step: local steps taken since the start; since_average: those since the last average;
    n: peers in the crew; live: those believed to take part now (this one included);
    round_s: how long the last average took (``None``: there was none yet);
    waited_s: how long this decision has been put off by ``Wait`` so far.
    """

    step: int
    since_average: int
    n: int
    live: frozenset[int]
    round_s: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compute:
    """Take another local step."""


@dataclass(frozen=True, slots=True)
class Average:
    """Average with the crew now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Stand by for ``for_s``, then decide again; once ``at_most_s`` have been waited in all, average."""

    for_s: float
    at_most_s: float

    def __post_init__(self) -> None:
        for name, value in (("for_s", self.for_s), ("at_most_s", self.at_most_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Wait: {name} is {value}; a wait has an end and is above 0 s")


Decision = Compute | Average | Wait


class Schedule(Protocol):
    """When to average."""

    def decide(self, progress: Progress) -> Decision:
        """Say what to do after a local step."""
        ...
