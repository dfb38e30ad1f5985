"""What a live crew does for a peer that was away, for recipes' peers in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragtag.core.types import Noted, Outcome
from ragtag.simulation.transport import SimulatedTransport
from ragtag.training.state.abreast import Abreast
from ragtag.training.state.keeper import StateKeeper


class Keeps:
    """Keeps one simulated peer in step: ``CrewOptimizer(..., **keeps.hooks)``.

    over: told of each round's outcome, before the peer looks back.
    keeper: of its state, for what else belongs to the training.
    """

    def __init__(
        self, peer: SimulatedTransport, seed: int, over: Callable[[Outcome], None] = lambda outcome: None
    ) -> None:
        def tell(note: Noted) -> None:
            if peer.crew.world.on_note is not None:
                peer.crew.world.on_note(peer.me, peer.now_s(), note)

        self.keeper = StateKeeper(peer.me, seed, tell)
        self.keeper.serve(peer.shelf)
        abreast = Abreast(self.keeper, peer, peer)

        def averaged(outcome: Outcome) -> None:
            over(outcome)
            abreast.averaged(outcome)

        self.hooks: dict[str, Any] = {"on_ready": abreast.begin, "on_outcome": averaged}
