"""How a peer that comes to few rounds brings in what it learned since it was last there.

Its own model is old: averaged as it is, it would pull the others back to where they were. So it takes the
crew's newest average first, adds to that what its own steps have changed, and offers the sum (the difference
to a common anchor, as in DiLoCo, Douillard et al., 2023, arXiv 2311.08105, section 2: not weights, but what
was learned).

It offers to the round after the newest, and computes on while the others come to it. A peer that stood there
would wait for others that, under a bound on staleness, wait for its next step. Nor does it take part in a
round to get an average, unless the others have begun one beyond that: before, the last one that it had is
the newest that there is. Whether its values were in the average it sees at its next turn: what is not in it
is offered again (error feedback, as for entries that a codec left out).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ragtag.core.types import Bools, Outcome, PeerId
from ragtag.training.exchange.base import Exchange, Layer, layer
from ragtag.training.exchange.dense import Replica
from ragtag.training.transport import Transport

_BASE_MIN = 0.5
"""Share of the crew's average that must have come for a peer to build on it."""


class SlowPeer(Layer):
    """Around an exchange of models whose rounds do not wait for slow peers.

    parameters: what is learned. The other tensors of the exchange are averaged as they are.

    A peer whose turn is not its first holds two more copies of them: the crew's average that it has gone on
    from, and what it offered beyond that.
    """

    def __init__(self, inner: Exchange, parameters: Sequence[torch.Tensor], transport: Transport) -> None:
        super().__init__(inner)
        self._parameters, self._transport = list(parameters), transport
        self._round = -1  # the last one whose average it has
        self._base: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []
        self._kept = False

    @property
    def kept(self) -> bool:
        """Whether some of what was learned is in no average yet, and is offered again."""
        return self._kept

    def average(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Outcome:
        """One round, or a slow peer's turn where this one is among those that rounds do not wait for."""
        return self.end(self.begin(weight, deadline_s, aside))

    def begin(
        self, weight: float = 1.0, deadline_s: float | None = None, aside: frozenset[PeerId] = frozenset()
    ) -> Any:
        """The same but for a slow peer's wait for the others; ``end`` takes what it returns.

        The peers that wait for each other do it here. So does one that finds itself slow for the first time:
        it has no average to have gone on from.
        """
        if self._transport.me not in aside:
            self.forget()
            return self.inner.average(weight, deadline_s, aside)
        if not self._base:
            outcome = self.inner.average(weight, deadline_s, aside)
            self._base = [parameter.detach().clone() for parameter in self._parameters]
            self._came(outcome)
            return outcome
        learned = self._lift()
        if self._newest > self._round + 1:  # that one is over
            taken = self.inner.average(0.0, deadline_s, aside)
            if not self._came(taken):
                self._land(learned)
                self._kept = True  # there is nothing to add it to
                return taken
        self._land(learned)
        self._given = learned
        for base, parameter in zip(self._base, self._parameters, strict=True):
            base.copy_(parameter.detach())  # steps from here on are learned beyond what is offered
        return _Offer(self.inner.begin(weight, deadline_s, aside))

    def end(self, begun: Any) -> Outcome:
        """The round is over: what its average does not have of this peer's is offered again."""
        if not isinstance(begun, _Offer):
            return begun  # type: ignore[no-any-return]
        learned = self._lift()
        outcome = self.inner.end(begun.under_way)
        self._came(outcome)
        lost = unheard(outcome, self._transport.me)
        self._kept = bool(lost.any())
        if self._kept:
            for at, (more, given) in enumerate(zip(learned, self._given, strict=True)):
                more += given * self.bucket.values_in(at, lost).to(given.device)
        self._given = []
        self._land(learned)
        return outcome

    def _came(self, outcome: Outcome) -> bool:
        """Whether enough of a round's average came to build on it."""
        came = bool(outcome.averaged.mean() >= _BASE_MIN)
        if came:
            self._round = outcome.round
        return came

    @property
    def _newest(self) -> int:
        """The newest round of which anything has come."""
        replica = layer(self.inner, Replica)
        assert replica is not None, "models are averaged whole"
        return self._transport.heard_of(replica.channel)

    def forget(self) -> None:
        """There is nothing to bring in later."""
        self._base, self._given, self._kept = [], [], False
        self.inner.forget()

    @torch.no_grad()
    def _lift(self) -> list[torch.Tensor]:
        """Set the parameters back to what they have gone on from. Returns what was learned since."""
        learned: list[torch.Tensor] = []
        for base, parameter in zip(self._base, self._parameters, strict=True):
            learned.append(parameter - base)
            parameter.copy_(base)
        return learned

    @torch.no_grad()
    def _land(self, learned: Sequence[torch.Tensor]) -> None:
        """Go on from the parameters as they are now, with what was learned."""
        for base, parameter, more in zip(self._base, self._parameters, learned, strict=True):
            base.copy_(parameter)
            parameter.add_(more)


class _Offer:
    """A slow peer's offer, whose round is under way."""

    def __init__(self, under_way: Any) -> None:
        self.under_way = under_way

    @property
    def over(self) -> bool:
        """Whether the round is done."""
        return bool(self.under_way.over)

    def wait(self) -> Outcome:
        """Wait for the round, and leave all as it is."""
        outcome: Outcome = self.under_way.wait()
        return outcome


def unheard(outcome: Outcome, me: PeerId) -> Bools:
    """Where an average came without this peer's values: bool ``[n_chunks]``."""
    if outcome.members and me not in outcome.members:
        return np.zeros(len(outcome.averaged), np.bool_)
    place = outcome.members.index(me) if outcome.members else me
    mine = (outcome.heard >> np.uint64(place)) & np.uint64(1) == 1
    lost: Bools = outcome.averaged & ~mine
    return lost
