"""The way out: messages in trains, as windows allow; end markers, until they are answered; and answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from ragtag.core.types import PEERS_MAX, Bytes, Outcome, PeerId, Send
from ragtag.core.wire import DATAGRAM_BYTES, HEADER_BYTES, Kind
from ragtag.network.control.controller import WINDOW_FIRST
from ragtag.network.control.mtu import PACKETS_MAX
from ragtag.network.control.path import PINGS, Uplink
from ragtag.network.link.flow import Ending, Flow, Hold, Outgoing
from ragtag.network.link.frame import Framer
from ragtag.network.link.inject import Injector
from ragtag.network.link.link import SLAB_ROWS, Link, TooLarge

_SEND_ROWS = SLAB_ROWS // 2
_ENDING_ROUNDS_MAX = 32
_COPIES_MAX = 8
_U32 = np.uint64(0xFFFFFFFF)
KEEP_OPEN_S = 15.0
"""Between two datagrams by which a router is kept from forgetting a peer behind it (RFC 8445, section 11).
When it forgets it does not tell, and that cannot be measured without being shut out."""
_KNOCKS_MAX = 16


class Outbox:
    """The way out over one link, with the faults that are injected on it.

    blocked: whether the link has no room now.
    sent, sent_bytes: datagrams that have left, and their bytes.
    """

    def __init__(self, link: Link, framer: Framer, injector: Injector, flows: dict[PeerId, Flow]) -> None:
        self._link, self._framer, self._injector, self._flows = link, framer, injector, flows
        self._busy: dict[PeerId, Flow] = {}  # with something queued, now or just before
        self._uplink = Uplink()
        self._capacity = link.capacity
        self._done: dict[int, int] = {}  # by channel, the newest round that is done
        self.clock_ns = time.time_ns
        """By which links say when something came."""
        self.clock_s: Callable[[], float] | None = None
        """The driver's clock, where it runs by one: an injected delay begins when something is sent, and not
        with the turn in which it is."""
        self.blocked = False
        self._flushed_s = 0.0
        self.sent = self.sent_bytes = 0

    @property
    def granted(self) -> int:
        """How many datagrams each peer may have on its way here: its share of the link's buffer.

        The buffer is cut into ``PEERS_MAX`` shares at most: no more peers are in a group, and so send much.
        """
        return max(2, self._capacity // max(1, min(len(self._flows), PEERS_MAX)))

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send, and no end marker lacks its answer."""
        return not self._injector.held.heap and all(
            not f.queue and not f.endings for f in self._busy.values()
        )

    def due_s(self, now_s: float) -> float:
        """When there is next something to send: ``now_s`` or before means at once."""
        due = [self._injector.held.heap[0][0]] if self._injector.held.heap else []
        for flow in self._busy.values():
            if flow.queue:
                if not self._may(flow):  # the link's descriptor wakes once it may
                    due.append(flow.queue[0].deadline_s)
                    continue
                if flow.path.allowance > 0 and not self.blocked:
                    if flow.path.next_s <= now_s:
                        return now_s
                    due.append(flow.path.next_s)
                due.append(min(flow.ping_s, flow.queue[0].deadline_s))
            due += [ending.next_s for ending in flow.endings.values()]
        return min(due, default=math.inf)

    def _may(self, flow: Flow) -> bool:
        """Whether there are keys for a flow, and room on the connection that it goes over."""
        return self._link.ready(flow.address) and self._link.room(flow.address)

    def finish(self, now_s: float, outcome: Outcome) -> None:
        """A round is done and its values may change: copy those that are still to be sent."""
        self._framer.forget()
        self._done[outcome.channel] = max(outcome.round, self._done.get(outcome.channel, -1))
        for flow in self._busy.values():
            flow.expire(now_s)
            for outgoing in flow.queue:
                key = outgoing.run.key
                if key.channel == outcome.channel and key.round == outcome.round:
                    outgoing.detach()

    def opened(self, channel: int) -> None:
        """A channel is opened, perhaps anew: its rounds are counted from the first."""
        self._done.pop(channel, None)

    def bye(self, now_s: float, copies: int) -> None:
        """Tell every peer, in so many copies, that this one leaves."""
        for flow in self._flows.values():
            for _ in range(copies):
                self.answer(now_s, flow, Kind.BYE)

    def knock(self, now_s: float) -> float:
        """Send a request for an answer to each peer that is due for one; when the next one is.

        A router that translates addresses (NAT) lets in what comes from where something was sent, and forgets
        after a while. Each new peer is sent some at growing pauses, as the first may be lost, or come to
        another such router that lets nothing in yet (hole punching: Ford, Srisuresh, Kegel, USENIX 2005).
        """
        for flow in self._flows.values():
            if flow.mute or flow.knock_s > now_s:
                continue
            if self._link.ready(flow.address):  # asks for keys where there are none, which knocks, too
                self._ping(now_s, flow)
            flow.knock_s = now_s + min(KEEP_OPEN_S, flow.path.rto_s * 2**flow.knocks)
            flow.knocks = min(flow.knocks + 1, _KNOCKS_MAX)
        return min((flow.knock_s for flow in self._flows.values() if not flow.mute), default=math.inf)

    def enqueue(self, effect: Send) -> None:
        """Queue a run for its peer, and draw the losses that are injected on its way."""
        run = effect.run
        flow = self._flows.get(run.peer)
        if flow is None or flow.mute:
            return
        k = len(run.payload)
        chunks = (
            np.arange(run.first, run.first + k) if run.mask is None else run.first + np.flatnonzero(run.mask)
        )
        if len(chunks) == 0:
            return
        arrive = self._injector.draw(run)
        self._busy[flow.peer] = flow
        alive = None if arrive is None else arrive[chunks]
        schema = self._framer.schemas.get(run.key.channel)
        outgoing = Outgoing(run, chunks, alive, effect.deadline_s, schema, effect.first)
        if run.key.round <= self._done.get(run.key.channel, -1):  # what is repaired after the round is done
            outgoing.detach()
        flow.push(outgoing)

    def flush(self, now_s: float) -> None:
        """Send what may leave now, and repeat end markers that have not been answered."""
        since_s, self._flushed_s = max(0.0, now_s - self._flushed_s), now_s
        for flow in self._busy.values():
            if flow.held is not None:
                flow.held_s[flow.held] = flow.held_s.get(flow.held, 0.0) + since_s
        self.blocked = False
        busy = [flow.path for flow in self._busy.values() if flow.queue]
        self._uplink.claim(now_s, busy, (flow.path for flow in self._flows.values()))
        for flow in list(self._busy.values()):
            if flow.queue or flow.endings:
                flow.expire(now_s)
            else:
                self._busy.pop(flow.peer, None)
            if flow.queue and not self._may(flow):
                continue  # its messages' deadlines go on
            if flow.queue:
                self._probe(now_s, flow)
            if flow.queue and not self.blocked:
                self._send_train(now_s, flow)
            if flow.endings:
                self._repeat_endings(now_s, flow)
            if flow.queue and flow.path.allowance <= 0 and now_s >= flow.ping_s:
                for _ in range(flow.path.copies):
                    self._ping(now_s, flow)
                flow.ping_s = now_s + max(1e-3, flow.path.rto_s) * 2 ** min(6, max(0, flow.pings - PINGS))
                flow.pings += 1
        for flow in self._busy.values():
            flow.held = self._hold(now_s, flow) if flow.queue else None
        while (due := self._injector.held.pop_due(now_s)) is not None:
            if due[0] in self._flows:
                self._out(self._flows[due[0]], due[1])

    def _probe(self, now_s: float, flow: Flow) -> None:
        """Find out whether the path takes larger datagrams, where enough is sent to be worth it.

        One that holds more than half of what the receiver grants would leave the path empty meanwhile. What
        is held back by an injected delay leaves one by one.
        """
        path, injector = flow.path, self._injector
        if now_s < path.mtu.due_s or not path.sure or path.sent < WINDOW_FIRST or injector.delays:
            return
        most = min(PACKETS_MAX, path.granted // 2)
        while count := path.mtu.next(now_s, path.rto_s, path.tries, most):
            flow.answers += 1
            path.mtu.sent(flow.answers & 0xFFFFFFFF)
            if injector.answer_lost(flow.peer) or injector.cut(flow.peer, now_s):
                return
            try:
                left = self._link.send(
                    self._framer.probe(flow.peer, flow.answers, count), flow.address, count
                )
            except TooLarge:
                path.mtu.refused()
            else:
                self._count(left, left * DATAGRAM_BYTES)
                return

    def _ping(self, now_s: float, flow: Flow) -> None:
        self._send_one(now_s, flow)
        self.emit(flow, self._framer.short(Kind.PING, flow.peer, seq=flow.path.sent), now_s)

    @staticmethod
    def _send_one(now_s: float, flow: Flow) -> None:
        """Count a request or a mark, which may be all that there is to send."""
        flow.path.send(now_s, 1)
        if not flow.queue:
            flow.path.idle()

    def _hold(self, now_s: float, flow: Flow) -> Hold:
        """What keeps a flow's next message from leaving."""
        path = flow.path
        if not self._link.ready(flow.address):
            return Hold.KEYS
        if self.blocked or not self._link.room(flow.address):
            return Hold.SOCKET
        if path.allowance <= 0:
            return Hold.RECEIVER if path.granted < path.control.window else Hold.WINDOW
        return Hold.RATE if path.next_s > now_s else Hold.DRIVER

    def _send_train(self, now_s: float, flow: Flow) -> None:
        """Send what may leave at once, of several messages where the first ones are short."""
        room = min(_SEND_ROWS, flow.path.train(now_s))
        while room > 0 and flow.queue:
            outgoing, packets = flow.queue[0], flow.path.mtu.packets
            sent = self._send_some(now_s, flow, room)
            # the first hop takes no such datagrams: go on in smaller ones
            if flow.path.mtu.packets < packets:
                room -= sent
                continue
            if sent <= 0:
                self.blocked = True
            if sent <= 0 or outgoing.at < len(outgoing.chunks):
                return
            room -= sent

    def _send_some(self, now_s: float, flow: Flow, room: int) -> int:
        """Send up to ``room`` datagrams of a flow's first message: how many left. 0: the link has no room."""
        outgoing = flow.queue[0]
        rest, per = len(outgoing.chunks) - outgoing.at, flow.path.mtu.packets
        n = min(room, rest)
        if per < n < rest:
            n -= n % per
        if flow.path.in_flight == 0:
            flow.ping_s, flow.pings = now_s + max(1e-3, flow.path.rto_s), 0
        part = slice(outgoing.at, outgoing.at + n)
        ends = outgoing.run.ended and outgoing.at + n == len(outgoing.chunks)
        chunks, seqs = outgoing.chunks[part], flow.path.sent + 1 + np.arange(n, dtype=np.uint64)
        alive = None if outgoing.alive is None else outgoing.alive[part]
        if self._injector.cut(flow.peer, now_s):
            alive = np.zeros(n, np.bool_)
        if alive is not None:
            self._injector.dropped += n - int(alive.sum())
            ends = ends and bool(alive[-1])
            chunks, seqs = chunks[alive], seqs[alive]
        together = 0
        if len(chunks):
            rows = self._framer.data(outgoing.run, chunks, seqs & _U32, ends, flow.asks(n), outgoing.schema)
            left = self._put(flow, rows, now_s)
            if left < len(rows):  # no more room: go on from the first datagram that stayed
                n = int(seqs[left]) - flow.path.sent - 1
            together = n - (left % per == 1) if per > 1 and left > 1 else 0
        outgoing.at += n
        if n > 0:
            flow.path.send(now_s, n, together)
        if outgoing.at == len(outgoing.chunks):
            flow.queue.popleft()
            if outgoing.run.ended:
                self._mark_end(now_s, flow, outgoing)
            if not flow.queue:
                flow.path.idle()
        return n

    def _put(self, flow: Flow, rows: Bytes, now_s: float) -> int:
        """Send rows, or hold them where the injector delays them. Returns how many need no further send."""
        injector = self._injector
        if not injector.delays and not injector.faults.duplicate:
            try:
                left = self._link.send(rows, flow.address, flow.path.mtu.packets)
            except TooLarge as error:  # the first hop took them before
                left = error.left
                flow.path.mtu.shrink(flow.path.mtu.packets - 1)
            self._count(left, left * rows.shape[1])
            return left
        for _ in range(2 if injector.duplicated() else 1):
            injector.held.push(injector.due_s(self._leaves_s(now_s), rows.nbytes), flow.peer, rows.copy())
        return len(rows)

    def _mark_end(self, now_s: float, flow: Flow, outgoing: Outgoing) -> None:
        """A message's last datagram has left with its mark: send the copies that the path's loss asks for."""
        seq = flow.path.sent
        run = outgoing.run
        ending = Ending(run.key, run.total, seq, outgoing.deadline_s, now_s, outgoing.schema)
        flow.endings[seq & 0xFFFFFFFF] = ending
        self._repeat_ending(now_s, flow, ending, flow.path.copies - 1)

    def _repeat_endings(self, now_s: float, flow: Flow) -> None:
        for number, ending in list(flow.endings.items()):
            if ending.next_s <= now_s:
                # One copy more each time, as the path may lose more than is known of it yet
                self._repeat_ending(
                    now_s, flow, ending, min(_COPIES_MAX, max(flow.path.copies, 1 + ending.rounds))
                )
                if ending.rounds >= _ENDING_ROUNDS_MAX:
                    del flow.endings[number]

    def _repeat_ending(self, now_s: float, flow: Flow, ending: Ending, copies: int) -> None:
        for _ in range(copies):
            self._send_one(now_s, flow)
            if not self._injector.marker_lost(flow.peer, ending.key, ending.repeat):
                data = self._framer.short(
                    Kind.END,
                    flow.peer,
                    key=ending.key,
                    schema=ending.schema,
                    chunk=ending.seq,
                    total=ending.total,
                    seq=flow.path.sent,
                )
                self.emit(flow, data, now_s, drawn=True)
            ending.repeat += 1
        ending.rounds += 1
        ending.next_s = now_s + max(1e-3, flow.path.rto_s) * min(4, ending.rounds)

    def answer(
        self,
        now_s: float,
        flow: Flow,
        kind: Kind,
        *,
        chunk: int = 0,
        total: int = 0,
        received: int = 0,
        highest: int = 0,
        waited_s: float = 0.0,
    ) -> None:
        """Send an answer of a kind to a peer. Answers have numbers of their own."""
        flow.answers += 1
        data = self._framer.short(
            kind, flow.peer, chunk=chunk, total=total, received=received, highest=highest, seq=flow.answers,
            waited_s=waited_s,
        )  # fmt: skip
        self.emit(flow, data, now_s)

    def emit(self, flow: Flow, data: bytes, now_s: float, drawn: bool = False) -> None:
        """Send one header-only datagram, through the injector's faults.

        drawn: whether the injector has decided already that it is not lost.
        """
        injector = self._injector
        if (not drawn and injector.answer_lost(flow.peer)) or injector.cut(flow.peer, now_s):
            return
        if injector.delays:
            injector.held.push(injector.due_s(self._leaves_s(now_s), HEADER_BYTES), flow.peer, data)
        else:
            self._out(flow, data)

    def _leaves_s(self, now_s: float) -> float:
        """When what is sent in the turn that began at ``now_s`` gets to an injected line."""
        return now_s if self.clock_s is None else max(now_s, self.clock_s())

    def _out(self, flow: Flow, data: Bytes | bytes) -> None:
        if isinstance(data, bytes):
            self._link.send_short(data, flow.address)
            self._count(1, len(data))
        else:
            left = self._link.send(data, flow.address)
            self._count(left, left * data.shape[1])

    def acknowledge(self, now_s: float, flow: Flow) -> None:
        """Tell a peer which of its datagrams have come, and how many it may have under way."""
        inbound = flow.inbound
        inbound.unanswered, inbound.asked = 0, False
        waited_s = max(0, self.clock_ns() - inbound.came_ns) * 1e-9 if inbound.came_ns else 0.0
        self.answer(
            now_s, flow, Kind.ACK, chunk=self.granted, total=inbound.whole, received=inbound.received,
            highest=inbound.highest, waited_s=waited_s,
        )  # fmt: skip

    def _count(self, datagrams: int, size: int) -> None:
        self.sent += datagrams
        self.sent_bytes += size
