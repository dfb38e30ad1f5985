"""Joining a crew: from the environment to a peer that has met the others."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ragtag import __version__
from ragtag.app.crew.crew import Crew
from ragtag.app.crew.donors import PassProver, start_donor
from ragtag.app.crew.membership import (
    Entrance,
    JoinError,
    admitted,
    asked,
    enter,
    launched,
    lost,
    member_socket,
    member_socket_of,
    outside,
    resolved,
    seated,
)
from ragtag.app.crew.peer import Again, Peer, Rejoined
from ragtag.app.crew.phases import Phases
from ragtag.app.crew.transport import DriverTransport, SeatLost, SoloTransport, await_meeting, known_to
from ragtag.app.disk import explain
from ragtag.app.environment import (
    Address,
    Announcer,
    Place,
    Reached,
    exchange_addresses,
    format_address,
    reachable_host,
)
from ragtag.app.invitation.token import (
    ADDRESSES_MAX,
    Credential,
    Token,
    TokenError,
    decode,
    encode,
    keep_token,
)
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace
from ragtag.core.address import is_loopback
from ragtag.core.types import PEERS_MAX, Arm, Expired, Left, Noted, PeerId, Tell
from ragtag.core.wire import Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.link import Link, open_link
from ragtag.network.link.sealed import SealedLink, fast_suite
from ragtag.network.link.udp import bound
from ragtag.network.transfer.donor import DonorServer
from ragtag.protocols.crew.joining import (
    Anew,
    Ends,
    In,
    Joining,
    JoiningEffect,
    JoiningEvent,
    Sits,
    Unseat,
    node_of,
)
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.passes import Passes
from ragtag.protocols.node import Node
from ragtag.protocols.sealing.noise import KEY_BYTES, KeyPair
from ragtag.protocols.sealing.sessions import Sessions, card_of
from ragtag.protocols.transfer.snapshots import Shelf

__all__ = ["JoinError", "join_as", "joined"]

_log = logging.getLogger("ragtag")
_GOODBYE_S = 1.0  # for a peer that ends before it was in, so that the others need not find out
_EARLY_MAX = 256  # notes that wait until there is a crew to write them


class JoinedCrews:
    """The crews that this process was launched for and has joined, one after another."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._crews = 0
        self._newest: weakref.ref[Peer] | None = None
        self._members: Membership | None = None  # of the newest, which outlives it
        self._lost: frozenset[PeerId] = frozenset()

    def join(self, place: Place, deadline_s: float) -> Crew:
        """Join the next one. Raises JoinError: the last one was not left."""
        newest = None if self._newest is None else self._newest()
        if newest is not None and not newest.left:  # one that is not left lives as long as its driver
            raise JoinError(
                f"this process is peer {newest.rank} of its crew already: go on with what ragtag.join() "
                "returned, or call its leave() before joining again (`with ragtag.join() as crew:` does)"
            )
        if place != self._place:
            self._place, self._crews, self._members, self._lost = place, 0, None, frozenset()
        if self._members is not None:
            self._lost = lost(self._members, place.size, self._lost)
        number = self._crews + 1
        mine = place.of_crew(number)
        if mine.socket_fd is not None:  # a crew closes what it has; the next one needs it, too
            mine = replace(mine, socket_fd=os.dup(mine.socket_fd))
        crew = join_as(mine, deadline_s, self._lost)
        driver = crew._peer.driver
        self._members = None if driver is None else driver.membership
        if number > 1 and mine.token is None:
            _begin_folder(mine, crew._peer)
        self._crews, self._newest = number, weakref.ref(crew._peer)
        return crew


joined = JoinedCrews()
"""Of this process."""


def _begin_folder(place: Place, peer: Peer) -> None:
    """What a launcher writes into a run's folder, for a crew that none has launched anew."""
    peer.log.record_run()
    if place.run_folder is None or place.key is None or peer.rank != min(peer.transport.live):
        return
    try:
        keep_token(place.run_folder, encode(peer.token()))
    except OSError as error:  # as for the trace: what is not written stops no run
        _log.warning("no invitation to crew %r could be kept: %s", place.crew, explain(error))


