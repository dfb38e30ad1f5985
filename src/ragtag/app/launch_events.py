"""What a launcher tells while peers run, and how a run ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragtag.core import trace
from ragtag.core.types import PeerId

EndedBy = Literal["itself", "fault", "launcher"]


@dataclass(frozen=True, slots=True)
class Started:
    """A peer's process runs."""

    peer: PeerId
    pid: int


@dataclass(frozen=True, slots=True)
class Line:
    """A peer has printed a line; ``error``: on its standard error."""

    peer: PeerId
    text: str
    error: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """All peers that run have joined; the times of faults count from now."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault has been done to a peer, or has begun on the network."""

    record: trace.Fault


@dataclass(frozen=True, slots=True)
class Ended:
    """A peer has ended.

    status: its exit status, or minus the number of the signal that ended it. by: who ended it.
    error: its traceback, where it left one. same_as: the peer that failed with this error before.
    shown: whether its traceback has come as lines already.
    """

    peer: PeerId
    status: int
    by: EndedBy
    error: str = ""
    same_as: PeerId | None = None
    shown: bool = False

    @property
    def failed(self) -> bool:
        """Whether the peer ended badly of its own accord."""
        return self.by == "itself" and self.status != 0

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
class Said:
    """Something the launcher has to say."""

    text: str


Event = Started | Line | Ready | Injected | Ended | Said


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a run ended: ``ends`` by peer number; ``signal``: the one that interrupted the run, or 0."""

    ends: tuple[Ended, ...]
    run_folder: Path | None
    wall_s: float
    signal: int = 0

    @property
    def failed(self) -> tuple[PeerId, ...]:
        """The peers that ended badly of their own accord (those that a fault killed did not)."""
        return tuple(end.peer for end in self.ends if end.failed)

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: a peer failed; 128 + the signal that interrupted the run."""
        return 128 + self.signal if self.signal else int(bool(self.failed))
