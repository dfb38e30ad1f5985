"""What is to be simulated, and how a central state's schedule is named (``--method softsync=2``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers, check_sides
from ragtag.core.names import named
from ragtag.core.types import PEERS_MAX
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.channel.averagers import AVERAGERS, averager_named
from ragtag.schedules.centre import Arrival, Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.schedules.names import CENTRES, SCHEDULES

__all__ = ["CENTRES", "method_of", "schedule_of"]


def schedule_of(text: str, peers: int) -> Centre | ProgressiveGrouping | None:
    """The schedule that a text names; ``None``: it names none.

    Raises ValueError: its number is none, or one that the schedule has no answer for in a crew of ``peers``.
    """
    if text.partition("=")[0] not in CENTRES:
        return None
    schedule = named(text, CENTRES, "schedule")
    if not isinstance(schedule, ProgressiveGrouping):
        schedule.judge(Arrival(0, 0, 1, peers))
    return schedule


def method_of(schedule: Centre | ProgressiveGrouping) -> Averager:
    """A central state under this schedule."""
    from ragtag.training.exchange.central import (
        Centre as central,  # needs torch, which other methods do without
    )

    return central(cast(Centre, schedule))


FLOOR_S = 1e-4
"""The shortest round trip."""


class ExperimentError(Error, ValueError):
    """What was asked for cannot be simulated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class ExperimentSetup:
    """A simulated run.

    values: length of each peer's vector.
    rounds: until round number ``rounds`` is done.
    compute_s: a local step's mean time.
    compute_sigma: of its logarithm, drawn per peer and step.
    check: hold the simulator's invariants meanwhile, and at the end heal the network and demand that all hear
        all again; in groups, that the values of all come to all. A central state has no such end, and is not
        checked.
    method: of ``AVERAGERS`` (``moshpit=4``), or a schedule of a central state (``centres.CENTRES``), as
        ``softsync=2``. Then a round is a peer's own turn, of which the first only takes the state. The run
        ends as soon as one peer has done its last. So disagreement is between peers after as many turns, at
        different times.

    In groups a line without delay takes ``FLOOR_S`` there and back: a peer that is asked again for what is
    missing would else answer in no time, for ever.
    """

    peers: int = 16
    values: int = 100_000
    rounds: int = 20
    method: str = "rps"
    faults: Faults = field(default_factory=Faults)
    compute_s: float = 0.1
    compute_sigma: float = 0.1
    seed: int = 0
    check: bool = False

    def __post_init__(self) -> None:
        for name in ("values", "rounds"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.compute_s < float("inf") or not 0 <= self.compute_sigma < float("inf"):
            raise ExperimentError(
                f"compute takes {self.compute_s} s, sigma {self.compute_sigma}; neither below 0"
            )
        try:
            centred = schedule_of(self.method, self.peers) is not None
            check_peers(self.faults, self.peers)
            check_sides(self.faults, self.peers)
        except ValueError as error:
            raise ExperimentError(str(error)) from None
        averager = averager_of(self.method)
        if not centred and averager is None:
            there = f"there are {', '.join([*AVERAGERS, *CENTRES])}"
            if self.method.partition("=")[0] in SCHEDULES:
                raise ExperimentError(
                    f"{self.method!r} says when a script averages, schedule={self.method!r}, and simulated "
                    f"peers average after every step; {there}"
                )
            raise ExperimentError(f"no method is called {self.method!r}; {there}")
        most = PEERS_MAX if averager is None else averager.seats_max
        if not 1 <= self.peers <= most:
            more = "" if most > PEERS_MAX else "; more average in groups: --method moshpit=8"
            raise ExperimentError(f"{self.peers} peers: {self.method} averages 1 to {most}{more}")
        if centred and self.check:
            raise ExperimentError(
                f"check demands a round that hears all in the end; {self.method} has none: leave it out"
            )

    @property
    def channel_method(self) -> Averager:
        """What averages."""
        schedule = schedule_of(self.method, self.peers)
        averager = averager_of(self.method) if schedule is None else method_of(schedule)
        assert averager is not None  # or no such setup could be made
        return averager

    @property
    def line(self) -> Faults:
        """The faults of the world that this runs in."""
        if self.in_groups and not self.faults.latency_s:
            return replace(self.faults, latency_s=FLOOR_S / 2)
        return self.faults

    @property
    def centred(self) -> bool:
        """Whether it is a schedule of a central state."""
        return schedule_of(self.method, self.peers) is not None

    @property
    def in_groups(self) -> bool:
        """Whether peers average in groups."""
        return self.channel_method.kind == "in groups"


def averager_of(name: str) -> Averager | None:
    """The averager of this name; ``None``: there is none.

    Raises:
        ExperimentError: it takes no such number.
    """
    if name.partition("=")[0] not in AVERAGERS:
        return None
    try:
        return averager_named(name)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