def join_as(place: Place | None, deadline_s: float, lost: frozenset[PeerId] = frozenset()) -> Crew:
    """``ragtag.join``, in this place (``None``: alone).

    lost: the peers that died in an earlier crew, and are not waited for.
    """
    if place is None:
        return Crew(Peer(Place(0, 1, "alone"), SoloTransport(0), None, None, time.monotonic()))
    # By the wall clock, which all machines share and somebody may set, once; never again
    running_s = 0.0 if place.started_unix_s is None else time.time() - place.started_unix_s
    origin_s = time.monotonic() - running_s
    if place.token is not None or place.size > 1:
        import torch._dynamo  # noqa: F401  (any optimizer imports it, for seconds, and the crew would wait)
    if place.token is not None:
        return _accept(place, place.token, origin_s, deadline_s)
    writer = TraceWriter(place.run_folder / peer_file(place.rank)) if place.run_folder is not None else None
    if place.size == 1:
        announcer = Announcer(place.rank, place.ready_fd)
        peer = Peer(place, SoloTransport(place.seed), None, writer, origin_s, announcer=announcer)
        peer.log.record(trace.Join(t=peer.log.now_s(), peer=0))
        announcer.tell(Reached.JOINED, place.rank)
        announcer.tell(Reached.READY)
        return Crew(peer)
    with ExitStack() as undo:
        if writer is not None:
            undo.callback(writer.close)
        crew = _join(place, writer, origin_s, deadline_s, lost)
        undo.pop_all()
    return crew


def _join(
    place: Place,
    writer: TraceWriter | None,
    origin_s: float,
    deadline_s: float,
    lost: frozenset[PeerId],
) -> Crew:
    """Meet the others over a driver."""
    with ExitStack() as undo:
        endpoint = _endpoint(place)
        undo.callback(endpoint.close)
        data, member = (reachable_host(place), endpoint.address[1]), None
        if place.rendezvous is not None:  # else its launcher has told, and bound, all
            sock = undo.enter_context(member_socket_of(place))
            place = replace(place, member_fd=sock.fileno())
            member = data[0], sock.getsockname()[1]
        try:
            known = exchange_addresses(place, data, deadline_s, member)
        except TimeoutError as error:
            raise JoinError(str(error)) from None
        way = _Way(replace(place, key=known.key, members=known.members), writer, origin_s, deadline_s)
        entrance = None
        if known.key is not None:
            way.begin_giving(known.key, data[0], undo)
            entrance = launched(way.place, data, way.state_port, way.card(data[0]))
            undo.callback(entrance.agent.close)
        node = Node(place.rank, place.size, place.seed)
        others = set(range(place.size)) - {place.rank}
        if entrance is not None and others - lost:  # membership tells where one of them comes all the same
            for peer in sorted(others & lost):
                node.step(0.0, Left(peer))
        joining = Joining(place.crew, __version__, deadline_s)
        sits = joining.step(time.monotonic(), Sits(place.rank, place.size, place.seed))
        started = _start(way, joining, sits, node, endpoint, dict(enumerate(known.addresses)), entrance)
        assert started is not None  # a peer that a launcher has seated looks for no other seat
        crew = _crew(way, started[0], entrance, started[1])
        undo.pop_all()
    return crew


def _accept(place: Place, text: str, origin_s: float, deadline_s: float) -> Crew:
    """Join by an invitation: membership first, which tells the other peers and which number is free."""
    way = _Way(place, None, origin_s, deadline_s, place.rank)
    try:
        token = resolved(decode(text, time.time()).for_processes(time.time()))
    except TokenError as error:
        raise JoinError(str(error)) from None
    joining = Joining(token.crew, __version__, deadline_s, asked(token))
    driver, entrance, met = _until_seated(way, joining, admitted(joining, token, way.phases))
    return _crew(way, driver, entrance, met)


def _until_seated(way: _Way, joining: Joining, token: Token) -> tuple[Driver, Entrance, int]:
    """In by an invitation, as often as ``joining`` says that another peer has this one's seat."""
    place = way.place
    while True:
        with ExitStack() as undo:
            found = _through(way, joining, token, undo)
            if found is not None:
                undo.pop_all()
                return found
        name = None if place.name is None else f"{place.name}~{joining.tried}"
        way.place = replace(place, socket_fd=None, member_fd=None, name=name)


