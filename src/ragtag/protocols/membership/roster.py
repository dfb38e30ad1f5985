"""Seats: the number under which each member averages, and a newcomer's way to one.

Membership knows members by name; averaging knows peers by small numbers, a bit each in a chunk's
contributors. A member tells its seat in its metadata, as a card. No peer gives out seats: a newcomer claims
one that is free in its view. Where two claim one seat all decide alike: a peer that averages goes before one
that comes, then the later term, then the process (``Holder.claim``). The other takes another seat, or ends if
it averaged. A seat is given away only once its holder is declared dead or has left, in a higher term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.core.address import family_of, unusable
from ragtag.core.types import LARGER_CREWS, PEERS_MAX, SEATS_MAX, Joined, Left, Noted, PeerId, Role, Visits
from ragtag.core.wire import VERSION
from ragtag.protocols.membership.passes import PROOF_BYTES_MAX, read_proof
from ragtag.protocols.membership.probe import ANNOUNCED_MAX
from ragtag.protocols.membership.types import HOST_BYTES_MAX, Address, Member, Status
from ragtag.protocols.sealing.sessions import CARD_BYTES

NO_SEAT = -1
CARD_BYTES_MAX, PROVEN_CARD_BYTES_MAX = 256, 512
"""Of a card; and of one that proves a person."""
_OBJECT_PERIODS = 2.0
"""For so many periods others may object. All hear of a claim at once and answer; gossip brings what was
lost."""
_Port = Annotated[int, Meta(ge=0, le=65535)]


class Card(msgspec.Struct, array_like=True, frozen=True):
    """What a member tells of itself in its metadata.

    wire: version of the data's format.
    seat: the number under which it averages.
    term: counts the holders of the seat.
    epoch: in its datagrams, so that another process's are not taken for its own.
    averaging: whether it takes part; else it is on its way in.
    host, port: where it takes data.
    state_port: where it gives its training state to newcomers; 0: nowhere.
    founded, seed: the crew's.
    seats: how many seats the crew may have, by all that it averages.
    key: for sessions (``protocols.sealing``); empty: it sends its data in clear.
    inner_host, inner_port: where it takes data within its own network, if a router translates its addresses
        (NAT); else empty, and 0.
    proof: whose process it is, in a crew that takes persons (``passes.Proof``); else empty.
    role: what it does once it takes part.
    """

    wire: Annotated[int, Meta(ge=0, le=255)]
    seat: Annotated[int, Meta(ge=NO_SEAT, lt=SEATS_MAX)]
    term: Annotated[int, Meta(ge=0, lt=1 << 31)]
    epoch: Annotated[int, Meta(ge=0, lt=1 << 32)]
    averaging: bool
    host: Annotated[str, Meta(min_length=1, max_length=HOST_BYTES_MAX)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    state_port: _Port
    founded: Annotated[int, Meta(ge=1, le=SEATS_MAX)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]
    seats: Annotated[int, Meta(ge=1, le=SEATS_MAX)] = PEERS_MAX
    key: Annotated[bytes, Meta(max_length=CARD_BYTES)] = b""
    inner_host: Annotated[str, Meta(max_length=HOST_BYTES_MAX)] = ""
    inner_port: _Port = 0
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES_MAX)] = b""
    role: Role = Role.TRAINER

    @property
    def trains(self) -> bool:
        """Whether it averages values of its own."""
        return self.averaging and self.role.gives

    @property
    def person(self) -> str:
        """Whose process it is; empty: the crew takes no persons."""
        read = read_proof(self.proof) if self.proof else None
        return "" if read is None else read.shown.person


_decoder = msgspec.msgpack.Decoder(Card)


def encode_card(card: Card) -> bytes:
    """A card as metadata. Raises ValueError: it is too long, by a host's name of 200 letters."""
    data = msgspec.msgpack.encode(card)
    if len(data) > (PROVEN_CARD_BYTES_MAX if card.proof else CARD_BYTES_MAX):
        raise ValueError(f"the host {card.host[:40]!r}... is too long to be told; give its address")
    return data


def decode_card(data: bytes) -> Card | None:
    """A card; ``None``: the data are none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Reach:
    """From now on data for ``peer`` goes to ``address``, to a process whose datagrams carry ``epoch``."""

    peer: PeerId
    address: Address
    epoch: int


@dataclass(frozen=True, slots=True)
class Unseated:
    """Another peer has this one's seat. The reason says which and why."""

    reason: str


RosterEffect = Reach | Visits | Joined | Left | Noted | Unseated


