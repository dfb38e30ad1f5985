"""The way in: turns data into runs, answers into windows, and marks into ends of messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ragtag.core.address import Address
from ragtag.core.types import Bytes, Joined, Left, Noted, PeerId, Run
from ragtag.core.wire import HEADER, Headers, Kind
from ragtag.network.link.flow import Flow
from ragtag.network.link.frame import Framer, Short
from ragtag.network.link.link import TRAIN, Link, Received
from ragtag.network.link.outbox import Outbox
from ragtag.protocols.node import Node

_SENDER = HEADER.fields["sender"][1] // 2 if HEADER.fields is not None else 0
"""The sender's column in a table of datagrams as 16-bit numbers."""
_NOBODY = 1 << 16
"""No peer's number."""


@dataclass(slots=True)
class Taken:
    """What one pass over the link brought.

    people: peers that came (again) or said good-bye.
    runs: in order of arrival.
    later: ends of messages, and when to believe each; what it has overtaken may still come before.
    drained: whether nothing was left to read.
    amid: whether it ended amid a message, with less than a train's worth of datagrams.
    """

    people: list[Joined | Left]
    runs: list[Run]
    later: list[tuple[float, Run]]
    drained: bool
    amid: bool = False


class Inbox:
    """The way in over one link.

    members: whether membership tells which peers come and go. Else their datagrams do.
    received: how many datagrams of data came.
    """

    def __init__(
        self,
        link: Link,
        framer: Framer,
        flows: dict[PeerId, Flow],
        outbox: Outbox,
        node: Node,
        members: bool = False,
    ) -> None:
        self._link, self._framer, self._flows = link, framer, flows
        self._outbox, self._node, self._members = outbox, node, members
        self.received = 0
        self.notes: list[Noted] = []
        """What is to be noted; the driver clears it."""
        self._heard: dict[PeerId, Flow] = {}  # peers heard in this pass; the others need no answer
        self._ahead_ns = 0
        self.clock_ns = time.time_ns
        """By which links say when something came."""
        self._peer_at: dict[Address, PeerId] = {}
        self.reindex()

    def receive(self, now_s: float) -> Taken:
        """Take what has come, and answer it. The runs' payloads are valid until the next call."""
        behind_ns = self._clocks(now_s)
        got = self._link.receive()
        self._framer.refused.malformed += got.refused
        taken = Taken([], [], [], got.drained)
        if got.sources:
            self._take_data(now_s, got, taken)
        short_came_ns = got.short_came_ns or [0] * len(got.short)
        for data, source, came_ns in zip(got.short, got.short_sources, short_came_ns, strict=True):
            short = self._framer.parse_short(data)
            if short is None:
                continue
            if self._peer_at.get(source) == short.sender:
                came_s = min(now_s, 1e-9 * (came_ns - behind_ns)) if came_ns else now_s
                self._take_short(now_s, short, taken, came_s, came_ns)
            else:
                self._framer.refused.elsewhere += 1
                self._note_elsewhere(short.sender, source)
        for probe in self._framer.probes:
            prober = self._flows.get(probe.sender)
            if prober is not None and self._enter(now_s, prober, probe.epoch, taken):
                self._outbox.answer(now_s, prober, Kind.PROBE_ACK, highest=probe.number)
        self._framer.probes.clear()
        for flow in self._heard.values():
            inbound = flow.inbound
            if inbound.asked or inbound.unanswered >= self._outbox.granted // 4:
                self._outbox.acknowledge(now_s, flow)
        self._heard.clear()
        return taken

    def _clocks(self, now_s: float) -> int:
        """How far the arrivals' clock is ahead of the driver's, in nanoseconds.

        Both are read one after the other, and a thread that stands still between makes it too much: then a
        datagram would have come earlier than it did, and a round trip would be almost nothing. So the least
        counts, which grows by a microsecond a pass, as clocks drift; and a clock that was set shows.
        """
        more_ns = self.clock_ns() - int(1e9 * now_s) - self._ahead_ns
        self._ahead_ns += min(more_ns, 1_000) if more_ns < 1_000_000_000 else more_ns
        return self._ahead_ns

    def reindex(self) -> None:
        """Peers have come or moved: learn anew which peer sends from which address."""
        # A mute flow keeps the address of a process that may have another seat now: the flow of that one wins
        flows = sorted(self._flows.values(), key=lambda flow: not flow.mute)
        self._peer_at = {flow.address: flow.peer for flow in flows}

    def _of_their_senders(self, got: Received) -> tuple[Bytes, Headers]:
        """The rows that come from the address of the peer in whose name they are, each sender's in order.

        Their headers come with them. Rows of the crew that do not are counted and noted: anybody that knows
        the crew's name can make them.
        """
        rows: Bytes = got.table
        ends = [end for end, _ in got.sources]
        at = [self._peer_at.get(source, _NOBODY) for _, source in got.sources]
        headers = self._framer.whole(rows, ends, at)
        if headers is None:
            rows, headers = self._framer.parse(self._without_strangers(got, ends, at))
        senders = headers["sender"]
        if np.count_nonzero(senders[1:] != senders[:-1]) >= 2 * len(self._flows):
            # A queue on the way has mixed senders datagram by datagram. Each sender's own are in order, and
            # sorted they make one run, which costs as much as a single datagram
            order = np.argsort(senders, kind="stable")
            rows, headers = rows[order], headers[order]
        return rows, headers

    def _without_strangers(self, got: Received, ends: list[int], at: list[PeerId]) -> Bytes:
        """The rows that come from the address of the peer in whose name they are.

        ends, at: of each train the row after its last one, and who sends from where it came.
        """
        rows: Bytes = got.table
        senders = rows.view("<u2")[:, _SENDER]
        true = senders == np.repeat(np.array(at, "<u4"), np.diff(ends, prepend=0))
        if true.all():
            return rows
        _, headers = self._framer.parse(rows[~true])
        self._framer.refused.elsewhere += len(headers) + len(self._framer.probes)
        self._framer.probes.clear()
        if len(headers):
            row = int(np.flatnonzero(~true & (senders == headers["sender"][0]))[0])
            source = next(source for end, source in got.sources if row < end)
            self._note_elsewhere(int(headers["sender"][0]), source)
        taken: Bytes = rows[true]
        return taken

    def _note_elsewhere(self, peer: PeerId, source: Address) -> None:
        """Note it once per peer. A router that translates addresses causes it, and nobody would know why."""
        flow = self._flows.get(peer)
        if flow is None or flow.doubted:
            return
        flow.doubted = True
        (host, port), (own, own_port) = source, flow.address
        self.notes.append(
            Noted(
                "from elsewhere",
                peer,
                f"datagrams in its name come from {host}:{port}, not {own}:{own_port}: they are not taken",
            )
        )

    def _take_data(self, now_s: float, got: Received, taken: Taken) -> None:
        rows, headers = self._of_their_senders(got)
        self.received += len(rows)
        seqs = headers["seq"]
        came_at = {source: came_ns for (_, source), came_ns in zip(got.sources, got.came_ns, strict=False)}
        found: list[tuple[Run | None, PeerId, int, int, int, bool]] = [
            (run, run.peer, a, b, epoch, asks) for run, a, b, epoch, asks in self._framer.runs(rows, headers)
        ]
        if self._framer.strays:  # data of another schema is of no use, but the path has not lost it
            found = sorted([*found, *((None, *stray) for stray in self._framer.strays)], key=lambda f: f[2])
        for run, sender, a, b, epoch, asks in found:
            flow = self._flows.get(sender)
            if flow is None or not self._enter(now_s, flow, epoch, taken):
                continue
            last_seq = int(seqs[b - 1])
            if flow.inbound.leaps(last_seq):
                self._framer.refused.leaps += b - a
                continue
            flow.inbound.count(now_s, int(seqs[a]), last_seq, b - a)
            flow.inbound.came_ns = came_at.get(flow.address, 0)
            flow.inbound.asked |= asks
            if run is not None:
                taken.runs.append(self._ending_of(now_s, flow, run, last_seq, taken) if run.ended else run)
        ended = any(run is not None and run.ended for run, *_ in found)
        taken.amid = got.drained and 0 < len(rows) < TRAIN and not ended

    def _enter(self, now_s: float, flow: Flow, epoch: int, taken: Taken) -> bool:
        if flow.barred or (flow.process is not None and epoch != flow.process):
            return False  # put out, or another process with this peer's number, now or once
        known = flow.inbound.epoch
        if not flow.inbound.enter(epoch):
            return False
        flow.hear(now_s)
        self._heard[flow.peer] = flow
        if known != epoch:
            flow.inbound.since_s = now_s
        if known != epoch and (known != -1 or flow.peer in self._node.gone):
            flow.path.restart()
            if not self._members:  # else a late datagram of a peer that has left would bring it back
                taken.people.append(Joined(flow.peer))
        return True

    def _take_short(self, now_s: float, short: Short, taken: Taken, came_s: float, came_ns: int) -> None:
        flow = self._flows.get(short.sender)
        if flow is None or not self._enter(now_s, flow, short.epoch, taken):
            return
        if short.kind in (Kind.END, Kind.PING):
            if flow.inbound.leaps(short.seq):
                self._framer.refused.leaps += 1
                return
            flow.inbound.count(now_s, short.seq, short.seq, 1)
            flow.inbound.asked, flow.inbound.came_ns = True, came_ns
        if short.kind == Kind.ACK:
            self._take_ack(now_s, flow, short, came_s)
        elif short.kind == Kind.END:
            self._end_message(now_s, flow, short, taken)
        elif short.kind == Kind.END_ACK:
            flow.endings.pop(short.chunk, None)
        elif short.kind == Kind.PROBE_ACK:
            flow.path.mtu.acknowledged(short.highest)
        elif short.kind == Kind.BYE and not self._members and short.sender not in self._node.gone:
            taken.people.append(Left(short.sender))

    def _take_ack(self, now_s: float, flow: Flow, short: Short, came_s: float) -> None:
        highest = flow.unwrap(short.highest)
        behind = (highest - short.received) & 0xFFFFFFFF
        received = highest - behind if behind < 1 << 31 else highest  # the path duplicates
        kept_s = now_s - came_s + short.waited_s
        flow.path.on_ack(now_s, highest, received, short.chunk, flow.inbound.since_s, kept_s)
        flow.ping_s, flow.pings = now_s + flow.path.rto_s, 0
        if flow.endings and short.total and highest == received:  # all marks up to here have come
            for number in [n for n, ending in flow.endings.items() if ending.seq <= highest]:
                del flow.endings[number]

    def _ending_of(self, now_s: float, flow: Flow, run: Run, number: int, taken: Taken) -> Run:
        """Take a run with a marked end. What its message lacks will not come, unless it was overtaken."""
        inbound = flow.inbound
        new = inbound.new_ending(run.key, number)
        if not inbound.whole:  # else the next answer says that nothing is missing, which is as good
            self._outbox.answer(now_s, flow, Kind.END_ACK, chunk=number)
        if new and inbound.reorder_s == 0.0:
            return run
        if new:
            ending = self._framer.ending(flow.peer, run.key, run.total)
            taken.later.append((now_s + 1.5 * inbound.reorder_s, ending))
        return replace(run, ended=False)

    def _end_message(self, now_s: float, flow: Flow, short: Short, taken: Taken) -> None:
        """Take an end marker: a copy of the mark on a message's last datagram."""
        number = short.chunk
        self._outbox.answer(now_s, flow, Kind.END_ACK, chunk=number)
        if short.schema != self._framer.schemas.get(short.key.channel, 0):
            return
        if not flow.inbound.new_ending(short.key, number):
            return
        ending = self._framer.ending(flow.peer, short.key, short.total)
        if flow.inbound.reorder_s > 0:
            taken.later.append((now_s + 1.5 * flow.inbound.reorder_s, ending))
        else:
            taken.runs.append(ending)
