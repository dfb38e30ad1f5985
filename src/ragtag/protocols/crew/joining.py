"""The way into a crew, live and simulated: ``Joining`` until it has met the others, then ``ChannelWay``s.

A driver carries out their effects and tells them what came of it: ``app.crew`` with sockets, ``simulation``
in virtual time. Each state that waits has a timer (``Arm``), so an answer always comes: ``In`` or ``Ends``,
``IsOpen`` or ``Differs``. ``PhaseOver`` tells the end of each phase, in the order of ``PHASES``.

    Joining    what comes                        becomes    and does
    --------------------------------------------------------------------------------------------------
    new        Invited                           asking     AskKey
    asking     Answered, welcome                 new
    asking     Answered, refused or by none      over       Ends
    asking     timer unanswered                  asking     Say: nobody answers yet
    asking     timer asking                      as Answered by none
    new        Sits (a launcher gave the seat)   greeting   Tell hello
    new        Enters, somebody to ask           let in     Knock
    new        Enters, nobody to ask             listening  Listen
    listening  Overheard, somebody               let in     Knock
    listening  Overheard, nobody                 greeting   Knock at nobody, Describes, Make, Tell hello
    listening  timer listening                   as Overheard, nobody
    let in     Looked, inside                    seat       PhaseOver let in
    let in     timer silence                     let in     Say: nobody answers yet
    let in     Looked, over; timer let in        over       Ends
    seat       Looked, nobody has a seat yet     seat
    seat       Looked, a seat is free            seat       Describes: claim it
    seat       Looked, no trainer, none trains   seat
    seat       Looked, its claim is contested    seat       Describes: claim another
    seat       Looked, settled, it is first      greeting   PhaseOver seat, Describes, Make, Tell hello
    seat       Looked, settled, others average   greeting   PhaseOver seat, Make, Tell hello, late
    seat       Looked, settled, nobody averages  awaiting   PhaseOver seat
    seat       Looked, settled, all are clients  over       Ends
    seat       Looked, over, or none is free     over       Ends
    seat       timer deadline                    over       Ends
    awaiting   Looked, somebody averages         greeting   Make, Tell hello, late
    awaiting   Looked, over; timer deadline      over       Ends
    greeting   Heard, it goes on                 in         Left (the refused), PhaseOver greeting, In
    greeting   Heard, others are more or equal   over       Ends
    greeting   Heard, all are clients            over       Ends
    greeting   Heard, nobody                     over       Ends
    greeting   timer greeting                    as Heard, nobody
    greeting   Unseat, it came to membership     new        Anew; the 16th time over, Ends
    greeting   Unseat, a launcher gave the seat  over       Ends

    ChannelWay what comes                        becomes    and does
    --------------------------------------------------------------------------------------------------
    new        Start                             schema     Tell schema
    schema     Heard, others are more or equal   over       Differs
    schema     Heard, some differ, not late      agreeing   Left (the refused), Tell: it is agreed
    schema     Heard, nobody averages yet        probing    Left, PhaseOver schema, ProbeRound
    schema     Heard, it or the channel is late  open       Left, PhaseOver schema, IsOpen
    schema     timer schema                      as Heard, nobody
    agreeing   Heard; timer agreeing             probing or open, as from schema
    probing    Timed, not the last one           probing    ProbeRound
    probing    Timed, the last; timer probing    open       IsOpen
    open       Fetching                          state
    state      StateHere                         heard      PhaseOver state, TakesPart
    open       StateHere                         heard      TakesPart (no state, or by other ways)
    heard      Newer; Nobody; timer heard        average    PhaseOver heard
    average    Done, with others                 in         PhaseOver average
    average    StateHere                         heard      TakesPart, anew

Events in any other state are ignored. Times are of the caller's clock, which never goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from ragtag.core.channels import channel_of
from ragtag.core.schema import Schema
from ragtag.core.types import (
    Arm,
    Done,
    Expired,
    Joined,
    Left,
    Met,
    Outcome,
    PeerId,
    Role,
    Start,
    Tell,
    Timer,
    Visits,
)
from ragtag.core.wire import VERSION, name_hash
from ragtag.protocols.membership.invitation import Said
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.roster import Card, Roster, Seating
from ragtag.protocols.membership.types import Address
from ragtag.protocols.node import Node

PHASES = ("let in", "seat", "greeting", "schema", "state", "heard", "average")
"""The phases of a newcomer's way in, by the names that a trace has for them."""
GREETING = 0
"""The number of the first meeting."""
LISTEN_S = 3 * INITIAL_RTO_S
"""How long the peer that a token names listens whether there is a crew. A crew's members send it something a
few times in each period. No round trip is known yet, so this follows from RFC 6298's first guess. A peer that
was let in by others that have no seats waits as long before it begins the crew with them. They may be
newcomers, which it overheard before it could hear of the crew."""
SEATS_TRIED_MAX = 16
PROBE_CHUNKS = 512
"""About half a megabyte: long against a round trip, short against a model."""
LAST_PROBE = 1
"""The round of the last probe."""
_RTT_MIN_S = 1e-4
_TOOK_MIN_S = 1e-6


