"""The line between simulated peers: what of a run arrives, and when.

A run goes onto its sender's uplink chunk by chunk (bandwidth, queue, deadline), then over a line that delays,
loses, duplicates and reorders, and waits for its receiver's downlink where that has a rate. What is to leave
first does not wait on the uplink, and all that is sent later does so for longer. A message's end
marker is a datagram of its own, repeated a round trip apart until a copy gets through. Where all chunks came
it says nothing new, and its loss is not drawn. Rates and queues count bytes on the wire, headers included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ragtag.core import seed as random
from ragtag.core.faults import Faults, LossStream
from ragtag.core.types import Arrived, Bools, Event, PeerId, Run, Send
from ragtag.core.wire import HEADER_BYTES
from ragtag.simulation.loop import Call, Port

OVERHEAD_BYTES = HEADER_BYTES + 48
"""Bytes that a datagram adds to its chunk: Ragtag's header, and those of IPv6 (40) and UDP (8)."""
REPEATS_MAX = 256
"""The most copies of an end marker: where a round trip takes no time, no deadline ends them."""
PIECES_MAX = 16
PIECE_S_MIN = 1e-3
"""A run that takes longer to send than a round trip, and than this, comes in pieces."""

Post = Callable[[float, PeerId, Event], None]
At = Callable[[float, Call], None]
_BATCH = 8  # it is faster to draw the losses of so many small messages at once
_NOTHING = np.zeros(1, np.bool_)
_NOTHING.flags.writeable = False
_STREAMS = ("jitter", "jitter of a copy", "duplicate", "reorder", "reordered part")


@dataclass(slots=True)
class Traffic:
    """What went over one peer's line, in bytes on the wire. Losses count at their sender."""

    bytes_sent: int = 0
    bytes_received: int = 0
    datagrams_sent: int = 0
    datagrams_lost: int = 0


