"""Which number in the crew each peer of a launcher has: its trace names peers as they themselves do."""

from __future__ import annotations

from msgspec.structs import replace

from ragtag.app.environment import Announcement, Place, Reached
from ragtag.app.launch.events import Ended, Seated
from ragtag.app.launch.faults import OF_PROCESSES
from ragtag.app.terminal.output import last_line
from ragtag.core import trace
from ragtag.core.types import PeerId


class Seats:
    """Of the peers that a launcher starts, by its own numbers.

    One that begins a crew has its place's number. One that is invited has none until it has joined, and
    another whenever it joins anew. What is written of one without a number is the crew's, and says of whom.
    """

    def __init__(self) -> None:
        self._seats: dict[PeerId, PeerId] = {}

    def begin(self, number: PeerId, place: Place) -> None:
        """A peer is started, for the first time or again."""
        self._seats[number] = trace.CREW if place.token is not None else place.rank

    def take(self, number: PeerId, told: Announcement) -> Seated | None:
        """What it tells: its new number, if it has joined."""
        if told.reached is not Reached.JOINED or not told.detail.isdecimal():
            return None
        self._seats[number] = int(told.detail)
        return Seated(number, self._seats[number])

    # -- Records

    def error(self, t: float, end: Ended) -> trace.Error:
        """Of a peer that has failed."""
        seat, what = self._of(end.peer), last_line(end.error) or end.how
        if seat < 0:
            what = f"peer {end.peer} of this launcher, before it joined: {what}"
        return trace.Error(t=t, peer=seat, what=what, detail=end.error)

    def lost(self, t: float, number: PeerId, how: str) -> trace.Note:
        """Of a peer that the machine has ended."""
        seat = self._of(number)
        what = "lost" if seat >= 0 else f"peer {number} of this launcher is lost before it joined"
        return trace.Note(t=t, peer=seat, what=what, detail=how)

    def back(self, t: float, number: PeerId) -> trace.Note:
        """Of a peer that was taken for lost."""
        seat = self._of(number)
        return trace.Note(
            t=t, what="back" if seat >= 0 else f"peer {number} of this launcher is back", other=seat
        )

    def fault(self, record: trace.Fault) -> trace.Fault:
        """As it goes to the trace: a fault of the network names a number in the crew already."""
        return replace(record, peer=self._of(record.peer)) if record.name in OF_PROCESSES else record

    def _of(self, number: PeerId) -> PeerId:
        return self._seats.get(number, trace.CREW)
