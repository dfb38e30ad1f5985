"""How much may be on its way to a peer: a window of datagrams.

The receiver grants its share of its socket buffer, so that a crew that sends to one peer at once does
not overflow it. Below that, a congestion window follows the path. A lossy link is not a full one: when
losses rise by more than chance would have it, the window is halved as a test, for as many round trips as it
takes to tell. Losses that fall with it were ours, and the window stays; losses that do not are the path's own
(its ambient loss), and the window is restored. So a link that drops one datagram in ten carries as much as it
can, where TCP would creep. Round-trip estimates are RFC 6298's.

A window that is not half used up says nothing about the path (RFC 7661): it does not grow, and a test halves
what was on its way, lest the halved window hold the same message, and what overflows a queue pass for the
path's own losses. Few losses, which chance explains in the long run, are then no reason for a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_FIRST = 64
"""Datagrams before the first answer: about 75 KB, five times TCP's first window (RFC 6928) at our size."""
_WINDOW_MIN = 8
_WINDOW_MAX = 1 << 16
_EXCESS = 0.02  # BBRv2's loss threshold (draft-cardwell-iccrg-bbr-congestion-control)
_SIGMAS = 3.0  # losses above what chance explains
_ENOUGH = 8.0  # losses of the path's own that a test waits for: none of them come once in 3,000 times
_AMBIENT_MAX = 0.6
_COPIES_MAX = 8
_GRANULARITY_S = 1e-3
_UNKNOWN_S = 0.1  # until there is an answer nothing is measured; peers begin to meet at the same pace


