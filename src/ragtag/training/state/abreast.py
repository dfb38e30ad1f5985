"""One peer in step with its crew, live and simulated: it looks whether rounds went by, and catches up.

A peer whose rounds went on without it, as it was frozen or cut off, or that comes late, lacks the steps of
these rounds. Where gradients are averaged it gets the state and the steps after it in its next average
(``replay``). Elsewhere it gets the state at once, and averages bring the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

from ragtag.core.arrival import others_in
from ragtag.core.types import Noted, Outcome
from ragtag.protocols.crew.standing import AWAY, NO_STATE, Standing
from ragtag.protocols.node import CATCH_UP
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.state.follower import rounds_max
from ragtag.training.state.keeper import CrewsState, Donors, StateKeeper
from ragtag.training.state.replay import CatchUp, Result, Ways
from ragtag.training.transport import Transport

T = TypeVar("T")


class CrewTransport(Transport, Protocol):
    """A transport of a crew whose peers give each other their state.

    standing: which peers are behind.
    """

    standing: Standing

    @property
    def deadline_s(self) -> float:
        """How long a peer that catches up or comes late waits for the others at most."""
        ...

    def heard_of(self, channel: int) -> int:
        """The newest round of a channel that anything has come of; -1: none."""
        ...

    def take_part(self, channel: int, round_: int) -> None:
        """Tell the crew that this peer averages from now on, its state being that after ``round_`` (-1: it
        has none). Return once others are past that, or none is to begin a round.
        """
        ...

    def await_newer(self, channel: int, at_most_s: float) -> bool:
        """Wait until others have begun a round that this peer has not. ``False``: none has, in time."""
        ...

    def await_future(self, future: Future[T]) -> T:
        """What a future comes to, or its error."""
        ...


class Abreast:
    """Keeps a peer in step with its crew, and has it give its state to those that are not.

    donors: who gives it the state (``None``: nobody can).
    record: told of each round that was followed while it caught up, but the last.
    phase: what goes on around the wait for a state.
    came_s: when a peer that came late had the state; ``None``: it did not, or that is told already.
    """

    def __init__(
        self,
        keeper: StateKeeper,
        transport: CrewTransport,
        donors: Donors | None,
        *,
        record: Callable[[Outcome], None] = lambda outcome: None,
        phase: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._keeper, self._transport, self._donors = keeper, transport, donors
        self._record, self._phase = record, phase
        self._last_s = transport.now_s()
        self._last_round: int | None = None
        self._counted: int | None = None  # what is kept has counted the steps up to this round
        self._steps = 0  # of this peer, at its last round
        self._left_out: dict[str, int] = {}  # how far the first was when another one left out an average
        self.came_s: float | None = None

    def begin(self, averaged: AveragedModel) -> None:
        """What an optimizer averages is agreed on. A peer that comes late takes the crew's state over.

        Where gradients are averaged it does so in its first average, and not here: all rounds from then on
        are to find it in step, whatever its script still has to do before.
        """
        first = self._keeper.first is None
        self._keeper.take_in(averaged)
        if first:
            averaged.look = self._look
        else:
            averaged.is_apart = partial(self._leaves_out, averaged.name)
        if not self._transport.late:
            return
        if first and averaged.follower is not None:
            averaged.arrive = partial(self._arrives, True, NO_STATE)
            return
        round_ = None
        if averaged.follower is not None:  # its state comes with the first one's, of some rounds ago
            averaged.follower.arrived(False)
        else:
            round_ = self.fetch(self._transport.deadline_s)
        self._transport.take_part(averaged.channel, -1 if round_ is None or not first else round_)
        self.came_s = self._transport.now_s() if first else None

    def _look(self) -> None:
        """Before a peer that was away averages again: get the state of the crew that went on without it.

        Until it begins a round of theirs nobody waits for it. Once it has, all wait in each round until it
        has the state.
        """
        kept, last = self._keeper.first, self._last_round
        if kept is not None and last is not None and self._is_behind():
            self._was_away(kept, last, self._transport.now_s() - self._last_s)

    def _leaves_out(self, name: str) -> bool:
        """Whether an optimizer beside the first averages nothing in this step, as the first one is behind.

        What it has is old, and peers that heard of it in its rounds would wait for it there, while this peer
        stays in those of the first. It leaves out one average for a step of the first, which is to bring the
        state: a script may step that one no more.
        """
        kept = self._keeper.first
        if kept is None or not self._is_behind() or self._left_out.get(name) == kept.progress[0]:
            return False
        self._left_out[name] = kept.progress[0]
        return True

    def _is_behind(self) -> bool:
        """Whether the first optimizer's rounds have gone on without this peer, which is not in step yet."""
        kept, last = self._keeper.first, self._last_round
        if kept is None or kept.stands_aside:
            return False
        if kept.asked.averager.kind != "at once":
            return False  # in groups, and around a centre, there are no rounds that all have
        if last is None:
            return kept.arrive is not None
        return self._transport.heard_of(kept.channel) - last > 1 + CATCH_UP

    def averaged(self, outcome: Outcome) -> None:
        """After a round: give the state to a peer that waits for it; take it anew after a long absence, where
        nothing of the crew's rounds had come before this one.
        """
        keeper, kept = self._keeper, self._keeper.first
        if kept is None or outcome.channel != kept.channel:
            return
        now_s = self._transport.now_s()
        last, self._last_round = self._last_round, outcome.round
        away_s = now_s - self._last_s
        # One that nobody hears makes rounds alone, and is away. One that froze amid a round ends it as it
        # comes back: the round's beginning counts.
        if others_in(outcome, keeper.me):
            self._last_s = now_s - outcome.scatter_s - outcome.gather_s
        self._count(kept, outcome.round)
        if last is not None and outcome.round - last > 1 + CATCH_UP and not kept.stands_aside:
            self._was_away(kept, last, away_s)
            if kept.arrive is not None:
                return
        keeper.offer(outcome.round)

    def _was_away(self, kept: AveragedModel, last: int, away_s: float) -> None:
        """Get the crew's state after a long absence.

        While it is fetched the crew goes on, so that the next gap is this peer's own doing. That may take no
        longer than it was away. Where gradients are averaged it is fetched in the next average; where there
        is nothing beside averaged models, the next average brings it.
        """
        self._last_round = None
        if kept.follower is not None and self._donors is not None:
            self._fall_behind(kept.channel, last)
            kept.arrive = partial(self._arrives, False, last)
        elif not self._keeper.only_model:
            self._fall_behind(kept.channel, AWAY)
            self.fetch(away_s)
            self._come_abreast(kept.channel)

    def _count(self, kept: AveragedModel, round_: int) -> None:
        """What is kept counts the steps of the rounds that this peer left out, whatever comes of its absence.

        One that counted its own only would average K-FAC's factors at other steps than all others, for good,
        and each would wait for the other's round.
        """
        counted, self._counted = self._counted, round_
        steps, self._steps = self._steps, kept.progress[0]
        if counted is not None and round_ > counted + 1 and not kept.stands_aside:
            self._keeper.went_on((round_ - counted - 1) * (self._steps - steps))

    def arrives_anew(self) -> Callable[[AveragedModel], None]:
        """This peer has another seat, and comes late to it. Returns what has it get the state of its first
        optimizer in the next average, where gradients are averaged.
        """
        last, self._last_round = self._last_round, None

        def arrives(averaged: AveragedModel) -> None:
            averaged.arrive = partial(self._arrives, True, NO_STATE if last is None else last)

        return arrives

    def fetch(self, at_most_s: float) -> int | None:
        """Put the crew's state in place of this peer's; the round that it is of. ``None``: it did not come in
        time; this peer goes on with what averages bring.
        """
        keeper, kept = self._keeper, self._keeper.first
        if self._donors is None or kept is None:
            return None
        behind = partial(self._transport.standing.known_behind, kept.channel)
        with self._phase():
            state = self._transport.await_future(keeper.asking(self._donors, behind)(at_most_s))
            if state is None or not keeper.put(state):
                return None
        self._counted, self._steps = state.round, kept.progress[0]
        self._transport.goes_on_after(kept.channel, state.round)
        return state.round

    # -- Catching up

    def _arrives(self, new: bool, state_round: int) -> Outcome | None:
        """Get into step (see ``replay``); the last round that was followed."""
        with self._phase():
            came = self.catch_up(new=new, state_round=state_round)
        self.came_s = self._transport.now_s() if new else None
        self._last_round = None
        return came.outcome

    def catch_up(self, *, new: bool, state_round: int) -> Result:
        """Get the crew's state and, following their rounds meanwhile, take the steps that others took after
        it.

        To be called by the trainer where a round is due. It takes ``transport.deadline_s`` at most.

        new: this peer does not take part yet.
        state_round: the last round after which its state was the crew's (``NO_STATE``: none).

        Raises:
            RuntimeError: there is no optimizer that follows, or nobody to ask for a state.
        """
        keeper, transport, first = self._keeper, self._transport, self._keeper.first
        follower = None if first is None else first.follower
        if first is None or follower is None or self._donors is None:
            raise RuntimeError("this peer averages no gradients with all others, so it has nothing to follow")
        _, since = first.progress
        channel, standing = first.channel, transport.standing

        def put(state: CrewsState) -> bool:
            if not keeper.put(state):
                return False
            standing.behind(channel, state.round)
            return True

        ask = keeper.asking(self._donors, partial(standing.known_behind, channel))
        if new:
            transport.take_part(channel, -1)
        self._fall_behind(channel, state_round)
        ways = Ways(
            newer=partial(transport.await_newer, channel),
            ask=ask,
            put=put,
            follow=follower.follow,
            redo=follower.redo,
            ahead=partial(standing.ahead, channel),
            over=partial(standing.over, channel),
            wait=transport.await_future,
            passed=self._record,
            now_s=transport.now_s,
        )
        try:
            came = CatchUp(ways, rounds_max(follower.n_bytes), transport.deadline_s).run()
        finally:
            self._come_abreast(channel)
        follower.arrived(came.in_step)
        if came.state_round >= 0:
            first.resume_at(first.progress[0] + came.redone * since, 0)
            keeper.went_on((came.redone + came.missing) * since)
            self._counted = came.state_round + came.redone + came.missing
            transport.goes_on_after(channel, self._counted)  # where the others have ended none is heard of
        keeper.tell(Noted("in step" if came.in_step else "not in step", keeper.me, str(came)))
        return came

    def _fall_behind(self, channel: int, state_round: int) -> None:
        """This peer is not in step any more: it says so, and gives its state to nobody."""
        self._transport.standing.behind(channel, state_round)
        self._keeper.gives(False)

    def _come_abreast(self, channel: int) -> None:
        """This peer catches up no longer."""
        self._transport.standing.abreast(channel)
        self._keeper.gives(True)