def _through(
    way: _Way, joining: Joining, token: Token, undo: ExitStack
) -> tuple[Driver, Entrance, int] | None:
    """In by an invitation, with a seat and a running driver; how many peers were met. ``None``: once more.

    Raises JoinError where nobody lets this peer in.
    """
    place = way.place
    ways = member_socket(token, place.member_fd)
    undo.callback(ways[0].close)
    host = ways[1][0]
    data = bound(socket.SOCK_DGRAM, (host, 0))
    undo.callback(data.close)
    seen = outside(token, ways, data, way.deadline_s / 2)
    if seen is not None:
        where = format_address(seen.data)
        _log.info("this peer is behind a router that translates addresses; others see it at %s", where)
        way.note(Noted("translated", -1, f"its addresses: others see it at {where}"))
    endpoint = open_link(fd=os.dup(data.fileno()))
    undo.callback(endpoint.close)
    data.close()
    if token.credential is not None and way.passes is None:
        way.credential, way.passes = token.credential, Passes(token.credential.signer, token.credential.shown)
    way.begin_giving(token.key, host, undo)
    port = endpoint.address[1]
    card = way.card(host, token.credential is not None)
    entrance, greets = enter(
        joining, place, token, ways, port, way.state_port, way.phases, card, seen, way.passes
    )
    undo.callback(entrance.agent.close)
    place = way.place = seated(place, token, entrance)
    if place.run_folder is not None:
        way.writer = way.trace_in(place.run_folder)
        if way.writer is not None:
            undo.callback(way.writer.close)
    node = node_of(entrance.card, entrance.n, entrance.agent.roster)
    started = _start(way, joining, greets, node, endpoint, entrance.known, entrance)
    if started is None:
        return None
    undo.callback(started[0].close, 0.0)
    return started[0], entrance, started[1]


def _again(way: _Way) -> Again:
    """How a peer comes in anew that was taken for dead, and whose seat another one has now."""

    def enter(driver: Driver) -> Rejoined:
        place = way.place
        addresses = driver.members()[:ADDRESSES_MAX]
        if place.key is None or not addresses:
            raise JoinError("no member of the crew is known any more; start this peer again")
        token = Token(tuple(addresses), place.crew, place.key, credential=way.credential)
        way.place = replace(place, socket_fd=None, member_fd=None, members=None, peers=None, name=None)
        joining = Joining(token.crew, __version__, way.deadline_s, asked(token))
        driver, entrance, met = _until_seated(way, joining, token)
        return Rejoined(way.place, driver, entrance, way.donor, way.shelf, way.writer, met)

    return enter


@dataclass(slots=True)
class _Way:
    """How a peer joins.

    number: what its launcher calls it (``None``: by its rank).
    keys: this process's own (``protocols.sealing``), for as long as it has one place in one crew.
    credential: by what it proves whose it is, in a crew that takes persons.
    passes: what it knows of others' passes; it knows that still when it joins anew.
    """

    place: Place
    writer: TraceWriter | None
    origin_s: float
    deadline_s: float
    number: int | None = None
    shelf: Shelf | None = None
    donor: DonorServer | None = None
    peers: list[Peer] = field(default_factory=list)
    early: list[Noted] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)
    keys: KeyPair = field(default_factory=lambda: KeyPair(secrets.token_bytes(KEY_BYTES)))
    credential: Credential | None = None
    passes: Passes | None = None

    def card(self, host: str, persons: bool = False) -> bytes:
        """What its membership card tells of its key; empty: it sends its data in clear.

        persons: whether the crew takes persons only, who prove by that key whose process it is.

        Raises:
            JoinError: RAGTAG_SEAL turns off what a crew of persons needs.
        """
        if persons:
            if self.place.seal is False:
                raise JoinError(
                    "RAGTAG_SEAL is off, and a crew that takes persons always encrypts: its members prove by "
                    "the keys who they are. Unset it"
                )
            return card_of(fast_suite(), self.keys)
        seals = not is_loopback(host) if self.place.seal is None else self.place.seal
        return card_of(fast_suite(), self.keys) if seals else b""

    def link(self, under: Link, identity: Identity, entrance: Entrance | None) -> Link:
        """``under``, or one on it that seals, if the crew is told so."""
        if entrance is None or not entrance.card.key:
            return under
        assert self.place.key is not None
        suite, roster = entrance.card.key[0], entrance.agent.roster
        sessions = Sessions(self.place.key, self.keys, roster.at, secrets.token_bytes, suite)
        return SealedLink(under, identity, sessions)

    def begin_giving(self, key: bytes, host: str, undo: ExitStack) -> None:
        """Be ready to give this peer's state to those who come later."""
        self.shelf = Shelf(threading.Lock())
        self.donor = start_donor(key, host, self.shelf, self.note, self.prover)
        undo.callback(self.donor.close)

    @property
    def prover(self) -> PassProver | None:
        """By what donors and newcomers know each other's persons; ``None``: the crew takes none."""
        if self.credential is None or self.passes is None:
            return None
        return PassProver(self.credential, self.passes)

    @property
    def state_port(self) -> int:
        """Where the state is given away; 0: nowhere."""
        return 0 if self.donor is None else self.donor.address[1]

    def trace_in(self, folder: Path) -> TraceWriter | None:
        """This peer's trace. Raises OSError where it cannot be, unless training goes on already."""
        try:
            return TraceWriter(folder / peer_file(self.place.rank))
        except OSError as error:
            if not self.peers:
                raise
            _log.warning("there is no trace of this peer from now on: %s", explain(error))
            return None

    def note(self, note: Noted) -> None:
        """For the trace, once there is one."""
        for peer in self.peers:
            peer.log.note(note)
        if not self.peers and len(self.early) < _EARLY_MAX:
            self.early.append(note)


