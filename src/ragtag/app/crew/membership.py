"""A peer's way into its crew's membership: by its launcher's word, or by an invitation."""

from __future__ import annotations

import heapq
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from ragtag.app.crew.phases import Phases
from ragtag.app.environment import Address, Place, format_address, looked_up, reachable_host
from ragtag.app.invitation.token import Token
from ragtag.core.address import is_loopback
from ragtag.core.errors import Error
from ragtag.core.types import PEERS_MAX, Arm, Expired, PeerId, Timer
from ragtag.core.wire import VERSION
from ragtag.network.link.udp import bound
from ragtag.network.membership.admission import ask_for_key, ask_where
from ragtag.network.membership.agent import Agent, Told
from ragtag.network.membership.datagrams import Datagrams
from ragtag.protocols.crew.district import partners
from ragtag.protocols.crew.joining import (
    Answered,
    AskKey,
    Describes,
    Ends,
    Enters,
    Invited,
    Joining,
    JoiningEffect,
    JoiningEvent,
    Knock,
    Listen,
    Looked,
    Make,
    Overheard,
)
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.passes import Passes, proof_of
from ragtag.protocols.membership.roster import NO_SEAT, Card, Roster, encode_card
from ragtag.protocols.membership.types import Changed, Identity, Status

FOREVER_S = 1e9
"""For as long as it lives a launched peer knocks at its crew's addresses, in a large crew at some of them."""


class JoinError(Error, RuntimeError):
    """This peer could not join its crew; the message says why and what to do."""


class NotLetIn(JoinError):
    """Membership could not be entered."""


@dataclass(slots=True)
class Entrance:
    """A peer that is in the membership, with its seat.

    card: what it tells of itself.
    late: whether others averaged before it came, so that it takes part only once it has what they have.
    known: the others' data addresses, by seat.
    n: how many seats the crew has, as far as this peer knows.
    """

    agent: Agent
    card: Card
    late: bool
    known: dict[PeerId, Address]
    n: int

    @property
    def seat(self) -> PeerId:
        """This peer's number."""
        return self.card.seat


def launched(place: Place, data: Address, state_port: int = 0, key: bytes = b"") -> Entrance:
    """Membership of a peer that a launcher has given a seat to; it enters while the crew already meets.

    key: for its card.
    """
    assert place.key is not None
    assert place.members is not None
    card = Card(
        VERSION, place.rank, 0, _epoch(), True, *data, state_port, place.size, place.seed,
        key=key, role=place.role,
    )  # fmt: skip
    sock = _heard(_socket(place.member_fd, place.members[place.rank]))
    name = place.name or _launched_name(place.rank)
    agent = _agent(name, place.members[place.rank], place.key, card, sock)
    agent.roster.claim(card)
    others = frozenset(range(place.size)) - {place.rank}
    asked = sorted(others if place.size <= PEERS_MAX else partners(place.rank, others))
    agent.join(agent.now_s(), [place.members[peer] for peer in asked], FOREVER_S)
    return Entrance(agent, card, False, {}, place.size)


def _launched_name(rank: PeerId) -> str:
    return f"peer-{rank}"


def lost(membership: Membership, size: int, before: frozenset[PeerId]) -> frozenset[PeerId]:
    """Which of a crew's launched peers are dead: declared so in it, or lost ``before`` and not seen in it."""
    found = set(before)
    members = membership.members()
    for peer in range(size):
        member = members.get(_launched_name(peer))
        if member is not None and member.status is Status.DEAD:
            found.add(peer)
        elif member is not None:
            found.discard(peer)
    return frozenset(found)


def resolved(token: Token) -> Token:
    """The token with numeric addresses, those that can be found.

    Raises:
        NotLetIn: none can.
    """
    found: list[Address] = []
    why = ""
    for host, port in token.addresses:
        try:
            found.append(looked_up((host, port)))
        except ValueError as error:
            why = f"the token's {error}"
    if not found:
        raise NotLetIn(f"{why}; is its name known to this machine?")
    v6 = ":" in found[0][0]  # one socket speaks one of the two
    return replace(token, addresses=tuple(address for address in found if (":" in address[0]) == v6))


def admitted(joining: Joining, token: Token, phases: Phases) -> Token:
    """The (resolved) token with the crew's key: for an invitation, a member gives that.

    Raises:
        NotLetIn: nobody answered, or all that did refused.
    """
    if not token.number:
        return token
    unanswered = Timer(0, 0, "unanswered")

    def step(event: JoiningEvent) -> list[JoiningEffect]:
        return _carried(joining.step(time.monotonic(), event), phases)

    def on_wait(left_s: float) -> None:
        step(Expired(unanswered))

    for effect in step(Invited()):
        if isinstance(effect, AskKey):
            key, refused = ask_for_key(
                token.addresses,
                token.key,
                token.number,
                token.ends_unix_s,
                effect.for_s,
                on_wait,
            )
            step(Answered(key is not None, {format_address(at): said for at, said in refused.items()}))
            if key is not None:
                return replace(token, key=key, ends_unix_s=0, number=b"")
    raise AssertionError("an invitation is neither answered nor refused")


