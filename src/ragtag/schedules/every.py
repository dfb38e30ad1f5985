"""Average after every local step, or after every k.

Local SGD: "Local SGD converges fast and communicates little", Stich, ICLR 2019 (arXiv 1805.09767).
"""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.schedules.base import Average, Compute, Decision, Progress, Schedule

_COMPUTE, _AVERAGE = Compute(), Average()


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Average after each local step."""

    def decide(self, progress: Progress) -> Decision:
        """Always average."""
        return _AVERAGE


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Average once every ``k`` local steps."""

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"local steps: k is {self.k!r}; average every 1, 2, 3, ... steps")

    def decide(self, progress: Progress) -> Decision:
        """Average when ``k`` steps have been taken since the last time."""
        return _AVERAGE if progress.since_average >= self.k else _COMPUTE


def every(steps: int) -> Schedule:
    """The schedule that averages every so many local steps. Raises ValueError below 1."""
    return EveryStep() if steps == 1 and not isinstance(steps, bool) else LocalSteps(steps)
