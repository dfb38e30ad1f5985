"""One process of a simulated crew (``crew``), and how processes are told apart there."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragtag.core.types import Floats, Noted, Outcome, PeerId, Run
from ragtag.protocols.crew.joining import ChannelWay, Joining
from ragtag.protocols.membership.roster import Card, Roster
from ragtag.protocols.node import Node
from ragtag.simulation.worlds.members import Life


@dataclass(slots=True)
class Member:
    """One process. node: its part in rounds, once it has a seat; inside: the seats that it counts on.

    joining, opening: its way in, until it averages (not of founders).
    reach: the process that it takes for each seat's. notes, outcomes: with their times. phases: when each
    part of a newcomer's way in was over, by name.
    """

    index: int
    entries: frozenset[int]
    life: Life
    roster: Roster
    card: Card
    values: Floats
    node: Node | None = None
    joining: Joining | None = None
    opening: ChannelWay | None = None
    unseated: str = ""
    failed: str = ""
    inside: set[PeerId] = field(default_factory=set)
    reach: dict[PeerId, int] = field(default_factory=dict)
    notes: list[tuple[float, Noted]] = field(default_factory=list)
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def seat(self) -> PeerId:
        """The number that it averages under."""
        return self.card.seat


def epoch_of(index: int) -> int:
    """What a process's datagrams carry."""
    return index + 1


def index_of(epoch: int) -> int:
    """Whose they are."""
    return epoch - 1


def run_of(run: Run, peer: PeerId) -> Run:
    """The run with another name for its other end."""
    return Run(peer, run.key, run.first, run.total, run.payload, run.weight, run.heard, run.mask, run.ended)
