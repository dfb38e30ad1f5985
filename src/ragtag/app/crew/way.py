"""A process's way into a crew: from a token, or a seat, to a driver that has met the others.

Peers that train (``join``) and auxiliaries, which have no script (``auxiliary``), go the same way.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragtag.app.crew.membership import (
    Entrance,
    JoinError,
    enter,
    member_socket,
    outside,
    resolved,
    seated,
)
from ragtag.app.crew.phases import Phases
from ragtag.app.crew.transport import SeatLost, await_meeting, known_to
from ragtag.app.disk import explain
from ragtag.app.environment import Address, Place, format_address
from ragtag.app.invitation.token import Credential, Token, TokenError, decode
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core.address import is_loopback
from ragtag.core.types import PEERS_MAX, Arm, Expired, Left, Noted, PeerId, Tell
from ragtag.core.wire import Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.driver.engine import Watch
from ragtag.network.link import Carrier, Link, open_link
from ragtag.network.link.relayed import RelayedLink
from ragtag.network.link.sealed import SealedLink, fast_suite
from ragtag.network.link.streamed import StreamedLink
from ragtag.network.link.udp import bound
from ragtag.network.transfer.donor import DonorServer
from ragtag.protocols.crew.joining import (
    Anew,
    Ends,
    In,
    Joining,
    JoiningEffect,
    JoiningEvent,
    Unseat,
    node_of,
)
from ragtag.protocols.membership.passes import Passes
from ragtag.protocols.node import Node
from ragtag.protocols.relays import Routes
from ragtag.protocols.sealing.noise import KEY_BYTES, KeyPair
from ragtag.protocols.sealing.sessions import Sessions, card_of
from ragtag.protocols.transfer.snapshots import Shelf

if TYPE_CHECKING:
    from ragtag.app.crew.peer import Peer

_log = logging.getLogger("ragtag")
_GOODBYE_S = 1.0  # for a peer that ends before it was in, so that the others need not find out
_EARLY_MAX = 256  # notes that wait until there is a crew to write them


StartDonor = Callable[["Way", bytes, str, Shelf], DonorServer]


@dataclass(slots=True)
class Way:
    """How a peer joins.

    number: what its launcher calls it (``None``: by its rank).
    keys: this process's own (``protocols.sealing``), for as long as it has one place in one crew.
    credential: by what it proves whose it is, in a crew that takes persons.
    passes: what it knows of others' passes; it knows that still when it joins anew.
    start_donor: begins to give its state to newcomers, at a host (``None``: it has none to give).
    watch: see ``Driver``.
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
    start_donor: StartDonor | None = None
    watch: Watch | None = None

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

    def link(self, under: Carrier, identity: Identity, entrance: Entrance | None) -> Link:
        """``under``, or one on it that seals, and goes over TCP or through others where it must, if the crew
        is told so.

        Nothing is relayed in clear: who relays could read it, and change it. Nor is anything taken over TCP
        that is not sealed: whoever connects is not asked who it is.
        """
        if entrance is None or not entrance.card.key:
            return under
        assert self.place.key is not None
        suite, roster = entrance.card.key[0], entrance.agent.roster
        sessions = Sessions(self.place.key, self.keys, roster.at, secrets.token_bytes, suite)
        link = StreamedLink(under)
        if link.streams.unheard:
            self.note(Noted("no TCP", -1, f"others cannot connect to this peer: {link.streams.unheard}"))
        routes = Routes(
            identity.peer,
            self.place.key,
            self.keys,
            roster,
            sessions.heard,
            secrets.token_bytes,
            streams=True,
        )
        return SealedLink(RelayedLink(link, routes, link.streams), identity, sessions)

    def begin_giving(self, key: bytes, host: str, undo: ExitStack) -> None:
        """Be ready to give this peer's state to those who come later."""
        if self.start_donor is not None:
            self.shelf = Shelf(threading.Lock())
            self.donor = self.start_donor(self, key, host, self.shelf)
            undo.callback(self.donor.close)

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


def start(
    way: Way,
    joining: Joining,
    greets: list[JoiningEffect],
    node: Node,
    endpoint: Carrier,
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
        watch=way.watch,
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
                meeting = driver.meet(effect.number, effect.blob, for_s, effect.late, effect.there)
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


def resolved_token(text: str) -> Token:
    """A token's text, as a process joins by it, with numeric addresses. Raises JoinError: it lets none in."""
    try:
        return resolved(decode(text, time.time()).for_processes(time.time()))
    except TokenError as error:
        raise JoinError(str(error)) from None


def until_seated(way: Way, joining: Joining, token: Token) -> tuple[Driver, Entrance, int]:
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
    way: Way, joining: Joining, token: Token, undo: ExitStack
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
        each = (
            "; it has another address for each peer, so others may relay what it sends" if seen.each else ""
        )
        way.note(Noted("translated", -1, f"its addresses: others see it at {where}{each}"))
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
    started = start(way, joining, greets, node, endpoint, entrance.known, entrance)
    if started is None:
        return None
    undo.callback(started[0].close, 0.0)
    return started[0], entrance, started[1]
