"""What reaches a peer: datagrams to runs, answers to windows, marks to ends of messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragtag.core.types import Bytes, Joined, Left, PeerId, Run
from ragtag.core.wire import Kind
from ragtag.network.flow import Flow
from ragtag.network.frame import Framer, Short
from ragtag.network.outbox import Outbox
from ragtag.network.udp import Endpoint
from ragtag.protocols.node import Node


@dataclass(slots=True)
class Taken:
    """What one pass over the socket brought.

    people: peers that came (again) or said good-bye; runs: in order of arrival; later: ends of messages, and
    when to believe them (what they have overtaken may still come); drained: nothing was left to read.
    """

    people: list[Joined | Left]
    runs: list[Run]
    later: list[tuple[float, Run]]
    drained: bool


class Inbox:
    """The way in over one socket. members: who comes is told by membership, not by a datagram."""

    def __init__(
        self,
        endpoint: Endpoint,
        framer: Framer,
        flows: dict[PeerId, Flow],
        outbox: Outbox,
        node: Node,
        members: bool = False,
    ) -> None:
        self._endpoint, self._framer, self._flows = endpoint, framer, flows
        self._outbox, self._node, self._members = outbox, node, members
        self.received = 0
        self._heard: dict[PeerId, Flow] = {}  # in this pass: others need no answer

    def receive(self, now_s: float) -> Taken:
        """Take what has come, and answer it. Arrived payloads are valid until the next call."""
        got = self._endpoint.receive()
        self._framer.refused.malformed += got.malformed
        taken = Taken([], [], [], got.drained)
        if len(got.table):
            self._take_data(now_s, got.table, taken)
        for data in got.short:
            short = self._framer.parse_short(data)
            if short is not None:
                self._take_short(now_s, short, taken)
        for flow in self._heard.values():
            inbound = flow.inbound
            if inbound.asked or inbound.unanswered >= self._outbox.granted // 4:
                self._outbox.answer(now_s, flow)
        self._heard.clear()
        return taken

    def _take_data(self, now_s: float, table: Bytes, taken: Taken) -> None:
        rows, headers = self._framer.parse(table)
        self.received += len(rows)
        seqs, stamps = headers["seq"], headers["stamp"]
        found: list[tuple[Run | None, PeerId, int, int, int, bool]] = [
            (run, run.peer, a, b, epoch, asks) for run, a, b, epoch, asks in self._framer.runs(rows, headers)
        ]
        if self._framer.strays:  # a path that delivers what nobody wants any more loses nothing
            found = sorted([*found, *((None, *stray) for stray in self._framer.strays)], key=lambda f: f[2])
        for run, sender, a, b, epoch, asks in found:
            flow = self._flows.get(sender)
            if flow is None or not self._enter(now_s, flow, epoch, taken):
                continue
            last_seq = int(seqs[b - 1])
            flow.inbound.count(now_s, int(seqs[a]), last_seq, b - a, int(stamps[b - 1]))
            flow.inbound.asked |= asks
            if run is not None:
                taken.runs.append(self._ending_of(now_s, flow, run, last_seq, taken) if run.ended else run)

    def _enter(self, now_s: float, flow: Flow, epoch: int, taken: Taken) -> bool:
        if flow.process is not None and epoch != flow.process:
            return False  # another process that claims this one's number, or claimed it once
        known = flow.inbound.epoch
        if not flow.inbound.enter(epoch):
            return False
        flow.hear(now_s)
        self._heard[flow.peer] = flow
        if known != epoch and (known != -1 or flow.peer in self._node.gone):
            flow.pacer.restart()
            if not self._members:  # leftovers of one that has left bring nobody back
                taken.people.append(Joined(flow.peer))
        return True

    def _take_short(self, now_s: float, short: Short, taken: Taken) -> None:
        flow = self._flows.get(short.sender)
        if flow is None or not self._enter(now_s, flow, short.epoch, taken):
            return
        if short.kind in (Kind.END, Kind.PING):
            flow.inbound.count(now_s, short.seq, short.seq, 1, short.stamp)
            flow.inbound.asked = True
        if short.kind == Kind.ACK:
            self._take_ack(now_s, flow, short)
        elif short.kind == Kind.END:
            self._end_message(now_s, flow, short, taken)
        elif short.kind == Kind.END_ACK:
            flow.endings.pop(short.chunk, None)
        elif short.kind == Kind.BYE and short.sender not in self._node.gone:
            taken.people.append(Left(short.sender))

    def _take_ack(self, now_s: float, flow: Flow, short: Short) -> None:
        highest = flow.unwrap(short.seq)
        behind = (highest - short.received) & 0xFFFFFFFF
        received = highest - behind if behind < 1 << 31 else highest  # the path duplicates
        rtt_s = ((int(now_s * 1e6) - short.stamp) & 0xFFFFFFFF) * 1e-6
        flow.pacer.on_ack(now_s, highest, received, short.chunk, rtt_s)
        flow.ping_s, flow.pings = now_s + flow.pacer.rto_s, 0
        if flow.endings and short.total and highest == received:  # all marks up to here have come
            for number in [n for n, ending in flow.endings.items() if ending.seq <= highest]:
                del flow.endings[number]

    def _ending_of(self, now_s: float, flow: Flow, run: Run, number: int, taken: Taken) -> Run:
        """A marked last datagram: what is missing of its message will not come, unless it was overtaken."""
        inbound = flow.inbound
        new = inbound.new_ending(run.key, number)
        if not inbound.whole:  # else the answer to come says as much: nothing is missing
            self._outbox.emit(flow, self._framer.short(Kind.END_ACK, flow.peer, chunk=number), now_s)
        if new and inbound.reorder_s == 0.0:
            return run
        if new:
            ending = self._framer.ending(flow.peer, run.key, run.total)
            taken.later.append((now_s + 1.5 * inbound.reorder_s, ending))
        return replace(run, ended=False)

    def _end_message(self, now_s: float, flow: Flow, short: Short, taken: Taken) -> None:
        """The copy of a marked last datagram's mark."""
        number = short.chunk
        self._outbox.emit(flow, self._framer.short(Kind.END_ACK, flow.peer, chunk=number), now_s)
        if short.schema != self._framer.schemas.get(short.key.channel, 0):
            return
        if not flow.inbound.new_ending(short.key, number):
            return
        ending = self._framer.ending(flow.peer, short.key, short.total)
        if flow.inbound.reorder_s > 0:
            taken.later.append((now_s + 1.5 * flow.inbound.reorder_s, ending))
        else:
            taken.runs.append(ending)
