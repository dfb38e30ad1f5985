"""One direction to one peer: what was sent, what came of it, how long it took; and what may leave now.

What is counted here, and called a datagram, is a packet (``core.wire``): where a path takes large datagrams,
several leave in one. They are numbered from 1 in the order in which they leave. When they left is kept here
for those under way, so no datagram carries a time: an answer names the highest number that came, and how many
came in all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ragtag.network.control.bbr import Bbr, Losses
from ragtag.network.control.controller import QUANTUM_S, WINDOW_FIRST, Controller, Delivery
from ragtag.network.control.mtu import PROBES_MAX, Search
from ragtag.network.control.window import WINDOW_MAX, WINDOW_MIN, LossWindow, OverStream

CONTROLLERS: Mapping[str, Callable[[], Controller]] = {"bbr": Bbr, "window": LossWindow}
CONTROLLER = "bbr"
"""The one that new paths have, unless they go over TCP."""
TRAINS_MAX = 4096
"""Departures that are kept of what is under way: beyond, the oldest are forgotten."""
PINGS = 6
"""After so many requests without an answer, a timeout apart, a path is silent: further ones become rarer."""
_COPIES_MAX = 8
_RECENT = 256.0
"""Datagrams after which a path's losses count for a third of what they did: copies for what it lost in bad
seconds would fill its window for minutes."""
_GRANULARITY_S = 1e-3
_UNKNOWN_S = 0.1  # until there is an answer nothing is measured; peers begin to meet at the same pace
_SPAN_TRAINS = 5  # over less, the rate of single trains would be measured
_UPLINK_SPANS = 32  # of which the most counts: what has become narrower shows after them
_UPLINK_ROUNDS = 4.0  # round trips in one: over less, answers that came together would pass for a rate
_UPLINK_PROBING = 1.25  # paths claim so many times the most that was seen, as one path's probe does (``bbr``)


class _Departure(NamedTuple):
    """Datagrams up to ``last`` left at once; what was known by then, for the rate at which they came."""

    last: int
    at_s: float
    delivered: int
    delivered_s: float
    first_s: float
    app_limited: bool
    in_flight: int


class _Measured(NamedTuple):
    """Up to where a rate was measured: how many had come, when, and when the newest of them had left."""

    received: int
    came_s: float
    left_s: float


class Path:
    """Measures one direction to one peer, and asks its controller.

    sent, acked: the highest number that left, and that is known to have come; received: how many came.
    granted: how many the receiver lets be under way.
    srtt_s, rttvar_s: round trips (RFC 6298), with what the two ends kept; 0: none measured.
    min_rtt_s: the shortest round trip, without what the two ends kept; inf: none measured.
    sure: whether one was measured with what was sent after the other had been heard. What was sent before may
        have lain in a socket that nobody read yet, for seconds.
    mtu: how many packets one of its datagrams may hold.
    streamed: whether it goes over TCP.
    """

    def __init__(self, control: Controller | None = None) -> None:
        self.control = CONTROLLERS[CONTROLLER]() if control is None else control
        self.sent = self.acked = self.received = 0
        self.granted = WINDOW_FIRST
        self.srtt_s = self.rttvar_s = 0.0
        self.min_rtt_s = math.inf
        self.sure = self.streamed = False
        self.mtu = Search()
        self._together: deque[tuple[int, int]] = deque()  # numbers that left several to a datagram, from to
        self._hole = 0  # how many of those did not come since one did
        self._unheard: int | None = None
        self._answered_s = self._silent_until_s = -math.inf
        self._recent = Losses()
        self._departures: deque[_Departure] = deque()
        self._forgotten = 0
        self._next_s = 0.0
        self._late_s = 0.0
        self._held = True  # by its window, or as there is nothing to send
        self._delivered_s = self._first_s = 0.0
        self._limited_until = -1
        self._measured: _Measured | None = None
        self._used = False  # as much was once under way as the first window lets be
        self._rounds = self._round_ends = 0
        self._round_until_s = -math.inf

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
        room, rate = self.allowance, self.control.rate
        if room <= 0:
            self._held = True
        if rate == math.inf:
            return room
        train_s = self.control.train_s if self.in_flight else QUANTUM_S  # the first one finds out
        due = rate * (self._behind_s(now_s) + train_s)
        return min(room, max(1, min(int(due), self.limit // 2)))

    # -- What left, and what came of it

    def send(self, now_s: float, count: int, together: int = 0) -> None:
        """``count`` datagrams, with the next numbers, leave now (or were lost where losses are injected).

        together: so many of them, the first ones, leave several to a datagram.
        """
        if together:
            self._note_together(self.sent + 1, self.sent + together)
        if self.in_flight == 0:
            self._first_s = self._delivered_s = now_s
            self._measured = None
            self._departures.clear()
        since_s = now_s - self._behind_s(now_s)
        if not self._held:
            self._late_s += 0.125 * (max(0.0, now_s - self._next_s) - self._late_s)
        self._held = False
        self.sent += count
        self._used |= self.allowance == 0
        departures = self._departures
        if departures and departures[-1].at_s == now_s:
            departures[-1] = departures[-1]._replace(last=self.sent, in_flight=self.in_flight)
        else:
            limited = self.acked <= self._limited_until
            if len(departures) == TRAINS_MAX:
                self._forgotten = departures.popleft().last
            departures.append(
                _Departure(
                    self.sent, now_s, self.received, self._delivered_s, self._first_s, limited, self.in_flight
                )
            )
        rate = self.control.rate
        if rate != math.inf:
            self._next_s = max(self._next_s, since_s) + count / rate
        self.control.sent(now_s, count, self.in_flight)

    def claim(self, fair: float, busy: int, part: float, crowded: bool) -> None:
        """Take part in what ``busy`` paths of this peer send: ``part`` of ``fair`` datagrams a second, or of
        what it has found. crowded: all of them claim more together than goes through.

        A first window is the peer's, not the path's: all leave it by one line, and what reached a short queue
        from 15 paths at once would be lost, a tenth of a first round.
        """
        self.control.fair, self.control.busy, self.control.part = fair, busy, part
        self.control.crowded = crowded
        if not self._used:
            self.control.window = max(float(WINDOW_MIN), WINDOW_FIRST / busy)

    def _behind_s(self, now_s: float) -> float:
        """For how long a train could have left already, as its driver was busy: so much is made up for.

        Not more than twice what is usual, lest a peer that stood still sends all at once what it could not,
        nor more than queues take (``Controller.makeup_s``). A path that had nothing to send, or no room in
        its window, is not behind.
        """
        most_s = min(2.0 * self._late_s, self.control.makeup_s)
        return 0.0 if self._held else min(max(0.0, now_s - self._next_s), most_s)

    def idle(self) -> None:
        """There is nothing more to send, though the window has room: what comes says little of the path."""
        self._held = True
        if self.allowance > 0:
            self._limited_until = self.sent

    def on_ack(
        self,
        now_s: float,
        highest: int,
        received: int,
        granted: int,
        since_s: float = -math.inf,
        kept_s: float = 0.0,
    ) -> None:
        """An answer: the highest number seen, how many came in all, and the window granted.

        since_s: since when the other has been heard. kept_s: how long the datagram and its answer lay at the
        two ends, whose drivers were busy: no part of the path's round trip (as in RFC 9002, section 5.3).
        """
        if not 0 <= highest <= self.sent or received > highest:
            return  # no answer to what was sent
        self.granted = max(1, min(granted, WINDOW_MAX))
        if highest <= self.acked:
            return  # overtaken or repeated: how long it took says nothing about the path
        ends = self._ends_silence(now_s)
        left, tx_in_flight, first = self._left(highest)
        rtt_s = None
        if left is not None:
            took_s = now_s - left.at_s
            kept_s = kept_s if 0.0 <= kept_s < took_s else 0.0  # else a clock was set meanwhile
            if took_s > 0.0:  # else it came within the turn in which that left
                rtt_s = took_s - kept_s
                told = left.at_s < self._silent_until_s and not ends
                self._measure(took_s, rtt_s, left.at_s >= since_s, told)
        if self._unheard is None:  # until its first answer the other may not have listened yet
            self._unheard = highest - self.acked + self.received - received
        before, in_flight, passed = self.received, self.in_flight, highest - self.acked
        self.received = max(self.received, min(highest, received + self._unheard))
        self.acked = highest
        if self._together:
            passed -= self._fallen(highest, passed, self.received - before)
        self._recent.add(passed, passed - (self.received - before), within=_RECENT)
        self._recent.lost = max(0.0, self._recent.lost)  # what comes late was counted before
        if highest > self._round_ends and now_s >= self._round_until_s:
            self._rounds, self._round_ends = self._rounds + 1, self.sent
            self._round_until_s = now_s + self.span_s
        rate, at_least = (None, 0.0) if left is None else self._rate(now_s - kept_s, left)
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
                rate,
                left is not None and left.app_limited,
                self._rounds,
                tx_in_flight,
                kept_s,
                self.mtu.packets,
                at_least,
                first.in_flight if first else 0,
                left.at_s - first.at_s if first and left else 0.0,
            )
        )

    def restart(self) -> None:
        """Another process listens from now on: what its predecessor did not get is no loss of the path."""
        self.received += self.sent - self.acked
        self.acked = self.sent
        self._unheard, self.sure = None, False
        self.moved(self.streamed)

    def moved(self, streamed: bool = False) -> None:
        """The way to the other may be another one from now on: nothing is known of what it takes.

        streamed: whether it goes over TCP, which has rate control of its own.
        """
        if streamed != self.streamed:
            self.streamed = streamed
            self.control = OverStream() if streamed else CONTROLLERS[CONTROLLER]()
            self._next_s, self._used = 0.0, False
            self.min_rtt_s = math.inf
        self.mtu = Search()
        self._together.clear()

    # -- Large datagrams

    def _note_together(self, first: int, last: int) -> None:
        together = self._together
        if together and together[-1][1] == first - 1:
            together[-1] = together[-1][0], last
        else:
            together.append((first, last))
            if len(together) > TRAINS_MAX:
                together.popleft()

    def _fallen(self, highest: int, passed: int, delivered: int) -> int:
        """How many of ``passed``, up to ``highest``, fell into a black hole: they say nothing of the load."""
        together, large, last = self._together, 0, 0
        while together and together[0][0] <= highest:
            first, last = together.popleft()
            if last > highest:
                together.appendleft((highest + 1, last))
                last = highest
            large += last + 1 - first
        if last == highest or delivered > passed - large:
            self._hole = 0  # one of them came
            return 0
        if self.mtu.packets > 1:  # else the hole is known, and these had left before
            self._hole += large
            if self._hole < self.tries * self.mtu.packets:
                return 0
            self._hole = 0
            self.mtu.shrink(self.mtu.packets)
        return large

    # -- What is known

    @property
    def tries(self) -> int:
        """How many large datagrams in a row, or answers to them, chance loses once in a thousand times."""
        return max(PROBES_MAX, _times(1.0 - (1.0 - self.loss) ** 2)) if self._lossy else PROBES_MAX

    @property
    def rto_s(self) -> float:
        """When to ask again for an answer (RFC 6298 section 2; granularity is the scheduler's)."""
        if self.srtt_s == 0.0:
            return _UNKNOWN_S
        return self.srtt_s + max(_GRANULARITY_S, 4.0 * self.rttvar_s)

    @property
    def loss(self) -> float:
        """The share of datagrams lost on this path of late."""
        return self._recent.share

    @property
    def copies(self) -> int:
        """How often to send at once what must not get lost: all copies are lost once in a thousand times."""
        return min(_COPIES_MAX, _times(self.loss)) if self._lossy else 1

    @property
    def _lossy(self) -> bool:
        return self.acked >= WINDOW_MIN and self.loss > 1e-3

    @property
    def span_s(self) -> float:
        """Over how long a rate is measured at least: paths that are busy at once take turns."""
        return _SPAN_TRAINS * self.control.train_s

    def _left(self, number: int) -> tuple[_Departure | None, int, _Departure | None]:
        """When a number left, and what was under way at most since the last answer's, and what left first.

        What left before it is not asked for again.
        """
        departures, most = self._departures, 0
        while departures and departures[0].last <= self.acked:
            departures.popleft()
        first = departures[0] if departures else None
        while departures and departures[0].last < number:
            most = max(most, departures.popleft().in_flight)
        if not departures or number <= self._forgotten:
            return None, most, first
        return departures[0], max(most, departures[0].in_flight), first

    def _ends_silence(self, now_s: float) -> bool:
        """An answer came: whether it ends a silence, in which none came for ``PINGS`` timeouts.

        A process that stood still, at either end, or a link that was down keeps back whatever is under way.
        What left before it was over tells of the silence, and little of the path.
        """
        since_s = max(self._answered_s, self._departures[0].at_s if self._departures else now_s)
        self._answered_s = now_s
        ends = self.srtt_s > 0.0 and now_s - since_s > PINGS * self.rto_s
        if ends:
            self._silent_until_s = now_s
        return ends

    def _measure(self, rtt_s: float, path_s: float, sure: bool, told: bool) -> None:
        """RFC 6298, section 2; but a silence teaches once (``told``), and at most twice the timeout.

        Else marks and questions would be repeated only that rarely after it. A path that has really become
        slower shows in every answer to what left later, and the timeout follows it. The first one that is
        ``sure`` replaces what was measured before.
        """
        first = self.srtt_s == 0.0 or (sure and not self.sure)
        self.min_rtt_s = path_s if first else min(self.min_rtt_s, path_s)
        self.sure |= sure
        if not first and rtt_s > self.rto_s:
            if told:
                return
            rtt_s = min(rtt_s, 2.0 * self.rto_s)
        if first:
            self.srtt_s, self.rttvar_s = rtt_s, rtt_s / 2
        else:
            self.rttvar_s += 0.25 * (abs(self.srtt_s - rtt_s) - self.rttvar_s)
            self.srtt_s += 0.125 * (rtt_s - self.srtt_s)

    def _rate(self, came_s: float, left: _Departure) -> tuple[float | None, float]:
        """Datagrams a second, and how many they are at least; ``None`` and 0 where nothing is known of it.

        It is what came since ``left``, over the longer of sending it and hearing of it. Where a round trip is
        over too soon for that, it is counted from the last time it could be measured. Where all has come that
        there was to send, it did so in a shorter time: the rate is that at least. Over a silence none is
        measured: a link that was down for seconds would be one of a datagram a second.
        """
        since = _Measured(left.delivered, left.delivered_s, left.first_s)
        self._delivered_s, self._first_s = came_s, left.at_s
        if left.at_s < self._silent_until_s:
            self._measured = None
            return None, 0.0
        if came_s - left.delivered_s < self.span_s and self._measured is not None:
            since = self._measured
        took_s = max(left.at_s - since.left_s, came_s - since.came_s)
        least_s = max(self.min_rtt_s, self.span_s)
        if took_s >= least_s:
            self._measured = _Measured(self.received, came_s, left.at_s)
            return (self.received - since.received) / took_s, 0.0
        self._measured = since
        over = not self.in_flight and self.acked <= self._limited_until
        return None, (self.received - since.received) / least_s if over else 0.0


def _times(loss: float) -> int:
    """How often to send something, so that all are lost once in a thousand times."""
    return math.ceil(math.log(1e-3) / math.log(min(loss, 0.9)))


class Uplink:
    """The line that the paths of one peer mostly share.

    A path that sends while others wait finds the whole line its own. So the rates that all have found are
    more than the line takes at once, up to as many times more as there are paths, and what their sum paces
    into the queue is lost there. What all have delivered in the same time is never more than the line takes:
    that bounds them once a queue has overflowed.

    rate: datagrams a second that several paths have delivered at once, at most; inf: not known.
    """

    def __init__(self) -> None:
        self.rate = math.inf
        self._spans = deque[float](maxlen=_UPLINK_SPANS)
        self._since_s, self._before = math.inf, 0

    def claim(self, now_s: float, busy: Sequence[Path], paths: Iterable[Path]) -> None:
        """Tell the ``busy`` ones of a peer's ``paths``, those that have something to send, what each may
        claim: as much as any other, and together, where more was lost than the paths' own, hardly more than
        was seen to go through. A path that still looks for its rate bounds nobody. They are told, too,
        whether they claim more together than goes through.
        """
        self._look(now_s, busy, paths)
        if not busy:
            return
        found = [path.control.bandwidth for path in busy]
        fair = sum(found) / len(found)
        wanted, most = sum(max(rate, fair) for rate in found), _UPLINK_PROBING * self.rate
        several = len(busy) > 1
        known = several and all(path.control.found for path in busy)
        crowded = several and not (known and wanted <= most < math.inf)
        overflown = any(path.control.makeup_s < math.inf for path in busy)
        part = min(1.0, most / wanted) if known and overflown and wanted else 1.0
        for path in busy:
            path.claim(fair, len(busy), part, crowded)

    def _look(self, now_s: float, busy: Sequence[Path], paths: Iterable[Path]) -> None:
        """Measure what comes through, from one time to a later one between which several paths are busy."""
        if len(busy) < 2:
            self._since_s = math.inf
            return
        span_s = max(max(path.span_s, _UPLINK_ROUNDS * path.srtt_s) for path in busy)
        if now_s - self._since_s >= span_s:
            received = sum(path.received for path in paths)
            if received > self._before:  # else nothing came through, or another process has a peer's seat
                self._spans.append((received - self._before) / (now_s - self._since_s))
                self.rate = max(self._spans)
            self._since_s, self._before = now_s, received
        elif self._since_s == math.inf:
            self._since_s, self._before = now_s, sum(path.received for path in paths)