class Hello(msgspec.Struct, frozen=True):
    """What peers tell each other first. All but their roles must be equal."""

    ragtag: str
    wire: int
    size: int
    seed: int
    role: Role = Role.TRAINER


def read_hello(blob: bytes) -> Hello:
    """A peer's hello. Raises ValueError: the bytes are none."""
    try:
        return msgspec.json.decode(blob, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


# -- What comes


@dataclass(frozen=True, slots=True)
class Invited:
    """The peer has an invitation: a member's answer brings the crew's key."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What members said to an invitation. refused: the words of each that refused, by its address."""

    welcome: bool
    refused: Mapping[str, Said]


@dataclass(frozen=True, slots=True)
class Enters:
    """The peer goes to a crew's membership.

    roster, card: its own.
    entries: members that it asks to be let in. None: it listens where others ask, and may begin the crew.
    at: where it listens.
    """

    roster: Roster
    card: Card
    entries: tuple[Address, ...]
    at: str = ""


@dataclass(frozen=True, slots=True)
class Overheard:
    """The members of the crew that send something to the place where the peer listens."""

    entries: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """How the peer's membership stands: told whenever that has changed, and at timers.

    inside: a member has let it in.
    over: it is no member any more.
    failure: why.
    period_s: the protocol's period.
    n: how many members live.
    whole: the list of members has come to its end.
    """

    inside: bool
    over: bool
    failure: str
    period_s: float
    n: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Sits:
    """A launcher has given the peer a seat: ``me`` of ``n``, in a crew of this seed."""

    me: PeerId
    n: int
    seed: int
    role: Role = Role.TRAINER


@dataclass(frozen=True, slots=True)
class Heard:
    """A meeting is over, with what the node knows by now.

    n: places of the crew.
    gone: peers that have left.
    rtt_s: the longest time that a peer took to answer.
    heard_of: the newest round from which anything came; -1: none.
    other_versions: datagrams of the crew in another wire format.
    """

    met: Met
    n: int
    gone: frozenset[PeerId]
    rtt_s: float = 0.0
    heard_of: int = -1
    other_versions: int = 0


@dataclass(frozen=True, slots=True)
class Unseat:
    """Another peer has this one's seat."""

    why: str


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a probe's longer stage took (``None``: a peer died meanwhile).

    rtt_s: as in ``Heard``.
    round: which probe it was. A peer that comes late to the first goes on with the others in the second.
    """

    took_s: float | None
    rtt_s: float
    round: int = 0

    @classmethod
    def of(cls, outcome: Outcome, rtt_s: float) -> Timed:
        """What a probe's outcome says."""
        took_s = None if outcome.expired else max(outcome.scatter_s, outcome.gather_s)
        return cls(took_s, rtt_s, outcome.round)


@dataclass(frozen=True, slots=True)
class Fetching:
    """The peer has begun to fetch the crew's state."""


@dataclass(frozen=True, slots=True)
class StateHere:
    """The state of a round is here; -1: none came, or none is needed."""

    round: int = -1


@dataclass(frozen=True, slots=True)
class Newer:
    """Something of a newer round was heard: the others know that this peer averages."""


@dataclass(frozen=True, slots=True)
class Nobody:
    """No other peer is there to begin a newer round."""


# -- What is to be done


@dataclass(frozen=True, slots=True)
class AskKey:
    """Ask the members that the invitation names for the crew's key. ``Answered`` follows."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen whether a member of the crew sends something here. ``Overheard`` follows."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Knock:
    """Have membership ask these members to let the peer in (none: the crew begins here)."""

    entries: tuple[Address, ...]
    for_s: float


@dataclass(frozen=True, slots=True)
class Describes:
    """Tell the crew this card of the peer."""

    card: Card


@dataclass(frozen=True, slots=True)
class Make:
    """Make the node, with ``node_of``. card: says which seat. late: others average already."""

    card: Card
    n: int
    late: bool


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the log."""

    text: str
    warning: bool = True


@dataclass(frozen=True, slots=True)
class PhaseOver:
    """A phase is over."""

    phase: str
    took_s: float


@dataclass(frozen=True, slots=True)
class In:
    """The peer is in, and has met so many others."""

    met: int


@dataclass(frozen=True, slots=True)
class Anew:
    """Give up everything and enter again (``Enters``). tried: how many seats were lost by now."""

    tried: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The peer does not get in. seat: since another has the seat that a launcher gave it."""

    why: str
    seat: bool = False


@dataclass(frozen=True, slots=True)
class Differs:
    """The peer averages something else than the others, and cannot go on."""

    why: str


@dataclass(frozen=True, slots=True)
class ProbeRound:
    """Average so many chunks of zeros once, within ``for_s``. ``Timed`` follows."""

    chunks: int
    for_s: float


@dataclass(frozen=True, slots=True)
class IsOpen:
    """The channel is ready, and its first round may take ``probe_s``. late: fetch the crew's state first."""

    probe_s: float
    late: bool


@dataclass(frozen=True, slots=True)
class TakesPart:
    """Tell the crew that the peer averages from now on, after ``round``. ``Newer`` or ``Nobody`` follows."""

    round: int


JoiningEvent = Invited | Answered | Enters | Overheard | Looked | Sits | Heard | Unseat | Expired
JoiningEffect = (
    AskKey | Listen | Knock | Describes | Make | Tell | Left | Say | PhaseOver | In | Anew | Ends | Arm
)  # ``Tell`` and ``Left`` are for the node
ChannelEvent = Start | Heard | Timed | Fetching | StateHere | Newer | Nobody | Done | Expired
ChannelEffect = Tell | Left | Say | PhaseOver | Differs | ProbeRound | IsOpen | TakesPart | Arm


# -- Words


def waiting(crew: str, asked: str, left_s: float | None) -> str:
    """The line to log while no member has answered. left_s: how much longer the peer waits, if known."""
    more = "" if left_s is None else f", {left_s:.0f} s more"
    return f"nobody of crew {crew!r} answers yet at {asked}; waiting for them{more}"


def refusal(crew: str, refused: Mapping[str, Said]) -> str:
    """Why the members that an invitation names do not let its holder in."""
    where = ", ".join(list(refused)[:4])
    if Said.ENDED in refused.values():
        return f"the invitation to crew {crew!r} has ended, by the clock of {where}; make a new one"
    if Said.REVOKED in refused.values():
        return (
            f"the token to crew {crew!r} was revoked, {where} says; ask whoever holds the crew's token for a "
            "new one"
        )
    return (
        f"{where} does not know this invitation: it is of another crew, of an earlier one, or it was "
        "changed; run `ragtag invite` again"
    )


def _these(peers: Collection[PeerId]) -> str:
    *others, last = map(str, peers)
    return f"peers {', '.join(others)} and {last}" if others else f"peer {last}"


def outvoted_by(mine: Hashable, theirs: Mapping[PeerId, Hashable]) -> list[PeerId]:
    """The largest side that differs from this peer, if it is no smaller than this peer's own side.

    mine, theirs: what each peer says; peers that say the same are one side. Empty: this peer goes on,
    without those that differ. In a tie both sides end.
    """
    sides: dict[Hashable, list[PeerId]] = {}
    for peer, said in theirs.items():
        sides.setdefault(said, []).append(peer)
    agreeing = 1 + len(sides.pop(mine, []))
    largest = max(sides.values(), key=len, default=[])
    return largest if len(largest) >= agreeing else []


def node_of(card: Card, n: int, roster: Roster) -> Node:
    """The node of a peer with a seat. It knows which peers average, are on their way in, or are gone."""
    node = Node(card.seat, n, card.seed, card.founded, card.role)
    held = roster.seats
    for peer in set(range(n)) - {card.seat}:
        holder = held.get(peer)
        if holder is None or not holder.live:
            node.step(0.0, Left(peer))
        elif not holder.card.averaging:
            node.step(0.0, Visits(peer, holder.card.role))
        elif holder.card.role is not Role.TRAINER:
            node.step(0.0, Joined(peer, holder.card.role))
    return node


class _State(StrEnum):
    NEW = "new"
    ASKING = "asking"
    LISTENING = "listening"
    LET_IN = "let in"
    SEAT = "seat"
    AWAITING = "awaiting"
    GREETING = "greeting"
    IN = "in"
    OVER = "over"
    SCHEMA = "schema"
    AGREEING = "agreeing"
    PROBING = "probing"
    OPEN = "open"
    STATE = "state"
    HEARD = "heard"
    AVERAGE = "average"


class Joining:
    """One process's way to a seat, and to the others that it averages with.

    crew: the crew's name.
    version: of Ragtag.
    deadline_s: how long it waits for others.
    asked: the addresses that its token names, as text.
    """

    def __init__(self, crew: str, version: str, deadline_s: float, asked: str = "") -> None:
        self.crew, self.version, self.deadline_s, self.asked = crew, version, deadline_s, asked
        self.state = _State.NEW
        self.late = False
        self.tried = 0
        self._since_s = self._until_s = self._begins_s = 0.0
        self._entry: Enters | None = None
        self._seating: Seating | None = None
        self._hello: Hello | None = None
        self._me, self._n = 0, 1

    @property
    def over(self) -> bool:
        """Whether the peer is in, or never will be."""
        return self.state in (_State.IN, _State.OVER)

    @property
    def looks(self) -> bool:
        """Whether it is to be told how membership stands (``Looked``)."""
        return self.state in (_State.LET_IN, _State.SEAT, _State.AWAITING)

    def step(self, now_s: float, event: JoiningEvent) -> list[JoiningEffect]:
        """Take one event and say what to do."""
        if isinstance(event, Expired):
            return self._expired(now_s, event.timer)
        if isinstance(event, Looked):
            return self._looked(now_s, event)
        if isinstance(event, Heard) and self.state is _State.GREETING:
            return self._greeted(now_s, event)
        if isinstance(event, Unseat) and self.state is _State.GREETING:
            return self._unseated(event.why)
        if isinstance(event, Overheard) and self.state is _State.LISTENING:
            return self._knock(now_s, event.entries) if event.entries else self._begin_crew(now_s)
        if isinstance(event, Answered) and self.state is _State.ASKING:
            return self._answered(event)
        if self.state is _State.NEW:
            return self._begin(now_s, event)
        return []

    def _begin(self, now_s: float, event: JoiningEvent) -> list[JoiningEffect]:
        if isinstance(event, Invited):
            self.state, self._until_s = _State.ASKING, now_s + self.deadline_s
            silence_s = min(INITIAL_RTO_S, self.deadline_s)
            timers = [self._arm("unanswered", now_s + silence_s), self._arm("asking", self._until_s)]
            return [AskKey(self.deadline_s), *timers]
        if isinstance(event, Sits):
            self._entry, self._me, self._n = None, event.me, event.n
            return self._greet(now_s, event.n, event.seed, event.role)
        if isinstance(event, Enters):
            self._entry = event
            if event.entries:
                return self._knock(now_s, event.entries)
            self.state = _State.LISTENING
            return [Listen(LISTEN_S), self._arm("listening", now_s + LISTEN_S)]
        return []

    def _expired(self, now_s: float, timer: Timer) -> list[JoiningEffect]:
        if timer.round != self.tried:
            return []
        if timer.name == "asking" and self.state is _State.ASKING:
            return self._answered(Answered(False, {}))
        if timer.name == "listening" and self.state is _State.LISTENING:
            return self._begin_crew(now_s)
        waits = {_State.ASKING: "unanswered", _State.LET_IN: "silence"}
        if timer.name == waits.get(self.state):
            return [Say(waiting(self.crew, self.asked, self._until_s - now_s))]
        if timer.name == ("let in" if self.state is _State.LET_IN else "deadline"):
            return self._too_late()
        if timer.name == "greeting" and self.state is _State.GREETING:
            nobody = Met(GREETING, {}, tuple(sorted(set(range(self._n)) - {self._me})))
            return self._greeted(now_s, Heard(nobody, self._n, frozenset()))
        return []

    def _too_late(self, failure: str = "") -> list[JoiningEffect]:
        """The peer did not come in in time, or is no member any more."""
        if self.state is _State.LET_IN:
            return self._end(failure or f"no member let this peer in within {self.deadline_s:g} s")
        if self.state is _State.SEAT and not (self._begins_none and not self._others_average()):
            return self._end(
                failure
                or f"no seat could be taken within {self.deadline_s:g} s: "
                "others claimed the same ones each time"
            )
        if self.state in (_State.SEAT, _State.AWAITING):
            return self._end(
                failure
                or "none of those that let this peer in averages; start the peer that begins the crew, on "
                "the machine that the token names"
            )
        return []

    def _end(self, why: str, seat: bool = False) -> list[JoiningEffect]:
        self.state = _State.OVER
        return [Ends(why, seat)]

    def _arm(self, name: str, at_s: float) -> Arm:
        return Arm(Timer(GREETING, self.tried, name), at_s)

    # -- Let in

    def _answered(self, event: Answered) -> list[JoiningEffect]:
        if event.welcome:
            self.state = _State.NEW
            return []
        if event.refused:
            return self._end(refusal(self.crew, event.refused))
        return self._end(
            f"no member of crew {self.crew!r} answered at {self.asked} within {self.deadline_s:g} s; does "
            "the crew still train, and does the firewall let UDP through?"
        )

    def _knock(self, now_s: float, entries: tuple[Address, ...]) -> list[JoiningEffect]:
        self.state, self._since_s = _State.LET_IN, now_s
        self._until_s = now_s + self.deadline_s
        return [
            Knock(entries, self.deadline_s),
            self._arm("silence", now_s + min(INITIAL_RTO_S, self.deadline_s)),
            # membership itself gives up at the deadline, and says why
            self._arm("let in", self._until_s + INITIAL_RTO_S),
            self._arm("deadline", self._until_s),
        ]

    def _begin_crew(self, now_s: float) -> list[JoiningEffect]:
        """No member is there: the crew begins here."""
        assert self._entry is not None
        where = f"this peer begins crew {self.crew!r} at {self._entry.at}"
        begins: list[JoiningEffect] = [Knock((), self.deadline_s), Say(f"nobody is there yet: {where}")]
        return begins + self._make(now_s, self._entry.card, first=True)

    # -- A seat

    def _looked(self, now_s: float, seen: Looked) -> list[JoiningEffect]:
        if not self.looks:
            return []
        effects: list[JoiningEffect] = []
        if self.state is _State.LET_IN and seen.inside:
            assert self._entry is not None
            self._seating = Seating(self._entry.roster, self._entry.card, now_s, seen.period_s)
            self._begins_s = now_s + min(LISTEN_S, (self._until_s - now_s) / 2)
            timers = [self._arm("seat", at_s) for at_s in (self._seating.until_s, self._begins_s)]
            effects = [self._passed(now_s), *timers]
            self.state = _State.SEAT
        if seen.over:
            return effects + self._too_late(seen.failure)
        if self.state is _State.SEAT:
            effects += self._sit(now_s, seen)
        elif self.state is _State.AWAITING and self._others_average():
            effects += self._make(now_s, self._card(), first=False)
        return effects

    def _card(self) -> Card:
        assert self._seating is not None
        return self._seating.card

    def _sit(self, now_s: float, seen: Looked) -> list[JoiningEffect]:
        seating, entry = self._seating, self._entry
        assert seating is not None and entry is not None
        if not seating.claimed and not entry.roster.living() and now_s < self._begins_s:
            return []  # it may have been let in by another newcomer, which knows no more of the crew
        until_s = seating.until_s
        try:
            claim = seating.look(now_s, seen.period_s, seen.n, seen.whole)
        except RuntimeError as error:
            return self._end(str(error))
        if claim is not None:
            return [Describes(claim), self._arm("seat", seating.until_s)]
        if not seating.settled:
            return [self._arm("seat", seating.until_s)] if seating.until_s != until_s else []
        passed, others, card = self._passed(now_s), self._others_average(), seating.card
        if others and not card.role.owns and not entry.roster.owned:
            return self._end(only_clients(self.crew))
        # the first peer with a seat has told all that it begins (``Seating``): they wait for it by now
        if card.averaging or (not entry.entries and not others):
            return [passed, *self._make(now_s, card, first=True)]
        if others:
            return [passed, *self._make(now_s, card, first=False)]
        self.state = _State.AWAITING
        return [passed]

    @property
    def _begins_none(self) -> bool:
        return self._entry is not None and self._entry.card.role is not Role.TRAINER

    def _others_average(self) -> bool:
        assert self._entry is not None
        return self._entry.roster.trains

    def _make(self, now_s: float, card: Card, first: bool) -> list[JoiningEffect]:
        """The peer has its seat. first: it averages before all others, which take part later."""
        assert self._entry is not None
        effects: list[JoiningEffect] = []
        self.late = not first
        if first:
            card = replace(card, seat=max(0, card.seat), averaging=True)
            effects.append(Describes(card))
        held = self._entry.roster.seats.items()
        n = max(card.founded, card.seat + 1, *(peer + 1 for peer, holder in held if holder.live))
        self._me, self._n = card.seat, n
        return [*effects, Make(card, n, self.late), *self._greet(now_s, card.founded, card.seed, card.role)]

    def _passed(self, now_s: float) -> PhaseOver:
        """The phase under way ends, and the next one begins."""
        phase, since_s, self._since_s = self.state.value, self._since_s, now_s
        return PhaseOver(phase, now_s - since_s)

    # -- Greeting

    def _greet(self, now_s: float, size: int, seed: int, role: Role) -> list[JoiningEffect]:
        self.state, self._since_s = _State.GREETING, now_s
        self._hello = Hello(self.version, VERSION, size, seed, role)
        blob = msgspec.json.encode(self._hello)
        return [
            Tell(GREETING, blob, now_s + self.deadline_s, self.late),
            self._arm(
                "greeting", now_s + 2 * self.deadline_s + 1.0
            ),  # the node's meeting is over long before
        ]

    def _greeted(self, now_s: float, heard: Heard) -> list[JoiningEffect]:
        assert self._hello is not None
        met, others = heard.met, set(range(heard.n)) - {self._me}
        refused, largest = _differing(self._hello, met.blobs)
        if largest:
            return self._end(refused[largest[0]])
        effects: list[JoiningEffect] = []
        for peer, why in refused.items():
            effects += [Say(f"peer {peer} is refused: {why}"), Left(peer)]
        absent = tuple(peer for peer in met.missing if peer not in heard.gone)
        there = [read_hello(blob).role for peer, blob in met.blobs.items() if peer not in refused]
        if there and not absent and not any(role.owns for role in (self._hello.role, *there)):
            return effects + self._end(only_clients(self.crew))
        if absent and heard.other_versions:
            speak = "speaks" if len(absent) == 1 else "speak"
            message = (
                f"{_these(absent)} of crew {self.crew!r} {speak} another wire format than version "
                f"{VERSION}; install the same version of Ragtag ({self.version} here) on every peer"
            )
            if len(absent) >= 1 + len(met.blobs) - len(refused):  # the smaller side ends, as above
                return effects + self._end(message)
            effects.append(Say(message))
        begins = heard.n == 1 or (self._entry is not None and not self.late)
        if begins and others <= heard.gone:  # no other is there yet, or only peers that take part later
            return effects + self._enter(now_s, 0)
        if not met.blobs:
            return effects + self._end(self._nobody(heard.n))
        if absent:
            waited_s = min(self.deadline_s, round(now_s - self._since_s, 1))
            without = f"{_these(absent)} did not answer within {waited_s:g} s; going on without"
            effects.append(Say(without))
        return effects + self._enter(now_s, len(met.blobs) - len(refused))

    def _enter(self, now_s: float, met: int) -> list[JoiningEffect]:
        passed = self._passed(now_s)
        self.state = _State.IN
        return [passed, In(met)]

    def _nobody(self, n: int) -> str:
        of = f"of crew {self.crew!r}"
        nobody = (
            f"the other peer {of} did not answer"
            if n == 2
            else (f"none of the other {n - 1} peers {of} answered")
        )
        return (
            f"{nobody} within {self.deadline_s:g} s; are they started, with the same crew name, and does the "
            "firewall let UDP through?"
        )

    def _unseated(self, why: str) -> list[JoiningEffect]:
        """Another peer has claimed the same seat at the same time."""
        if self._entry is None:
            return self._end(why, seat=True)
        self.tried += 1
        looking = Say(f"looking for another seat: {why}", warning=False)
        if self.tried >= SEATS_TRIED_MAX:
            lost = f"others took the seat that this peer wanted, {SEATS_TRIED_MAX} times; start it again"
            return [looking, *self._end(lost)]
        self.state, self.late = _State.NEW, False
        return [looking, Anew(self.tried)]


def only_clients(crew: str) -> str:
    """Why a client ends where all others are clients, too."""
    return (
        f"all peers of crew {crew!r} are clients, which own nothing of what is averaged, so nobody averages; "
        "start one at least without --client (or client=True, or RAGTAG_ROLE), or an auxiliary "
        "(ragtag join --auxiliary)"
    )


def _differing(mine: Hello, blobs: Mapping[PeerId, bytes]) -> tuple[dict[PeerId, str], list[PeerId]]:
    """Why each peer with another hello is refused, and the side that this peer gives way to."""
    hellos: dict[PeerId, Hello | None] = {}
    refused: dict[PeerId, str] = {}
    for peer, blob in blobs.items():
        try:
            theirs = hellos[peer] = replace(read_hello(blob), role=mine.role)
        except ValueError as error:
            hellos[peer] = None
            refused[peer] = f"peer {peer} says no hello that can be read ({error}); is it Ragtag?"
            continue
        if theirs != mine:
            refused[peer] = _difference(peer, mine, theirs)
    return refused, outvoted_by(mine, hellos)


def _difference(peer: PeerId, mine: Hello, theirs: Hello) -> str:
    what, here, there = next(
        (what, here, there)
        for what, here, there in (
            ("version of Ragtag", mine.ragtag, theirs.ragtag),
            ("number of peers", mine.size, theirs.size),
            ("seed", mine.seed, theirs.seed),
            ("wire format", mine.wire, theirs.wire),
        )
        if here != there
    )
    return f"peer {peer} has another {what}: {there} there, {here} here; make them equal"


class ChannelWay:
    """How one channel is opened, and how a late peer comes to its first average on it.

    channel: also the number of the meeting in which schemas are compared.
    chunks: of a round.
    deadline_s: how long it waits for others.
    late: the crew averaged on the channel before this peer came.
    there: the peers that open it (``None``: all).
    probes: the channel of its probes, its own: others repair them after they have gone on.
    """

    def __init__(
        self,
        me: PeerId,
        channel: int,
        schema: Schema,
        chunks: int,
        deadline_s: float,
        late: bool = False,
        there: frozenset[PeerId] | None = None,
    ) -> None:
        self._me, self._channel, self._schema, self._chunks = me, channel, schema, chunks
        self.deadline_s, self._late, self._there = deadline_s, late, there
        self.probes = channel_of(f"{channel}/probe")
        self.probe_chunks = min(chunks, PROBE_CHUNKS)
        self.state = _State.NEW
        self._since_s = 0.0
        self._rtt_s, self._heard_of = 0.0, -1
        self._first_took_s: float | None = None

    def step(self, now_s: float, event: ChannelEvent) -> list[ChannelEffect]:
        """Take one event and say what to do."""
        state = self.state
        if isinstance(event, Expired):
            return self._expired(now_s, event.timer.name)
        if isinstance(event, Start) and state is _State.NEW:
            return self._meet(now_s, _State.SCHEMA, self._channel, self._schema.encode())
        if isinstance(event, Heard) and state is _State.SCHEMA:
            return self._compare(now_s, event)
        if isinstance(event, Heard) and state is _State.AGREEING:
            self._rtt_s, self._heard_of = event.rtt_s, event.heard_of
            return self._agreed(now_s)
        if isinstance(event, Timed) and state is _State.PROBING:
            return self._timed(now_s, event)
        if isinstance(event, Fetching) and state is _State.OPEN:
            self.state, self._since_s = _State.STATE, now_s
            return []
        if isinstance(event, StateHere) and state in (
            _State.OPEN,
            _State.STATE,
            _State.HEARD,
            _State.AVERAGE,
        ):
            return self._take_part(now_s, event.round)
        if isinstance(event, Newer | Nobody) and state is _State.HEARD:
            return [self._passed(now_s, _State.AVERAGE)]
        if isinstance(event, Done) and state is _State.AVERAGE and event.outcome.averaged.any():
            return [self._passed(now_s, _State.IN)]
        return []

    def _expired(self, now_s: float, name: str) -> list[ChannelEffect]:
        if name != self.state.value:
            return []
        nobody = Heard(Met(self._channel, {}, ()), 1, frozenset())
        if self.state is _State.SCHEMA:
            return self._compare(now_s, nobody)
        if self.state is _State.AGREEING:
            return self._agreed(now_s)
        if self.state is _State.PROBING:
            return self._timed(now_s, Timed(None, self._rtt_s, LAST_PROBE))
        if self.state is _State.HEARD:
            waited = f"within {self.deadline_s:g} s; going on"
            said = Say(f"nothing was heard of the crew's rounds {waited}")
            return [self._passed(now_s, _State.AVERAGE), said]
        return []

    def _passed(self, now_s: float, then: _State) -> PhaseOver:
        phase, since_s = self.state.value, self._since_s
        self.state, self._since_s = then, now_s
        return PhaseOver(phase, now_s - since_s)

    def _arm(self, at_s: float) -> Arm:
        return Arm(Timer(self._channel, 0, self.state.value), at_s)

    def _meet(self, now_s: float, state: _State, number: int, blob: bytes) -> list[ChannelEffect]:
        first = state is _State.SCHEMA
        self.state = state
        if first:
            self._since_s = now_s
        tell = Tell(number, blob, now_s + self.deadline_s, first and self._late, self._there)
        return [tell, self._arm(now_s + 2 * self.deadline_s)]  # the node's meeting is over long before

    def _compare(self, now_s: float, heard: Heard) -> list[ChannelEffect]:
        """Schemas are known: the larger side goes on, the others end."""
        mine, self._rtt_s, self._heard_of = self._schema, heard.rtt_s, heard.heard_of
        theirs: dict[PeerId, Schema | str] = {}
        for peer, blob in heard.met.blobs.items():
            try:
                theirs[peer] = Schema.decode(blob)
            except ValueError as error:
                theirs[peer] = str(error)
        effects: list[ChannelEffect] = []
        coming = frozenset(heard.met.missing) if self._there is None else self._there
        missing = [peer for peer in heard.met.missing if peer in coming - heard.gone]
        if missing:
            has = "has" if len(missing) == 1 else "have"
            effects.append(Say(f"{_these(missing)} {has} not made {self._what} yet; going on without"))
        if larger := outvoted_by(mine, theirs):
            self.state = _State.OVER
            why = (
                f"peer {self._me} averages something else than {_these(larger)}: "
                f"{self._difference(theirs[larger[0]])}. Build the same model, with the same averager and "
                "settings, on every peer"
            )
            return [*effects, Differs(why)]
        differing = {peer: other for peer, other in theirs.items() if other != mine}
        for peer, other in differing.items():
            what = f"peer {peer} is refused, it averages something else: {self._difference(other)}"
            effects += [Say(what), Left(peer)]
        if differing and not self._late:  # a crew that averages holds no such meeting any more
            # no peer averages before all take them for gone, or peers would differ in the blocks' owners
            agreed = name_hash(f"agreed/{self._channel}")
            return effects + self._meet(now_s, _State.AGREEING, agreed, b"")
        return effects + self._agreed(now_s)

    def waits_for(self, peers: Collection[PeerId], at_most_s: float) -> Say:
        """What is said where others take long to come to this channel."""
        return Say(
            f"waiting for {_these(peers)} to make {self._what}, as all do, for {at_most_s:.0f} s at most"
        )

    @property
    def _what(self) -> str:
        """What others are to make, in words: a model, or by its name what has named tensors."""
        name, named, _ = self._schema.content.partition(": ")
        return f"{name!r}" if named else "a model"

    def _difference(self, other: Schema | str) -> str:
        return other if isinstance(other, str) else self._schema.difference(other) or ""

    def _agreed(self, now_s: float) -> list[ChannelEffect]:
        """Probe, unless others average already: then no peer is left to probe with."""
        self.state = _State.SCHEMA
        passed = self._passed(now_s, _State.PROBING)
        if not self._late and self._heard_of < 0:
            return [passed, *self._probe(now_s)]
        self.state = _State.OPEN
        opened = IsOpen(2.0 * max(_RTT_MIN_S, self._rtt_s), self._late)
        if self._late:
            return [passed, opened]
        by_rtt = "this peer comes late; its first deadlines come from round trips alone"
        return [passed, Say(by_rtt, warning=False), opened]

    def _probe(self, now_s: float) -> list[ChannelEffect]:
        return [ProbeRound(self.probe_chunks, self.deadline_s), self._arm(now_s + 2 * self.deadline_s)]

    def _timed(self, now_s: float, event: Timed) -> list[ChannelEffect]:
        """A probe is over. The first one brings peers into step, and the second one is timed.

        Peers come to the first from meetings, which end as far apart as a lost message of theirs takes to be
        sent again, and that is no time that values take. Where a peer died in a probe, it lasted until its
        deadline and measured nothing. It is followed by the second one all the same, as others wait in that
        for each that they met.
        """
        if event.round < LAST_PROBE:
            self._first_took_s = event.took_s
            return self._probe(now_s)
        # of one that was cut off the first says more
        took_s = event.took_s or self._first_took_s or 2.0 * event.rtt_s
        self.state = _State.OPEN
        return [IsOpen(max(took_s, _TOOK_MIN_S) * self._chunks / self.probe_chunks, self._late)]

    def _take_part(self, now_s: float, round_: int) -> list[ChannelEffect]:
        passed: list[ChannelEffect] = (
            [self._passed(now_s, _State.HEARD)] if self.state is _State.STATE else []
        )
        self.state, self._since_s = _State.HEARD, now_s
        return [*passed, TakesPart(round_), self._arm(now_s + self.deadline_s)]
