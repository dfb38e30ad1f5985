"""A peer's way into its crew's membership: by its launcher's word, or by an invitation."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from ragtag.app.crew.phases import Phases
from ragtag.app.environment import Address, Place, format_address, looked_up, reachable_host
from ragtag.app.invitation.token import Token
from ragtag.core.errors import Error
from ragtag.core.types import PEERS_MAX, PeerId
from ragtag.core.wire import VERSION
from ragtag.network.link.udp import bound
from ragtag.network.membership.admission import ask_for_key
from ragtag.network.membership.agent import Agent, Told
from ragtag.protocols.crew.district import partners
from ragtag.protocols.membership.invitation import Said
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.pace import INITIAL_RTO_S
from ragtag.protocols.membership.roster import NO_SEAT, Card, Roster, encode_card
from ragtag.protocols.membership.seating import Seating
from ragtag.protocols.membership.types import Changed, Identity, Status

_log = logging.getLogger("ragtag")
LISTEN_S = 3 * INITIAL_RTO_S
"""How long the first peer of a token listens whether there is a crew. Members of one knock a few times in
each period; no round trip is known yet, so this follows from RFC 6298's first guess."""
FOREVER_S = 1e9
"""A launched peer knocks at its crew's addresses, in a large crew at some, for as long as it lives."""


class NotLetIn(Error, RuntimeError):
    """Membership could not be entered; the message says why and what to do."""


@dataclass(slots=True)
class Entrance:
    """A peer that is in the membership, with its seat.

    card: what it tells of itself. late: whether others average already, so that it takes part only once it
    has what they have. known: the others' data addresses, by seat.
    """

    agent: Agent
    card: Card
    late: bool
    known: dict[PeerId, Address]

    @property
    def seat(self) -> PeerId:
        """This peer's number."""
        return self.card.seat

    def n(self) -> int:
        """How many seats the crew has, as far as this peer knows."""
        live = [peer for peer, holder in self.agent.roster.seats.items() if holder.live]
        return max(self.card.founded, self.seat + 1, *(peer + 1 for peer in live))


def launched(place: Place, data: Address, state_port: int = 0) -> Entrance:
    """Membership of a peer that a launcher has given a seat to; it enters while the crew already meets."""
    assert place.key is not None
    assert place.members is not None
    card = Card(VERSION, place.rank, 0, _epoch(), True, *data, state_port, place.size, place.seed)
    sock = _socket(place.member_fd, place.members[place.rank])
    name = place.name or _launched_name(place.rank)
    agent = _agent(name, place.members[place.rank], place.key, card, sock)
    agent.roster.claim(card)
    others = frozenset(range(place.size)) - {place.rank}
    asked = sorted(others if place.size <= PEERS_MAX else partners(place.rank, others))
    agent.join(agent.now_s(), [place.members[peer] for peer in asked], FOREVER_S)
    return Entrance(agent, card, False, {})


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


def admitted(token: Token, deadline_s: float) -> Token:
    """The (resolved) token with the crew's key: for an invitation, a member gives that.

    Raises:
        NotLetIn: nobody answered, or all that did refused.
    """
    if not token.number:
        return token
    key, refused = ask_for_key(
        token.addresses,
        token.key,
        token.number,
        token.ends_unix_s,
        deadline_s,
        lambda left_s: _log.warning("%s", waiting(token, left_s)),
    )
    if key is not None:
        return replace(token, key=key, ends_unix_s=0, number=b"")
    raise NotLetIn(refusal(token, refused) if refused else _silence(token, deadline_s))


def waiting(token: Token, left_s: float | None) -> str:
    """What is said while nobody has answered yet. left_s: how long they are waited for, where it is known."""
    more = "" if left_s is None else f", {left_s:.0f} s more"
    return f"nobody of crew {token.crew!r} answers yet at {_asked(token)}; waiting for them{more}"


def _silence(token: Token, waited_s: float) -> str:
    return (
        f"no member of crew {token.crew!r} answered at {_asked(token)} within {waited_s:g} s; does the crew "
        "still train, and does the firewall let UDP through?"
    )


def refusal(token: Token, refused: Mapping[Address, Said]) -> str:
    """Why those that a token names do not let its holder in."""
    where = ", ".join(map(format_address, list(refused)[:4]))
    if Said.ENDED in refused.values():
        return f"the invitation to crew {token.crew!r} has ended, by the clock of {where}; make a new one"
    return (
        f"{where} does not know this invitation: it is of another crew, of an earlier one, or it was "
        "changed; run `ragtag invite` again"
    )


def _asked(token: Token) -> str:
    return ", ".join(map(format_address, token.addresses[:4]))


Ways = tuple[socket.socket, Address, list[Address]]
"""A socket for membership, the address that others reach it at, and whom a newcomer asks."""


def member_socket(token: Token, fd: int | None = None) -> Ways:
    """What a newcomer enters through. fd: a socket that its launcher has bound for it.

    The address of a token that begins a crew is taken where it is this machine's and free: the first one to
    join listens where the others ask.

    Raises:
        NotLetIn: no way leads from this machine to the crew.
    """
    if fd is not None:
        sock = _socket(fd, None)
        own = sock.getsockname()[:2]
        return sock, own, [other for other in token.addresses if other != own]
    for address in token.addresses if token.begins else ():
        try:
            sock = _socket(None, address)
        except OSError:
            continue  # another machine's, or taken
        return sock, address, [other for other in token.addresses if other != address]
    host = reachable(token)
    sock = _socket(None, (host, 0))  # what comes from elsewhere would not be taken for this peer's
    return sock, (host, sock.getsockname()[1]), list(token.addresses)


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
    return all(host.startswith("127.") or host == "::1" for host, _ in token.addresses)


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


