"""A driver's thread: it alone reads the clock and the socket.

It turns datagrams into runs and events, effects into datagrams and timers, keeps windows so that receivers
are not overrun, and repeats end markers until they are answered. Nothing is retransmitted here: whether what
is missing matters is the machine's business.
"""

from __future__ import annotations

import heapq
import math
import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.types import (
    Arm,
    Arrived,
    Done,
    Effect,
    Event,
    Expired,
    Met,
    Noted,
    Outcome,
    PeerId,
    Run,
    Send,
    Timer,
)
from ragtag.core.wire import Identity
from ragtag.network.driver.mailbox import Mailbox
from ragtag.network.driver.members import People
from ragtag.network.link.flow import Flow
from ragtag.network.link.frame import Framer
from ragtag.network.link.inbox import Inbox
from ragtag.network.link.inject import Injector
from ragtag.network.link.link import Link
from ragtag.network.link.outbox import Outbox
from ragtag.network.membership.agent import Agent
from ragtag.protocols.node import Node

_LOOK_S = 1e-3  # how often a closing driver looks whether its queue is empty
_PASSES_MAX = 64  # reads in a row before timers are looked at although more is to be read


@dataclass(frozen=True, slots=True)
class _Held:
    """An end marker that waits for what it may have overtaken."""

    run: Run


class Engine:
    """Runs ``node`` over ``link`` in a thread of its own.

    peers: every other peer's address, numeric. on_note: called in the driver's thread with (now_s, note).
    agent: tells who comes and goes, turned by this driver from now on (``None``: peers do not change).
    epoch: in all datagrams; where the agent's card has told it, else from the clock, so that it grows.
    expected_until_s: when peers that have not become members by then are left out, on the agent's clock.

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
    ) -> None:
        for peer, address in peers.items():
            if peer != node.me and (why := link.unusable(address)):
                raise ValueError(f"peer {peer}'s address {why}")
        self.node, self.link = node, link
        epoch = int(time.time() * 10) & 0xFFFFFFFF if epoch is None else epoch
        self._framer = Framer(identity, epoch, link.sealed)
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
        self._outbox = Outbox(link, self._framer, self._injector, self._flows)
        self._inbox = Inbox(link, self._framer, self._flows, self._outbox, node, agent is not None)
        self._people: People | None = None
        if agent is not None:
            there = self._flows.keys() - node.gone
            self._people = People(node.me, agent, self._flows, self._injector, there, expected_until_s)
            for peer, holder in agent.roster.seats.items():
                if peer in self._flows:
                    self._flows[peer].process = holder.card.epoch
        self._heard: dict[int, list[Future[bool]]] = {}
        self._watched = select.POLLIN
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._poll.register(self._mailbox.fileno(), select.POLLIN)
        if agent is not None:
            self._poll.register(agent.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"ragtag-{node.me}", daemon=True)

    def now_s(self) -> float:
        """Seconds since this driver was made."""
        return time.monotonic() - self._origin_s

    _deferred_close: Callable[[float], None] | None = None
    _close_at_s = math.inf

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
                *(future for waiting in self._heard.values() for future in waiting),
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
        came = {fd for fd, _ in ready}
        if self._mailbox.fileno() in came:
            self._mailbox.woken()
        self._mailbox.run(now_s)
        people = self._people
        if people is not None and (people.due_s <= now_s or people.agent.fileno() in came):
            self._look_around(now_s)
        drained = self._receive(now_s)
        self._passes = 0 if drained else self._passes + 1
        if drained or self._passes >= _PASSES_MAX:
            self._passes = 0
            self._expire(now_s)
        self._outbox.flush(now_s)
        if self.link.failures.news:
            self._tell_failures(now_s)
        if self._deferred_close is not None:
            self._deferred_close(self.now_s())

    def _timeout_ms(self, now_s: float) -> float:
        """How long to wait for the socket: not at all while something can be sent."""
        if len(self._mailbox):
            return 0
        due_s = min(self._outbox.due_s(now_s), self._timers[0][0] if self._timers else math.inf)
        if self._people is not None:
            due_s = min(due_s, self._people.due_s)
        if self._deferred_close is not None:
            due_s = min(due_s, self._close_at_s, now_s + _LOOK_S)
        return min(1.0, max(0.0, due_s - now_s)) * 1e3

    def _watch_for_room(self) -> None:
        """Wake up when a full socket takes datagrams again."""
        wanted = select.POLLIN | (select.POLLOUT if self._outbox.blocked else 0)
        if wanted != self._watched:
            self._poll.modify(self.link.fileno(), wanted)
            self._watched = wanted

    def _receive(self, now_s: float) -> bool:
        taken = self._inbox.receive(now_s)
        for note in self._inbox.notes:
            self._apply(now_s, note)
        self._inbox.notes.clear()
        for event in taken.people:
            self._step(now_s, event)
        for at_s, ending in taken.later:
            self._set_timer(at_s, _Held(ending))
        if taken.runs:
            self._step(now_s, Arrived(taken.runs))
            for number in [n for n in self._heard if self.node.newer(n)]:
                self._tell_waiting(number, True)
        return taken.drained

    def _look_around(self, now_s: float) -> None:
        """Who has come or gone."""
        assert self._people is not None
        for news in self._people.turn(now_s):
            if isinstance(news, Noted):
                self._apply(now_s, news)
            else:
                self._step(now_s, news)
        if self._people.moved:
            self._people.moved = False
            self._inbox.reindex()
        if self._people.lost_seat:  # who lost its seat takes no part
            for number in list(self._heard):
                self._tell_waiting(number, False)

    def _tell_failures(self, now_s: float) -> None:
        """What the system did not send."""
        at = {flow.address: peer for peer, flow in self._flows.items()}
        for address, why in self.link.failures.news:
            self._apply(now_s, Noted("not sent", at.get(address, -1), why))
        self.link.failures.news.clear()

    def _tell_waiting(self, number: int, newer: bool) -> None:
        """Answer who waits for something newer of a channel."""
        for future in self._heard.pop(number, []):
            if future.set_running_or_notify_cancel():
                future.set_result(newer)

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
