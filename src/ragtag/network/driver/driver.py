"""The driver: one background thread that runs a node over a UDP socket, and how other threads speak to it.

What the thread does is in ``engine``.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from ragtag.core.address import Address
from ragtag.core.types import (
    Average,
    Left,
    Measured,
    Met,
    Offer,
    Outcome,
    PeerId,
    Post,
    Publish,
    Tell,
)
from ragtag.core.wire import DATAGRAM_BYTES
from ragtag.network.driver.engine import Engine
from ragtag.network.driver.mailbox import DriverFailed
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.membership.machine import Membership
from ragtag.protocols.membership.roster import Card, Holder
from ragtag.protocols.node import Channel

__all__ = ["Driver", "DriverFailed", "Traffic"]

_BYES = 3
LARGE_CHUNKS = 1 << 14
"""From so many on (18 MB) compiled loops save more in a minute than the second that it takes to have them."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one peer has sent and received so far."""

    bytes_sent: int
    bytes_received: int
    datagrams_sent: int
    datagrams_received: int
    datagrams_lost: int
    refused: int


class Driver(Engine):
    """An engine as the rest of the process sees it: what is asked of it is answered by futures."""

    _compiling: threading.Thread | None = None

    # -- From other threads

    def start(self) -> None:
        """Start the thread."""
        self._mailbox.closed = False
        self._thread.start()

    def average(self, event: Average | Offer) -> Future[Outcome]:
        """Begin a round; the outcome comes by the round's own deadline."""
        future: Future[Outcome] = Future()

        def begin(now_s: float) -> None:
            if event.channel in self._averages:
                future.set_exception(RuntimeError(f"a round of channel {event.channel} is not done yet"))
                return
            self._averages[event.channel] = future
            self._tell_measurements(now_s)
            try:
                self._step(now_s, event)
            except (KeyError, ValueError, RuntimeError) as error:
                self._averages.pop(event.channel, None)
                future.set_exception(error)

        self._mailbox.put(begin, future)
        return future

    def meet(
        self, number: int, blob: bytes, deadline_s: float, late: bool = False, silent: bool = False
    ) -> Future[Met]:
        """Tell ``blob`` to all peers and hear theirs, for at most ``deadline_s`` from now (see ``Tell``)."""
        future: Future[Met] = Future()

        def begin(now_s: float) -> None:
            if number in self._meetings:
                future.set_exception(RuntimeError(f"meeting {number} is not over yet"))
                return
            self._meetings[number] = future
            try:
                self._step(now_s, Tell(number, blob, now_s + deadline_s, late, silent))
            except (ValueError, RuntimeError) as error:
                self._meetings.pop(number, None)
                future.set_exception(error)

        self._mailbox.put(begin, future)
        return future

    def post(self, topic: int, blob: bytes) -> Future[int]:
        """Put this peer's newest value of a topic on the notice board; the future has its number."""
        future: Future[int] = Future()

        def begin(now_s: float) -> None:
            try:
                self._step(now_s, Post(topic, blob))
            except (ValueError, RuntimeError) as error:
                future.set_exception(error)
            else:
                future.set_result(self.notices(topic).posts[self.node.me].number)

        self._mailbox.put(begin, future)
        return future

    def publish(self, event: Publish) -> Future[None]:
        """Have a channel of named tensors take these values; the future is done once it has."""
        future: Future[None] = Future()

        def begin(now_s: float) -> None:
            try:
                self._step(now_s, event)
            except (KeyError, ValueError, RuntimeError) as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._mailbox.put(begin, future)
        return future

    def notices(self, topic: int) -> Notices:
        """What the notice board knows of a topic (a snapshot; any thread may ask)."""
        return self.node.board.notices(topic)

    def posts(self, topic: int) -> dict[PeerId, bytes]:
        """Every peer's newest value of a topic, one's own included (a snapshot; any thread may ask)."""
        return {peer: posted.blob for peer, posted in self.notices(topic).posts.items()}

    def _tell_measurements(self, now_s: float) -> None:
        for peer, flow in self._flows.items():
            if flow.path.srtt_s > 0 and peer not in self.node.gone:
                self._step(now_s, Measured(peer, flow.path.rto_s))

    def configure(self, number: int, channel: Channel, schema: int) -> Future[None]:
        """Open a channel whose datagrams carry ``schema``."""
        future: Future[None] = Future()

        def open_channel(now_s: float) -> None:
            try:
                self.node.configure(number, channel, now_s)
                self._framer.open(number, schema)
            except ValueError as error:
                future.set_exception(error)
                return
            if channel.n_chunks >= LARGE_CHUNKS and not channel.passing:
                self._compile()
            future.set_result(None)

        self._mailbox.put(open_channel, future)
        return future

    def _compile(self) -> None:
        """Once there is much to frame, begin to compile how; rounds go on meanwhile."""
        if self._compiling is None:
            self._compiling = threading.Thread(
                target=self._framer.compile, name="ragtag-compile", daemon=True
            )
            self._compiling.start()

    def probed(self, number: int, probe_s: float) -> None:
        """Tell the node how long a channel's first round may take."""
        self._mailbox.put(lambda now_s: self.node.probed(number, probe_s, now_s), None)

    def resume(self, number: int, round_: int, card: Card) -> Future[bool]:
        """Take part on a channel whose last round was ``round_``, and tell the crew so by ``card``.

        The result comes once something newer is heard of it: the others know of this peer. ``False``: this
        peer's seat is another's.
        """
        future: Future[bool] = Future()

        def begin(now_s: float) -> None:
            self.node.resume(number, round_)
            if self._people is not None and not self.lost_seat:
                self._people.agent.describe(now_s, card)
            self._await_newer(number, future)

        self._mailbox.put(begin, future)
        return future

    def newer(self, number: int) -> Future[bool]:
        """The result comes once others are known to have begun a round of a channel that this peer has not.

        ``False``: this peer's seat is another's. Who waits no longer cancels it.
        """
        future: Future[bool] = Future()
        self._mailbox.put(lambda now_s: self._await_newer(number, future), future)
        return future

    def _await_newer(self, number: int, future: Future[bool]) -> None:
        waiting = self._heard.setdefault(number, [])
        waiting[:] = [other for other in waiting if not other.cancelled()] + [future]
        if self.lost_seat or self.node.newer(number):
            self._tell_waiting(number, not self.lost_seat)

    def describe(self, card: Card) -> None:
        """Tell the crew this of oneself, as long as this peer has its seat."""

        def tell(now_s: float) -> None:
            if self._people is not None and not self.lost_seat:
                self._people.agent.describe(now_s, card)

        self._mailbox.put(tell, None)

    @property
    def seats(self) -> dict[PeerId, Holder]:
        """Who holds which seat, as membership tells (empty: without membership)."""
        return {} if self._people is None else dict(self._people.agent.roster.seats)

    def answering(self) -> dict[PeerId, Holder]:
        """The same without those that have been silent since they last owed a message; all, if all have."""
        seats, node = self.seats, self.node
        there = {peer: holder for peer, holder in seats.items() if node.heard_lately(peer)}
        return there or seats

    def members(self) -> list[Address]:
        """Where the membership of the living listens, as this peer knows it; the others', not its own."""
        if self._people is None:
            return []
        machine = self._people.agent.machine
        live = set(machine.live()) - {machine.me.name}
        return [member.address for name, member in list(machine.members().items()) if name in live]

    @property
    def membership(self) -> Membership | None:
        """What this peer knows of the members, after ``close`` too (``None``: without membership)."""
        return None if self._people is None else self._people.agent.machine

    @property
    def own_member_address(self) -> Address | None:
        """Where this peer's membership listens (``None``: it has none)."""
        return None if self._people is None else self._people.agent.machine.me.address

    @property
    def lost_seat(self) -> str:
        """Why this peer may average no more; empty: it may."""
        return "" if self._people is None else self._people.lost_seat

    def leave(self, peer: PeerId) -> None:
        """Take a peer as gone for good."""
        self._mailbox.put(lambda now_s: self._step(now_s, Left(peer)), None)

    def traffic(self) -> Traffic:
        """What has been sent and received (a snapshot)."""
        lost = sum(flow.path.acked - flow.path.received for flow in self._flows.values())
        return Traffic(
            bytes_sent=self._outbox.sent_bytes,
            bytes_received=sum(f.inbound.received for f in self._flows.values()) * DATAGRAM_BYTES,
            datagrams_sent=self._outbox.sent,
            datagrams_received=self._inbox.received,
            datagrams_lost=max(0, lost),
            refused=self._framer.refused.total,
        )

    @property
    def refused(self) -> dict[PeerId, int]:
        """The schema hash of each peer whose data was refused."""
        return dict(self._framer.refused.schemas)

    def rto_s(self) -> float:
        """The longest time after which some peer's answer is overdue (RFC 6298)."""
        return max((f.path.rto_s for f in list(self._flows.values()) if f.path.srtt_s > 0), default=0.0)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def other_versions(self) -> int:
        """Datagrams of this crew that speak another version of the wire format."""
        return self._framer.refused.version

    def rtt_s(self) -> dict[PeerId, float]:
        """The smoothed round-trip time to each peer that has answered."""
        return {peer: f.path.srtt_s for peer, f in list(self._flows.items()) if f.path.srtt_s > 0}

    def close(self, deadline_s: float) -> None:
        """Send what is queued, say good-bye, and end the thread; takes at most about ``deadline_s``."""
        if not self._thread.is_alive():
            self._release()
            return
        if self._compiling is not None:
            self._compiling.join(deadline_s)  # an interpreter that ends while others compile may crash
        until_s = self.now_s() + deadline_s
        said = False

        def end(now_s: float) -> None:
            nonlocal said
            self._deferred_close = end
            if not self._outbox.idle and now_s < until_s:
                return
            agent = None if self._people is None else self._people.agent
            if not said:
                if agent is None:
                    self._outbox.bye(now_s, _BYES)
                else:
                    agent.leave(now_s)
            said = True
            if self._injector.held.heap and now_s < until_s:
                return  # an injected delay keeps the good-bye back
            if agent is not None and not agent.over and now_s < until_s:
                return  # it says good-bye a few times, round trips apart
            self._deferred_close = None
            self._mailbox.closed = True

        self._close_at_s = until_s
        with contextlib.suppress(DriverFailed):  # it has ended meanwhile
            self._mailbox.put(end, None)
        self._thread.join(deadline_s + 1.0)
        self._release()

    def _release(self) -> None:
        if not self._thread.is_alive():
            self.link.close()
            self._mailbox.release()
            if self._people is not None:
                self._people.agent.close()
