"""The driver: one background thread that runs a node over a UDP socket.

It alone reads the clock and the socket. It turns datagrams into runs and events, effects into datagrams
and timers, keeps windows so that receivers are not overrun, and repeats end markers until they are
answered. Nothing is retransmitted here: whether what is missing matters is the machine's business.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Event,
    Expired,
    Left,
    Measured,
    Met,
    Noted,
    Offer,
    Outcome,
    PeerId,
    Post,
    Run,
    Send,
    Tell,
    Timer,
)
from ragtag.core.wire import DATAGRAM_BYTES, Identity
from ragtag.network.agent import Agent
from ragtag.network.flow import Flow
from ragtag.network.frame import Framer
from ragtag.network.inbox import Inbox
from ragtag.network.inject import Injector
from ragtag.network.mailbox import DriverFailed, Mailbox
from ragtag.network.outbox import Outbox
from ragtag.network.people import People
from ragtag.network.udp import Address, Endpoint
from ragtag.protocols.board import Notices
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.roster import Card, Holder

__all__ = ["Driver", "DriverFailed", "Traffic"]

_BYES = 3
_LOOK_S = 1e-3  # how often a closing driver looks whether its queue is empty
_PASSES_MAX = 64  # reads in a row before timers are looked at although more is to be read


@dataclass(frozen=True, slots=True)
class _Held:
    """An end marker that waits for what it may have overtaken."""

    run: Run


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one peer has sent and received so far."""

    bytes_sent: int
    bytes_received: int
    datagrams_sent: int
    datagrams_received: int
    datagrams_lost: int
    refused: int