@dataclass(slots=True)
class Holder:
    """The member that has a seat, or had it last."""

    name: str
    epoch: int
    card: Card
    live: bool = True

    @property
    def claim(self) -> tuple[bool, int, int, str]:
        """Of two claims to a seat the greater one holds.

        Of two that average in one term it is the later process: no peer averages before it has the seat, and
        a seat is given away only to newcomers. Terms repeat, since newcomers hear nothing of the dead. Of two
        that come it is the older process, so that one that has settled already stays.
        """
        averaging = self.card.averaging
        return averaging, self.card.term, self.epoch if averaging else -self.epoch, self.name


class Roster:
    """The seats, as one peer sees them. It is told of each change of membership.

    A seat belongs to its greatest living claim, in whatever order claims and deaths are heard of. So peers
    that believe the same of all members see the same seats. Its tables are bounded by membership's.

    seals: whether this peer encrypts what it sends, as all of a crew do or none.
    """

    def __init__(self, name: str, epoch: int, seals: bool = False) -> None:
        self._name, self._epoch, self._seals = name, epoch, seals
        self._mine: Card | None = None
        self._claims: dict[str, Holder] = {}
        self._refused: dict[str, str] = {}  # members that cannot average with this peer, and why
        self._claimed: dict[PeerId, dict[str, Holder]] = {}  # the same by seat
        self._seats: dict[PeerId, Holder] = {}
        self._terms: dict[PeerId, int] = {}

    @property
    def mine(self) -> Card | None:
        """This peer's own card."""
        return self._mine

    @property
    def seats(self) -> Mapping[PeerId, Holder]:
        """The others' seats, those of the dead too."""
        return self._seats

    def at(self, address: Address) -> tuple[PeerId, bytes] | None:
        """The seat and key of the living member that takes data at an address; ``None``: there is none."""
        for peer, holder in self._seats.items():
            if holder.live and self.way_to(holder.card) == address:
                return peer, holder.card.key
        return None

    def there(self, peer: PeerId) -> tuple[Address, bytes] | None:
        """Where the living member that has a seat takes data, and its card's key; ``None``: there is none."""
        holder = self._seats.get(peer)
        return (self.way_to(holder.card), holder.card.key) if holder is not None and holder.live else None

    def living(self) -> list[PeerId]:
        """The seats of the others that live."""
        return [peer for peer, holder in self._seats.items() if holder.live]

    def way_to(self, card: Card) -> Address:
        """Where this peer sends a member's data.

        Two peers behind one router reach each other within their network: few routers send back what came
        from inside (RFC 4787, section 6).
        """
        mine = self._mine
        if mine is not None and mine.inner_host and card.inner_host and mine.host == card.host:
            return card.inner_host, card.inner_port
        return card.host, card.port

    def seat_of(self, name: str) -> PeerId:
        """The seat that a member has, or had last; -1: none."""
        if name == self._name and self._mine is not None:
            return self._mine.seat
        claim = self._claims.get(name)
        if claim is not None and self._seats.get(claim.card.seat) is claim:
            return claim.card.seat
        return next((peer for peer, holder in self._seats.items() if holder.name == name), NO_SEAT)

    def claim(self, card: Card) -> None:
        """This peer tells this card of itself."""
        before, self._mine = self._mine, card
        for peer in {card.seat, before.seat if before is not None else NO_SEAT} - {NO_SEAT}:
            self._terms[peer] = max(self._terms.get(peer, 0), card.term if peer == card.seat else 0)
            self._settle(peer, None)

    @property
    def trains(self) -> bool:
        """Whether another peer averages values of its own, as this one believes."""
        return any(holder.live and holder.card.trains for holder in self._seats.values())

    @property
    def owned(self) -> bool:
        """Whether another peer owns a share of what is averaged, as this one believes."""
        return any(h.live and h.card.averaging and h.card.role.owns for h in self._seats.values())

    @property
    def unfit(self) -> str:
        """Why this peer can average with no member that there is; empty: it can, or there is none."""
        if not self._refused or any(holder.live for holder in self._seats.values()):
            return ""
        name, why = next(iter(self._refused.items()))
        return f"{name} {why}"

    def contested(self) -> str:
        """Why this peer's claim does not hold; empty: it does."""
        mine = self._mine
        holder = self._seats.get(mine.seat) if mine is not None else None
        if mine is None or holder is None or not holder.live:
            return ""
        return f"seat {mine.seat} is {holder.name}'s"

    @property
    def room(self) -> int:
        """How many seats the crew may have: more than ``PEERS_MAX`` where all averaging is in groups."""
        cards = [holder.card for holder in self._claims.values()]
        if any(card.founded > PEERS_MAX or card.seat >= PEERS_MAX for card in cards):
            return SEATS_MAX
        return min((card.seats for card in cards if card.averaging), default=PEERS_MAX)

    def rivals(self, card: Card) -> int:
        """How many members have a better claim to a card's seat than this peer would have by that card."""
        mine = Holder(self._name, self._epoch, card).claim
        return sum(holder.claim > mine for holder in self._claimed.get(card.seat, {}).values())

    def free(self, after: int = 0) -> tuple[PeerId, int]:
        """A seat to take, and the term to take it for. Seats of the dead go first, so that the crew need not
        grow.

        after: how many free seats to leave to others that look for one, too. In a large crew many come at
            once, and would all claim the same ones. A smaller crew should rather not grow.

        Raises:
            RuntimeError: no seat is free.
        """
        room = self.room
        after = after if room > PEERS_MAX else 0
        taken = {holder.card.seat for holder in self._claims.values()}
        founded = max((holder.card.founded for holder in self._claims.values()), default=0)
        n = max([founded, *(peer + 1 for peer in taken)])
        free = [peer for peer in range(min(n + 1 + after, room)) if peer not in taken]
        if free:
            peer = free[min(after, len(free) - 1)]
            return peer, 1 + self._terms.get(peer, 0)
        why = LARGER_CREWS if room < SEATS_MAX else "a crew has no more"
        raise RuntimeError(f"all {room} seats of the crew are taken; {why}")

    # -- Changes

    def changed(self, member: Member, was: Status | None) -> list[RosterEffect]:
        """Membership believes something new of a member: what follows for averaging."""
        if member.status is Status.SUSPECT:  # frequent under load; death or refutation is told
            return []
        self._refused.pop(member.name, None)
        before = self._claims.get(member.name)
        if member.status in (Status.DEAD, Status.LEFT):
            if before is None or before.epoch != member.epoch:
                return []
            self._withdraw(member.name)
            return self._settle(before.card.seat, member)
        card = decode_card(member.metadata)
        if card is None or (why := self._unfit(card)):
            return self._refuse(
                member, "has no card; install the same Ragtag everywhere" if card is None else why
            )
        self._withdraw(member.name)
        if card.seat >= 0:
            holder = Holder(member.name, member.epoch, card)
            self._claims[member.name] = self._claimed.setdefault(card.seat, {})[member.name] = holder
            self._terms[card.seat] = max(self._terms.get(card.seat, 0), card.term)
        moved = before is not None and before.card.seat != card.seat
        effects = self._settle(before.card.seat, member) if before is not None and moved else []
        return effects if card.seat < 0 else effects + self._settle(card.seat, member, before)

    def _withdraw(self, name: str) -> Holder | None:
        """A member claims nothing any more."""
        holder = self._claims.pop(name, None)
        if holder is not None:
            del self._claimed[holder.card.seat][name]
        return holder

    def _unfit(self, card: Card) -> str:
        """Why this peer cannot average with a member that tells this card; empty: it can."""
        if card.wire != VERSION:
            return f"has wire format {card.wire}, {VERSION} here; install the same Ragtag everywhere"
        if bool(card.key) != self._seals:
            one, other = ("seals", "this peer does not") if card.key else ("does not seal", "this peer does")
            return (
                f"{one} what it sends, and {other}. Peers do where their address is not loopback, unless "
                "RAGTAG_SEAL says on or off: set it alike for all"
            )
        family = 0 if self._mine is None else family_of(self._mine.host)
        why = unusable(self.way_to(card), family)
        return f"takes data where nothing can be sent: {why}" if why else ""

    def _refuse(self, member: Member, why: str) -> list[RosterEffect]:
        """A member that has another wire format, or cannot be reached, has no seat."""
        self._refused[member.name] = why
        before = self._withdraw(member.name)
        seat = NO_SEAT if before is None else before.card.seat
        left = [] if before is None else self._settle(seat, member)
        return [Noted("refused", seat, f"{member.name} {why}"), *left]

    def _settle(self, peer: PeerId, told: Member | None, was: Holder | None = None) -> list[RosterEffect]:
        """Find a seat's holder, now that news of ``told`` came. was: what ``told`` claimed before."""
        claims = self._claimed.get(peer, {})
        best = max(claims.values(), key=lambda holder: holder.claim, default=None)
        before = self._seats.get(peer)
        if self._mine is not None and self._mine.seat == peer:
            return self._defend(peer, best, self._mine)
        if best is None:
            if before is None or not before.live:
                return []
            before.live = False
            return [*_gone(peer, before, told), Left(peer)]
        effects: list[RosterEffect] = []
        claimed = told is not None and self._claims.get(told.name)
        if (
            told is not None
            and claimed
            and claimed is not best
            and claimed != was
            and claimed.card.seat == peer
        ):
            effects.append(Noted("seat taken", peer, f"{told.name} claims the seat of {best.name}"))
        return effects + self._seat(peer, best, told)

    def _defend(self, peer: PeerId, best: Holder | None, mine: Card) -> list[RosterEffect]:
        """See whether this peer's own seat is still its own. best: the best other claim."""
        before = self._seats.get(peer)
        if best is None or best.claim < Holder(self._name, self._epoch, mine).claim:
            self._seats.pop(peer, None)
            return []
        self._seats[peer] = best
        known = before is not None and before.live and (before.name, before.epoch) == (best.name, best.epoch)
        return [] if known else [Unseated(self.contested())]

    def _seat(self, peer: PeerId, holder: Holder, told: Member | None) -> list[RosterEffect]:
        """``holder`` has the seat: what follows if that is new."""
        before = self._seats.get(peer)
        if before is holder:
            return []
        self._seats[peer] = holder
        effects: list[RosterEffect] = []
        known = before is not None and (before.name, before.epoch) == (holder.name, holder.epoch)
        same = before if known else None  # the process as it was before
        card, address = holder.card, self.way_to(holder.card)
        if before is not None and same is None and before.live:
            effects += [*_gone(peer, before, told), Left(peer)]
        if same is None or address != self.way_to(same.card):
            effects.append(Reach(peer, address, card.epoch))
        if same is not None and same.live and same.card.averaging == card.averaging:
            return effects
        if not card.role.gives:
            effects.append(Noted("assists" if card.averaging else "comes", peer, holder.name))
        elif same is not None and not same.live:
            why = f"{holder.name} was out of reach, and had been declared dead"
            effects.append(Noted("back", peer, why))
        else:
            as_client = "" if card.role.owns else ", a client"
            effects.append(Noted("takes part" if card.averaging else "comes", peer, holder.name + as_client))
        if not card.averaging:
            return [*effects, Visits(peer, card.role)]
        return [*effects, Joined(peer, card.role, same is not None and same.card.averaging)]


