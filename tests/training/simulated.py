"""A crew in virtual time (``ragtag.simulation.transport``), with what tests of training look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Average, Effect, Event, Machine, Noted, Offer, PeerId, Run, Send
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

T = TypeVar("T")
LATENCY_S = 0.001


class Tapped:
    """A node, and what it is asked and sends on the channels that training opened."""

    def __init__(self, me: PeerId, node: Machine, crew: TappedCrew) -> None:
        self._me, self._node, self._crew = me, node, crew

    def step(self, now_s: float, event: Event) -> list[Effect]:
        crew = self._crew
        if isinstance(event, Average | Offer) and event.channel in crew.schemas:
            crew.asked.append(event)
        effects = self._node.step(now_s, event)
        sent = [effect.run for effect in effects if isinstance(effect, Send)]
        crew.sent += [replace(run, peer=self._me) for run in sent if run.key.channel in crew.schemas]
        return effects


class TappedCrew(SimulatedCrew):
    """``n`` peers on lines that lose a share of all chunks.

    asked: what training asked for. sent: runs, with their senders. notes: by whom and what.
    """

    def __init__(self, n: int, *, loss: float = 0.0, seed: int = 1) -> None:
        self.asked: list[Average | Offer] = []
        self.sent: list[Run] = []
        self.notes: list[tuple[int, Noted]] = []
        lines = Faults(loss=Loss(loss) if loss else None, latency_s=LATENCY_S)
        super().__init__(n, lines, seed, on_note=lambda peer, _, note: self.notes.append((peer, note)))
        self.world.nodes = [Tapped(me, node, self) for me, node in enumerate(self.world.nodes)]


def run_peers(crew: TappedCrew, train: Callable[[SimulatedTransport], T]) -> list[T]:
    """What ``train`` returns for each peer; the first error ends all and is raised here."""
    return crew.run(train)  # type: ignore[return-value]  # nobody crashes here
