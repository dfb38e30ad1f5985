"""What a launcher tells while peers run, and how a run ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragtag.app.environment import Reached
from ragtag.core import trace
from ragtag.core.types import PeerId

EndedBy = Literal["itself", "fault", "launcher"]


@dataclass(frozen=True, slots=True)
class Started:
    """A peer's process runs."""

    peer: PeerId
    pid: int


@dataclass(frozen=True, slots=True)
class Printed:
    """A peer has printed a line.

    error: on its standard error.
    """

    peer: PeerId
    text: str
    error: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """All peers that run have joined; the times of faults count from now."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Seated:
    """A peer has joined its crew, for the first time or anew.

    seat: its number there.
    """

    peer: PeerId
    seat: PeerId


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault has been done to a peer, or has begun on the network."""

    record: trace.Fault


@dataclass(frozen=True, slots=True)
class Ended:
    """A peer has ended.

    status: its exit status, or minus the number of the signal that ended it.
    by: what ended it.
    error: its traceback, where it left one.
    same_as: the peer that failed with this error before.
    shown: whether its traceback has come as lines already.
    reached: how far it came.
    """

    peer: PeerId
    status: int
    by: EndedBy
    error: str = ""
    same_as: PeerId | None = None
    shown: bool = False
    reached: Reached = Reached.STARTED

    @property
    def finished(self) -> bool:
        """Whether its script came to its end, and averaged with the crew (a crew of one: with itself)."""
        return self.status == 0 and self.reached is Reached.AVERAGED

    @property
    def lost(self) -> bool:
        """Whether a signal has ended it that its launcher did not send, or a fault: the machine's doing."""
        return self.by == "fault" or (self.by == "itself" and self.status < 0)

    @property
    def failed(self) -> bool:
        """Whether its script ended with an error of its own."""
        return self.by == "itself" and self.status > 0

    @property
    def how(self) -> str:
        """The way it ended, in words."""
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            return f"ended by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"ended by signal {-self.status}"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something the launcher has to say."""

    text: str


Event = Started | Printed | Ready | Seated | Injected | Ended | Remark


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a run ended.

    ends: by peer number, the last one of a peer that was started again.
    wall_s: how long the run took.
    signal: the one that interrupted it, or 0.
    stopped: whether the end of a peer has ended the others.
    min_peers: so many must have finished.
    restarts: how often a lost peer was started again.
    """

    ends: tuple[Ended, ...]
    run_folder: Path | None
    wall_s: float
    signal: int = 0
    stopped: bool = False
    min_peers: int = 1
    restarts: int = 0

    @property
    def finished(self) -> tuple[PeerId, ...]:
        """The peers that came to their end and averaged."""
        return tuple(end.peer for end in self.ends if end.finished)

    @property
    def failed(self) -> tuple[PeerId, ...]:
        """The peers whose script ended with an error of its own."""
        return tuple(end.peer for end in self.ends if end.failed)

    @property
    def exit_code(self) -> int:
        """0: no script failed, and at least ``min_peers`` finished; 1: else; 128 + the signal that
        interrupted the run.
        """
        if self.signal:
            return 128 + self.signal
        return int(bool(self.failed) or self.stopped or len(self.finished) < self.min_peers)
