"""A driver's thread: it alone reads the clock and the link.

It turns datagrams into runs and events, and effects into datagrams and timers. It keeps windows, so that
receivers are not overrun, and repeats end markers until they are answered. It retransmits no data: the
machine decides whether what is missing matters.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ragtag.core.address import Address
from ragtag.core.faults import Faults
from ragtag.core.recording import Recording
from ragtag.core.types import (
    Arm,
    Arrived,
    Assisted,
    Done,
    Effect,
    Event,
    Expired,
    Joined,
    Left,
    Met,
    Noted,
    Outcome,
    PeerId,
    Posted,
    Run,
    Send,
    Timer,
    Visits,
)
from ragtag.core.wire import Identity
from ragtag.network.control.controller import QUANTUM_S
from ragtag.network.driver.mailbox import DriverFailed, Mailbox, Promises
from ragtag.network.driver.ready import ready
from ragtag.network.link import Link
from ragtag.network.link.flow import Flow
from ragtag.network.link.frame import Framer
from ragtag.network.link.inbox import Inbox
from ragtag.network.link.inject import Injector
from ragtag.network.link.outbox import Outbox
from ragtag.network.membership.agent import Agent, Told
from ragtag.protocols.membership.roster import NO_SEAT, Reach, RosterEffect, Unseated
from ragtag.protocols.membership.types import Changed, Failed, PutOut
from ragtag.protocols.node import Node
from ragtag.protocols.relays import Routes

_LOOK_S = 1e-3  # how often a closing driver looks whether its queue is empty
_BYES = 3
_PASSES_MAX = 64  # reads in a row before timers are looked at although more is to be read
APART_MAX = 256
"""Processes that have lost their seat and whose counts are kept; beyond, the oldest are forgotten."""

News = Joined | Left | Visits | Noted
Watch = Callable[[float, Posted | Assisted], None]


@dataclass(frozen=True, slots=True)
class _Held:
    """An end marker that is not believed yet: datagrams that it has overtaken may still come."""

    run: Run

    @property
    def channel(self) -> int:
        """The channel of its message."""
        return self.run.key.channel


class Engine:
    """The thread that runs ``node`` over ``link``. Its arguments are the driver's.

    Other threads call it through ``mailbox``, and it answers through ``promises``.
    """

    def __init__(
        self,
        node: Node,
        link: Link,
        identity: Identity,
        peers: Mapping[PeerId, Address],
        faults: Faults,
        seed: int,
        on_note: Callable[[float, Noted], None] | None,
        recording: Recording | None,
        agent: Agent | None,
        epoch: int | None,
        expected_until_s: float,
        watch: Watch | None,
    ) -> None:
        for peer, address in peers.items():
            if peer != node.me and (why := link.unusable(address)):
                raise ValueError(f"peer {peer}'s address {why}")
        self.node, self.link = node, link
        epoch = int(time.time() * 10) & 0xFFFFFFFF if epoch is None else epoch
        self.framer = Framer(identity, epoch, link.sealed)
        self.flows = {peer: Flow(peer, address) for peer, address in peers.items() if peer != node.me}
        self.injector = Injector(faults, seed, node.me)
        self._on_note, self._watch = on_note, watch
        self._recording = recording
        self._origin_s = time.monotonic() if agent is None else agent.origin_s
        self._timers: list[tuple[float, int, Timer | _Held]] = []
        self._timer_count = 0
        self.mailbox = Mailbox()
        self.promises = Promises()
        self._passes = 0
        self._gathering = False
        self.outbox = Outbox(link, self.framer, self.injector, self.flows)
        self.inbox = Inbox(link, self.framer, self.flows, self.outbox, node, agent is not None)
        self.reach: Reachability | None = None
        if agent is not None:
            there = self.flows.keys() - node.gone
            self.reach = Reachability(node.me, agent, self.flows, self.injector, there, expected_until_s)
            for peer, holder in agent.roster.seats.items():
                if peer in self.flows:
                    self.flows[peer].process = holder.card.epoch
        mine = None if agent is None else agent.roster.mine
        self._translated = mine is not None and mine.inner_host != ""
        self._knock_s = 0.0 if self._translated else math.inf
        self._close_by_s: float | None = None
        self._said_bye = False
        self.thread = threading.Thread(target=self._run, name=f"ragtag-{node.me}", daemon=True)

    def now_s(self) -> float:
        """Seconds since this driver was made (with membership: since its agent was)."""
        return time.monotonic() - self._origin_s

    def lost_seat(self) -> str:
        """Why this peer may not average any more; empty: it may."""
        return "" if self.reach is None else self.reach.lost_seat

    # -- From other threads

    def start(self) -> None:
        """Let the mailbox take calls, and start the thread."""
        self.mailbox.closed = False
        self.outbox.clock_s = self.now_s
        self.thread.start()

    def close(self, deadline_s: float) -> None:
        """Send what is queued, say good-bye, and end the thread, within about ``deadline_s`` seconds."""
        if self.thread.is_alive():
            until_s = self.now_s() + deadline_s

            def begin(now_s: float) -> None:
                self._close_by_s = until_s

            with contextlib.suppress(DriverFailed):  # the thread has ended meanwhile
                self.mailbox.put(begin, None)
            self.thread.join(deadline_s + 1.0)
        if not self.thread.is_alive():
            self.link.close()
            self.mailbox.release()
            if self.reach is not None:
                self.reach.agent.close()

    # -- The thread

    def _run(self) -> None:
        try:
            while not self.mailbox.closed:
                self._turn()
        except BaseException as error:
            self.mailbox.failure = error
            raise
        finally:
            self.mailbox.end()
            self.promises.fail(self.mailbox.error(f"the driver of peer {self.node.me}"))

    def _turn(self) -> None:
        """Wait, take what came, run the timers that are due, and send what may be sent."""
        now_s = self.now_s()
        frozen_until_s = self.injector.frozen_until_s(now_s)
        if frozen_until_s > now_s:
            threading.Event().wait(frozen_until_s - now_s)
        came = self._await()
        now_s = self.now_s()
        if self.mailbox.fileno() in came:
            self.mailbox.woken()
        self.mailbox.run(now_s)
        reach = self.reach
        if reach is not None and (reach.due_s <= now_s or reach.agent.fileno() in came):
            self._look_around(now_s)
        if self._knock_s <= now_s:
            self._knock_s = self.outbox.knock(now_s)
        drained = self._receive(now_s)
        self._passes = 0 if drained else self._passes + 1
        if drained or self._passes >= _PASSES_MAX:
            self._passes = 0
            self._expire(now_s)
        self.outbox.flush(now_s)
        self.link.turn(now_s)  # after what waits for keys has asked for them
        if self.link.failures.news:
            self._tell_failures(now_s)
        if self.link.routes is not None and self.link.routes.news:
            self._tell_ways(now_s, self.link.routes)
        if self._close_by_s is not None:
            self._take_leave(self.now_s(), self._close_by_s)

    def _wait_s(self, now_s: float) -> float:
        """How long to wait for the socket: 0 while something can be sent."""
        if len(self.mailbox):
            return 0
        due_s = min(self.outbox.due_s(now_s), self.link.due_s)
        due_s = min(due_s, self._knock_s, self._timers[0][0] if self._timers else math.inf)
        if self.reach is not None:
            due_s = min(due_s, self.reach.due_s)
        if self._close_by_s is not None:
            due_s = min(due_s, self._close_by_s, now_s + _LOOK_S)
        if self._gathering:
            due_s = min(due_s, now_s + QUANTUM_S)
        return min(1.0, max(0.0, due_s - now_s))

    def _await(self) -> set[int]:
        """Wait until something comes, or is due, or while the socket is full until it has room again.

        Amid a message what comes wakes nobody: where datagrams come one by one, a turn for each would cost
        more than all that is done with them. They gather for as long as a paced train takes.
        """
        link, reads = self.link.fileno(), [self.mailbox.fileno()]
        if not self._gathering:
            reads.append(link)
        if self.reach is not None:
            reads.append(self.reach.agent.fileno())
        return ready(reads, [link] if self.outbox.blocked else [], self._wait_s(self.now_s()))

    def _receive(self, now_s: float) -> bool:
        taken = self.inbox.receive(now_s)
        self._gathering = taken.amid
        for note in self.inbox.notes:
            self._apply(now_s, note)
        self.inbox.notes.clear()
        for event in taken.people:
            self.step(now_s, event)
        for at_s, ending in taken.later:
            self._set_timer(at_s, _Held(ending))
        if taken.runs:
            self.step(now_s, Arrived(taken.runs))
            self.promises.look(self.node)
        return taken.drained

    def _look_around(self, now_s: float) -> None:
        """Turn the agent, and tell the node which peers have come or gone."""
        assert self.reach is not None
        for news in self.reach.turn(now_s):
            if isinstance(news, Noted):
                self._apply(now_s, news)
            else:
                self.step(now_s, news)
        if self.reach.moved:
            self.reach.moved = False
            self.inbox.reindex()
            if self._translated:
                self._knock_s = now_s
        if self.reach.lost_seat:  # a peer without a seat takes no part in rounds
            self.promises.lose_seat()

    def _tell_failures(self, now_s: float) -> None:
        """Note what the operating system did not send."""
        at = {flow.address: peer for peer, flow in self.flows.items()}
        for address, why in self.link.failures.news:
            self._apply(now_s, Noted("not sent", at.get(address, -1), why))
        self.link.failures.news.clear()

    def _tell_ways(self, now_s: float, routes: Routes) -> None:
        """Note which peers are reached in another way; what it takes is to be found out anew."""
        for turned in routes.news:
            flow = self.flows.get(turned.peer)
            if flow is not None:
                flow.path.moved(routes.streamed(turned.peer))
            if turned.what:
                self._apply(now_s, Noted(turned.what, turned.peer, turned.detail))
        routes.news.clear()

    def _take_leave(self, now_s: float, until_s: float) -> None:
        """Once all is sent or time is up, say good-bye, wait until it has left, and end the thread."""
        late, agent = now_s >= until_s, None if self.reach is None else self.reach.agent
        if not (self.outbox.idle or late):
            return
        if not self._said_bye:
            self._said_bye = True
            if agent is None:
                self.outbox.bye(now_s, _BYES)
            else:
                agent.leave(now_s)
        if self.injector.held.heap and not late:
            return  # an injected delay keeps the good-bye back
        if agent is not None and not agent.over and not late:
            return  # the agent says good-bye a few times, round trips apart
        self.mailbox.closed = True

    # -- Events and effects

    def _expire(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            if isinstance(timer, _Held):
                self.step(now_s, Arrived((timer.run,)))
            else:
                self.step(now_s, Expired(timer))

    def step(self, now_s: float, event: Event) -> None:
        """Step the node with an event, and carry out the effects (in this thread only)."""
        if self._recording is not None:
            self._recording.add(now_s, event)
        for effect in self.node.step(now_s, event):
            self._apply(now_s, effect)

    def _apply(self, now_s: float, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.outbox.enqueue(effect)
        elif isinstance(effect, Arm):
            self._set_timer(effect.at_s, effect.timer)
        elif isinstance(effect, Done):
            self._finish(now_s, effect.outcome)
        elif isinstance(effect, Met):
            self.promises.met(effect)
        elif isinstance(effect, Posted | Assisted):
            if isinstance(effect, Assisted):
                self.outbox.finish(now_s, effect.outcome)
            if self._watch is not None:
                self._watch(now_s, effect)
        elif isinstance(effect, Noted) and self._on_note is not None:
            self._on_note(now_s, effect)

    def _finish(self, now_s: float, outcome: Outcome) -> None:
        self.outbox.finish(now_s, outcome)
        self.promises.done(outcome)

    def opened(self, number: int, schema: int) -> None:
        """A channel is opened, perhaps anew: what still waits here is of the rounds that it had before.

        An end marker of those would say that others are rounds ahead, and this peer would begin theirs.
        """
        self.framer.open(number, schema)
        self.outbox.opened(number)
        self._timers = [entry for entry in self._timers if entry[2].channel != number]
        heapq.heapify(self._timers)

    def _set_timer(self, at_s: float, timer: Timer | _Held) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (at_s, self._timer_count, timer))


class Reachability:
    """Applies what membership tells to a driver's flows, and passes it on as news for the node.

    inside: peers that the node takes for averaging from the beginning; a peer on its way in is not one.
    expected_until_s: a peer of ``inside`` that is no member by this time is left out until it is one.
    lost_seat: why this peer may not average any more; empty: it may.
    barred: whether that is since the crew lets its person in no more.
    moved: whether a peer has another address than before, or is not there any more. A caller that keeps a
        table of addresses resets it.
    """

    def __init__(
        self,
        me: PeerId,
        agent: Agent,
        flows: dict[PeerId, Flow],
        injector: Injector,
        inside: Iterable[PeerId],
        expected_until_s: float = math.inf,
    ) -> None:
        self.agent, self._flows, self._me = agent, flows, me
        self._injector = injector
        self._inside, self._expected_until_s = set(inside), expected_until_s
        self._known: set[PeerId] = set()
        self._apart: OrderedDict[tuple[PeerId, int], Flow] = OrderedDict()
        self.lost_seat, self.barred, self.moved = "", False, False
        agent.lost = self._lost

    @property
    def due_s(self) -> float:
        """When to turn it although nothing has come."""
        return min(self.agent.due_s, self._expected_until_s)

    def turn(self, now_s: float) -> Iterator[News]:
        """Turn the agent, and yield the news for the node and the trace."""
        for told in self.agent.turn(now_s):
            yield from self.take(now_s, told)
        if now_s >= self._expected_until_s:
            self._expected_until_s = math.inf
            for peer in sorted(self._inside - self.agent.roster.seats.keys()):
                yield Noted("never came", peer, "its launcher named it, and it has not become a member")
                yield from self._place(Left(peer))

    def take(self, now_s: float, told: Told) -> Iterator[News]:
        """Apply one thing that membership tells, and yield the news in it."""
        roster = self.agent.roster
        if isinstance(told, Changed):
            for effect in roster.changed(told.member, told.was):
                if self._is_no_news(effect):
                    continue
                if isinstance(effect, Reach):
                    self._reach(effect)
                elif isinstance(effect, Unseated):
                    self.lost_seat = (
                        f"{effect.reason}: it was out of reach for so long that it was declared dead, or two "
                        "newcomers took one seat; start it again to join anew"
                    )
                    self._give_up(now_s)
                    yield Noted("lost its seat", self._me, effect.reason)
                elif isinstance(effect, Noted):
                    yield effect
                else:
                    yield from self._place(effect)
        elif isinstance(told, PutOut):
            seat = roster.seat_of(told.member.name)
            flow = self._flows.get(seat)
            if flow is not None:  # it may go on sending, and has the keys
                flow.barred = True
            yield Noted("put out", seat, f"{told.member.name}: {told.why}")
        elif isinstance(told, Failed):
            self.lost_seat, self.barred = told.reason, told.barred
            yield Noted("no member any more", self._me, told.reason)
        else:
            yield Noted(told.what, roster.seat_of(told.name), f"{told.name} {told.detail}".strip())

    def _is_no_news(self, effect: RosterEffect) -> bool:
        """Whether it only says that a peer takes part which the node has counted on from the beginning."""
        if not isinstance(effect, Noted) or effect.what != "takes part":
            return False
        return effect.peer in self._inside and effect.peer not in self._known

    def _give_up(self, now_s: float) -> None:
        """Tell the crew that this peer claims no seat. Else it would get its old one when that is free."""
        card = self.agent.roster.mine
        if card is not None:
            self.agent.describe(now_s, replace(card, seat=NO_SEAT, averaging=False))

    def _place(self, effect: Joined | Left | Visits) -> Iterator[News]:
        """Take down where a peer stands now. It is no news that a peer joins which the node counts on, unless
        it is a client.
        """
        peer = effect.peer
        self._known.add(peer)
        self._mute(peer, isinstance(effect, Left))
        known = peer in self._inside
        if isinstance(effect, Joined):
            self._inside.add(peer)
        else:
            self._inside.discard(peer)
        if not (known and isinstance(effect, Joined) and effect.role.owns):
            yield effect

    def _reach(self, reach: Reach) -> None:
        """A process takes data at an address. Its flow is new if another process had the seat before.

        A process may come back: it was thought dead, and a newcomer had claimed its seat. Then its old counts
        go on. With new ones it would take our datagrams for old, as it has seen their numbers, and its
        answers would make no sense.
        """
        flow = self._flows.get(reach.peer)
        known = flow is None or (
            flow.process in (None, reach.epoch) and flow.inbound.epoch in (-1, reach.epoch)
        )
        if flow is None or not known:
            if flow is not None:
                self._set_apart(flow)
            self._inside.discard(reach.peer)
            flow = self._apart.pop((reach.peer, reach.epoch), None) or Flow(reach.peer, reach.address)
            self._flows[reach.peer] = flow
        if flow.address != reach.address:
            flow.path.moved()
        flow.process, flow.address, flow.doubted = reach.epoch, reach.address, False
        flow.knock_s, flow.knocks = 0.0, 0
        self.moved = True

    def _set_apart(self, flow: Flow) -> None:
        """Keep the counts of a process whose seat another one has now."""
        process = flow.process if flow.process is not None else flow.inbound.epoch
        flow.retire()
        self._apart[flow.peer, process] = flow
        while len(self._apart) > APART_MAX:
            self._apart.popitem(last=False)

    def _mute(self, peer: PeerId, mute: bool) -> None:
        flow = self._flows.get(peer)
        if flow is not None:
            self.moved |= flow.mute != mute
            flow.mute = mute
            if mute:
                flow.clear()
            else:
                flow.barred = False

    def _lost(self, address: Address, now_s: float) -> bool:
        """Whether a membership datagram is lost: the faults injected between two peers hold for it, too."""
        faults = self._injector.faults
        if faults.loss is None and not faults.one_way and not faults.partitions:
            return False
        peer = self._peer_at(address)
        if peer < 0:
            return False
        return self._injector.answer_lost(peer) or self._injector.cut(peer, now_s)

    def _peer_at(self, address: Address) -> PeerId:
        for member in self.agent.machine.members().values():
            if member.address == address:
                return self.agent.roster.seat_of(member.name)
        return -1
