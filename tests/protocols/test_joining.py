"""The way in, row by row of its table, and what it answers whatever comes in whatever order, or never."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.schema import Schema, TensorSpec
from ragtag.core.types import Arm, Done, Expired, Left, Met, Role, Start, Tell, Timer
from ragtag.core.wire import VERSION, name_hash
from ragtag.protocols.crew import joining as module
from ragtag.protocols.crew.joining import (
    GREETING,
    LISTEN_S,
    PROBE_CHUNKS,
    SEATS_TRIED_MAX,
    Anew,
    Answered,
    AskKey,
    ChannelEvent,
    ChannelWay,
    Describes,
    Differs,
    Ends,
    Enters,
    Fetching,
    Heard,
    Hello,
    In,
    Invited,
    IsOpen,
    Joining,
    JoiningEvent,
    Knock,
    Listen,
    Looked,
    Make,
    Newer,
    Nobody,
    Overheard,
    PhaseOver,
    ProbeRound,
    Say,
    Sits,
    StateHere,
    TakesPart,
    Timed,
    Unseat,
    outvoted_by,
)
from ragtag.protocols.membership.invitation import Said
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.roster import Roster, encode_card
from ragtag.protocols.membership.types import Member, Status
from tests.protocols.rostered import card_of

DEADLINE_S, PERIOD_S = 10.0, 0.5
ENTRIES = (("10.0.0.0", 4000),)
OLD, YOUNG = 20, 100
ROWS: dict[tuple[str, str, str], Callable[[], None]] = {}


def row(machine: str, state: str, comes: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(test: Callable[[], None]) -> Callable[[], None]:
        assert (machine, state, comes) not in ROWS
        ROWS[machine, state, comes] = test
        return test

    return keep


def rows_of_the_table() -> list[tuple[str, str, str]]:
    rows, machine = [], ""
    for line in (module.__doc__ or "").splitlines():
        if "what comes" in line:
            machine = line.split()[0]
        elif machine and line.startswith("    ") and not line.strip().startswith("-"):
            rows.append((machine, line[4:15].strip(), line[15:49].strip()))
    return rows


@pytest.mark.parametrize("at", rows_of_the_table(), ids=": ".join)
def test_row(at: tuple[str, str, str]) -> None:
    ROWS[at]()


def test_every_test_of_a_row_is_of_a_row_that_is_there() -> None:
    assert set(ROWS) == set(rows_of_the_table())


# -- A way in at each state


class Way:
    """A way in, its roster, and all that it has wanted."""

    def __init__(self, begins: bool = False) -> None:
        self.joining = Joining("otters", "1.0", DEADLINE_S, "here:1")
        self.roster, self.card, self.now_s = Roster("me", 50), card_of(9, 1), 100.0
        self.entries = () if begins else ENTRIES
        self.all: list[Any] = []

    def __call__(self, event: JoiningEvent, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        effects = self.joining.step(self.now_s, event)
        for effect in effects:
            if isinstance(effect, Describes):
                self.roster.claim(effect.card)
        self.all += effects
        return list(effects)

    @property
    def state(self) -> str:
        return self.joining.state.value

    def member(self, seat: int, averaging: bool = True, epoch: int = OLD, term: int = 0) -> None:
        card = card_of(seat, 2, seat=seat, averaging=averaging, term=term)
        told = Member(f"m{seat}", ("10.0.0.1", 4000 + seat), epoch, 0, Status.ALIVE, encode_card(card))
        self.roster.changed(told, None)

    def enters(self) -> list[Any]:
        return self(Enters(self.roster, self.card, self.entries, "here:1"))

    def looks(
        self, inside: bool = True, over: bool = False, failure: str = "", after_s: float = 0.0
    ) -> list[Any]:
        return self(Looked(inside, over, failure, PERIOD_S, 2, True), after_s)

    def seats(self) -> list[Any]:
        """A claim that nobody contests holds."""
        self.looks()
        self.looks(after_s=LISTEN_S)
        return self.looks(after_s=2 * PERIOD_S)

    def timer(self, name: str) -> list[Any]:
        arms = [effect for effect in self.all if isinstance(effect, Arm) and effect.timer.name == name]
        self.now_s = max(self.now_s, arms[-1].at_s)
        return self(Expired(arms[-1].timer))


def kinds(effects: list[Any]) -> list[type]:
    return [type(effect) for effect in effects if not isinstance(effect, Arm)]


def ends(effects: list[Any]) -> str:
    (end,) = (effect for effect in effects if isinstance(effect, Ends))
    return end.why


def hello(**of: object) -> bytes:
    return msgspec.json.encode({"ragtag": "1.0", "wire": VERSION, "size": 3, "seed": 7, **of})


def heard(blobs: dict[int, bytes], missing: tuple[int, ...] = (), n: int = 3, **of: Any) -> Heard:
    return Heard(Met(GREETING, blobs, missing), n, of.pop("gone", frozenset()), **of)


def asking() -> Way:
    way = Way()
    assert kinds(way(Invited())) == [AskKey]
    return way


def listening() -> Way:
    way = Way(begins=True)
    assert kinds(way.enters()) == [Listen]
    return way


def let_in(begins: bool = False) -> Way:
    way = listening() if begins else Way()
    way(Overheard(ENTRIES)) if begins else way.enters()
    assert way.state == "let in"
    return way


def in_seat(averaging: bool = True, begins: bool = False) -> Way:
    way = let_in(begins)
    way.member(0, averaging)
    way.looks()
    assert way.state == "seat"
    return way


def awaiting() -> Way:
    way = in_seat(averaging=False)
    assert kinds(way.looks(after_s=2 * PERIOD_S)) == [PhaseOver]
    return way


def greeting() -> Way:
    """Of peers 0 to 2 it is number 0, by its launcher."""
    way = Way()
    assert kinds(way(Sits(0, 3, 7))) == [Tell]
    return way


def came() -> Way:
    way = in_seat()
    way.looks(after_s=2 * PERIOD_S)
    assert way.state == "greeting"
    return way


# -- Joining


def test_a_seat_is_looked_at_again_when_its_time_is_known_to_be_shorter() -> None:
    """Else only something that comes would have it looked at before a guess of seconds is over."""
    way = let_in()
    way.member(0)
    way(Looked(True, False, "", 50 * PERIOD_S, 2, True))
    claimed_s = way.now_s
    (arm,) = way(Looked(True, False, "", PERIOD_S, 2, True), 0.01)
    assert arm == Arm(arm.timer, pytest.approx(claimed_s + 2 * PERIOD_S)) and arm.timer.name == "seat"
    assert way(Looked(True, False, "", PERIOD_S, 2, True), 0.01) == []


@row("Joining", "new", "Invited")
def _() -> None:
    way = Way()
    asks, *arms = way(Invited())
    assert asks == AskKey(DEADLINE_S)
    assert [(arm.timer.name, arm.at_s) for arm in arms] == [
        ("unanswered", 100 + INITIAL_RTO_S), ("asking", 100 + DEADLINE_S),
    ]  # fmt: skip


@row("Joining", "asking", "Answered, welcome")
def _() -> None:
    way = asking()
    assert way(Answered(True, {})) == []
    assert kinds(way.enters()) == [Knock]


@row("Joining", "asking", "Answered, refused or by none")
def _() -> None:
    assert "'otters' has ended, by the clock of a:1" in ends(asking()(Answered(False, {"a:1": Said.ENDED})))
    way = asking()
    assert ends(way(Answered(False, {"a:1": Said.UNKNOWN}))).startswith("a:1 does not know this invitation")
    assert way.state == "over"
    assert ends(asking()(Answered(False, {}))) == (
        "no member of crew 'otters' answered at here:1 within 10 s; does the crew still train, and does the "
        "firewall let UDP through?"
    )


@row("Joining", "asking", "timer unanswered")
def _() -> None:
    assert asking().timer("unanswered") == [
        Say("nobody of crew 'otters' answers yet at here:1; waiting for them, 9 s more")
    ]


@row("Joining", "asking", "timer asking")
def _() -> None:
    assert ends(asking().timer("asking")).startswith("no member of crew 'otters' answered at here:1")


@row("Joining", "new", "Sits (a launcher gave the seat)")
def _() -> None:
    tell, arm = Way()(Sits(1, 3, 7))
    assert tell == Tell(GREETING, tell.blob, 100 + DEADLINE_S, late=False)
    assert module.read_hello(tell.blob) == Hello("1.0", VERSION, 3, 7)
    assert arm.at_s > tell.deadline_s


@row("Joining", "new", "Enters, somebody to ask")
def _() -> None:
    way = Way()
    assert way.enters()[0] == Knock(ENTRIES, DEADLINE_S)
    assert way.state == "let in"


@row("Joining", "new", "Enters, nobody to ask")
def _() -> None:
    assert Way(begins=True).enters()[0] == Listen(LISTEN_S)


@row("Joining", "listening", "Overheard, somebody")
def _() -> None:
    way = listening()
    assert way(Overheard(ENTRIES))[0] == Knock(ENTRIES, DEADLINE_S)
    assert way.state == "let in"


def begun(way: Way, effects: list[Any]) -> None:
    assert kinds(effects)[-3:] == [Describes, Make, Tell]
    describes, make, tell = (e for e in effects if isinstance(e, Describes | Make | Tell))
    assert (describes.card.seat, describes.card.averaging) == (0, True)
    assert (make.card, make.n, make.late, tell.late) == (describes.card, 1, False, False)


@row("Joining", "listening", "Overheard, nobody")
def _() -> None:
    way = listening()
    effects = way(Overheard(()))
    assert effects[:2] == [
        Knock((), DEADLINE_S), Say("nobody is there yet: this peer begins crew 'otters' at here:1"),
    ]  # fmt: skip
    begun(way, effects)
    assert kinds(way(heard({}, n=1))) == [PhaseOver, In]


@row("Joining", "listening", "timer listening")
def _() -> None:
    way = listening()
    begun(way, way.timer("listening"))


@row("Joining", "let in", "Looked, inside")
def _() -> None:
    way = let_in()
    way.member(0)
    effects = way.looks(after_s=0.25)
    assert effects[0] == PhaseOver("let in", 0.25)
    assert way.state == "seat"
    assert kinds(let_in().looks(inside=False)) == []
    late = let_in()
    late.member(0)
    begins_s = late.now_s + DEADLINE_S - 2.0  # half of what is left is the others' to answer it
    assert begins_s in [
        effect.at_s for effect in late.looks(after_s=DEADLINE_S - 4.0) if isinstance(effect, Arm)
    ]


@row("Joining", "let in", "timer silence")
def _() -> None:
    assert "answers yet at here:1; waiting for them, 9 s more" in let_in().timer("silence")[0].text


@row("Joining", "let in", "Looked, over; timer let in")
def _() -> None:
    assert ends(let_in().looks(inside=False, over=True, failure="the name is taken")) == "the name is taken"
    way = let_in()
    assert way.timer("deadline") == []  # membership says why itself
    assert ends(way.timer("let in")) == "no member let this peer in within 10 s"


@row("Joining", "seat", "Looked, nobody has a seat yet")
def _() -> None:
    """Another newcomer let it in. The crew may be there, and be heard of a little later."""
    way = let_in()
    way.looks()
    assert way.looks(after_s=0.9 * LISTEN_S) == [] and way.state == "seat"
    way.member(0)
    (claim,) = (effect.card for effect in way.looks() if isinstance(effect, Describes))
    assert (claim.seat, claim.averaging) == (1, False)
    short = Way()
    short.joining.deadline_s = LISTEN_S
    short.enters()
    short.looks()
    assert Describes in kinds(short.looks(after_s=0.6 * LISTEN_S)), "it has a deadline"


@row("Joining", "seat", "Looked, a seat is free")
def _() -> None:
    way = let_in()
    way.member(0)
    (claim,) = (effect.card for effect in way.looks() if isinstance(effect, Describes))
    assert (claim.seat, claim.averaging, claim.founded) == (1, False, 2)


@row("Joining", "seat", "Looked, no trainer, none trains")
def _() -> None:
    """An auxiliary begins no crew, and claims no seat before somebody averages values; another auxiliary does
    not. Nor does a client.
    """
    begins_none(Role.AUXILIARY)
    begins_none(Role.CLIENT)


def begins_none(role: Role) -> None:
    way = Way()
    way.card = card_of(9, 1, role=role)
    way.enters()
    helper = card_of(1, 2, seat=1, averaging=True, role=Role.AUXILIARY)
    way.roster.changed(Member("m1", ("10.0.0.1", 4001), OLD, 0, Status.ALIVE, encode_card(helper)), None)
    way.looks()
    assert way.state == "seat" and Describes not in kinds(way.looks(after_s=10 * PERIOD_S))
    begun = Way()
    begun.card = way.card
    begun.enters()
    begun.looks()
    begun.member(0)
    (claim,) = [e for e in begun.looks(after_s=3 * PERIOD_S) if isinstance(e, Describes)]
    assert (claim.card.seat, claim.card.averaging, claim.card.role) == (1, False, role)
    over = way(Expired(Timer(0, 0, "deadline")), DEADLINE_S)
    assert ends(over).startswith("none of those that let this peer in averages; start the peer that begins")


@row("Joining", "seat", "Looked, its claim is contested")
def _() -> None:
    way = in_seat()
    way.member(1, averaging=False, term=1, epoch=OLD)  # older than this one, so it stays
    effects = way.looks(after_s=0.01)
    assert [effect.card.seat for effect in effects if isinstance(effect, Describes)] == [2]
    assert way.looks(after_s=1.9 * PERIOD_S) == []  # it waits anew


@row("Joining", "seat", "Looked, settled, it is first")
def _() -> None:
    way = let_in()
    effects = way.seats()  # others are in, and nobody has a seat
    assert kinds(effects) == [PhaseOver, Describes, Make, Tell]
    begun(way, effects)
    way = in_seat(averaging=False, begins=True)  # it is to begin, and another one waits already
    effects = way.looks(after_s=2 * PERIOD_S)
    assert kinds(effects) == [PhaseOver, Describes, Make, Tell]
    assert effects[1].card.averaging and effects[1].card.seat == 1


@row("Joining", "seat", "Looked, settled, others average")
def _() -> None:
    way = in_seat()
    passed, make, tell, _ = way.looks(after_s=2 * PERIOD_S)
    assert passed == PhaseOver("seat", 2 * PERIOD_S)
    assert (make.card.seat, make.n, make.late, tell.late) == (1, 2, True, True)
    way = in_seat(begins=True)  # it listens where others ask, and the crew has outlived the one that did
    assert kinds(way.looks(after_s=2 * PERIOD_S)) == [PhaseOver, Make, Tell] and way.joining.late


@row("Joining", "seat", "Looked, settled, nobody averages")
def _() -> None:
    way = in_seat(averaging=False)
    assert way.looks(after_s=2 * PERIOD_S) == [PhaseOver("seat", 2 * PERIOD_S)]
    assert way.state == "awaiting"


@row("Joining", "seat", "Looked, over, or none is free")
def _() -> None:
    assert ends(in_seat().looks(over=True, failure="it is dead")) == "it is dead"
    way = let_in()
    for seat in range(64):
        way.member(seat)
    assert "all 64 seats of the crew are taken" in ends(way.looks())


@row("Joining", "seat", "timer deadline")
def _() -> None:
    assert ends(in_seat().timer("deadline")) == (
        "no seat could be taken within 10 s: others claimed the same ones each time"
    )


@row("Joining", "awaiting", "Looked, somebody averages")
def _() -> None:
    way = awaiting()
    assert way.looks() == []
    way.member(3)
    make, tell, _ = way.looks()
    assert (make.n, make.late, tell.late) == (4, True, True)


@row("Joining", "awaiting", "Looked, over; timer deadline")
def _() -> None:
    assert ends(awaiting().looks(over=True, failure="it is dead")) == "it is dead"
    assert ends(awaiting().timer("deadline")) == (
        "none of those that let this peer in averages; start the peer that begins the crew, on the machine "
        "that the token names"
    )


@row("Joining", "greeting", "Heard, it goes on")
def _() -> None:
    assert greeting()(heard({1: hello(), 2: hello()})) == [PhaseOver("greeting", 0.0), In(2)]
    refused, left, passed, is_in = greeting()(heard({1: hello(), 2: hello(seed=6)}))
    assert refused.text == "peer 2 is refused: peer 2 has another seed: 6 there, 7 here; make them equal"
    assert (left, passed.phase, is_in) == (Left(2), "greeting", In(1))
    more = {1: hello(), 2: hello(seed=6), 3: hello(), 4: hello(seed=5)}
    assert [effect for effect in greeting()(heard(more)) if isinstance(effect, Left)] == [Left(2), Left(4)]
    way = greeting()
    said, _, is_in = way(heard({1: hello()}, (2,)), after_s=4.0)
    assert (said.text, is_in) == ("peer 2 did not answer within 4 s; going on without", In(1))
    assert kinds(greeting()(heard({1: hello()}, (2,), gone=frozenset({2})))) == [PhaseOver, In]
    other, said, *_ = greeting()(heard({1: hello()}, (2,), other_versions=3))
    assert f"peer 2 of crew 'otters' speaks another wire format than version {VERSION}" in other.text


@row("Joining", "greeting", "Heard, others are more or equal")
def _() -> None:
    way = greeting()
    assert ends(way(heard({1: hello(seed=6), 2: hello(seed=6)}))) == (
        "peer 1 has another seed: 6 there, 7 here; make them equal"
    )
    assert way.state == "over"
    tie = ends(greeting()(heard({1: hello(ragtag="0.9")}, (2,), gone=frozenset({2}))))
    assert tie == "peer 1 has another version of Ragtag: 0.9 there, 1.0 here; make them equal"
    assert "says no hello that can be read" in ends(greeting()(heard({1: b"GET /"}, (2,))))
    assert "wire format" in ends(greeting()(heard({}, (1, 2), other_versions=1)))


@row("Joining", "seat", "Looked, settled, all are clients")
def _() -> None:
    """A client is told so at once, and what to do; anybody else that comes owns, and so may come."""
    for role, others, goes_on in (
        (Role.CLIENT, Role.CLIENT, False),
        (Role.CLIENT, Role.TRAINER, True),
        (Role.TRAINER, Role.CLIENT, True),
        (Role.AUXILIARY, Role.CLIENT, True),
    ):
        way = Way()
        way.card = card_of(9, 1, role=role)
        way.enters()
        way.looks()
        card = card_of(0, 2, seat=0, averaging=True, role=others)
        way.roster.changed(Member("m0", ("10.0.0.1", 4000), OLD, 0, Status.ALIVE, encode_card(card)), None)
        way.looks(after_s=3 * PERIOD_S)
        settled = way.looks(after_s=3 * PERIOD_S)
        assert way.state == ("greeting" if goes_on else "over")
        if not goes_on:
            assert ends(settled).startswith("all peers of crew 'otters' are clients")
            assert "without --client" in ends(settled) and "--auxiliary" in ends(settled)


@row("Joining", "greeting", "Heard, all are clients")
def _() -> None:
    """One that does not answer may own; and roles need not be equal, as all else that peers say."""

    def greets(role: Role) -> Way:
        way = Way()
        way(Sits(0, 3, 7, role))
        return way

    clients = {1: hello(role=Role.CLIENT), 2: hello(role=Role.CLIENT)}
    said = ends(greets(Role.CLIENT)(heard(clients)))
    assert said.startswith("all peers of crew 'otters' are clients") and "without --client" in said
    assert kinds(greets(Role.TRAINER)(heard(clients))) == [PhaseOver, In]
    assert kinds(greets(Role.CLIENT)(heard({**clients, 2: hello()}))) == [PhaseOver, In]
    assert kinds(greets(Role.CLIENT)(heard({**clients, 2: hello(role=Role.AUXILIARY)}))) == [PhaseOver, In]
    assert kinds(greets(Role.CLIENT)(heard({1: clients[1]}, (2,)))) == [Say, PhaseOver, In]


@row("Joining", "greeting", "Heard, nobody")
def _() -> None:
    assert ends(greeting()(heard({}, (1, 2)))) == (
        "none of the other 2 peers of crew 'otters' answered within 10 s; are they started, with the same "
        "crew name, and does the firewall let UDP through?"
    )
    way = Way()
    way(Sits(0, 2, 7))
    assert ends(way(heard({}, (1,), n=2))).startswith("the other peer of crew 'otters' did not answer")


@row("Joining", "greeting", "timer greeting")
def _() -> None:
    assert ends(greeting().timer("greeting")).startswith("none of the other 2 peers")


@row("Joining", "greeting", "Unseat, it came to membership")
def _() -> None:
    way = came()
    for tried in range(1, SEATS_TRIED_MAX):
        assert way(Unseat("seat 1 is b's")) == [
            Say("looking for another seat: seat 1 is b's", warning=False), Anew(tried),
        ]  # fmt: skip
        way.roster = Roster("me", 50)
        way.enters()
        way.member(0)
        way.seats()
        assert way.state == "greeting"
    assert ends(way(Unseat("seat 1 is b's"))) == (
        f"others took the seat that this peer wanted, {SEATS_TRIED_MAX} times; start it again"
    )


@row("Joining", "greeting", "Unseat, a launcher gave the seat")
def _() -> None:
    assert greeting()(Unseat("seat 0 is b's")) == [Ends("seat 0 is b's", seat=True)]


# -- ChannelWay

MINE = Schema((TensorSpec("weight", (4,), "float32"),), "fp32", "rps")
OTHER = Schema((TensorSpec("weight", (5,), "float32"),), "fp32", "rps")
CHANNEL, CHUNKS = 300, 4 * PROBE_CHUNKS


class Ways:
    """A channel that is being opened by peer 0 of three."""

    def __init__(self, late: bool = False) -> None:
        self.opening = ChannelWay(0, CHANNEL, MINE, CHUNKS, DEADLINE_S, late)
        self.now_s = 100.0
        self.all: list[Any] = []

    def __call__(self, event: ChannelEvent, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        effects = self.opening.step(self.now_s, event)
        self.all += effects
        return list(effects)

    @property
    def state(self) -> str:
        return self.opening.state.value

    def timer(self) -> list[Any]:
        arm = next(effect for effect in reversed(self.all) if isinstance(effect, Arm))
        self.now_s = arm.at_s
        return self(Expired(arm.timer))


def met(*schemas: Schema, missing: tuple[int, ...] = (), heard_of: int = -1, **of: Any) -> Heard:
    blobs = {peer: schema.encode() for peer, schema in enumerate(schemas, 1)}
    return Heard(Met(CHANNEL, blobs, missing), 3, of.pop("gone", frozenset()), 0.01, heard_of)


def comparing(late: bool = False) -> Ways:
    way = Ways(late)
    assert kinds(way(Start())) == [Tell]
    return way


def probing() -> Ways:
    way = comparing()
    assert kinds(way(met(MINE, MINE))) == [PhaseOver, ProbeRound]
    return way


def opened(late: bool = True) -> Ways:
    way = comparing(late)
    way(met(MINE, MINE, heard_of=5))
    assert way.state == "open"
    return way


def hearing() -> Ways:
    way = opened()
    way(StateHere(7))
    return way


def outcome(averaged: bool) -> Done:
    return Done(cast(Any, SimpleNamespace(averaged=np.array([averaged]))))


@row("ChannelWay", "new", "Start")
def _() -> None:
    tell, arm = Ways(late=True)(Start())
    assert tell == Tell(CHANNEL, MINE.encode(), 100 + DEADLINE_S, late=True)
    assert arm.at_s > tell.deadline_s


@row("ChannelWay", "schema", "Heard, others are more or equal")
def _() -> None:
    (differs,) = comparing()(met(OTHER, OTHER))
    assert differs == Differs(
        "peer 0 averages something else than peers 1 and 2: tensor 0: 'weight' (4,) float32 here, (5,) "
        "float32 there. Build the same model, with the same averager and settings, on every peer"
    )
    assert kinds(comparing()(met(OTHER, missing=(2,), gone=frozenset({2})))) == [Differs]  # a tie
    way = comparing()
    assert "no schema" in way(Heard(Met(CHANNEL, {1: b"GET /"}, ()), 2, frozenset()))[0].why
    assert way.state == "over"


@row("ChannelWay", "schema", "Heard, some differ, not late")
def _() -> None:
    said, left, tell, _ = comparing()(met(MINE, OTHER))
    assert said.text.startswith("peer 2 is refused, it averages something else: tensor 0: 'weight'")
    assert (left, tell.number, tell.blob) == (Left(2), name_hash(f"agreed/{CHANNEL}"), b"")
    said, left, *rest = comparing(late=True)(met(MINE, OTHER))  # members hold no such meeting
    assert (left, kinds(rest)) == (Left(2), [PhaseOver, IsOpen])


@row("ChannelWay", "schema", "Heard, nobody averages yet")
def _() -> None:
    way = comparing()
    said, passed, probe, arm = way(met(MINE, missing=(2,)), after_s=2.0)
    assert said.text == "peer 2 has not made a model yet; going on without"
    assert (passed, probe) == (PhaseOver("schema", 2.0), ProbeRound(PROBE_CHUNKS, DEADLINE_S))
    assert arm.at_s > way.now_s + DEADLINE_S


@pytest.mark.parametrize("content", ["kfac: averaged (damping 0.01)", "kfac: computed"])
def test_what_a_channel_waits_for_has_the_name_that_a_script_gave_it(content: str) -> None:
    opening = ChannelWay(
        0, CHANNEL, msgspec.structs.replace(MINE, content=content), CHUNKS, DEADLINE_S, False
    )
    said = opening.waits_for([2], 115.2)
    assert said == Say("waiting for peer 2 to make 'kfac', as all do, for 115 s at most")
    opening.step(0.0, Start())
    said, *_ = opening.step(1.0, met(MINE, missing=(1, 2)))
    assert said.text == "peers 1 and 2 have not made 'kfac' yet; going on without"


def test_one_that_does_not_open_a_channel_has_nothing_to_make_for_it() -> None:
    """Peers that have ended open one, and another one trains on."""
    opening = ChannelWay(0, CHANNEL, MINE, CHUNKS, DEADLINE_S, there=frozenset({0, 2}))
    opening.step(0.0, Start())
    said, *_ = opening.step(1.0, met(missing=(1, 2)))
    assert said.text == "peer 2 has not made a model yet; going on without"
    opening = ChannelWay(0, CHANNEL, MINE, CHUNKS, DEADLINE_S, there=frozenset({0, 2}))
    opening.step(0.0, Start())
    assert not any(isinstance(effect, Say) for effect in opening.step(1.0, met(MINE, missing=(1,))))


@row("ChannelWay", "schema", "Heard, it or the channel is late")
def _() -> None:
    assert comparing(late=True)(met(MINE, MINE)) == [PhaseOver("schema", 0.0), IsOpen(0.02, late=True)]
    _, said, ready = comparing()(met(MINE, MINE, heard_of=3))
    assert ready == IsOpen(0.02, late=False) and not said.warning


@row("ChannelWay", "schema", "timer schema")
def _() -> None:
    assert kinds(comparing().timer()) == [PhaseOver, ProbeRound]


@row("ChannelWay", "agreeing", "Heard; timer agreeing")
def _() -> None:
    for agreed in (lambda way: way(met()), Ways.timer):
        way = comparing()
        way(met(MINE, OTHER))
        assert way.state == "agreeing"
        assert kinds(agreed(way)) == [PhaseOver, ProbeRound]


@row("ChannelWay", "probing", "Timed, not the last one")
def _() -> None:
    way = probing()
    assert way(Timed(0.5, 0.01))[0] == ProbeRound(PROBE_CHUNKS, DEADLINE_S)
    assert way(Timed(0.1, 0.01, 1)) == [IsOpen(0.1 * CHUNKS / PROBE_CHUNKS, late=False)], (
        "as the second one took"
    )


@row("ChannelWay", "probing", "Timed, the last; timer probing")
def _() -> None:
    way = probing()
    assert kinds(way(Timed(None, 0.01))) == [ProbeRound], "others wait in the second for all that they met"
    assert way(Timed(None, 0.01, 1)) == [IsOpen(0.02 * CHUNKS / PROBE_CHUNKS, late=False)]
    assert kinds(probing().timer()) == [IsOpen]
    assert kinds(probing()(Timed(0.5, 0.01, 1))) == [IsOpen], "the others were in the second one already"
    way = probing()
    way(Timed(0.5, 0.01))
    assert way(Timed(None, 0.01, 1)) == [IsOpen(0.5 * CHUNKS / PROBE_CHUNKS, late=False)]


@row("ChannelWay", "open", "Fetching")
def _() -> None:
    way = opened()
    assert way(Fetching()) == [] and way.state == "state"


@row("ChannelWay", "state", "StateHere")
def _() -> None:
    way = opened()
    way(Fetching())
    passed, takes_part, arm = way(StateHere(7), after_s=3.0)
    assert (passed, takes_part, arm.at_s) == (PhaseOver("state", 3.0), TakesPart(7), 103 + DEADLINE_S)


@row("ChannelWay", "open", "StateHere")
def _() -> None:
    assert kinds(opened()(StateHere())) == [TakesPart]


@row("ChannelWay", "heard", "Newer; Nobody; timer heard")
def _() -> None:
    for event in (Newer(), Nobody()):
        way = hearing()
        assert way(event, after_s=0.5) == [PhaseOver("heard", 0.5)] and way.state == "average"
    passed, said = hearing().timer()
    assert passed == PhaseOver("heard", DEADLINE_S)
    assert said.text == "nothing was heard of the crew's rounds within 10 s; going on"


@row("ChannelWay", "average", "Done, with others")
def _() -> None:
    way = hearing()
    way(Newer())
    assert way(outcome(False), after_s=1.0) == []
    assert way(outcome(True), after_s=1.0) == [PhaseOver("average", 2.0)] and way.state == "in"


@row("ChannelWay", "average", "StateHere")
def _() -> None:
    way = hearing()
    way(Newer())
    assert kinds(way(StateHere(9))) == [TakesPart] and way.state == "heard"


# -- Parties


@pytest.mark.parametrize(
    ("theirs", "more"),
    [
        ({}, []),
        ({1: "a", 2: "a"}, []),
        ({1: "b"}, [1]),
        ({1: "a", 2: "b"}, []),
        ({1: "b", 2: "b", 3: "a"}, [1, 2]),
        ({1: "b", 2: "c"}, [1]),
        ({1: "b", 2: "c", 3: "c"}, [2, 3]),
    ],
)
def test_the_larger_party_goes_on_and_of_a_tie_nobody(theirs: dict[int, str], more: list[int]) -> None:
    assert outvoted_by("a", theirs) == more


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9))
def test_at_most_one_party_goes_on(said: list[str]) -> None:
    goes_on = {
        mine
        for me, mine in enumerate(said)
        if not outvoted_by(mine, {peer: other for peer, other in enumerate(said) if peer != me})
    }
    assert len(goes_on) <= 1


# -- Whatever comes, or does not

BLOBS = st.sampled_from([hello(), hello(seed=6), hello(size=2), b"", b"\xff"])
SCHEMAS = st.sampled_from([MINE.encode(), OTHER.encode(), b"", b"\xff"])
CARDS = st.builds(
    lambda peer, seat, averaging, epoch, term: Member(
        f"m{peer}", ("10.0.0.1", 4000 + peer), epoch, 0, Status.ALIVE,
        encode_card(card_of(seat, 2, seat=seat, averaging=averaging, term=term)),
    ),
    st.integers(0, 5), st.integers(0, 3), st.booleans(), st.integers(1, 99), st.integers(0, 3),
)  # fmt: skip
LOOKS = st.builds(
    Looked, st.booleans(), st.just(False), st.just(""), st.just(PERIOD_S), st.integers(1, 5), st.booleans()
)
MEETINGS = st.builds(
    lambda blobs, gone: Heard(
        Met(GREETING, blobs, tuple({1, 2, 3} - blobs.keys())), 4, frozenset(gone), 0.01, -1, 0
    ),
    st.dictionaries(st.integers(1, 3), BLOBS, max_size=3),
    st.sets(st.integers(1, 3)),
)
EVENTS = st.one_of(
    LOOKS, LOOKS, LOOKS, CARDS, CARDS, MEETINGS,
    st.builds(Answered, st.booleans(), st.just({})), st.just(Unseat("taken")),
    st.builds(Overheard, st.sampled_from([(), ENTRIES])),
)  # fmt: skip


def played(
    step: Callable[[float, Any], list[Any]],
    begins: Any,
    comes: list[tuple[float, Any]],
    over: tuple[type, ...],
    again: Callable[[], Any] | None = None,
) -> tuple[float, Any]:
    """When the machine answered, and what: timers run out, and what comes comes in between."""
    heap: list[tuple[float, int, Any]] = [(0.0, 0, begins)]
    for at_s, event in comes:
        heapq.heappush(heap, (at_s, len(heap), event))
    order = len(heap)
    while heap:
        now_s, _, event = heapq.heappop(heap)
        for effect in step(now_s, event):
            if isinstance(effect, over):
                return now_s, effect
            order += 1
            if isinstance(effect, Arm):
                heapq.heappush(heap, (max(now_s, effect.at_s), order, Expired(effect.timer)))
            elif isinstance(effect, Anew) and again is not None:
                heapq.heappush(heap, (now_s, order, again()))
    raise AssertionError("it waits for ever")


TIMES = st.floats(0.0, 60.0)


@given(
    st.lists(st.tuples(TIMES, EVENTS), max_size=40), st.sampled_from(["Invited", "begins", "comes", "sits"])
)
def test_whatever_comes_and_in_whatever_order_a_way_in_ends_by_its_deadlines(
    comes: list[tuple[float, Any]], how: str
) -> None:
    way = Way(begins=how == "begins")

    def step(now_s: float, event: Any) -> list[Any]:
        way.now_s = now_s
        if isinstance(event, Member):
            way.roster.changed(event, None)
            return []
        effects = way(event)
        entered = isinstance(event, Answered) and event.welcome and way.state == "new"
        return effects + (way.enters() if entered else [])

    def enters() -> Enters:
        way.roster = Roster("me", 50)
        return Enters(way.roster, way.card, way.entries, "here:1")

    begins = {"Invited": Invited(), "sits": Sits(0, 4, 7)}.get(how) or enters()
    at_s, end = played(step, begins, comes, (In, Ends), enters)
    lost = sum(isinstance(event, Unseat) for _, event in comes)
    once_s = DEADLINE_S + LISTEN_S + (DEADLINE_S + INITIAL_RTO_S) + 2 * DEADLINE_S + 1.0
    assert at_s <= (1 + lost) * once_s
    assert isinstance(end, In) or end.why


@given(
    st.lists(
        st.tuples(
            TIMES,
            st.one_of(
                st.builds(
                    lambda blobs, rounds: Heard(Met(CHANNEL, blobs, (3,)), 4, frozenset(), 0.01, rounds),
                    st.dictionaries(st.integers(1, 3), SCHEMAS, max_size=3),
                    st.integers(-1, 3),
                ),
                st.builds(Timed, st.one_of(st.none(), st.floats(0.0, 1.0)), st.floats(0.0, 1.0)),
                st.sampled_from([Newer(), Nobody(), Fetching(), StateHere(3)]),
            ),
        ),
        max_size=20,
    ),
    st.booleans(),
)
def test_whatever_comes_a_channel_is_open_or_refused_by_its_deadlines(
    comes: list[tuple[float, Any]], late: bool
) -> None:
    opening = ChannelWay(0, CHANNEL, MINE, CHUNKS, DEADLINE_S, late)
    at_s, end = played(opening.step, Start(), comes, (IsOpen, Differs))
    assert at_s <= 3 * 2 * DEADLINE_S
    assert isinstance(end, Differs) or end.probe_s > 0