def _gone(peer: PeerId, holder: Holder, told: Member | None) -> list[RosterEffect]:
    """The note on a seat's last holder, if the news ``told`` are of it."""
    if told is None or (told.name, told.epoch) != (holder.name, holder.epoch):
        return []
    what = {Status.LEFT: "has left", Status.DEAD: "declared dead"}.get(told.status)
    return [] if what is None else [Noted(what, peer, holder.name)]


class Seating:
    """A newcomer's way to a seat: hear which members there are, claim a free seat, and wait for objections.

    Call ``look`` whenever something has changed, and at ``until_s``.

    card: what the newcomer tells of itself.
    until_s: when what it waits for is over, by the period as it is known now. One that was let in before it
        could measure a round trip has a guess of seconds at first.
    settled: its claim holds.
    """

    def __init__(self, roster: Roster, card: Card, now_s: float, period_s: float) -> None:
        self._roster, self.card = roster, card
        self._since_s, self._periods = now_s, 2.0  # by then the rest of a long list of members is here
        self.until_s = now_s + self._periods * period_s
        self.settled = False

    @property
    def claimed(self) -> bool:
        """Whether it has claimed a seat, which may be contested."""
        return self.card.seat >= 0

    def look(self, now_s: float, period_s: float, n: int, whole: bool = False) -> Card | None:
        """Look at the roster. A card that this returns is to be told to the crew, of ``n`` members, at once.

        whole: the list of members has come to its end.

        Raises:
            RuntimeError: no seat is free.
        """
        if self.settled:
            return None
        self.until_s = self._since_s + self._periods * period_s
        if self.claimed and not self._roster.contested():
            self.settled = now_s >= self.until_s
            return None
        if not self.claimed and not whole and now_s < self.until_s:
            return None
        if self.card.role is not Role.TRAINER and not self._roster.trains:
            return None  # it begins no crew
        self.card = self._next()
        spread = math.log2(n / ANNOUNCED_MAX) if n > ANNOUNCED_MAX else 0.0  # periods until all have heard
        self._since_s, self._periods = now_s, _OBJECT_PERIODS + spread
        self.until_s = now_s + self._periods * period_s
        return self.card

    def _next(self) -> Card:
        """The next claim. Where no member has a seat yet, the first to have one begins the crew."""
        holders = [holder for holder in self._roster.seats.values() if holder.live]
        founded, seed = self.card.founded, self.card.seed
        if holders:
            first = min(holders, key=lambda holder: holder.epoch).card
            founded, seed = first.founded, first.seed
        lost = self._roster.rivals(self.card) if self.claimed else 0
        seat, term = self._roster.free(max(0, lost - 1))
        return msgspec.structs.replace(
            self.card, seat=seat, term=term, averaging=not holders, founded=founded, seed=seed
        )
