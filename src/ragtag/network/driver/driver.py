"""The driver: one background thread that runs a node over a link, and how other threads speak to it.

What the thread does is in ``engine``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields

from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.types import (
    Average,
    Left,
    Met,
    Noted,
    Offer,
    Outcome,
    PeerId,
    Post,
    Publish,
    Tell,
)
from ragtag.core.wire import DATAGRAM_BYTES, Identity
from ragtag.network.driver.engine import Engine, Watch
from ragtag.network.driver.mailbox import DriverFailed
from ragtag.network.link import Link
from ragtag.network.link.sealed import SealedLink
from ragtag.network.membership.agent import Agent
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.roster import Card, Holder
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.relays import DIRECT

__all__ = ["Driver", "DriverFailed", "Traffic"]

LARGE_CHUNKS = 1 << 14
"""From so many chunks on (18 MB) compiled loops save more in a minute than the second it takes to compile."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one peer has sent and received so far.

    datagrams_sent, datagrams_received: packets (``core.wire``), of which a datagram may hold several.
    datagrams_lost: those of this peer that were lost on the way, as the others' answers tell.
    refused: datagrams that came and were not accepted.
    """

    bytes_sent: int
    bytes_received: int
    datagrams_sent: int
    datagrams_received: int
    datagrams_lost: int
    refused: int


@dataclass(frozen=True, slots=True)
class Direction:
    """What is known of the way from this peer to another one.

    sent, came, lost: packets that left, and that are known to have come, and not to.
    through: the peer that relays what is sent; -1: none.
    streamed: whether what is sent leaves over TCP, as UDP does not get through.
    datagram_bytes: how large datagrams are at most: what the path is known to take.
    late: messages whose deadline passed before they left.
    rate_bytes_per_s: what the path delivers, by rate control; 0: not known.
    rtt_s, min_rtt_s: round trips, smoothed with what busy ends keep, and the path's shortest; 0: none known.
    held_s: what has kept messages from leaving, and for how long (``network.link.flow.Hold``).
    """

    peer: PeerId
    sent: int
    came: int
    lost: int
    late: int
    rate_bytes_per_s: float
    rtt_s: float
    min_rtt_s: float
    held_s: Mapping[str, float]
    datagram_bytes: int
    through: PeerId = DIRECT
    streamed: bool = False


class Driver:
    """One peer on a link, as the rest of its process sees it. Futures answer what is asked of it.

    peers: every other peer's address.
    on_note: called in the driver's thread with (now_s, note).
    agent: tells which peers come and go. This driver turns it from now on (``None``: peers do not change).
    epoch: the number of this process, in all its datagrams; the one on the agent's card where there is one.
        ``None``: taken from the clock, so that a later process has a higher one.
    expected_until_s: peers that are no members by this time, on the agent's clock, are left out.
    watch: called in the driver's thread with (now_s, what) for each post that is new to this peer, and, at an
        auxiliary, for each round that it has averaged its blocks of.

    Raises:
        ValueError: nothing can be sent to a peer's address over this link.
    """

    def __init__(
        self,
        node: Node,
        link: Link,
        identity: Identity,
        peers: Mapping[PeerId, Address],
        *,
        faults: Faults | None = None,
        seed: int = 0,
        on_note: Callable[[float, Noted], None] | None = None,
        recording: Recording | None = None,
        agent: Agent | None = None,
        epoch: int | None = None,
        expected_until_s: float = math.inf,
        watch: Watch | None = None,
    ) -> None:
        self.node, self.link = node, link
        self.engine = Engine(
            node,
            link,
            identity,
            peers,
            faults or Faults(),
            seed,
            on_note,
            recording,
            agent,
            epoch,
            expected_until_s,
            watch,
        )
        self._compiling: threading.Thread | None = None

    # -- From other threads

    def start(self) -> None:
        """Start the thread; before that, every call fails."""
        self.engine.start()

    def now_s(self) -> float:
        """Seconds since this driver was made (with membership: since its agent was)."""
        return self.engine.now_s()

    def average(self, event: Average | Offer) -> Future[Outcome]:
        """Begin a round. The future has its outcome by the round's own deadline."""
        future: Future[Outcome] = Future()

        def begin(now_s: float) -> None:
            if not self.engine.promises.outcome(event.channel, future):
                return
            self.tell_measurements(now_s)
            try:
                self.engine.step(now_s, event)
            except (KeyError, ValueError, RuntimeError) as error:
                self.engine.promises.misused(future, error)

        self.engine.mailbox.put(begin, future)
        return future

    def idle(self, channel: int) -> Future[None]:
        """Done once no round of a channel is under way, of those that were asked for before."""
        future: Future[None] = Future()

        def look(now_s: float) -> None:
            under_way = self.engine.promises.under_way(channel)
            if under_way is None:
                future.set_result(None)
            else:
                under_way.add_done_callback(lambda _: future.set_result(None))

        self.engine.mailbox.put(look, future)
        return future

    def meet(
        self,
        number: int,
        blob: bytes,
        deadline_s: float,
        late: bool = False,
        there: frozenset[PeerId] | None = None,
    ) -> Future[Met]:
        """Tell ``blob`` to all peers and hear theirs, for at most ``deadline_s`` seconds (see ``Tell``)."""
        future: Future[Met] = Future()

        def begin(now_s: float) -> None:
            if not self.engine.promises.meeting(number, future):
                return
            self.tell_measurements(now_s)
            try:
                self.engine.step(now_s, Tell(number, blob, now_s + deadline_s, late, there))
            except (ValueError, RuntimeError) as error:
                self.engine.promises.misused(future, error)

        self.engine.mailbox.put(begin, future)
        return future

    def post(self, topic: int, blob: bytes) -> Future[int]:
        """Put this peer's newest value of a topic on the notice board; the future has its number."""
        future: Future[int] = Future()

        def begin(now_s: float) -> None:
            try:
                self.engine.step(now_s, Post(topic, blob))
            except (ValueError, RuntimeError) as error:
                future.set_exception(error)
            else:
                future.set_result(self.notices(topic).posts[self.node.me].number)

        self.engine.mailbox.put(begin, future)
        return future

    def publish(self, event: Publish) -> Future[None]:
        """Have a channel of named tensors take these values; the future is done once it has."""
        future: Future[None] = Future()

        def begin(now_s: float) -> None:
            try:
                self.engine.step(now_s, event)
            except (KeyError, ValueError, RuntimeError) as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self.engine.mailbox.put(begin, future)
        return future

    def notices(self, topic: int) -> Notices:
        """What the notice board knows of a topic (a snapshot; any thread may ask)."""
        return self.node.board.notices(topic)

    def posts(self, topic: int) -> dict[PeerId, bytes]:
        """Every peer's newest value of a topic, this peer's included (a snapshot; any thread may ask)."""
        return {peer: posted.blob for peer, posted in self.notices(topic).posts.items()}

    def tell_measurements(self, now_s: float) -> None:
        """Tell the node how far away the peers are, in the driver's own thread: before rounds begin."""
        for peer, flow in self.engine.flows.items():
            if peer not in self.node.gone and (measured := flow.measured) is not None:
                self.engine.step(now_s, measured)

    def configure(self, number: int, channel: Channel, schema: int) -> Future[None]:
        """Open a channel whose datagrams carry the hash ``schema``. The future fails where it cannot open."""
        future: Future[None] = Future()

        def open_channel(now_s: float) -> None:
            try:
                self.open(now_s, number, channel, schema)
            except ValueError as error:
                future.set_exception(error)
                return
            future.set_result(None)

        self.engine.mailbox.put(open_channel, future)
        return future

    def open(self, now_s: float, number: int, channel: Channel, schema: int) -> None:
        """``configure`` in the driver's own thread. Raises ValueError: the channel cannot open."""
        self.node.configure(number, channel, now_s)
        self.engine.opened(number, schema)
        if channel.n_chunks >= LARGE_CHUNKS and not channel.passing:
            self._compile()

    def _compile(self) -> None:
        """Begin to compile the loops that frame datagrams. Rounds go on without them meanwhile."""
        if self._compiling is None:
            self._compiling = threading.Thread(
                target=self.engine.framer.compile, name="ragtag-compile", daemon=True
            )
            self._compiling.start()

    def call(self, function: Callable[[float], None]) -> None:
        """Have the driver's own thread call ``function(now_s)``."""
        self.engine.mailbox.put(function, None)

    def probed(self, number: int, probe_s: float) -> None:
        """Tell the node how long a channel's first round may take, in seconds."""
        self.engine.mailbox.put(lambda now_s: self.node.probed(number, probe_s, now_s), None)

    def resume(self, number: int, round_: int, card: Card) -> Future[bool]:
        """Take part on a channel whose last round was ``round_``, and tell the crew so by ``card``.

        The result is ``True`` once a newer round of the channel is heard of: then the others know of this
        peer. It is ``False`` where another peer has this one's seat.
        """
        future: Future[bool] = Future()

        def begin(now_s: float) -> None:
            self.node.resume(number, round_)
            if self.engine.reach is not None and not self.lost_seat:
                self.engine.reach.agent.describe(now_s, card)
            self._await_newer(number, future)

        self.engine.mailbox.put(begin, future)
        return future

    def newer(self, number: int) -> Future[bool]:
        """Wait for a round of a channel that others are known to have begun, and this peer has not.

        The result is ``True`` then, and ``False`` where another peer has this one's seat. A caller that waits
        no longer cancels the future.
        """
        future: Future[bool] = Future()
        self.engine.mailbox.put(lambda now_s: self._await_newer(number, future), future)
        return future

    def _await_newer(self, number: int, future: Future[bool]) -> None:
        self.engine.promises.newer(number, future)
        if self.lost_seat:
            self.engine.promises.lose_seat()
        else:
            self.engine.promises.look(self.node)

    def describe(self, card: Card) -> None:
        """Tell the crew this card of this peer, as long as it has its seat."""

        def tell(now_s: float) -> None:
            if self.engine.reach is not None and not self.lost_seat:
                self.engine.reach.agent.describe(now_s, card)

        self.engine.mailbox.put(tell, None)

    @property
    def seats(self) -> dict[PeerId, Holder]:
        """The holder of each seat, as membership tells (empty: without membership)."""
        return {} if self.engine.reach is None else dict(self.engine.reach.agent.roster.seats)

    def persons(self) -> dict[PeerId, tuple[str, int]]:
        """Whose process has each seat, this peer's too, and its number; empty: the crew takes no persons."""
        reach = self.engine.reach
        mine = None if reach is None else reach.agent.roster.mine
        if mine is None or not mine.proof:
            return {}
        cards = {peer: holder.card for peer, holder in self.seats.items()} | {mine.seat: mine}
        return {peer: (card.person, card.epoch) for peer, card in cards.items() if card.person}

    def answering(self) -> dict[PeerId, Holder]:
        """``seats`` without peers that have been silent since they owed a message; all seats, if all have."""
        seats, node = self.seats, self.node
        there = {peer: holder for peer, holder in seats.items() if node.heard_lately(peer)}
        return there or seats

    def members(self) -> list[Address]:
        """Where the membership of each other living peer listens, as this peer knows it."""
        if self.engine.reach is None:
            return []
        machine = self.engine.reach.agent.machine
        live = set(machine.live()) - {machine.me.name}
        return [member.address for name, member in list(machine.members().items()) if name in live]

    @property
    def membership(self) -> Membership | None:
        """What this peer knows of the members, after ``close`` too (``None``: without membership)."""
        return None if self.engine.reach is None else self.engine.reach.agent.machine

    @property
    def own_member_address(self) -> Address | None:
        """Where this peer's membership listens (``None``: it has none)."""
        return None if self.engine.reach is None else self.engine.reach.agent.machine.me.address

    @property
    def lost_seat(self) -> str:
        """Why this peer may not average any more; empty: it may."""
        return self.engine.lost_seat()

    @property
    def barred(self) -> bool:
        """Whether this peer may not average any more since the crew lets its person in no more."""
        return self.engine.reach is not None and self.engine.reach.barred

    def leave(self, peer: PeerId) -> None:
        """Take a peer as gone for good."""
        self.engine.mailbox.put(lambda now_s: self.engine.step(now_s, Left(peer)), None)

    def traffic(self) -> Traffic:
        """What has been sent and received (a snapshot)."""
        flows = list(self.engine.flows.values())  # at once: the driver's thread adds newcomers
        lost = sum(flow.path.acked - flow.path.received for flow in flows)
        return Traffic(
            bytes_sent=self.engine.outbox.sent_bytes,
            bytes_received=sum(flow.inbound.received for flow in flows) * DATAGRAM_BYTES,
            datagrams_sent=self.engine.outbox.sent,
            datagrams_received=self.engine.inbox.received,
            datagrams_lost=max(0, lost),
            refused=sum(self.refusals().values()),
        )

    def directions(self) -> list[Direction]:
        """The ways to other peers to which something has left (a snapshot)."""
        found, routes = [], self.link.routes
        for peer, flow in sorted(self.engine.flows.items()):
            path = flow.path
            if path.sent:
                rate, lost = path.control.bandwidth * DATAGRAM_BYTES, max(0, path.acked - path.received)
                shortest_s = path.min_rtt_s if path.min_rtt_s < math.inf else 0.0
                held_s = {hold.value: seconds for hold, seconds in flow.held_s.copy().items()}
                found.append(
                    Direction(
                        peer, path.sent, path.received, lost, flow.dropped_late, rate, path.srtt_s,
                        shortest_s, held_s, path.mtu.packets * DATAGRAM_BYTES,
                        DIRECT if routes is None else max(DIRECT, routes.via(peer)), path.streamed,
                    )
                )  # fmt: skip
        return found

    def refusals(self) -> dict[str, int]:
        """How many datagrams came and were not accepted, by reason."""
        refused = self.engine.framer.refused
        counts = {field.name: getattr(refused, field.name) for field in fields(refused)}
        counts.pop("schemas")
        if isinstance(self.link, SealedLink):
            for reason, count in self.link.sessions.refused.copy().items():
                counts[reason] = counts.get(reason, 0) + count
        if self.link.routes is not None:
            for reason, count in self.link.routes.refused.copy().items():
                counts[reason] = counts.get(reason, 0) + count
        return {reason: count for reason, count in counts.items() if count}

    def relayed(self) -> int:
        """How many packets of other peers this one has passed on (``protocols.relays``)."""
        return 0 if self.link.routes is None else self.link.routes.forwarded

    @property
    def refused(self) -> dict[PeerId, int]:
        """By peer, the schema hash of its data that was refused for it."""
        return dict(self.engine.framer.refused.schemas)

    def rto_s(self) -> float:
        """The longest time after which some peer's answer is overdue (RFC 6298)."""
        return max((f.path.rto_s for f in list(self.engine.flows.values()) if f.path.srtt_s > 0), default=0.0)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self.engine.thread.is_alive()

    @property
    def other_versions(self) -> int:
        """How many datagrams of this crew came in another version of the wire format."""
        return self.engine.framer.refused.version

    def rtt_s(self) -> dict[PeerId, float]:
        """The smoothed round-trip time to each peer that has answered."""
        return {peer: f.path.srtt_s for peer, f in list(self.engine.flows.items()) if f.path.srtt_s > 0}

    def close(self, deadline_s: float) -> None:
        """Send what is queued, say good-bye, and end the thread, within about ``deadline_s`` seconds."""
        if self._compiling is not None and self.alive:
            self._compiling.join(deadline_s)  # an interpreter that ends while a thread compiles may crash
        self.engine.close(deadline_s)