class Driver:
    """Runs ``node`` over ``endpoint`` in a thread of its own.

    peers: every other peer's address. on_note: called in the driver's thread with (now_s, note).
    agent: tells who comes and goes, turned by this driver from now on (``None``: peers do not change).
    epoch: in all datagrams; where the agent's card has told it, else from the clock, so that it grows.
    """

    def __init__(
        self,
        node: Node,
        endpoint: Endpoint,
        identity: Identity,
        peers: Mapping[PeerId, Address],
        *,
        faults: Faults | None = None,
        seed: int = 0,
        on_note: Callable[[float, Noted], None] | None = None,
        recording: Recording | None = None,
        agent: Agent | None = None,
        epoch: int | None = None,
    ) -> None:
        self.node, self.endpoint = node, endpoint
        self._framer = Framer(identity, int(time.time() * 10) & 0xFFFFFFFF if epoch is None else epoch)
        self._flows = {peer: Flow(peer, address) for peer, address in peers.items() if peer != node.me}
        self._injector = Injector(faults or Faults(), seed, node.me)
        self._on_note = on_note
        self._recording = recording
        self._origin_s = time.monotonic() if agent is None else agent.origin_s
        self._timers: list[tuple[float, int, Timer | _Held]] = []
        self._timer_count = 0
        self._mailbox = Mailbox()
        self._averages: dict[int, Future[Outcome]] = {}
        self._meetings: dict[int, Future[Met]] = {}
        self._passes = 0
        self._outbox = Outbox(endpoint, self._framer, self._injector, self._flows)
        self._inbox = Inbox(endpoint, self._framer, self._flows, self._outbox, node, agent is not None)
        self._people: People | None = None
        if agent is not None:
            self._people = People(
                node.me, agent, self._flows, self._injector, self._flows.keys() - node.gone
            )
            for peer, holder in agent.roster.seats.items():
                if peer in self._flows:
                    self._flows[peer].process = holder.card.epoch
        self._heard: dict[int, Future[None]] = {}
        self._watched = select.POLLIN
        self._poll = select.poll()
        self._poll.register(endpoint.fileno(), select.POLLIN)
        self._poll.register(self._mailbox.fileno(), select.POLLIN)
        if agent is not None:
            self._poll.register(agent.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"ragtag-{node.me}", daemon=True)

    # -- From other threads

    def start(self) -> None:
        """Start the thread."""
        self._mailbox.closed = False
        self._thread.start()

    def now_s(self) -> float:
        """Seconds since this driver was made."""
        return time.monotonic() - self._origin_s

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

    def meet(self, number: int, blob: bytes, deadline_s: float) -> Future[Met]:
        """Tell ``blob`` to all peers and hear theirs, for at most ``deadline_s`` from now."""
        future: Future[Met] = Future()

        def begin(now_s: float) -> None:
            if number in self._meetings:
                future.set_exception(RuntimeError(f"meeting {number} is not over yet"))
                return
            self._meetings[number] = future
            try:
                self._step(now_s, Tell(number, blob, now_s + deadline_s))
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

    def notices(self, topic: int) -> Notices:
        """What the notice board knows of a topic (a snapshot; any thread may ask)."""
        return self.node.board.notices(topic)

    def posts(self, topic: int) -> dict[PeerId, bytes]:
        """Every peer's newest value of a topic, one's own included (a snapshot; any thread may ask)."""
        return {peer: posted.blob for peer, posted in self.notices(topic).posts.items()}

    def _tell_measurements(self, now_s: float) -> None:
        for peer, flow in self._flows.items():
            if flow.pacer.srtt_s > 0 and peer not in self.node.gone:
                self._step(now_s, Measured(peer, flow.pacer.rto_s))

    def configure(self, number: int, channel: Channel, schema: int) -> Future[None]:
        """Open a channel whose datagrams carry ``schema``."""
        future: Future[None] = Future()

        def open_channel(now_s: float) -> None:
            try:
                self.node.configure(number, channel, now_s)
            except ValueError as error:
                future.set_exception(error)
                return
            self._framer.schemas[number] = schema
            future.set_result(None)

        self._mailbox.put(open_channel, future)
        return future

    def probed(self, number: int, probe_s: float) -> None:
        """Tell the node how long a channel's first round may take."""
        self._mailbox.put(lambda now_s: self.node.probed(number, probe_s, now_s), None)

    def resume(self, number: int, round_: int, card: Card) -> Future[None]:
        """Take part on a channel whose last round was ``round_``, and tell the crew so by ``card``.

        The result comes once something newer is heard of it: the others know of this peer.
        """
        future: Future[None] = Future()

        def begin(now_s: float) -> None:
            self.node.resume(number, round_)
            if self._people is not None and not self.lost_seat:
                self._people.agent.describe(now_s, card)
            if self.lost_seat or self.node.newer(number):  # who lost its seat takes no part
                future.set_result(None)
            else:
                self._heard[number] = future

        self._mailbox.put(begin, future)
        return future

    def describe(self, card: Card) -> None:
        """Tell the crew this of oneself."""
        people = self._people
        if people is not None:
            self._mailbox.put(lambda now_s: people.agent.describe(now_s, card), None)

    @property
    def seats(self) -> dict[PeerId, Holder]:
        """Who holds which seat, as membership tells (empty: without membership)."""
        return {} if self._people is None else dict(self._people.agent.roster.seats)

    def members(self) -> list[Address]:
        """Where the membership of the living listens, as this peer knows it; the others', not its own."""
        if self._people is None:
            return []
        machine = self._people.agent.machine
        live = set(machine.live()) - {machine.me.name}
        return [member.address for name, member in list(machine.members().items()) if name in live]

    @property
    def lost_seat(self) -> str:
        """Why this peer may average no more; empty: it may."""
        return "" if self._people is None else self._people.lost_seat

    def leave(self, peer: PeerId) -> None:
        """Take a peer as gone for good."""
        self._mailbox.put(lambda now_s: self._step(now_s, Left(peer)), None)

    def traffic(self) -> Traffic:
        """What has been sent and received (a snapshot)."""
        lost = sum(flow.pacer.acked - flow.pacer.received for flow in self._flows.values())
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
        return max((f.pacer.rto_s for f in list(self._flows.values()) if f.pacer.srtt_s > 0), default=0.0)

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
        return {peer: f.pacer.srtt_s for peer, f in list(self._flows.items()) if f.pacer.srtt_s > 0}

    def close(self, deadline_s: float) -> None:
        """Send what is queued, say good-bye, and end the thread; takes at most about ``deadline_s``."""
        if not self._thread.is_alive():
            self._release()
            return
        until_s = self.now_s() + deadline_s
        said = False

        def end(now_s: float) -> None:
            nonlocal said
            self._deferred_close = end
            if not self._outbox.idle and now_s < until_s:
                return
            agent = None if self._people is None else self._people.agent
            if not said:
                self._outbox.bye(now_s, _BYES)
                if agent is not None:
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

    _deferred_close: Callable[[float], None] | None = None
    _close_at_s = math.inf

    def _release(self) -> None:
        if not self._thread.is_alive():
            self.endpoint.close()
            self._mailbox.release()
            if self._people is not None:
                self._people.agent.close()

    # -- The thread

    def _run(self) -> None:
        try:
            while not self._mailbox.closed:
                self._turn()
        except BaseException as error:
            self._mailbox.failure = error
            raise
        finally:
            self._mailbox.end()
            failed = self._mailbox.error(f"the driver of peer {self.node.me}")
            futures: list[Future[Any]] = [
                *self._averages.values(),
                *self._meetings.values(),
                *self._heard.values(),
            ]
            for future in futures:
                if not future.done():
                    future.set_exception(failed)

    def _turn(self) -> None:
        """One turn: wait, take what came, run timers, send what may be sent."""
        now_s = self.now_s()
        frozen_until_s = self._injector.frozen_until_s(now_s)
        if frozen_until_s > now_s:
            threading.Event().wait(frozen_until_s - now_s)
        self._watch_for_room()
        ready = self._poll.poll(self._timeout_ms(self.now_s()))
        now_s = self.now_s()
        for fd, _ in ready:
            if fd == self._mailbox.fileno():
                self._mailbox.woken()
        self._mailbox.run(now_s)
        if self._people is not None:
            self._look_around(now_s)
        drained = self._receive(now_s)
        self._passes = 0 if drained else self._passes + 1
        if drained or self._passes >= _PASSES_MAX:
            self._passes = 0
            self._expire(now_s)
        self._outbox.flush(now_s)
        if self._deferred_close is not None:
            self._deferred_close(self.now_s())

    def _timeout_ms(self, now_s: float) -> float:
        """How long to wait for the socket: not at all while something can be sent."""
        if len(self._mailbox):
            return 0
        due_s = min(self._outbox.due_s(now_s), self._timers[0][0] if self._timers else math.inf)
        if self._people is not None:
            due_s = min(due_s, self._people.agent.due_s)
        if self._deferred_close is not None:
            due_s = min(due_s, self._close_at_s, now_s + _LOOK_S)
        return min(1.0, max(0.0, due_s - now_s)) * 1e3

    def _watch_for_room(self) -> None:
        """Wake up when a full socket takes datagrams again."""
        wanted = select.POLLIN | (select.POLLOUT if self._outbox.blocked else 0)
        if wanted != self._watched:
            self._poll.modify(self.endpoint.fileno(), wanted)
            self._watched = wanted

    def _receive(self, now_s: float) -> bool:
        taken = self._inbox.receive(now_s)
        for event in taken.people:
            self._step(now_s, event)
        for at_s, ending in taken.later:
            self._set_timer(at_s, _Held(ending))
        if taken.runs:
            self._step(now_s, Arrived(taken.runs))
            for number in [n for n in self._heard if self.node.newer(n)]:
                self._heard.pop(number).set_result(None)
        return taken.drained

    def _look_around(self, now_s: float) -> None:
        """Who has come or gone."""
        assert self._people is not None
        for news in self._people.turn(now_s):
            if isinstance(news, Noted):
                self._apply(now_s, news)
            else:
                self._step(now_s, news)

    # -- Events and effects

    def _expire(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            if isinstance(timer, _Held):
                self._step(now_s, Arrived((timer.run,)))
            else:
                self._step(now_s, Expired(timer))

    def _step(self, now_s: float, event: Event) -> None:
        if self._recording is not None:
            self._recording.add(now_s, event)
        for effect in self.node.step(now_s, event):
            self._apply(now_s, effect)

    def _apply(self, now_s: float, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._outbox.enqueue(effect)
        elif isinstance(effect, Arm):
            self._set_timer(effect.at_s, effect.timer)
        elif isinstance(effect, Done):
            self._finish(now_s, effect.outcome)
        elif isinstance(effect, Met):
            meeting = self._meetings.pop(effect.number, None)
            if meeting is not None:
                meeting.set_result(effect)
        elif isinstance(effect, Noted) and self._on_note is not None:
            self._on_note(now_s, effect)

    def _finish(self, now_s: float, outcome: Outcome) -> None:
        self._outbox.finish(now_s, outcome)
        future = self._averages.pop(outcome.channel, None)
        if future is not None:
            future.set_result(outcome)

    def _set_timer(self, at_s: float, timer: Timer | _Held) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (at_s, self._timer_count, timer))