def _carried(effects: Iterable[JoiningEffect], phases: Phases) -> list[JoiningEffect]:
    """The effects that are left to do, once what is only to be told is. Raises NotLetIn where it ends."""
    left: list[JoiningEffect] = []
    for effect in effects:
        if isinstance(effect, Ends):
            raise NotLetIn(effect.why)
        if not phases.told(effect):
            left.append(effect)
    return left


def asked(token: Token) -> str:
    """The addresses that a token names, as text."""
    return ", ".join(map(format_address, token.addresses[:4]))


Ways = tuple[Datagrams, Address, list[Address]]
"""A socket for membership, the address that others reach it at, and those that a newcomer asks."""


def member_socket(token: Token, fd: int | None = None) -> Ways:
    """What a newcomer enters through.

    fd: a socket that its launcher has bound for it.

    The address of a token that begins a crew is taken where it is this machine's and free: the first one to
    join listens where the others ask.

    Raises:
        NotLetIn: no way leads from this machine to the crew.
    """
    if fd is not None:
        sock = _socket(fd, None)
        own = sock.getsockname()[:2]
        return _heard(sock), own, [other for other in token.addresses if other != own]
    for address in token.addresses if token.begins else ():
        try:
            sock = _socket(None, address)
        except OSError:
            continue  # another machine's, or taken
        return _heard(sock), address, [other for other in token.addresses if other != address]
    host = reachable(token)
    sock = _socket(None, (host, 0))  # what comes from elsewhere would not be taken for this peer's
    return _heard(sock), (host, sock.getsockname()[1]), list(token.addresses)


def member_socket_of(place: Place) -> socket.socket:
    """A socket for the membership of a peer that finds the others through a store."""
    return _socket(None, (reachable_host(place), 0))


def begins_here(token: Token) -> bool:
    """Whether a peer that joins here, now, would begin the token's crew."""
    if not token.begins:
        return False
    try:
        sock, _, others = member_socket(token)
    except NotLetIn:
        return False
    sock.close()
    return not others


def here_only(token: Token) -> bool:
    """Whether the crew is on this machine only."""
    return all(is_loopback(host) for host, _ in token.addresses)


def reachable(token: Token) -> str:
    """Under which host others reach this machine: the interface that leads to the crew (nothing is sent).

    Raises:
        NotLetIn: none does.
    """
    target = token.addresses[0]
    if here_only(token):
        return "::1" if ":" in target[0] else "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            where = format_address(target)
            raise NotLetIn(f"no way leads from this machine to {where}: {error.strerror}") from None
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Outside:
    """Where others see a peer behind a router that translates addresses (NAT).

    each: whether each of them sees it elsewhere: the router draws a port for each destination. Then these
        addresses are those that one member sees; the others find out where it is when it says hello.
    """

    member: Address
    data: Address
    each: bool = False


def outside(token: Token, ways: Ways, data: socket.socket, for_s: float) -> Outside | None:
    """Where others see this peer's sockets; ``None``: where it sees itself, or nobody answers.

    data: the socket for data, bound. for_s: how long to wait for a first answer.
    """
    sock, own, entries = ways
    if not entries or here_only(token):
        return None
    if own[0] in {host for host, _ in entries}:
        return None  # that member is on this machine
    seen = ask_where(sock, entries, token.key, for_s)
    if not seen or own in seen.values():
        return None
    asking = Datagrams(data)
    try:
        there = ask_where(asking, list(seen), token.key, for_s)
    finally:
        asking.close(sock=False)
    if not there:
        return None
    each = any(len(set(found.values())) > 1 for found in (seen, there))
    return Outside(next(iter(seen.values())), next(iter(there.values())), each)


