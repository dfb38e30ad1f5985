"""A peer tells its launcher how far it is."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from ragtag.core.types import PeerId


class Reached(IntEnum):
    """How far a peer is, as it tells its launcher. Each stage comes after the one before."""

    STARTED = 0
    """Its process runs; nothing was told."""
    JOINED = 1
    """``ragtag.join`` has returned."""
    READY = 2
    """What it averages is agreed on with the others."""
    AVERAGED = 3
    """It has ended a round, or published a value."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a peer told its launcher.

    number: as the launcher counts its peers.
    detail: for ``JOINED`` the peer's number in the crew, for ``READY`` by what it averages ("": not told).
    """

    number: PeerId
    reached: Reached
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Announcer:
    """Tells the launcher how far this peer is: once all are ready, the times of faults begin to count.

    number: what the launcher calls this peer. fd: a pipe to it; ``None``: no launcher listens.
    """

    number: PeerId
    fd: int | None

    def tell(self, reached: Reached, detail: object = "") -> None:
        """One announcement; a launcher that is gone hears nothing, and that is no error."""
        if self.fd is None:
            return
        line = f"{self.number} {reached.name.lower()} {detail}".strip()
        with suppress(OSError):  # the launcher has gone: nobody to tell
            os.write(self.fd, line.encode() + b"\n")


_REACHED = {stage.name.lower(): stage for stage in Reached}


def read_announcements(data: bytes) -> list[Announcement]:
    """What peers have told their launcher; what is no announcement is left out."""
    found = []
    for line in data.splitlines():
        number, _, told = line.decode("ascii", "replace").partition(" ")
        name, _, detail = told.partition(" ")
        fits = number.isdecimal() and len(number) <= 4 and len(detail) <= 40 and detail.isprintable()
        if fits and name in _REACHED:
            found.append(Announcement(int(number), _REACHED[name], detail))
    return found
