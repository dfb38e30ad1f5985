"""One direction to one peer: what was sent, what came of it, how long it took; and what may leave now.

Datagrams are numbered from 1 in the order in which they leave. When they left is kept here for those under
way, so no datagram carries a time: an answer names the highest number that came, and how many came in all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ragtag.network.control.controller import Controller, Delivery
from ragtag.network.control.window import WINDOW_FIRST, WINDOW_MAX, WINDOW_MIN, LossWindow

CONTROLLERS: Mapping[str, Callable[[], Controller]] = {"window": LossWindow}
CONTROLLER = "window"
"""The one that new paths have."""
TRAINS_MAX = 4096
"""Departures that are kept of what is under way: beyond, the oldest are forgotten."""
_COPIES_MAX = 8
_GRANULARITY_S = 1e-3
_UNKNOWN_S = 0.1  # until there is an answer nothing is measured; peers begin to meet at the same pace
_QUANTUM_S = 1e-3  # a paced train is what leaves in a millisecond, as Linux' TCP sizes its own


class _Departure(NamedTuple):
    """Datagrams up to ``last`` left at once; what was known by then, for the rate at which they came."""

    last: int
    at_s: float
    delivered: int
    delivered_s: float
    first_s: float
    app_limited: bool


class Path:
    """Measures one direction to one peer, and asks its controller.

    sent, acked: the highest number that left, and that is known to have come; received: how many came.
    granted: how many the receiver lets be under way.
    srtt_s, rttvar_s: round trips (RFC 6298); 0: none measured. min_rtt_s: the shortest.
    sure: whether one was measured with what was sent after the other had been heard. What was sent before may
        have lain in a socket that nobody read yet, for seconds.
    """

    def __init__(self, control: Controller | None = None) -> None:
        self.control = CONTROLLERS[CONTROLLER]() if control is None else control
        self.sent = self.acked = self.received = 0
        self.granted = WINDOW_FIRST
        self.srtt_s = self.rttvar_s = 0.0
        self.min_rtt_s = math.inf
        self.sure = False
        self._unheard: int | None = None
        self._departures: deque[_Departure] = deque()
        self._forgotten = 0
        self._next_s = 0.0
        self._delivered_s = self._first_s = 0.0
        self._limited_until = 0

    # -- What may leave

    @property
    def limit(self) -> int:
        """How many datagrams may be under way at once."""
        return min(self.granted, int(self.control.window))

    @property
    def in_flight(self) -> int:
        """Datagrams that left and are not known to have arrived or been lost."""
        return self.sent - self.acked

    @property
    def allowance(self) -> int:
        """How many datagrams the window lets leave."""
        return max(0, self.limit - self.in_flight)

    @property
    def next_s(self) -> float:
        """When the next train may leave, as far as the pacing rate goes."""
        return self._next_s

    def train(self, now_s: float) -> int:
        """How many datagrams may leave now, at once."""
        if now_s < self._next_s:
            return 0
        rate = self.control.rate
        return self.allowance if rate == math.inf else min(self.allowance, max(1, int(rate * _QUANTUM_S)))

    # -- What left, and what came of it

    def send(self, now_s: float, count: int) -> None:
        """``count`` datagrams, with the next numbers, leave now (or were lost where losses are injected)."""
        if self.in_flight == 0:
            self._first_s = self._delivered_s = now_s
        self.sent += count
        departures = self._departures
        if departures and departures[-1].at_s == now_s:
            departures[-1] = departures[-1]._replace(last=self.sent)
        else:
            limited = self.received < self._limited_until
            if len(departures) == TRAINS_MAX:
                self._forgotten = departures.popleft().last
            departures.append(
                _Departure(self.sent, now_s, self.received, self._delivered_s, self._first_s, limited)
            )
        rate = self.control.rate
        if rate != math.inf:
            self._next_s = max(self._next_s, now_s) + count / rate
        self.control.sent(now_s, count, self.in_flight)

    def idle(self) -> None:
        """There is nothing more to send, though the window has room: what comes says little of the path."""
        if self.allowance > 0:
            self._limited_until = self.received + self.in_flight

    def on_ack(
        self, now_s: float, highest: int, received: int, granted: int, since_s: float = -math.inf
    ) -> None:
        """An answer: the highest number seen, how many came in all, and the window granted.

        since_s: since when the other has been heard.
        """
        if not 0 <= highest <= self.sent or received > highest:
            return  # no answer to what was sent
        self.granted = max(1, min(granted, WINDOW_MAX))
        if highest <= self.acked:
            return  # overtaken or repeated: how long it took says nothing about the path
        left = self._left(highest)
        rtt_s = None
        if left is not None:
            rtt_s = now_s - left.at_s
            self._measure(rtt_s, left.at_s >= since_s)
        if self._unheard is None:  # until its first answer the other may not have listened yet
            self._unheard = highest - self.acked + self.received - received
        before, in_flight, passed = self.received, self.in_flight, highest - self.acked
        self.received = max(self.received, min(highest, received + self._unheard))
        self.acked = highest
        self.control.acknowledged(
            Delivery(
                now_s,
                passed,
                self.received - before,
                in_flight,
                self.granted,
                rtt_s,
                self.srtt_s,
                self.min_rtt_s,
                None if left is None else self._rate(now_s, left),
                left is not None and left.app_limited,
            )
        )

    def restart(self) -> None:
        """Another process listens from now on: what its predecessor did not get is no loss of the path."""
        self.received += self.sent - self.acked
        self.acked = self.sent
        self._departures.clear()
        self._unheard, self.sure = None, False

    # -- What is known

    @property
    def rto_s(self) -> float:
        """When to ask again for an answer (RFC 6298 section 2; granularity is the scheduler's)."""
        if self.srtt_s == 0.0:
            return _UNKNOWN_S
        return self.srtt_s + max(_GRANULARITY_S, 4.0 * self.rttvar_s)

    @property
    def loss(self) -> float:
        """The share of datagrams lost so far on this path."""
        return 1.0 - self.received / self.acked if self.acked else 0.0

    @property
    def copies(self) -> int:
        """How often to send at once what must not get lost: all copies are lost once in a thousand times."""
        if self.acked < WINDOW_MIN or self.loss <= 1e-3:
            return 1
        return min(_COPIES_MAX, math.ceil(math.log(1e-3) / math.log(min(self.loss, 0.9))))

    def _left(self, number: int) -> _Departure | None:
        """When a number left; what left before it is not asked for again."""
        departures = self._departures
        while departures and departures[0].last < number:
            departures.popleft()
        return departures[0] if departures and number > self._forgotten else None

    def _measure(self, rtt_s: float, sure: bool) -> None:
        """RFC 6298, section 2; but one answer teaches at most twice the timeout.

        What a process stood still for, at either end, is in the round trip of whatever was under way:
        seconds, after which marks and questions would be repeated only that rarely. A path that has really
        become slower shows in every answer, and the timeout follows it. The first one that is ``sure``
        replaces what was measured before.
        """
        first = self.srtt_s == 0.0 or (sure and not self.sure)
        self.min_rtt_s = rtt_s if first else min(self.min_rtt_s, rtt_s)
        self.sure |= sure
        if not first:
            rtt_s = min(rtt_s, 2.0 * self.rto_s)
        if first:
            self.srtt_s, self.rttvar_s = rtt_s, rtt_s / 2
        else:
            self.rttvar_s += 0.25 * (abs(self.srtt_s - rtt_s) - self.rttvar_s)
            self.srtt_s += 0.125 * (rtt_s - self.srtt_s)

    def _rate(self, now_s: float, left: _Departure) -> float | None:
        """Datagrams a second: what came since ``left``, over the longer of sending it and hearing of it."""
        self._delivered_s, self._first_s = now_s, left.at_s
        took_s = max(left.at_s - left.first_s, now_s - left.delivered_s)
        return (self.received - left.delivered) / took_s if took_s >= self.min_rtt_s and took_s > 0 else None
