"""One process of a simulated crew (``crew``), and how its datagrams name it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragtag.core.types import Floats, Noted, Outcome, PeerId, Run
from ragtag.protocols.crew.joining import ChannelWay, Joining
from ragtag.protocols.membership.roster import Card, Roster
from ragtag.protocols.node import Node
from ragtag.simulation.worlds.members import Life


@dataclass(slots=True)
class Member:
    """One process.

    values: what it averages.
    node: its part in rounds, once it has a seat.
    joining, opening: its way in, until it averages; founders have none.
    unseated: why it lost its seat.
    failed: why it did not get in.
    inside: the seats whose peers take part, as far as it knows.
    reach: the epoch of the process that it believes to have each seat.
    notes, outcomes: each with its time.
    phases: when each phase of its way in was over.
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
        """The number under which it averages."""
        return self.card.seat


def epoch_of(index: int) -> int:
    """The epoch that a process's datagrams carry."""
    return index + 1


def index_of(epoch: int) -> int:
    """The process whose datagrams carry an epoch."""
    return epoch - 1


def run_of(run: Run, peer: PeerId) -> Run:
    """The run with another peer at its other end."""
    return Run(peer, run.key, run.first, run.total, run.payload, run.weight, run.heard, run.mask, run.ended)