class Link:
    """All lines of a world.

    Delays are drawn per run from streams named (fault, sender), losses from a ``LossStream``.

    ports: the peers' processes. Nothing leaves one that has ended.
    post: ``post(at_s, dest, event)`` is called for each arrival.
    at: ``at(at_s, call)`` calls something at a time, whatever the peers' processes do: lines do not freeze.
    """

    def __init__(self, faults: Faults, seed: int, ports: Sequence[Port], post: Post, at: At) -> None:
        n = len(ports)
        self.traffic = [Traffic() for _ in range(n)]
        self._ports, self._post, self._land, self._at = ports, post, post, at
        self._free_s = [0.0] * n  # when each uplink will have sent what it has queued
        self._first_free_s = [0.0] * n  # and what goes before all else
        self._down_free_s = [0.0] * n  # when each downlink will have received what waits for it
        self._drawn = [0] * n
        self._streams = {
            name: [random.stream_key(seed, f"line/{name}", peer) for peer in range(n)] for name in _STREAMS
        }
        self._losses = LossStream(faults, seed)
        self.change(faults)

    def change(self, faults: Faults) -> None:
        """These faults hold from now on. Runs on their way arrive as they would have."""
        self._faults = self._losses.faults = faults
        self._lossy = faults.loss is not None
        self._cuts = bool(faults.one_way or faults.partitions)
        self._delays = faults.jitter_s > 0 or faults.duplicate > 0 or faults.reorder > 0
        own = {line.peer: line for line in faults.lines}
        n = len(self._free_s)
        self._rate = [own[p].rate_bytes_per_s if p in own else faults.rate_bytes_per_s for p in range(n)]
        self._beside_s = [own[p].latency_s if p in own else 0.0 for p in range(n)]
        self._rtt_s = 2 * (faults.latency_s + faults.jitter_s + 2 * max(self._beside_s, default=0.0))
        self._paced = faults.rate_bytes_per_s < math.inf or bool(own)
        self._plain = not (self._paced or self._cuts or self._delays)
        self._down = {line.peer: line.down_bytes_per_s for line in faults.lines}
        narrow = any(rate < math.inf for rate in self._down.values())
        self._post = self._through_downlink if narrow else self._land

    def through_s(self, now_s: float, source: PeerId) -> float:
        """When all that a peer has sent so far will have arrived, where nothing is reordered."""
        return max(now_s, self._free_s[source], *self._down_free_s) + self._rtt_s

    def send(self, now_s: float, source: PeerId, sends: Sequence[Send]) -> None:
        """Put runs on the line, in this order."""
        if now_s >= self._ports[source].ends_s:
            return
        lost = self._draw_small(now_s, source, sends) if self._lossy and len(sends) >= _BATCH else None
        deliver = self._queue if self._paced else self._cross
        traffic, post = self.traffic, self._post
        arrives_s = now_s + self._faults.latency_s
        datagrams = size = 0  # of whole messages without a loss on a plain line, the most frequent case
        for i, send in enumerate(sends):
            if now_s > send.deadline_s:
                continue
            run = send.run
            if lost is not None:
                through = _NOTHING if lost[i] else None
            else:
                through = self._losses.draw(source, run.peer, run.key, run.total) if self._lossy else None
            payload, dest, total = run.payload, run.peer, run.total
            if not self._plain or run.mask is not None or len(payload) != total:
                deliver(now_s, source, send, through)
            elif through is None:
                on_wire = total * (payload.shape[1] + OVERHEAD_BYTES)
                datagrams += total
                size += on_wire
                traffic[dest].bytes_received += on_wire
                came = Run(source, run.key, 0, total, payload, run.weight, run.heard, None, run.ended)
                post(arrives_s, dest, Arrived((came,)))
            elif through is _NOTHING:
                self._lose(now_s, source, send)
            else:
                deliver(now_s, source, send, through)
        traffic[source].datagrams_sent += datagrams
        traffic[source].bytes_sent += size

    def _lose(self, now_s: float, source: PeerId, send: Send) -> None:
        """A message of one chunk is lost on a plain line: only its end marker arrives."""
        run, traffic = send.run, self.traffic[source]
        traffic.datagrams_sent += 1
        traffic.datagrams_lost += 1
        traffic.bytes_sent += run.payload.shape[1] + OVERHEAD_BYTES
        marker_s = self._marker_s(now_s, source, send) if run.ended else None
        if marker_s is not None:
            self._end(marker_s + self._faults.latency_s, source, run)

    def _draw_small(self, now_s: float, source: PeerId, sends: Sequence[Send]) -> list[bool] | None:
        """The losses of many one-chunk messages at once; ``None``: some have more chunks."""
        for send in sends:
            if send.run.total != 1 or now_s > send.deadline_s:
                return None
        return self._losses.draw_ones(source, [(send.run.peer, send.run.key) for send in sends])

    def _cross(self, now_s: float, source: PeerId, send: Send, through: Bools | None) -> None:
        """Send a run over a line of endless bandwidth: it leaves at once."""
        run = send.run
        payload, mask, total = run.payload, run.mask, run.total
        k, traffic = len(payload), self.traffic[source]
        sent = k if mask is None else int(np.count_nonzero(mask))
        traffic.datagrams_sent += sent
        traffic.bytes_sent += sent * (payload.shape[1] + OVERHEAD_BYTES)
        if through is not None:
            rows = through if k == total else through[run.first : run.first + k]
            mask = rows if mask is None else mask & rows
        if self._cuts and self._faults.cut(source, run.peer, now_s):
            mask = np.zeros(k, np.bool_)
        if mask is None and k == total:
            self._put(now_s, source, run, 0, k, None, sent, run.ended)
            return
        marker_s = self._marker_s(now_s, source, send) if run.ended else None
        arrives_s = self._put(now_s, source, run, 0, k, mask, sent, marker_s == now_s)
        if marker_s is not None and marker_s > now_s:
            self._end(arrives_s + marker_s - now_s, source, run)

    # -- The uplink

    def _queue(self, now_s: float, source: PeerId, send: Send, through: Bools | None) -> None:
        """Put a run's chunks on the uplink's queue; deliver them in pieces if they take long."""
        run, traffic, rate = send.run, self.traffic[source], self._rate[source]
        size = run.payload.shape[1] + OVERHEAD_BYTES
        each_s = size / rate
        rows = np.arange(len(run.payload)) if run.mask is None else np.flatnonzero(run.mask)
        busy_s = max(now_s, self._free_s[source])
        start_s = max(now_s, self._first_free_s[source]) if send.first else busy_s
        until_s = min(send.deadline_s, self._ports[source].ends_s)
        fits = _at_most(len(rows), (self._faults.queue_bytes - (busy_s - now_s) * rate) / size)
        k = _at_most(fits, (until_s - start_s) / each_s)
        traffic.datagrams_sent += k
        traffic.bytes_sent += k * size
        traffic.datagrams_lost += len(rows) - fits
        end_s = start_s + k * each_s
        self._free_s[source] = busy_s + k * each_s  # what was queued before leaves as planned
        if send.first:
            self._first_free_s[source] = end_s
        leaves_s = end_s if k == fits else max(end_s, send.deadline_s)  # the rest waits until its deadline
        marker_s = self._marker_s(leaves_s, source, send) if run.ended else None
        pieces = max(1, min(PIECES_MAX, k, math.ceil(k * each_s / max(self._rtt_s, PIECE_S_MIN))))
        bounds = [k * piece // pieces for piece in range(pieces + 1)]
        arrives_s = end_s
        for piece, (i, j) in enumerate(pairwise(bounds)):
            a, b = (int(rows[i]), int(rows[j - 1]) + 1) if j > i else (0, 0)
            left_s = start_s + j * each_s
            mask = _both(run.mask, through, run.first, a, b)
            if self._cuts and self._faults.cut(source, run.peer, left_s):
                mask = np.zeros(b - a, np.bool_)
            ended = piece == pieces - 1 and marker_s == end_s
            arrives_s = self._put(left_s, source, run, a, b, mask, j - i, ended)
        if marker_s is not None and marker_s > end_s:
            self._end(arrives_s + marker_s - end_s, source, run)

    def _marker_s(self, leaves_s: float, source: PeerId, send: Send) -> float | None:
        """When the first copy of an end marker that gets through leaves; ``None``: none gets through."""
        run, cuts = send.run, self._cuts
        until_s = min(send.deadline_s, self._ports[source].ends_s)
        for repeat in range(REPEATS_MAX):
            at_s = leaves_s + repeat * self._rtt_s
            if at_s > until_s:
                return None
            if cuts and self._faults.cut(source, run.peer, at_s):
                continue
            if not self._losses.marker_lost(source, run.peer, run.key, repeat):
                return at_s
        return None

    # -- The downlink

    def _through_downlink(self, at_s: float, dest: PeerId, event: Event) -> None:
        """Rows come to a peer's downlink at ``at_s``, and wait until it has received what came before."""
        rate = self._down.get(dest, math.inf)
        if rate == math.inf or not isinstance(event, Arrived):
            self._land(at_s, dest, event)
            return
        size = sum(
            (len(run.payload) if run.mask is None else int(np.count_nonzero(run.mask)))
            * (run.payload.shape[1] + OVERHEAD_BYTES)
            for run in event.runs
        )

        def comes() -> None:
            lands_s = self._down_free_s[dest] = max(at_s, self._down_free_s[dest]) + size / rate
            self._land(lands_s, dest, event)

        self._at(at_s, comes)

    # -- The line

    def _put(
        self,
        left_s: float,
        source: PeerId,
        run: Run,
        a: int,
        b: int,
        mask: Bools | None,
        sent: int,
        ended: bool,
    ) -> float:
        """Deliver rows ``[a, b)`` of a run where ``mask`` (bool ``[b - a]``) is set. Returns their time."""
        at_s = left_s + self._faults.latency_s + self._beside_s[source] + self._beside_s[run.peer]
        if mask is None:
            come = b - a
        else:
            come = int(np.count_nonzero(mask))
            self.traffic[source].datagrams_lost += sent - come
            if come == 0:
                a = b = 0
                mask = None
                if not ended:
                    return at_s
        self.traffic[run.peer].bytes_received += come * (run.payload.shape[1] + OVERHEAD_BYTES)
        if self._delays:
            return self._scramble(at_s, source, run, a, b, mask, ended)
        self._post(at_s, run.peer, Arrived((_rows(source, run, a, b, mask, ended),)))
        return at_s

    def _scramble(
        self, at_s: float, source: PeerId, run: Run, a: int, b: int, mask: Bools | None, ended: bool
    ) -> float:
        """Deliver rows with jitter, perhaps twice, perhaps some of them late. Returns when they arrive."""
        faults, dest, post = self._faults, run.peer, self._post
        self._drawn[source] += 1
        at_s += self._jitter_s("jitter", source)
        on_time, k = 0, b - a
        if faults.reorder > 0 and self._uniform("reorder", source) < faults.reorder:
            on_time = min(k, 1 + int(k * self._uniform("reordered part", source)))
            late = None if mask is None else mask[:on_time]
            flag = ended and on_time == k
            piece = _rows(source, run, a, a + on_time, late, flag)
            post(at_s + faults.reorder_s, dest, Arrived((piece,)))
            if on_time == k:
                return at_s + faults.reorder_s
        rest = None if mask is None else mask[on_time:]
        piece = _rows(source, run, a + on_time, b, rest, ended)
        post(at_s, dest, Arrived((piece,)))
        if faults.duplicate > 0 and self._uniform("duplicate", source) < faults.duplicate:
            again_s = at_s + faults.latency_s + self._jitter_s("jitter of a copy", source)
            post(again_s, dest, Arrived((piece,)))
        return at_s

    def _end(self, at_s: float, source: PeerId, run: Run) -> None:
        """Deliver a message's end marker by itself."""
        self._post(at_s, run.peer, Arrived((_rows(source, run, 0, 0, None, True),)))

    def _uniform(self, name: str, source: PeerId) -> float:
        return random.uniform(self._streams[name][source], self._drawn[source])

    def _jitter_s(self, name: str, source: PeerId) -> float:
        mean_s = self._faults.jitter_s
        return -mean_s * math.log1p(-self._uniform(name, source)) if mean_s > 0 else 0.0


def timeout_s(faults: Faults, *ends: PeerId) -> float:
    """The timeout that a driver would measure on such a line, seconds: a round trip and a margin (RFC 6298).

    A round trip is the shortest one and twice the mean jitter. The margin is four mean deviations of the sum
    of two exponential delays, 32/e^2 = 4.33 times their mean. ends: as in ``shortest_s``.
    """
    return shortest_s(faults, *ends) + 2 * faults.jitter_s + 4.33 * faults.jitter_s


def shortest_s(faults: Faults, *ends: PeerId) -> float:
    """The shortest round trip on the common line, seconds.

    ends: two peers; the delays of their own lines come on top.
    """
    beside_s = sum(line.latency_s for line in faults.lines if line.peer in ends)
    return 2 * (faults.latency_s + beside_s)


def _rows(source: PeerId, run: Run, a: int, b: int, mask: Bools | None, ended: bool) -> Run:
    """Rows ``[a, b)`` of a run as its receiver gets them, without a copy."""
    payload, weight, heard = run.payload, run.weight, run.heard
    if b - a == len(payload):
        return Run(source, run.key, run.first, run.total, payload, weight, heard, mask, ended)
    payload, weight, heard = payload[a:b], weight[a:b], heard[a:b]
    return Run(source, run.key, run.first + a, run.total, payload, weight, heard, mask, ended)


def _both(mask: Bools | None, through: Bools | None, first: int, a: int, b: int) -> Bools | None:
    """Which of rows ``[a, b)`` are in a run and get through; ``None``: all."""
    present = None if mask is None else mask[a:b]
    if through is None:
        return present
    rows = through[first + a : first + b]
    return rows if present is None else present & rows


def _at_most(count: int, room: float) -> int:
    """How many of ``count`` fit into ``room``, which may be infinite."""
    return count if room >= count else max(0, int(room))
