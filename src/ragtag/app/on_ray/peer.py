"""A peer as its launcher sees it: what is asked of its actor at the moment, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ragtag.app.environment import Reached
from ragtag.app.launch.events import Ended, EndedBy
from ragtag.app.on_ray.actor import Came
from ragtag.app.on_ray.script import End
from ragtag.app.terminal.output import SeenErrors
from ragtag.core.types import PeerId


class Stage(Enum):
    """How far a peer is."""

    COMING = "coming"
    """Ray is looking for a place for its actor, or starts it again."""
    HERE = "here"
    """It waits for the crew to begin."""
    STARTING = "starting"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True)
class RayPeer:
    """One peer.

    actor: Ray's handle; came: where its present process is; again_s: when to ask for it again; starts: how
    often the script was started; reached: how far the peer has come since the last start.
    """

    number: PeerId
    actor: Any
    stage: Stage = Stage.COMING
    came: Came | None = None
    again_s: float | None = None
    starts: int = 0
    reached: Reached = Reached.STARTED

    @property
    def joined(self) -> bool:
        """Whether it averages with its crew."""
        return self.reached >= Reached.READY

    @property
    def up(self) -> bool:
        """Whether its script runs, or is about to."""
        return self.stage in (Stage.STARTING, Stage.RUNNING)


def explain(peer: RayPeer, end: End, by: EndedBy, seen: SeenErrors) -> Ended:
    """How a peer's script ended, for whoever watches."""
    number = peer.number
    failed = by == "itself" and end.status != 0
    shown = end.passed_on if end.status == 1 and not end.held else ""  # it took long to end
    error = (end.held or shown) if failed else ""
    same_as = seen.same_as(number, error)
    return Ended(number, end.status, by, error, same_as, bool(shown), peer.reached)
