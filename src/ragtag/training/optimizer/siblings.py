"""What the optimizers of one peer have in common, and the average of all that step towards a target batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ragtag.core.types import Outcome
from ragtag.training.exchange.central import is_centred
from ragtag.training.exchange.combine import Asked
from ragtag.training.exchange.dense import Corrections
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.scheduling import Scheduling

_CROSSWISE = (
    "averages at steps of its own, so that peers would wait for each other crosswise: give both the same "
    'target_batch (with average="gradients"), or the one without it a schedule that waits for nobody '
    "(ragtag.Partial(), ragtag.SSP(), ragtag.Asynchronous())"
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
        self._waits = False  # one averages by another schedule, and has to wait for others in it
        self._towards: list[Stepping] = []  # a target batch, in the order of their names: on all peers alike

    @property
    def gathering(self) -> Gathering | None:
        """Towards the crew's target batch; ``None``: no optimizer has one."""
        return self._towards[0].gathering if self._towards else None

    def require(self, asked: Asked) -> None:
        """One more optimizer is asked for. Raises ValueError, saying what to write: it cannot be beside those
        that there are.

        A peer averages towards a target batch whenever the crew has it, and in other schedules after as many
        steps as these say. So it would wait in one for others, which wait in the other.
        """
        here = self.gathering
        if asked.target is None:
            if here is not None and _waits(asked):
                raise ValueError(
                    f"another optimizer of this crew has target_batch={here.target:g}, and this one "
                    f"{_CROSSWISE}"
                )
        elif self._waits:
            raise ValueError(
                f"this one has target_batch={asked.target.samples:g}, and another optimizer of this crew "
                f"{_CROSSWISE}"
            )
        elif here is not None and here.target != asked.target.samples:
            raise ValueError(
                f"target_batch={asked.target.samples:g}, and another optimizer of this crew has "
                f"{here.target:g}: the crew makes the steps of all of them together, by one target; give "
                "each the same"
            )

    def joins(self, made: Stepping) -> None:
        """One more optimizer has been made."""
        if made.gathering is None:
            self._waits = self._waits or _waits(made.asked)
            return
        self._towards = sorted([*self._towards, made], key=lambda each: each.name)
        made.gathering.joined()

    def averages(self, leads: Stepping, due: Callable[[], bool]) -> None:
        """Have all that step towards the target batch average while that is ``due``, which the one that leads
        decides. They do so one right after the other, so that no peer computes while others wait for it.
        """
        others = [each.scheduling for each in self._towards if each is not leads]
        for scheduling in others:
            scheduling.pauses()
        # a peer that has to get into step first gathers for no step of the crew
        while any(each.arrive is not None for each in self._towards) or due():
            self._turn(leads)
        for scheduling in others:
            scheduling.resumes()

    def _turn(self, leads: Stepping) -> None:
        gathering = leads.gathering
        assert gathering is not None
        towards = [each for each in self._towards if each.found]
        for each in towards:
            each.prepares(aside=each is not leads)
        arrives = any(each.arrive is not None for each in towards)
        with gathering.turn(arrives):
            for each in sorted(towards, key=lambda each: each.arrive is None):
                each.turns(aside=each is not leads)


def _waits(asked: Asked) -> bool:
    return not (asked.partial or is_centred(asked.averager))