def _start(
    way: _Way,
    joining: Joining,
    greets: list[JoiningEffect],
    node: Node,
    endpoint: Link,
    peers: Mapping[PeerId, Address],
    entrance: Entrance | None,
) -> tuple[Driver, int] | None:
    """Start the driver, and greet the others; how many were met (``None``: to be done once more)."""
    place = way.place
    identity = Identity(place.crew, place.rank)
    driver = Driver(
        node,
        way.link(endpoint, identity, entrance),
        identity,
        peers,
        faults=place.faults,
        seed=place.seed,
        on_note=lambda now_s, note: way.note(note),
        agent=None if entrance is None else entrance.agent,
        epoch=None if entrance is None else entrance.card.epoch,
        # in a smaller crew all meet all, and rounds find out which peers are silent
        expected_until_s=way.deadline_s if node.n > PEERS_MAX else math.inf,
    )
    driver.start()
    try:
        met = _greet(joining, greets, driver, way.phases)
    except BaseException:
        driver.close(_GOODBYE_S)
        raise
    if met is None:
        driver.close(_GOODBYE_S)
        return None
    return driver, met


def _greet(joining: Joining, greets: list[JoiningEffect], driver: Driver, phases: Phases) -> int | None:
    """Carry out a greeting; how many were met. ``None``: another peer has this one's seat, so enter anew.

    Raises:
        JoinError: this peer is not to go on with those that were met, or nobody was.
        SeatLost: another peer has the seat that a launcher gave this one.
    """
    event: JoiningEvent
    effects = greets
    while True:
        meeting = until = None
        for effect in effects:
            if isinstance(effect, Tell):
                for_s = effect.deadline_s - time.monotonic()
                meeting = driver.meet(effect.number, effect.blob, for_s, effect.late, effect.silent)
            elif isinstance(effect, Left):
                driver.leave(effect.peer)
            elif isinstance(effect, Arm):
                until = effect
            elif isinstance(effect, In):
                return effect.met
            elif isinstance(effect, Anew):
                return None
            elif isinstance(effect, Ends):
                raise SeatLost(effect.why) if effect.seat else JoinError(effect.why)
            else:
                phases.told(effect)
        assert meeting is not None and until is not None
        try:
            event = known_to(driver, await_meeting(driver, meeting, until.at_s - time.monotonic()))
        except SeatLost as error:
            event = Unseat(str(error))
        except TimeoutError:
            event = Expired(until.timer)
        effects = joining.step(time.monotonic(), event)


def _crew(way: _Way, driver: Driver, entrance: Entrance | None, met: int) -> Crew:
    place = way.place
    announcer = Announcer(place.rank if way.number is None else way.number, place.ready_fd)
    transport = DriverTransport(
        driver,
        way.deadline_s,
        on_ready=partial(announcer.tell, Reached.READY),
        entrance=entrance,
        phases=way.phases,
    )
    peer = Peer(
        place,
        transport,
        driver,
        way.writer,
        way.origin_s,
        donor=way.donor,
        shelf=way.shelf,
        again=None if entrance is None else _again(way),
        phases=way.phases,
        announcer=announcer,
    )
    if peer.donors is not None:
        peer.donors.persons = way.prover
    way.peers.append(peer)
    for note in way.early:
        peer.log.note(note)
    peer.log.record_join(met)
    announcer.tell(Reached.JOINED, place.rank)
    return Crew(peer)


def _endpoint(place: Place) -> Link:
    if place.socket_fd is not None:
        return open_link(fd=place.socket_fd)
    if place.peers is not None:
        return open_link(place.peers[place.rank])
    return open_link((reachable_host(place), 0))