def invited(
    place: Place, token: Token, ways: Ways, data_port: int, state_port: int, deadline_s: float, phases: Phases
) -> Entrance:
    """Enter a crew by its (resolved) token, and take a seat. The socket of ``ways`` is closed with the agent.

    The peer that listens where the token says begins the crew, unless it finds one that averages, or another
    one that came in together with it has a seat first: then that one does. The others wait until it does.

    Raises:
        NotLetIn: nobody answered, the name is taken, another crew or version answered, no seat is free, or
            nobody begins.
    """
    sock, address, entries = ways
    begins = not entries
    host = address[0]
    card = Card(VERSION, NO_SEAT, 0, _epoch(), False, host, data_port, state_port, 1, place.seed)
    name = place.name or f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(3)}"
    agent = _agent(name, address, token.key, card, sock)
    try:
        if begins:
            entries = agent.listen(LISTEN_S)  # the crew may have outlived the one that began it
        agent.join(agent.now_s(), entries, deadline_s)
        if not entries:
            _log.warning(
                "nobody is there yet: this peer begins crew %r at %s", token.crew, format_address(address)
            )
            return _found(agent, card)
        until_s = agent.now_s() + deadline_s
        with phases.of("let in"):
            _get_in(agent, token, deadline_s)
        with phases.of("seat"):
            card = _take_seat(agent, card, until_s, deadline_s)
        # the first one to have a seat has told all that it begins (``seating``): they wait for it by now
        if card.averaging or (begins and not _averaging(agent)):
            return _found(agent, card)
        if not begins:
            _await_beginner(agent, until_s)
        return Entrance(agent, card, True, _addresses(agent))
    except BaseException:
        agent.close()
        raise


def _found(agent: Agent, card: Card) -> Entrance:
    """The first one: the crew begins here. Whoever is in besides has come to take part later."""
    card = msgspec.structs.replace(card, seat=max(0, card.seat), averaging=True)
    agent.describe(agent.now_s(), card)
    return Entrance(agent, card, False, _addresses(agent))


def _addresses(agent: Agent) -> dict[PeerId, Address]:
    """Where the others take data, by seat."""
    seats = agent.roster.seats
    return {p: (h.card.host, h.card.port) for p, h in seats.items() if h.live}


def _get_in(agent: Agent, token: Token, deadline_s: float) -> None:
    first_s = min(INITIAL_RTO_S, deadline_s)
    _turn(agent, lambda: agent.entered, first_s)
    if not agent.entered and not agent.over:
        _log.warning("%s", waiting(token, deadline_s - first_s))
        _turn(agent, lambda: agent.entered, deadline_s - first_s)
    if not agent.entered:
        raise NotLetIn(agent.failure or f"no member let this peer in within {deadline_s:g} s")


def _averaging(agent: Agent) -> bool:
    return any(holder.live and holder.card.averaging for holder in agent.roster.seats.values())


def _await_beginner(agent: Agent, until_s: float) -> None:
    _turn(agent, lambda: _averaging(agent), until_s - agent.now_s())
    if not _averaging(agent):
        raise NotLetIn(
            agent.failure
            or "none of those that let this peer in averages; start the peer that begins the crew, on the "
            "machine that the token names"
        )


def _take_seat(agent: Agent, card: Card, until_s: float, deadline_s: float) -> Card:
    """A card with a seat of its own."""
    machine, roster = agent.machine, agent.roster
    seating = Seating(roster, card, agent.now_s(), machine.period_s)
    while not seating.settled:
        try:
            claim = seating.look(agent.now_s(), machine.period_s, len(machine.live()), machine.whole)
        except RuntimeError as error:
            raise NotLetIn(str(error)) from None
        if claim is not None:
            agent.describe(agent.now_s(), claim)
        now_s = agent.now_s()
        if agent.over:
            raise NotLetIn(agent.failure)
        if now_s >= until_s:
            raise NotLetIn(
                f"no seat could be taken within {deadline_s:g} s: others claimed the same ones each time"
            )
        _turn(
            agent,
            lambda: bool(roster.contested()) if seating.claimed else machine.whole,
            seating.until_s - now_s,
        )
    return seating.card


def _turn(agent: Agent, done: Callable[[], bool], for_s: float) -> None:
    """Turn the agent; what changes goes to the roster (nobody averages here yet)."""

    def take(told: Told) -> None:
        if isinstance(told, Changed):
            agent.roster.changed(told.member, told.was)

    agent.run_until(done, for_s, take)


def _epoch() -> int:
    """What tells this process's datagrams from those of another with its number; above 0."""
    return 1 + secrets.randbelow((1 << 32) - 1)


def _agent(name: str, address: Address, key: bytes, card: Card, sock: socket.socket) -> Agent:
    epoch = (int(time.time() * 1e6) << 8 | secrets.randbits(8)) & ((1 << 62) - 1)
    identity = Identity(name, address, epoch, key, encode_card(card), seed=secrets.randbits(62))
    return Agent(Membership(identity), Roster(name, epoch), sock)


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
