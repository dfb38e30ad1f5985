"""What is to be simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragtag.app.experiment.centres import CENTRES, method_of, schedule_of
from ragtag.core.errors import Error
from ragtag.core.faults import Faults
from ragtag.core.faultspec import check_peers
from ragtag.core.types import PEERS_MAX
from ragtag.protocols.allreduce import direct, ring
from ragtag.protocols.method import Method
from ragtag.protocols.rps import rps, rps_repair

METHODS: dict[str, Method] = {method.name: method for method in (rps, rps_repair, direct, ring)}


class ExperimentError(Error, ValueError):
    """What was asked for cannot be simulated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A simulated run.

    values: length of each peer's vector. rounds: until round number ``rounds`` is done. compute_s: a local
    step's mean time; compute_sigma: of its logarithm, drawn per peer and step. check: hold the simulator's
    invariants meanwhile, and at the end heal the network and demand that all hear all again.

    method: of ``METHODS``, or a schedule of a central state (``centres.CENTRES``), as ``softsync=2``. Then
    a round is a peer's own turn, of which the first only takes the state, and the run ends as soon as one
    peer has done its last: disagreement is between peers after as many turns, at different times.
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
        if not 1 <= self.peers <= PEERS_MAX:
            raise ExperimentError(f"{self.peers} peers: one crew averages 1 to {PEERS_MAX} peers directly")
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
        except ValueError as error:
            raise ExperimentError(str(error)) from None
        if not centred and self.method not in METHODS:
            there = ", ".join([*METHODS, *CENTRES])
            raise ExperimentError(f"no method is called {self.method!r}; there are {there}")
        if centred and self.check:
            raise ExperimentError(
                f"check demands a round that hears all in the end; {self.method} has none: leave it out"
            )

    @property
    def channel_method(self) -> Method:
        """What averages."""
        schedule = schedule_of(self.method, self.peers)
        return METHODS[self.method] if schedule is None else method_of(schedule)
