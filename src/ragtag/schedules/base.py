"""What a schedule is: it looks at how far this peer has come and says what to do next. It is pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ragtag.schedules.target import Tally


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this peer has come when it is about to decide.

    step: local steps taken since the start.
    since_average: those since the last average began.
    n: peers in the crew.
    live: those believed to take part now (this one included).
    round_s: how long the last average took (``None``: there was none yet).
    waited_s: how long this decision has been put off by ``Wait`` so far.

    What some schedules ask for beside it; each says what it does where it is not known.
    me: the peer that decides (-1: not told).
    computed_s: time spent computing since the last average began.
    clocks: steps that each peer, this one included, is known to have taken.
    step_s: what a step of each peer takes, as measured.
    since_s: how long ago each took its last step.
    tallies: what each, this one included, has gathered towards the crew's next step.
    others_began: whether others have begun an average that this peer has not.
    """

    step: int
    since_average: int
    n: int
    live: frozenset[int]
    round_s: float | None = None
    waited_s: float = 0.0
    me: int = -1
    computed_s: float | None = None
    clocks: Mapping[int, int] = field(default_factory=dict)
    step_s: Mapping[int, float] = field(default_factory=dict)
    since_s: Mapping[int, float] = field(default_factory=dict)
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    others_began: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Take another local step."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The others average now, and this peer does not: take another local step. Its next average is none that
    went by so: it would be out of step by a round, and heard too late in each.
    """


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


Decision = Compute | Skip | Average | Wait


class Schedule(Protocol):
    """When to average."""

    def decide(self, progress: Progress) -> Decision:
        """Say what to do after a local step."""
        ...


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, which others can be compared with."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(what: str, value: object, least: int, unit: str) -> int:
    """``value`` as an integer of at least ``least``. Raises ValueError: what it is and what it must be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}; it must be a whole number of {unit}, {least} or more")
    return value
