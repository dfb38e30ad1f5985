"""Joining a crew: from the environment to a peer that has met the others."""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ragtag import __version__
from ragtag.app.crew.crew import Crew
from ragtag.app.crew.donors import PassProver, start_donor
from ragtag.app.crew.membership import (
    Entrance,
    JoinError,
    admitted,
    asked,
    launched,
    lost,
    member_socket_of,
)
from ragtag.app.crew.peer import Again, Peer, Rejoined
from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.app.crew.way import Way, resolved_token, start, until_seated
from ragtag.app.disk import explain
from ragtag.app.environment import (
    Announcer,
    Place,
    Reached,
    exchange_addresses,
    reachable_host,
)
from ragtag.app.invitation.token import (
    ADDRESSES_MAX,
    Token,
    encode,
    keep_token,
)
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace
from ragtag.core.types import Left, PeerId
from ragtag.network.driver.driver import Driver
from ragtag.network.link import Carrier, open_link
from ragtag.network.transfer.donor import DonorServer
from ragtag.protocols.crew.joining import (
    Joining,
    Sits,
)
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.node import Node
from ragtag.protocols.transfer.snapshots import Shelf

__all__ = ["JoinError", "join_as", "joined"]

_log = logging.getLogger("ragtag")


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
            mine = replace(mine, socket_fd=_copy_of(mine.socket_fd, place.rank))
        crew = join_as(mine, deadline_s, self._lost)
        driver = crew._peer.driver
        self._members = None if driver is None else driver.membership
        if number > 1 and mine.token is None:
            _begin_folder(mine, crew._peer)
        self._crews, self._newest = number, weakref.ref(crew._peer)
        return crew


joined = JoinedCrews()
"""Of this process."""


def _copy_of(socket_fd: int, rank: PeerId) -> int:
    try:
        return os.dup(socket_fd)
    except OSError as error:
        raise JoinError(
            f"this process has the environment of peer {rank}, and not its socket: a script that a peer "
            "starts is no peer. To train alone there, start it without the RAGTAG_ variables"
        ) from error


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
        there = replace(place, key=known.key, members=known.members)
        if known.key is None and not place.role.owns:
            raise JoinError(
                "a client is known as one by the crew's membership, which this crew has none of: start it by "
                "ragtag run, ragtag join or torchrun"
            )
        way = Way(there, writer, origin_s, deadline_s, start_donor=_donor if place.role.owns else None)
        entrance = None
        if known.key is not None:
            way.begin_giving(known.key, data[0], undo)
            entrance = launched(way.place, data, way.state_port, way.card(data[0]))
            undo.callback(entrance.agent.close)
        node = Node(place.rank, place.size, place.seed, role=place.role)
        others = set(range(place.size)) - {place.rank}
        if entrance is not None and others - lost:  # membership tells where one of them comes all the same
            for peer in sorted(others & lost):
                node.step(0.0, Left(peer))
        joining = Joining(place.crew, __version__, deadline_s)
        sits = joining.step(time.monotonic(), Sits(place.rank, place.size, place.seed, place.role))
        started = start(way, joining, sits, node, endpoint, dict(enumerate(known.addresses)), entrance)
        assert started is not None  # a peer that a launcher has seated looks for no other seat
        crew = _crew(way, started[0], entrance, started[1])
        undo.pop_all()
    return crew


def _accept(place: Place, text: str, origin_s: float, deadline_s: float) -> Crew:
    """Join by an invitation: membership first, which tells the other peers and which number is free."""
    way = Way(place, None, origin_s, deadline_s, place.rank, start_donor=_donor)
    token = resolved_token(text)
    if not place.role.owns:  # a client's line has better to do than to give its state
        way.start_donor = None
        token = replace(token, begins=False)
    joining = Joining(token.crew, __version__, deadline_s, asked(token))
    driver, entrance, met = until_seated(way, joining, admitted(joining, token, way.phases))
    return _crew(way, driver, entrance, met)


def _donor(way: Way, key: bytes, host: str, shelf: Shelf) -> DonorServer:
    return start_donor(key, host, shelf, way.note, _prover(way))


def _prover(way: Way) -> PassProver | None:
    """By what donors and newcomers know each other's persons; ``None``: the crew takes none."""
    if way.credential is None or way.passes is None:
        return None
    return PassProver(way.credential, way.passes)


def _again(way: Way) -> Again:
    """How a peer comes in anew that was taken for dead, and whose seat another one has now."""

    def enter(driver: Driver) -> Rejoined:
        place = way.place
        addresses = driver.members()[:ADDRESSES_MAX]
        if place.key is None or not addresses:
            raise JoinError("no member of the crew is known any more; start this peer again")
        token = Token(tuple(addresses), place.crew, place.key, credential=way.credential)
        way.place = replace(place, socket_fd=None, member_fd=None, members=None, peers=None, name=None)
        joining = Joining(token.crew, __version__, way.deadline_s, asked(token))
        driver, entrance, met = until_seated(way, joining, token)
        return Rejoined(way.place, driver, entrance, way.donor, way.shelf, way.writer, met)

    return enter


def _crew(way: Way, driver: Driver, entrance: Entrance | None, met: int) -> Crew:
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
        peer.donors.persons = _prover(way)
    way.peers.append(peer)
    for note in way.early:
        peer.log.note(note)
    peer.log.record_join(met)
    announcer.tell(Reached.JOINED, place.rank)
    return Crew(peer)


def _endpoint(place: Place) -> Carrier:
    if place.socket_fd is not None:
        return open_link(fd=place.socket_fd)
    if place.peers is not None:
        return open_link(place.peers[place.rank])
    return open_link((reachable_host(place), 0))
