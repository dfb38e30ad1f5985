"""How a peer that comes late gets into step with a crew that averages gradients.

A snapshot is of some round R. When it is here the crew is some rounds further on, and nobody sends the
gradients of those rounds again: a peer that began then would lie so many rounds behind for good. So it takes
part before it has the state. With weight 0 it is given each round's mean gradient as every member is, and
keeps it, while the state is fetched beside that. Then the state is put in place, the steps of the
rounds after R are taken again with the means that were kept, by the same arithmetic, and only then does it
give gradients of its own. It begins each round once another peer has, and computes nothing between two
rounds; so nobody waits for it longer than for a member.

What steps that are taken again cannot know:

- Where a chunk of a mean was lost its gradient counts as zeros; a member that loses it has its own there.
- Learning rates, and whatever else user code changed after R by itself, are the snapshot's in all of these
  steps, and so are schedulers afterwards: they stay as many steps behind as were taken again.
- What is kept and counts steps with the crew (K-FAC) is told how many it missed (``went_on``).
- Buffers that are not averaged (integers, such as the number of batches seen) are the snapshot's.
- How many steps a round had: as many as this peer had taken when it was to average.
- Dense averages of models that a sparse average does now and then (``TopK(resync=...)``): the next one brings
  them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ragtag.core.types import Outcome
from ragtag.training.state.follower import Mean, Means

TRIES = 3
"""So often a state is fetched whose next rounds turn out not to be kept."""
_TAKEN_MIN = 2  # rounds taken again between two of the crew's: above 1, so that this ends


class State(Protocol):
    """A crew's state that has come."""

    @property
    def round(self) -> int:
        """The round after which it was taken."""
        ...

    @property
    def mixed(self) -> bool:
        """Whether parts of it are of other rounds."""
        ...


S = TypeVar("S", bound=State)


@dataclass(frozen=True, slots=True)
class Ways(Generic[S]):
    """What a peer that catches up needs of others.

    newer: waits until others are past a round, at most so many seconds and as long as somebody is to begin
        one; ``False``: nothing came of them.
    ahead: whether a peer that lives may have a newer state than this one.
    over: whether the others have come to their end: no round will follow their state.
    wait: for a state that was asked for.
    ask: asks for a state, to come within so many seconds beside the rounds; ``None``: nobody gave it.
    put: puts it into the model and its optimizer; ``False``: it does not fit.
    follow, redo: see ``Follower``.
    passed: told of each round's outcome except the last one's.
    """

    newer: Callable[[float], bool]
    ask: Callable[[float], Future[S | None]]
    put: Callable[[S], bool]
    follow: Callable[[bool], tuple[Outcome, Mean | None]]
    redo: Callable[[Mean], None]
    ahead: Callable[[], bool] = lambda: True
    over: Callable[[], bool] = lambda: False
    wait: Callable[[Future[S | None]], S | None] = Future.result
    passed: Callable[[Outcome], None] = lambda outcome: None
    now_s: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Result:
    """What catching up came to.

    outcome: of the last round (``None``: there was none).
    why: the reason for which it failed (empty: it did not).
    state_round: the round of the state that was put in place (-1: none was).
    redone: how many rounds had their steps taken again.
    incomplete: how many of these lacked some chunks.
    missing: how many rounds had their steps not taken.
    tries: how many states were asked for.
    newest: no living peer has a newer state than this one.
    """

    outcome: Outcome | None = None
    why: str = ""
    state_round: int = -1
    redone: int = 0
    incomplete: int = 0
    missing: int = 0
    tries: int = 0
    newest: bool = False

    def begin(self, round_: int) -> None:
        """The state of this round was put in place."""
        self.state_round, self.why = round_, ""
        self.redone = self.incomplete = self.missing = 0

    @property
    def in_step(self) -> bool:
        """Whether the state came and no step after it lacks, or no living peer has a newer one."""
        return self.newest or (self.state_round >= 0 and not self.missing)

    def __str__(self) -> str:
        if self.state_round < 0:
            return self.why
        text = f"the state of round {self.state_round} and the steps of {self.redone} rounds after it"
        if self.incomplete:
            text += f", {self.incomplete} of them without what was lost"
        return text + (f"; {self.missing} rounds are missing: {self.why}" if self.missing else "")


