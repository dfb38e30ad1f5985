"""A simulated crew with seats: membership machines in virtual time, and a roster on top of each.

What ``network.people`` and ``app.membership`` do over sockets is done here at the machines' own times.
"""

from __future__ import annotations

from msgspec.structs import replace

from ragtag.core.faults import Faults
from ragtag.core.types import PEERS_MAX, Joined, Left, Noted, PeerId, Visits
from ragtag.core.wire import VERSION
from ragtag.protocols.membership.roster import (
    NO_SEAT,
    Card,
    Roster,
    RosterEffect,
    Seating,
    Unseated,
    encode_card,
)
from ragtag.protocols.membership.types import Changed, Describe, Entered, MemberEffect, MemberEvent
from ragtag.simulation.worlds.members import Life, MemberWorld, name_of

AVERAGES_AFTER_S = 0.5
"""How long after it has settled a newcomer takes part: it meets the others meanwhile."""


def card_of(peer: int, founded: int, **of: object) -> Card:
    return replace(
        Card(
            VERSION,
            NO_SEAT,
            0,
            200 + peer,
            False,
            f"10.0.{peer >> 8}.{peer & 255}",
            5000 + peer,
            0,
            founded,
            7,
        ),
        **of,
    )


class Seated:
    """One process with its roster. told: what its roster made of changes; part: who averages."""

    def __init__(self, life: Life, card: Card) -> None:
        self.life, self.card = life, card
        self.roster = Roster(life.machine.me.name, life.machine.me.epoch)
        self.seating: Seating | None = None
        self.settled, self.unseated, self.failed = card.averaging, "", ""
        self.told: list[tuple[float, RosterEffect]] = []
        self.part: set[PeerId] = set()

    @property
    def mine(self) -> Card:
        """What it says of itself."""
        assert self.roster.mine is not None
        return self.roster.mine

    def notes(self, what: str) -> list[Noted]:
        """What was noted of one kind."""
        return [told for _, told in self.told if isinstance(told, Noted) and told.what == what]

    def view(self) -> dict[PeerId, tuple[str, bool]]:
        """Who holds which seat, itself with it, and whether that one averages."""
        seats = {p: (h.name, h.card.averaging) for p, h in self.roster.seats.items() if h.live}
        if self.mine.seat >= 0 and not self.roster.contested():
            seats[self.mine.seat] = self.life.machine.me.name, self.mine.averaging
        return seats


class SeatedWorld:
    """``founders`` peers start together with a seat each; others ``come``."""

    def __init__(self, founders: int, faults: Faults, seed: int) -> None:
        self.founders = founders
        self.world = MemberWorld(faults, seed)
        self.world.on_step = self._stepped
        self.members: dict[int, Seated] = {}
        self.all: list[Seated] = []
        for peer in range(founders):
            entries = tuple(other for other in range(founders) if other != peer)
            self._start(peer, entries, card_of(peer, founders, seat=peer, averaging=True))

    def come(self, peer: int, entries: tuple[int, ...]) -> Seated:
        """A process that looks for a seat."""
        return self._start(peer, entries, card_of(peer, 1))

    def running(self) -> list[Seated]:
        """The processes that run, and take part or are on their way."""
        return [m for m in self.members.values() if self.world.is_running(m.life.peer) and not m.life.leaving]

    def run(self, until_s: float) -> None:
        self.world.run(until_s)

    def _start(self, peer: int, entries: tuple[int, ...], card: Card) -> Seated:
        life = self.world.start(peer, entries)
        member = self.members[peer] = Seated(life, card)
        self.all.append(member)
        self._describe(member, card)
        return member

    def _describe(self, member: Seated, card: Card) -> None:
        member.roster.claim(card)
        life = member.life
        if life.ended_s > self.world.now_s:
            self.world.tell(life, Describe(encode_card(card)))

    def _stepped(self, life: Life, event: MemberEvent, effects: list[MemberEffect]) -> None:
        member = next(m for m in self.all if m.life is life)
        for effect in effects:
            if isinstance(effect, Changed):
                for told in member.roster.changed(effect.member, effect.was):
                    self._take(member, told)
            elif isinstance(effect, Entered) and not member.card.averaging:
                machine, now_s = life.machine, self.world.now_s
                member.seating = Seating(member.roster, member.card, now_s, machine.period_s)
                self._look_at(member, member.seating.until_s)
        self._look(member)

    def _take(self, member: Seated, told: RosterEffect) -> None:
        member.told.append((self.world.now_s, told))
        if isinstance(told, Unseated) and member.settled:
            member.unseated = told.reason
            member.settled = False
            self._describe(member, replace(member.mine, seat=NO_SEAT, averaging=False))
        elif isinstance(told, Joined):
            member.part.add(told.peer)
        elif isinstance(told, Left | Visits):
            member.part.discard(told.peer)

    def _look(self, member: Seated) -> None:
        seating, machine = member.seating, member.life.machine
        if seating is None or seating.settled or machine.over or member.failed:
            return
        try:
            claim = seating.look(self.world.now_s, machine.period_s, len(machine.live()), machine.whole)
        except RuntimeError as error:
            member.failed = str(error)
            return
        if claim is not None:
            self._describe(member, claim)
            self._look_at(member, seating.until_s)
        if seating.settled:
            member.settled = True
            self.world.at(self.world.now_s + AVERAGES_AFTER_S, lambda: self._average(member))

    def _look_at(self, member: Seated, at_s: float) -> None:
        self.world.at(at_s, lambda: self._look(member) if member.life.ended_s > self.world.now_s else None)

    def _average(self, member: Seated) -> None:
        if member.settled:
            self._describe(member, replace(member.mine, averaging=True))

    # -- What must hold when all is quiet

    def is_quiet(self) -> bool:
        """Whether all agree now."""
        try:
            self.check_quiet()
        except AssertionError:
            return False
        return self.world.agreed()

    def check_quiet(self) -> None:
        """All agree on who holds which seat, everybody has one of its own, and takes part."""
        running = [member for member in self.running() if not member.unseated]
        assert running
        seats: dict[PeerId, str] = {}
        for member in running:
            assert member.settled, f"{name_of(member.life.peer)} has no seat"
            assert not member.roster.contested()
            assert member.mine.seat not in seats, f"two in seat {member.mine.seat}"
            seats[member.mine.seat] = member.life.machine.me.name
        assert all(0 <= seat < PEERS_MAX for seat in seats)
        want = {seat: (name, True) for seat, name in seats.items()}
        for member in running:
            assert member.view() == want
            assert member.part == set(seats) - {member.mine.seat}