def enter(
    joining: Joining,
    place: Place,
    token: Token,
    ways: Ways,
    data_port: int,
    state_port: int,
    phases: Phases,
    key: bytes = b"",
    seen: Outside | None = None,
    passes: Passes | None = None,
) -> tuple[Entrance, list[JoiningEffect]]:
    """Enter a crew by its (resolved) token, and take a seat; what ``joining`` wants done next.

    key: for its card.
    passes: what this peer knows of persons, in a crew that takes them, with the token's credential.
    seen: where others see this peer, if that is elsewhere. Nobody can fetch the state from such a peer, as
        that takes a connection to it.

    The socket of ``ways`` is closed with the agent. The peer that listens where the token says begins the
    crew, unless it finds one that averages, or another one that came in together with it has a seat first:
    then that one does. The others wait until it does.

    Raises:
        NotLetIn: nobody answered, the name is taken, another crew or version answered, no seat is free, or
            nobody begins.
    """
    sock, address, entries = ways
    data, inner = (address[0], data_port), ("", 0)
    if seen is not None:
        address, data, inner, state_port = seen.member, seen.data, data, 0
    card = Card(
        VERSION, NO_SEAT, 0, _epoch(), False, *data, state_port, 1, place.seed,
        key=key, inner_host=inner[0], inner_port=inner[1], role=place.role,
    )  # fmt: skip
    name = place.name or f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(3)}"
    of = token.credential
    if of is not None:
        card = msgspec.structs.replace(card, proof=proof_of(of.shown, of.secret, name, card.epoch, key))
    agent = _agent(name, address, token.key, card, sock, passes)
    try:
        begins = Enters(agent.roster, card, tuple(entries), format_address(address))
        return _seat(joining, agent, begins, phases)
    except BaseException:
        agent.close()
        raise


def _seat(
    joining: Joining, agent: Agent, begins: Enters, phases: Phases
) -> tuple[Entrance, list[JoiningEffect]]:
    """Turn the agent and step ``joining`` by turns, until there is a seat."""
    events: deque[JoiningEvent] = deque([begins])
    timers: list[tuple[float, Timer]] = []
    while True:
        if not events:
            _turn(agent, timers[0][0] - time.monotonic())
            while timers and timers[0][0] <= time.monotonic():
                events.append(Expired(heapq.heappop(timers)[1]))
            events.append(_look(agent))
        effects = joining.step(time.monotonic(), events.popleft())
        for at, effect in enumerate(effects):
            if isinstance(effect, Make):
                seats = agent.roster.seats
                known = {p: agent.roster.way_to(h.card) for p, h in seats.items() if h.live}
                return Entrance(agent, effect.card, effect.late, known, effect.n), effects[at + 1 :]
            if isinstance(effect, Arm):
                heapq.heappush(timers, (effect.at_s, effect.timer))
            elif isinstance(effect, Listen):
                events.append(Overheard(tuple(agent.listen(effect.for_s))))
            elif isinstance(effect, Knock):
                agent.join(agent.now_s(), effect.entries, effect.for_s)
            elif isinstance(effect, Describes):
                agent.describe(agent.now_s(), effect.card)
            else:
                _carried((effect,), phases)


def _look(agent: Agent) -> Looked:
    machine = agent.machine
    n, whole = len(machine.live()), machine.whole
    failure = agent.failure or agent.roster.unfit
    return Looked(agent.entered, agent.over or bool(failure), failure, machine.period_s, n, whole)


def _turn(agent: Agent, for_s: float) -> None:
    """Turn the agent until something has changed; that goes to the roster (nobody averages here yet)."""
    before, news = (agent.entered, agent.machine.whole), False

    def take(told: Told) -> None:
        nonlocal news
        if isinstance(told, Changed):
            news = True
            agent.roster.changed(told.member, told.was)

    agent.run_until(lambda: news or (agent.entered, agent.machine.whole) != before, max(0.0, for_s), take)


def _epoch() -> int:
    """What tells this process's datagrams from those of another with its number; above 0."""
    return 1 + secrets.randbelow((1 << 32) - 1)


def _agent(
    name: str,
    address: Address,
    key: bytes,
    card: Card,
    sock: Datagrams,
    passes: Passes | None = None,
) -> Agent:
    epoch = (int(time.time() * 1e6) << 8 | secrets.randbits(8)) & ((1 << 62) - 1)
    identity = Identity(name, address, epoch, key, encode_card(card), seed=secrets.randbits(62))
    membership = Membership(identity) if passes is None else Membership(identity, passes=passes)
    return Agent(membership, Roster(name, epoch, bool(card.key)), sock)


def _heard(sock: socket.socket) -> Datagrams:
    """Membership's sockets. On other machines UDP may not get through; then others may connect."""
    return Datagrams(sock, listens=not is_loopback(sock.getsockname()[0]))


def _socket(fd: int | None, address: Address | None) -> socket.socket:
    if fd is not None:
        return socket.socket(fileno=os.dup(fd))
    assert address is not None
    return bound(socket.SOCK_DGRAM, address)


def seated(place: Place, token: Token, entrance: Entrance) -> Place:
    """The place that an invited peer has, now that it has a seat."""
    return replace(
        place,
        rank=entrance.seat,
        size=entrance.card.founded,
        crew=token.crew,
        seed=entrance.card.seed,
        key=token.key,
        one_machine=here_only(token),
    )
