"""What the optimizers of one peer have in common, and the average of all that step towards a target batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ragtag.core.types import Outcome
from ragtag.training.exchange.central import is_centred
from ragtag.training.exchange.combine import Asked
from ragtag.training.exchange.dense import Corrections
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.scheduling import Scheduling

_CROSSWISE = (
    "averages at steps of its own, so that peers would wait for each other crosswise: give both the same "
    'target_batch (with average="gradients"), or the one without it a schedule that waits for nobody '
    "(as ragtag.schedules.Partial(), SSP(4) or Asynchronous())"
)


class Stepping(Protocol):
    """What one optimizer averages, as far as the others see it.

    asked: what the optimizer is asked for.
    name: of what is averaged, the same on all peers.
    gathering: towards a target batch, where it has one.
    scheduling: when it averages, and where its time goes.
    arrive: what its next average begins with, where this peer has to get into step with the crew.
    """

    asked: Asked
    name: str
    gathering: Gathering | None
    scheduling: Scheduling
    arrive: Callable[[], Outcome | None] | None

    @property
    def found(self) -> bool:
        """Whether it is known what it averages."""
        ...

    def prepares(self, aside: bool) -> None:
        """Its turn is to come: end what is under way, and see whether this peer has to get into step.

        aside: in another optimizer's step. What the script has in ``.grad`` is to be left there.
        """
        ...

    def turns(self, aside: bool) -> None:
        """Average, or begin to. aside: as above."""
        ...


class Siblings:
    """What the optimizers of one peer have in common.

    corrections: of buffers, by all of these.
    """

    def __init__(self) -> None:
        self.corrections = Corrections()
        self._made: list[tuple[weakref.ref[torch.optim.Optimizer], Stepping]] = []

    @property
    def _held(self) -> list[Stepping]:
        """Those of optimizers that somebody holds still, in the order of their names: as on all peers."""
        return sorted((made for held, made in self._made if held() is not None), key=lambda made: made.name)

    @property
    def target(self) -> float | None:
        """Samples of a step of the crew, by the last optimizer that was made with a target batch."""
        made = [one.gathering.target for _, one in self._made if one.gathering is not None]
        return made[-1] if made else None

    def gathering(self, target: float) -> Gathering | None:
        """Towards this target batch; ``None``: no optimizer has it."""
        found = (made.gathering for made in self._held if made.gathering is not None)
        return next((one for one in found if one.target == target), None)

    def joins(self, optimizer: torch.optim.Optimizer, made: Stepping) -> None:
        """One more optimizer has been made. made: what it averages."""
        self._made.append((weakref.ref(optimizer), made))
        if made.gathering is not None:
            made.gathering.joined()

    def require(self, made: Stepping) -> None:
        """One of them takes its first step. Raises ValueError, saying what to write: it cannot be beside the
        others that there are.

        A peer averages towards a target batch whenever the crew has it, and in other schedules after as many
        steps as these say. So it would wait in one for others, which wait in the other.

        Not when it is made: ``optimizer = crew.optimizer(...)`` lets go of an older one only after that.
        """
        if self._beside(made):
            gc.collect()  # one in a cycle is nobody's any more
        if why := self._beside(made):
            raise ValueError(why)

    def _beside(self, made: Stepping) -> str:
        """Why it cannot be beside the others; empty: it can."""
        here = made.gathering
        for other in self._held:
            there = other.gathering
            if here is there:
                continue
            if here is not None and there is not None:
                return (
                    f"target_batch={here.target:g}, and another optimizer of this crew has {there.target:g}: "
                    "the crew makes the steps of all of them together, by one target; give each the same"
                )
            if there is not None and _waits(made.asked):
                has = f"another optimizer of this crew has target_batch={there.target:g}"
                return f"{has}, and this one {_CROSSWISE}"
            if here is not None and _waits(other.asked):
                has = f"this one has target_batch={here.target:g}"
                return f"{has}, and another optimizer of this crew {_CROSSWISE}"
        return ""

    def averages(self, leads: Stepping, due: Callable[[], bool]) -> None:
        """Have all that step towards the target batch average while that is ``due``, which the one that leads
        decides. They do so one right after the other, so that no peer computes while others wait for it.
        """
        gathering = leads.gathering
        assert gathering is not None
        towards = [each for each in self._held if each.gathering is gathering and each.found]
        others = [each.scheduling for each in towards if each is not leads]
        for scheduling in others:
            scheduling.pauses()
        # a peer that has to get into step first gathers for no step of the crew
        while any(each.arrive is not None for each in towards) or due():
            for each in towards:
                each.prepares(aside=each is not leads)
            with gathering.turn(arrives=any(each.arrive is not None for each in towards)):
                for each in sorted(towards, key=lambda each: each.arrive is None):
                    each.turns(aside=each is not leads)
        for scheduling in others:
            scheduling.resumes()


def _waits(asked: Asked) -> bool:
    return not (asked.partial or is_centred(asked.averager))
