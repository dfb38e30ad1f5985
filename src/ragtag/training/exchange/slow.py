"""How a peer that comes to few rounds brings in what it learned since it was last there.

Its own model is old: averaged as it is, it would pull the others back to where they were. So it takes the
crew's average first, adds to that what its own steps have changed, and offers the sum (the difference to a
common anchor, as in DiLoCo, Douillard et al., 2023, arXiv 2311.08105, section 2: not weights, but what was
learned).

It cannot know whether the round that it offers to is half over. Where an average comes without its values,
it adds what it learned to that average and offers the sum to the round after, which has not begun; what is
in no average even then is kept for its next turn (error feedback, as for entries that a codec left out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ragtag.core.types import Bools, Outcome, PeerId
from ragtag.training.exchange.base import Exchange, Layer
from ragtag.training.transport import Peers

_BASE_MIN = 0.5
"""Share of the crew's average that must have come for a peer to build on it."""
_GIVES = 2
"""Rounds in a row that the same work is offered to: the first may be over for others, the second is not."""


class Merge:
    """The anchor of one model: what its parameters were after the last average."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._anchor: list[torch.Tensor] = []
        self.kept = False
        """Whether some of what was learned is in no average yet, and is kept for the next turn."""

    @property
    def marked(self) -> bool:
        """Whether ``mark`` was called: there is an average to measure what was learned from."""
        return bool(self._anchor)

    @torch.no_grad()
    def mark(self) -> None:
        """The parameters are as the last average left them."""
        if not self._anchor:
            self._anchor = [parameter.detach().clone() for parameter in self._parameters]
            return
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.copy_(parameter)

    def forget(self) -> None:
        """There is nothing to bring in later."""
        self._anchor, self.kept = [], False

    def give(
        self,
        average: Callable[[float], Outcome],
        weight: float,
        unheard: Callable[[Outcome], Bools],
        values_in: Callable[[int, Bools], torch.Tensor],
    ) -> Outcome:
        """One turn of a slow peer: take the crew's average, add to it what was learned, and offer the sum.

        average: averages the parameters in place, with a weight; 0 takes and gives nothing.
        unheard: bool ``[n_chunks]``, where an average came without this peer's values.
        values_in: which values of a parameter lie in such chunks: bool, in its shape.
        Returns the last round's outcome.
        """
        if self.marked:
            self.lift()
            taken = average(0.0)
            self.land()
            if taken.averaged.mean() < _BASE_MIN:
                self.kept = True  # there is nothing to add it to
                return taken
        for _ in range(_GIVES):
            self.hold()
            outcome = average(weight)
            lost = unheard(outcome)
            self.kept = self.marked and bool(lost.any())
            if not self.kept:
                self.mark()
                break
            self.keep([values_in(at, lost) for at in range(len(self._parameters))])
        return outcome

    @torch.no_grad()
    def lift(self) -> None:
        """Set the parameters back to the anchor; keep what was learned since in its place."""
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            learned = parameter - anchor
            parameter.copy_(anchor)
            anchor.copy_(learned)

    @torch.no_grad()
    def land(self) -> None:
        """Add what was learned to the parameters as they are now; the anchor is where they stood before."""
        for learned, parameter in zip(self._anchor, self._parameters, strict=True):
            base = parameter.detach().clone()
            parameter.add_(learned)
            learned.copy_(base)

    @torch.no_grad()
    def hold(self) -> None:
        """Keep what was learned in the anchor's place, if there is one; the parameters stay as they are."""
        if not self.marked:
            return
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            torch.sub(parameter, anchor, out=anchor)

    @torch.no_grad()
    def keep(self, lost: Sequence[torch.Tensor]) -> None:
        """After ``hold`` and an average: add to it what was learned where it is ``lost`` (bool, in each
        parameter's shape); the anchor is the average.
        """
        for learned, parameter, left in zip(self._anchor, self._parameters, lost, strict=True):
            more = learned * left.to(learned.device)
            learned.copy_(parameter)
            parameter.add_(more)


class SlowPeer(Layer):
    """Around an exchange of models whose rounds do not wait for slow peers: their turns are ``Merge``'s."""

    def __init__(self, inner: Exchange, parameters: Sequence[torch.Tensor], peers: Peers) -> None:
        super().__init__(inner)
        self._merge, self._peers = Merge(parameters), peers

    @property
    def kept(self) -> bool:
        """Whether some of what was learned is offered again."""
        return self._merge.kept

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round, or a slow peer's turn where this one is among those that rounds do not wait for."""
        me = self._peers.me
        if me not in aside:
            outcome = self.inner.average(weight, deadline_s, aside)
            self._merge.forget()
            return outcome
        return self._merge.give(
            lambda weight: self.inner.average(weight, deadline_s, aside),
            weight,
            lambda outcome: unheard(outcome, me),
            self.bucket.values_in,
        )

    def forget(self) -> None:
        """There is nothing to bring in later."""
        self._merge.forget()
        self.inner.forget()


def unheard(outcome: Outcome, me: PeerId) -> Bools:
    """Where an average came without this peer's values: bool ``[n_chunks]``."""
    if outcome.members and me not in outcome.members:
        return np.zeros(len(outcome.averaged), np.bool_)
    place = outcome.members.index(me) if outcome.members else me
    mine = (outcome.heard >> np.uint64(place)) & np.uint64(1) == 1
    lost: Bools = outcome.averaged & ~mine
    return lost