@dataclass(slots=True)
class Pacer:
    """One direction to one peer.

    sure: whether a round trip was measured with what was sent after the other had been heard. What was sent
    before may have lain in a socket that nobody read yet, for seconds.
    """

    granted: int = WINDOW_FIRST
    window: float = WINDOW_FIRST
    sent: int = 0
    acked: int = 0
    received: int = 0
    srtt_s: float = 0.0
    rttvar_s: float = 0.0
    sure: bool = False
    ambient: float = 0.0
    _mark_acked: int = 0
    _mark_received: int = 0
    _mark_s: float = 0.0
    _peak: int = 0
    _slow_start: bool = True
    _tested: tuple[float, float] | None = None
    _passed: int = 0
    _lost: float = 0.0
    _unheard: int | None = None

    @property
    def allowance(self) -> int:
        """How many datagrams may leave now."""
        return max(0, self.limit - (self.sent - self.acked))

    @property
    def limit(self) -> int:
        """How many datagrams may be on their way at once."""
        return min(self.granted, int(self.window))

    @property
    def in_flight(self) -> int:
        """Datagrams that left and are not known to have arrived or been lost."""
        return self.sent - self.acked

    @property
    def rto_s(self) -> float:
        """When to ask again for an answer (RFC 6298 section 2; granularity is the scheduler's)."""
        if self.srtt_s == 0.0:
            return _UNKNOWN_S
        return self.srtt_s + max(_GRANULARITY_S, 4.0 * self.rttvar_s)

    @property
    def copies(self) -> int:
        """How often to send at once what must not get lost: all copies are lost once in a thousand times."""
        if self.acked < _WINDOW_MIN or self.loss <= 1e-3:
            return 1
        return min(_COPIES_MAX, math.ceil(math.log(1e-3) / math.log(min(self.loss, 0.9))))

    @property
    def loss(self) -> float:
        """The share of datagrams lost so far on this path."""
        return 1.0 - self.received / self.acked if self.acked else 0.0

    def on_ack(
        self,
        now_s: float,
        highest: int,
        received: int,
        granted: int,
        rtt_s: float | None,
        sure: bool = True,
    ) -> None:
        """An answer: the highest number seen, how many came in all, and the window granted.

        sure: what it answers was sent after the other had been heard.
        """
        if not 0 <= highest <= self.sent or received > highest:
            return  # no answer to what was sent
        self.granted = max(1, min(granted, _WINDOW_MAX))
        if highest <= self.acked:
            return  # overtaken or repeated: how long it took says nothing about the path
        if rtt_s is not None:
            self._measure(rtt_s, sure)
        if self._unheard is None:  # until its first answer the other may not have listened yet
            self._unheard = highest - self.acked + self.received - received
        self.received = max(self.received, min(highest, received + self._unheard))
        self._peak = max(self._peak, self.in_flight)
        self.acked = highest
        if now_s - self._mark_s >= self.srtt_s and self.acked - self._mark_acked >= _WINDOW_MIN:
            self._adapt(now_s)

    def restart(self) -> None:
        """Another process listens from now on: what its predecessor did not get is no loss of the path."""
        self.received += self.sent - self.acked
        self.acked = self.sent
        self._unheard, self.sure = None, False

    def _measure(self, rtt_s: float, sure: bool) -> None:
        """RFC 6298, section 2; but one answer teaches at most twice the timeout.

        What a process stood still for, at either end, is in the round trip of whatever was under way:
        seconds, after which marks and questions would be repeated only that rarely. A path that has really
        become slower shows in every answer, and the timeout follows it. The first one that is ``sure``
        replaces what was measured before.
        """
        first = self.srtt_s == 0.0 or (sure and not self.sure)
        self.sure |= sure
        if not first:
            rtt_s = min(rtt_s, 2.0 * self.rto_s)
        if first:
            self.srtt_s, self.rttvar_s = rtt_s, rtt_s / 2
        else:
            self.rttvar_s += 0.25 * (abs(self.srtt_s - rtt_s) - self.rttvar_s)
            self.srtt_s += 0.125 * (rtt_s - self.srtt_s)

    def _adapt(self, now_s: float) -> None:
        """Once a round trip: grow, or find out whose losses these are."""
        passed = self.acked - self._mark_acked
        lost = max(0.0, 1.0 - (self.received - self._mark_received) / passed)
        usual = max(self.ambient, _EXCESS)
        noise = _SIGMAS * (usual * (1.0 - usual) / passed) ** 0.5
        # a doubled window that overflows loses a third and more; one that creeps, hardly more than chance
        worth = _EXCESS + noise if self._slow_start else max(_EXCESS, noise)
        used = 2 * self._peak >= self.limit
        if self._tested is not None:
            self._judge(passed, lost)
        elif lost > self.ambient + worth and (used or lost * passed >= _ENOUGH):
            self.window = max(_WINDOW_MIN, min(self.window, float(self._peak)))
            self._tested, self._passed, self._lost = (self.window, lost), 0, 0.0
            self.window = max(_WINDOW_MIN, self.window / 2)
        else:
            # only down: a window that creeps into a full queue would pass its own losses off as the path's
            self.ambient += 0.25 * min(0.0, lost - self.ambient)
            # a twentieth at most: what overflows before it is noticed is lost
            step = self.window if self._slow_start else min(_WINDOW_MIN, self.window / 20)
            if used:
                self.window = min(_WINDOW_MAX, self.window + step)
        self._mark_acked, self._mark_received, self._mark_s = self.acked, self.received, now_s
        self._peak = 0

    def _judge(self, passed: int, lost: float) -> None:
        """Whose losses were these, once enough has passed to tell.

        A path loses the same share at half the load. A queue that lost a share L, at 1/(1-L) times what it
        carries, loses 2L-1 at half of that, or nothing.
        """
        assert self._tested is not None
        window, before = self._tested
        self._passed, self._lost = self._passed + passed, self._lost + lost * passed
        if before * self._passed < _ENOUGH:
            return
        self._tested = None
        share = self._lost / self._passed
        if share >= (before + max(0.0, 2.0 * before - 1.0)) / 2:
            self.ambient = min(_AMBIENT_MAX, share)
            self.window = window
        else:
            self._slow_start = False
