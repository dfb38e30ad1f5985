"""Average after every local step, or after every k.

Local SGD: "Local SGD converges fast and communicates little", Stich, ICLR 2019 (arXiv 1805.09767).

Peers that each count their own steps come apart, unless they wait for each other. Those that average as soon
as others do, once they are nearer to their next average than to their last, stay together and stand still for
nobody. So Decoupled DiLoCo's syncer merges what each learner has by then (Douillard et al., 2026, arXiv
2604.21428): here there is no syncer, and the first peer that is due begins.
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
    """Average once every ``k`` local steps.

    least: or after so many, as soon as others have begun to average. Peers take steps that differ in number
        then: have them count by ``weight="samples"``. 0: each counts its own ``k``.
    Raises ValueError: ``k`` is no number of steps, or ``least`` is none up to ``k``.
    """

    k: int
    least: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"local steps: k is {self.k!r}; average every 1, 2, 3, ... steps")
        if isinstance(self.least, bool) or not isinstance(self.least, int) or not 0 <= self.least <= self.k:
            raise ValueError(
                f"local steps: least is {self.least!r}; others are followed after 1 to {self.k} steps, or "
                "not at all: 0"
            )

    @property
    def follows(self) -> bool:
        """Whether it asks if others have begun to average."""
        return self.least > 0

    def decide(self, progress: Progress) -> Decision:
        """Average when ``k`` steps have been taken since the last time, or ``least`` and others average."""
        since = progress.since_average
        early = self.follows and progress.others_began and since >= self.least
        return _AVERAGE if since >= self.k or early else _COMPUTE


def every(steps: int) -> Schedule:
    """The schedule that averages every so many local steps. Raises ValueError below 1."""
    return EveryStep() if steps == 1 and not isinstance(steps, bool) else LocalSteps(steps)
