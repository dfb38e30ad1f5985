"""A target batch: the crew averages, and steps, when all peers together have gathered so many samples.

DeDLOC: "Distributed Deep Learning in Open Collaborations", Diskin et al., NeurIPS 2021 (arXiv 2106.10207),
section 3.1. Each peer gathers gradients at its own pace; who is there, and how fast, does not change what a
step is made of.

What the others have gathered is known from what they last told, and is carried on by the pace that they
told: whole batches, one each time that a batch takes. That is bounded by what it starts from: never more
than was told is added to it. So a pace that cannot be, or one of a peer that has died, makes a step smaller
by no more than that peer's samples, and needs no judgement.

Peers are to come to the average at one moment, and nobody asks anybody for that. Before each batch a peer
looks ahead as far as it would take. Where the target is met before its end, it either stands by until then,
or computes the batch, for which the others wait: the second, where it brings more samples than the others
would have computed while they wait. So a peer whose batch takes longer than the crew's steps computes
nothing, and keeps in step. None stands by for one step for longer than its batch would have taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from ragtag.schedules.base import Average, Compute, Decision, Progress, Wait, is_number

_LOOKS = 16
"""A peer that stands by looks again so often in the time of one of its batches, at least."""
_BISECTIONS = 24


class Doing(IntEnum):
    """What a peer was about to do when it told what it has gathered."""

    COMPUTES = 0
    STANDS_BY = 1
    AVERAGES = 2


@dataclass(frozen=True, slots=True)
class Tally:
    """What a peer has gathered, as it last told.

    step: towards which step of the crew (the number of its round).
    samples: so many.
    batch: samples of its last batch.
    batch_s: seconds that a batch takes it.
    doing: what it does since.
    age_s: how long ago that was; of one that told of the step before, how long ago that was over, at most.
    before: samples that it had for the step before.
    """

    step: int
    samples: float
    batch: float
    batch_s: float
    doing: Doing = Doing.COMPUTES
    age_s: float = 0.0
    before: float = 0.0

    def computes(self, step: int) -> bool:
        """Whether it computes towards a step. A peer that told of the one before, which is over, begins to:
        that it averaged may be on its way still.
        """
        return self.step == step - 1 or (self.step == step and self.doing is Doing.COMPUTES)

    def towards(self, step: int, in_s: float = 0.0) -> float:
        """Samples that it has for a step: now, at most twice those that it told; or ``in_s`` from now, at
        most twice those that it told or had for the step before.

        What a peer will have that has told nothing of this step yet is foreseen, and is nothing now.
        """
        told = self.samples if self.step == step else 0.0
        if not self.computes(step) or (self.step != step and in_s == 0.0):
            return told
        batches = math.floor(min(self.age_s + in_s, self.batch_s * 2**53) / self.batch_s)
        return min(2.0 * self.samples if in_s == 0.0 else self.most, told + batches * self.batch)

    @property
    def most(self) -> float:
        """As many samples as it is believed to compute for a step."""
        return 2.0 * max(self.samples, self.before)

    @property
    def rate(self) -> float:
        """Samples a second, while it computes."""
        return self.batch / self.batch_s


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """Average once all have gathered ``samples`` together. Raises ValueError: that is not above 0."""

    samples: float

    def __post_init__(self) -> None:
        value = self.samples
        if not is_number(value):
            raise TypeError(f"target_batch is {value!r}; it is a number of samples, as target_batch=4096")
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"target_batch is {value!r}; it is a number of samples above 0")

    def decide(self, progress: Progress) -> Decision:
        """Average, compute another batch, or stand by. ``progress.tallies`` has this peer's own, too."""
        mine = progress.tallies[progress.me]
        others = [tally for peer, tally in progress.tallies.items() if peer != progress.me]
        if begun(others, mine.step) or is_over(others, mine.step) or self._met(mine, others):
            return Average()
        if progress.waited_s >= mine.batch_s or not self._met(mine, others, mine.batch_s):
            return Compute()
        met_s = self._met_in(mine, others)
        if idle(others, mine.step, mine.batch_s - met_s) <= mine.batch:
            return Compute()
        look_s = mine.batch_s / _LOOKS
        return Wait(min(max(met_s, look_s / 4), look_s), 2 * mine.batch_s)

    def _met(self, mine: Tally, others: Collection[Tally], in_s: float = 0.0) -> bool:
        """Whether others go so far, ``in_s`` from now, that with what is here the target is met."""
        return mine.samples + sum(tally.towards(mine.step, in_s) for tally in others) >= self.samples

    def _met_in(self, mine: Tally, others: Collection[Tally]) -> float:
        """In how many seconds that is so; it is within this peer's next batch."""
        low_s, high_s = 0.0, mine.batch_s
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if self._met(mine, others, middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s


def idle(others: Collection[Tally], step: int, for_s: float) -> float:
    """Samples that others would compute in so many seconds."""
    return sum(min(tally.most, for_s * tally.rate) for tally in others if tally.computes(step))


def begun(others: Collection[Tally], step: int) -> bool:
    """Whether a peer averages for this step."""
    return any(tally.step == step and tally.doing is Doing.AVERAGES for tally in others)


def is_over(others: Collection[Tally], step: int) -> bool:
    """Whether the crew has made a step: most of the others gather for a later one. A single peer may have
    gone ahead by mistake.
    """
    return 2 * sum(tally.step > step for tally in others) > len(others)
