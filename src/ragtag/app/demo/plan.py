"""What the demo does, and what goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass

from ragtag.core.errors import Error
from ragtag.core.faults import Crash, Faults, Freeze, Loss


class DemoError(Error, RuntimeError):
    """A run of the demo did not end as it should; the message says which, and where its output lies."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo does. The faults come at these parts of the time that the calm run took to train.

    settle_s: so long after the freeze the death comes at the earliest.
    """

    peers: int = 6
    rounds: int = 130
    every: int = 8
    seed: int = 0
    loss: float = 0.1
    frozen: int = 2
    frozen_at: float = 0.3
    frozen_for_s: float = 4.0
    killed: int = 4
    killed_at: float = 0.75
    settle_s: float = 2.0

    def faults(self, calm_s: float) -> Faults:
        """All that goes wrong, where the calm run trained for ``calm_s``."""
        thawed_s = self.frozen_at * calm_s + self.frozen_for_s
        return Faults(
            loss=Loss(self.loss),
            freezes=(Freeze(self.frozen, self.frozen_at * calm_s, self.frozen_for_s),),
            crashes=(Crash(self.killed, max(self.killed_at * calm_s, thawed_s + self.settle_s)),),
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        """The peers that are not killed."""
        return tuple(peer for peer in range(self.peers) if peer != self.killed)

    @property
    def story(self) -> str:
        """What goes wrong, in words."""
        return (
            f"{self.loss:.0%} of datagrams dropped, peer {self.frozen} frozen for {self.frozen_for_s:g} s, "
            f"peer {self.killed} killed"
        )