@dataclass(slots=True)
class CatchUp(Generic[S]):
    """One peer's way into step: ``run`` it, between its own steps.

    rounds_max: so many means are kept.
    deadline_s: for all of it.
    """

    ways: Ways[S]
    rounds_max: int
    deadline_s: float
    result: Result = field(default_factory=Result)
    _at: int | None = None  # the model is that after this round
    _coming: Future[S | None] | None = None
    _idle_s: float = 0.0

    def run(self) -> Result:
        """Follow the crew's rounds until the model is as theirs, or it shows that it will not be.

        Where nobody is ahead it is what the crew goes on from; where the others have come to their end, it
        takes the state that they end with. It fails where ``TRIES`` times nobody gives
        the state, or nothing is heard of rounds, or time is up: the model has
        then taken the steps of the rounds that were followed. Where ``TRIES`` states were too old for the
        means that are kept it makes do with the last one; ``Result.missing`` says how far that is off.
        """
        means = Means(self.rounds_max)
        until_s = self.ways.now_s() + self.deadline_s
        while self._follow(means, until_s):
            if self._at is None and self._coming is None:
                # also where no round has a mean: with a guard none has, perhaps, before this peer gives again
                self._ask(until_s)
            elif self._at is None and self._coming is not None and self._coming.done():
                if not self._put(means, self._coming.result()):
                    break
                self._coming = None
            if self._at is not None and self._redo(means):
                break
        return self.result

    def _ask(self, until_s: float) -> Future[S | None]:
        self.result.tries += 1
        self._coming = self.ways.ask(max(1e-3, until_s - self.ways.now_s()))
        return self._coming

    def _follow(self, means: Means, until_s: float) -> bool:
        """Take part in the next round."""
        ways, result = self.ways, self.result
        began_s = ways.now_s()
        if began_s >= until_s or not ways.newer(until_s - began_s):
            self._end(means, until_s, in_time=began_s < until_s)
            return False
        self._idle_s = ways.now_s() - began_s
        if result.outcome is not None:
            ways.passed(result.outcome)
        result.outcome, mean = ways.follow(self._at is None)
        if mean is None:
            means.missed(result.outcome.round)
        else:
            means.add(mean)
        return True

    def _end(self, means: Means, until_s: float, in_time: bool) -> None:
        """There are no more rounds to follow."""
        result = self.result
        newest = in_time and not self.ways.ahead()
        over = in_time and not newest and self.ways.over()
        if newest:
            result.newest, result.why = (
                True,
                "nobody that lives is ahead: the crew goes on from this peer's state",
            )
        else:
            heard = (
                "the others have come to their end" if over else "nothing more was heard of the crew's rounds"
            )
            result.why = heard if in_time else "time was up"
        if over and self._at is None:
            self._place(self.ways.wait(self._coming or self._ask(until_s)))
        if (newest or over) and self._at is not None:
            for mean in means.after(self._at) or []:
                self._take(mean)
        if not newest and self._at is not None:
            result.missing += max(0, means.newest - self._at)

    def _put(self, means: Means, state: S | None) -> bool:
        """A state has come. It is put in place where the rounds after it were kept, or no other will be asked
        for. Returns whether to go on.
        """
        tries = self.result.tries
        if state is not None and tries < TRIES and (state.mixed or means.after(state.round) is None):
            return True
        # those that were asked may have fallen behind themselves; others may be in step
        return self._place(state) or (state is None and tries < TRIES)

    def _place(self, state: S | None) -> bool:
        """Put a state that has come in place; whether it is."""
        result = self.result
        if state is None:
            result.why = "nobody gave the crew's state"
            return False
        if not self.ways.put(state):
            result.why = "the crew's state does not fit"
            return False
        result.begin(state.round)
        self._at = state.round
        return True

    def _redo(self, means: Means) -> bool:
        """Take steps again for as long as a member would compute; whether the model is as the crew's."""
        ways, result = self.ways, self.result
        assert self._at is not None
        due = means.after(self._at)
        if due is None:  # a round was missed
            if result.tries < TRIES:
                self._at, result.state_round = None, -1
                return False
            due = list(means)
            first = due[0].round if due else means.newest + 1
            result.missing += first - self._at - 1
            result.why = f"{TRIES} states were too old for the rounds that were kept"
            self._at = first - 1
        began_s = ways.now_s()
        for count, mean in enumerate(due):
            if count >= _TAKEN_MIN and ways.now_s() - began_s >= self._idle_s:
                return False
            self._take(mean)
        return means.newest >= self._at  # else the state is newer than what was followed

    def _take(self, mean: Mean) -> None:
        """Take the step of a round again."""
        self.ways.redo(mean)
        self._at = mean.round
        self.result.redone += 1
        self.result.incomplete += not mean.whole
