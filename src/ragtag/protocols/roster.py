"""Seats: under which number each member averages.

Membership knows members by name; averaging knows peers by small numbers, a bit each in a chunk's
contributors. A member tells its seat in its metadata, as a card. There is nobody who gives out seats: a
newcomer takes one that is free in its view. Where two claim one seat all decide alike: who averages already
stays before who only comes, then the later term, then the older process; the other one takes another seat,
or, if it averaged, ends. A seat is given away only once its holder is declared dead or has left, in a
higher term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.core.types import PEERS_MAX, Joined, Left, Noted, PeerId, Visits
from ragtag.core.wire import VERSION
from ragtag.protocols.member_types import HOST_BYTES_MAX, Address, Member, Status

NO_SEAT = -1
CARD_BYTES_MAX = 256
_Port = Annotated[int, Meta(ge=0, le=65535)]


class Card(msgspec.Struct, array_like=True, frozen=True):
    """What a member tells of itself in its metadata.

    wire: version of the data's format. seat, term: under which number it averages, and the how manieth holder
    it is. epoch: in its datagrams, so that another process's are not taken for its own. averaging: whether it
    takes part; else it is on its way in. host, port: where it takes data;
    state_port: where it gives its training state to newcomers (0: nowhere). founded, seed: the crew's.
    """

    wire: Annotated[int, Meta(ge=0, le=255)]
    seat: Annotated[int, Meta(ge=NO_SEAT, lt=PEERS_MAX)]
    term: Annotated[int, Meta(ge=0, lt=1 << 31)]
    epoch: Annotated[int, Meta(ge=0, lt=1 << 32)]
    averaging: bool
    host: Annotated[str, Meta(min_length=1, max_length=HOST_BYTES_MAX)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    state_port: _Port
    founded: Annotated[int, Meta(ge=1, le=PEERS_MAX)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]


_decoder = msgspec.msgpack.Decoder(Card)


def encode_card(card: Card) -> bytes:
    """A card as metadata. Raises ValueError where it is too long (a host's name of 200 letters)."""
    data = msgspec.msgpack.encode(card)
    if len(data) > CARD_BYTES_MAX:
        raise ValueError(f"the host {card.host[:40]!r}... is too long to be told; give its address")
    return data


def decode_card(data: bytes) -> Card | None:
    """A card; ``None`` where it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Reach:
    """Data for ``peer`` goes to ``address`` from now on, to a process whose datagrams carry ``epoch``."""

    peer: PeerId
    address: Address
    epoch: int


@dataclass(frozen=True, slots=True)
class Unseated:
    """This peer's own seat is another's; the reason says whose and why."""

    reason: str


RosterEffect = Reach | Visits | Joined | Left | Noted | Unseated


@dataclass(slots=True)
class Holder:
    """Who has a seat, or had it last."""

    name: str
    epoch: int
    card: Card
    live: bool = True

    @property
    def claim(self) -> tuple[bool, int, int, str]:
        """Of two claims to a seat the greater one holds."""
        return self.card.averaging, self.card.term, -self.epoch, self.name


class Roster:
    """The seats, as one peer sees them; told of each change of membership."""

    def __init__(self, name: str, epoch: int) -> None:
        self._name, self._epoch = name, epoch
        self._mine: Card | None = None
        self._seats: dict[PeerId, Holder] = {}
        self._at: dict[str, PeerId] = {}

    @property
    def seats(self) -> Mapping[PeerId, Holder]:
        """The others' seats, the dead's too."""
        return self._seats

    def seat_of(self, name: str) -> PeerId:
        """A member's seat; -1: none."""
        if name == self._name and self._mine is not None:
            return self._mine.seat
        return self._at.get(name, NO_SEAT)

    def claim(self, card: Card) -> None:
        """This peer says this of itself."""
        self._mine = card

    def contested(self) -> str:
        """Why this peer's claim does not hold, if it does not."""
        mine = self._mine
        holder = self._seats.get(mine.seat) if mine is not None else None
        if mine is None or holder is None or not holder.live:
            return ""
        if holder.claim < Holder(self._name, self._epoch, mine).claim:
            return ""
        return f"seat {mine.seat} is {holder.name}'s"

    def free(self) -> tuple[PeerId, int]:
        """A seat to take, and the term to take it for: of the dead first, so that the crew need not grow.

        Raises:
            RuntimeError: there is none.
        """
        live = {peer: holder for peer, holder in self._seats.items() if holder.live}
        founded = max((holder.card.founded for holder in live.values()), default=0)
        n = max([founded, *(peer + 1 for peer in live)])
        for peer in [*range(n), n]:
            if peer not in live and peer < PEERS_MAX:
                before = self._seats.get(peer)
                return peer, 1 + (before.card.term if before is not None else 0)
        raise RuntimeError(f"all {PEERS_MAX} seats of the crew are taken; larger crews average in groups")

    # -- Changes

    def changed(self, member: Member, was: Status | None) -> list[RosterEffect]:
        """Membership believes something new of a member: what that means to averaging."""
        if member.status in (Status.DEAD, Status.LEFT):
            return self._gone(member)
        seat = self._at.get(member.name, NO_SEAT)
        if member.status is Status.SUSPECT:  # under load this is often; what comes of it is told
            return []
        card = decode_card(member.metadata)
        if card is None or card.wire != VERSION:
            version = "no card" if card is None else f"wire format {card.wire}, {VERSION} here"
            return [Noted("refused", seat, f"{member.name}: {version}; install the same Ragtag everywhere")]
        effects: list[RosterEffect] = []
        if seat >= 0 and card.seat != seat:
            del self._at[member.name]
            self._seats.pop(seat)
            effects.append(Left(seat))
        return effects if card.seat < 0 else effects + self._seated(member, card, was)

    def _seated(self, member: Member, card: Card, was: Status | None) -> list[RosterEffect]:
        peer, before = card.seat, self._seats.get(card.seat)
        new = Holder(member.name, member.epoch, card)
        if self._mine is not None and self._mine.seat == peer:
            if new.claim < Holder(self._name, self._epoch, self._mine).claim:
                return []
            self._seats[peer] = new
            return [Unseated(self.contested())]
        other = before is not None and before.name != member.name
        if before is not None and other and before.live and before.claim > new.claim:
            return [Noted("seat taken", peer, f"{member.name} claims the seat of {before.name}")]
        effects: list[RosterEffect] = []
        if before is not None and other:
            self._at.pop(before.name, None)
            if before.live:
                effects.append(Left(peer))
        process = before is not None and (before.name, before.epoch) == (member.name, member.epoch)
        self._seats[peer], self._at[member.name] = new, peer
        address = (card.host, card.port)
        if not process or before is None or address != (before.card.host, before.card.port):
            effects.append(Reach(peer, address, card.epoch))
        if process and before is not None and before.live and before.card.averaging == card.averaging:
            return effects
        if process and was is Status.DEAD:
            effects.append(Noted("back", peer, f"{member.name} was out of reach, and had been declared dead"))
        elif card.averaging:
            effects.append(Noted("takes part", peer, member.name))
        else:
            effects.append(Noted("comes", peer, member.name))
        return [*effects, Joined(peer) if card.averaging else Visits(peer)]

    def _gone(self, member: Member) -> list[RosterEffect]:
        peer = self._at.get(member.name, NO_SEAT)
        holder = self._seats.get(peer)
        if holder is None or holder.epoch != member.epoch or not holder.live:
            return []
        holder.live = False
        what = "has left" if member.status is Status.LEFT else "declared dead"
        return [Noted(what, peer, member.name), Left(peer)]
