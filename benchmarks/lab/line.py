"""Lines in virtual time, and a crew's paths that send through them: what tests of rate control stand on.

A line is one queue, which drops what finds no room, a rate, what is lost behind it, and a delay. What waits
and what is lost is decided train by train, so a second of 500 Mbit/s takes some tens of milliseconds. The
paths are the product's own (``ragtag.network.control``), with the controller that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ragtag.core.seed import generator
from ragtag.network.control.controller import Controller
from ragtag.network.control.path import Path, Uplink
from ragtag.simulation.loop import Loop

SIZE = 1194
"""Bytes of one datagram with all headers."""
VALUES = 1088
"""Bytes of values in it."""
TICK_S = 1e-3
"""A driver that waits for its next train wakes at multiples of this, as on a busy machine."""


def tick_after(at_s: float, due_s: float = 0.0) -> float:
    """When a driver that is busy looks again: at the next tick, or at the first one by which it has to.

    A tick that rounding made a little less than itself is not the next one: time would stand still.
    """
    return max(math.floor(at_s / TICK_S + 1e-6) + 1, math.ceil(due_s / TICK_S - 1e-9)) * TICK_S


def datagrams(mbit: float) -> float:
    """A rate in datagrams a second."""
    return mbit * 1e6 / 8 / SIZE


class Way(Protocol):
    """Brings trains from one peer to another. rtt_s: the delay there and back, without queues."""

    rtt_s: float

    def send(self, count: int, arrive: Callable[[int], object]) -> None:
        """A train leaves: calls, when the last of it would have come, with how many did."""


class Line:
    """A bottleneck.

    rate: datagrams a second, at a time.
    room: datagrams in the queue.
    loss: the share that is lost behind it, at a time, one by one or in bursts.
    bursts: of so many datagrams on the mean.
    jitter_s: each train is later than the delay by so much on the mean (exponentially), and may be overtaken.
    dropped: what found no room so far.
    on_the_way: trains that have left, and not come.
    """

    def __init__(
        self,
        loop: Loop,
        rate: Callable[[float], float],
        room: int,
        rtt_s: float,
        loss: Callable[[float], float] = lambda _: 0.0,
        seed: int = 0,
        *,
        bursts: float = 1.0,
        jitter_s: float = 0.0,
    ) -> None:
        self.loop, self.rate, self.room, self.rtt_s, self.loss = loop, rate, room, rtt_s, loss
        self._bursts, self._jitter_s = bursts, jitter_s
        self.dropped = self.on_the_way = 0
        self._queued, self._at_s = 0.0, 0.0
        self._losing, self._lasts = False, 0
        self._draws = generator(seed, "line")

    @property
    def queued(self) -> float:
        """Datagrams that wait now."""
        now_s = self.loop.now_s
        self._queued = max(0.0, self._queued - (now_s - self._at_s) * self.rate(now_s))
        self._at_s = now_s
        return self._queued

    def send(self, count: int, arrive: Callable[[int], object]) -> None:
        """See ``Way``."""
        now_s = self.loop.now_s
        fits = max(0, min(count, int(self.room + 1 - self.queued)))
        self.dropped += count - fits
        self._queued += fits
        came = fits - self._lost(fits, self.loss(now_s))
        wait_s = self._queued / self.rate(now_s) + self.rtt_s / 2
        if self._jitter_s:
            wait_s += float(self._draws.exponential(self._jitter_s))
        self.on_the_way += 1

        def arrives() -> None:
            arrive(came)
            self.on_the_way -= 1

        self.loop.at(now_s + wait_s, arrives)

    def _lost(self, count: int, share: float) -> int:
        """How many of the next ``count`` are lost. Bursts and the gaps are geometric (Gilbert)."""
        if self._bursts == 1.0 or not share:
            return int(self._draws.binomial(count, share))
        lost = 0
        while count:
            if not self._lasts:
                self._losing = not self._losing
                mean = self._bursts if self._losing else self._bursts * (1.0 - share) / share
                self._lasts = int(self._draws.geometric(1.0 / mean))
            some = min(count, self._lasts)
            lost += some * self._losing
            count, self._lasts = count - some, self._lasts - some
        return lost


class Both:
    """An uplink, and behind it a downlink."""

    def __init__(self, up: Line, down: Line) -> None:
        self._up, self._down, self.rtt_s = up, down, up.rtt_s + down.rtt_s

    def send(self, count: int, arrive: Callable[[int], object]) -> None:
        """See ``Way``."""
        self._up.send(count, lambda came: self._down.send(came, arrive) if came else arrive(0))


@dataclass
class Sender:
    """One path, which has ``backlog`` datagrams to send (inf: always more).

    keeps_s: how long the receiver keeps an answer, at a time: its driver is busy.
    siblings: the paths of the same peer; this one adds itself.
    came: when how many came.
    uplink: what its peer's paths share, where it is their first.
    """

    loop: Loop
    way: Way
    control: Controller
    backlog: float = 0.0
    keeps_s: Callable[[float], float] = lambda _: TICK_S
    siblings: list[Sender] = field(default_factory=list)
    came: list[tuple[float, int]] = field(default_factory=list)
    uplink: Uplink = field(default_factory=Uplink)
    _planned_s: float = math.inf
    _asked: int = 0
    _highest: tuple[int, float] = (0, 0.0)
    _received: int = 0
    _answers_s: float = -1.0

    def __post_init__(self) -> None:
        self.path = Path(self.control)
        self.path.granted = 1 << 16
        self.siblings.append(self)

    def give(self, count: float) -> None:
        """So many more are to be sent."""
        self.backlog += count
        self.wake()

    def wake(self) -> None:
        """Send what may leave, and plan the next time."""
        path, loop = self.path, self.loop
        busy = [other.path for other in self.siblings if other.backlog > 0]
        self.siblings[0].uplink.claim(loop.now_s, busy, (other.path for other in self.siblings))
        while self.backlog > 0 and (k := int(min(path.train(loop.now_s), self.backlog))) > 0:
            first = not path.in_flight
            asks = first or path.allowance <= k
            asks |= path.sent + k - self._asked >= path.limit // 8
            path.send(loop.now_s, k)
            self.backlog -= k
            if self.backlog <= 0:
                asks = True
                path.idle()
            if asks:
                self._asked = path.sent
            number = path.sent
            self.way.send(k, lambda came, number=number, asks=asks: self._arrive(number, came, asks))
        if self.backlog > 0 and path.allowance > 0:
            at_s = tick_after(loop.now_s, path.next_s)
            if at_s != self._planned_s:
                self._planned_s = at_s
                loop.at(at_s, self._tick)
        elif self.path.in_flight:
            self._ask_later(path.acked)

    def _tick(self) -> None:
        self._planned_s = math.inf
        self.wake()

    def _ask_later(self, acked: int) -> None:
        """What was to be answered may be lost, and its answer: ask once more after a while."""
        self.loop.at(self.loop.now_s + max(TICK_S, self.path.rto_s), lambda: self._ask(acked))

    def _ask(self, acked: int) -> None:
        path = self.path
        if path.acked == acked and path.in_flight:
            path.send(self.loop.now_s, 1)
            number = path.sent
            self.way.send(1, lambda came: self._arrive(number, came, True))
            self._ask_later(acked)

    def _arrive(self, number: int, came: int, asked: bool) -> None:
        if not came:
            return
        now_s = self.loop.now_s
        self._received += came
        self._highest = max(self._highest, (number, now_s))
        self.came.append((now_s, came))
        if asked and self._answers_s < now_s:
            self._answers_s = now_s + self.keeps_s(now_s)
            self.loop.at(self._answers_s, self._answer)

    def _answer(self) -> None:
        (highest, came_s), received = self._highest, self._received
        kept_s = self.loop.now_s - came_s

        def back() -> None:
            self.path.on_ack(self.loop.now_s, highest, received, self.path.granted, kept_s=kept_s)
            self.wake()

        self.loop.at(self.loop.now_s + self.way.rtt_s / 2, back)

    def rate_between(self, from_s: float, until_s: float) -> float:
        """Datagrams a second that came."""
        return sum(k for at_s, k in self.came if from_s <= at_s < until_s) / (until_s - from_s)


class Tcp:
    """A TCP flow that always has more to send: CUBIC (RFC 9438) after slow start, an answer for two segments.

    came: when how many came.
    """

    def __init__(self, loop: Loop, way: Way) -> None:
        self.loop, self.way = loop, way
        self.window, self.came = 10.0, list[tuple[float, int]]()
        self._slow_until = math.inf  # slow start, up to this window
        self._in_flight, self._sent, self._recover = 0, 0, 0
        self._full, self._since_s, self._reno, self._rtt_s = 0.0, 0.0, 0.0, way.rtt_s

    def wake(self) -> None:
        """Send what the window allows."""
        while self.window - self._in_flight >= 2:
            self._in_flight, self._sent = self._in_flight + 2, self._sent + 2
            self.way.send(2, partial(self._arrive, self._sent, self.loop.now_s))

    def _arrive(self, number: int, left_s: float, came: int) -> None:
        self.came.append((self.loop.now_s, came))
        self.loop.at(self.loop.now_s + self.way.rtt_s / 2, partial(self._answer, number, left_s, came))

    def _answer(self, number: int, left_s: float, came: int) -> None:
        now_s = self.loop.now_s
        self._in_flight -= 2
        self._rtt_s += 0.125 * (now_s - left_s - self._rtt_s)
        if came < 2:
            if number > self._recover:  # once in a round trip
                self._recover, self._full, self._since_s = self._sent, self.window, now_s
                self.window = self._slow_until = self._reno = max(2.0, 0.7 * self.window)
        elif self.window < self._slow_until:
            self.window += 2
        else:
            back_s = (self._full * 0.3 / 0.4) ** (1 / 3)
            self._reno += 3 * 0.3 / 1.7 * 2 / self.window
            aim = max(self._full + 0.4 * (now_s - self._since_s + self._rtt_s - back_s) ** 3, self._reno)
            self.window += (min(max(aim, self.window), 1.5 * self.window) - self.window) * 2 / self.window
        self.wake()

    def rate_between(self, from_s: float, until_s: float) -> float:
        """Segments a second that came."""
        return sum(k for at_s, k in self.came if from_s <= at_s < until_s) / (until_s - from_s)


def share_beside_tcp(
    *controls: Controller,
    mbit: float = 50.0,
    queue_ms: float = 20.0,
    rtt_s: float = 2e-4,
    message: float = math.inf,
    for_s: float = 30.0,
) -> float:
    """The share of a line that the paths of one peer have beside a CUBIC flow, after a third of the time.

    message: datagrams that each path sends at a time, with 20 ms between (inf: always more).
    """
    loop, rate = Loop(), datagrams(mbit)
    line = Line(loop, lambda _: rate, int(rate * queue_ms / 1e3), rtt_s, seed=1)
    paths, tcp = list[Sender](), Tcp(loop, line)
    for control in controls:
        Sender(loop, line, control, siblings=paths)
    tcp.wake()
    while loop.now_s < for_s:
        for path in paths:
            path.give(message)
        while any(path.backlog > 0 for path in paths) and loop.now_s < for_s:
            loop.next()
        loop.run(loop.now_s + 0.02)
    ours, theirs = (
        sum(one.rate_between(for_s / 3, for_s) for one in paths),
        tcp.rate_between(for_s / 3, for_s),
    )
    return ours / (ours + theirs)


@dataclass(frozen=True)
class Round:
    """An average of a crew. s: until the last datagram came; limit_s: what one uplink needs for it."""

    s: float
    limit_s: float
    dropped: int
    sent: int


class Crew:
    """Peers that average as reduce-scatter and all-gather do: each sends a block to each other, twice.

    Each has an uplink and a downlink of one rate.

    loss, bursts, jitter_s: on the downlinks (see ``Line``).
    """

    def __init__(
        self,
        make: Callable[[], Controller],
        n: int = 4,
        *,
        mbit: float = 500.0,
        queue_ms: float = 20.0,
        rtt_s: float = 2e-4,
        loss: float = 0.0,
        mb: float = 16.0,
        bursts: float = 1.0,
        jitter_s: float = 0.0,
        keeps_s: Callable[[float], float] = lambda _: TICK_S,
    ) -> None:
        self.loop = loop = Loop()
        rate = datagrams(mbit)
        room = int(rate * queue_ms / 1e3)
        self.block = int(mb * 1e6 / n / VALUES)
        self._ups = [Line(loop, lambda _: rate, room, rtt_s / 2, seed=2 * i) for i in range(n)]
        self._downs = [
            Line(
                loop, lambda _: rate, room, rtt_s / 2, lambda _: loss, 2 * i + 1,
                bursts=bursts, jitter_s=jitter_s,
            )
            for i in range(n)
        ]  # fmt: skip
        self.senders: list[Sender] = []
        for i in range(n):
            mine: list[Sender] = []
            for j in range(n):
                if i != j:
                    way = Both(self._ups[i], self._downs[j])
                    Sender(loop, way, make(), keeps_s=keeps_s, siblings=mine)
            self.senders += mine
        self.limit_s = 2 * (n - 1) * self.block / rate

    def average(self, gap_s: float = 0.02) -> Round:
        """One round; then all compute for ``gap_s``."""
        loop, lines = self.loop, [*self._ups, *self._downs]
        began_s, dropped = loop.now_s, sum(line.dropped for line in lines)
        sent = sum(one.path.sent for one in self.senders)
        for _ in range(2):
            for one in self.senders:  # a driver queues all messages of a stage, and sends then
                one.came.clear()
                one.backlog += self.block
            for one in self.senders:
                one.wake()
            while any(one.backlog > 0 for one in self.senders):
                loop.next()
            while any(line.on_the_way for line in lines):
                loop.next()
        took_s = loop.now_s - began_s
        loop.run(loop.now_s + gap_s)
        return Round(
            took_s,
            self.limit_s,
            sum(line.dropped for line in lines) - dropped,
            sum(one.path.sent for one in self.senders) - sent,
        )
