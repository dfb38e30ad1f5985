"""How much may be on its way to a peer: a window of datagrams.

The receiver grants its share of its socket buffer, so that a crew that sends to one peer at once does
not overflow it. Below that, this window follows the path. A lossy link is not a full one: when
losses rise by more than chance would have it, the window is halved as a test, for as many round trips as it
takes to tell. Losses that fall with it were ours, and the window stays; losses that do not are the path's own
(its ambient loss), and the window is restored. So a link that drops one datagram in ten carries as much as it
can, where TCP would creep.

A window that is not half used up says nothing about the path (RFC 7661): it does not grow, and a test halves
what was on its way, lest the halved window hold the same message, and what overflows a queue pass for the
path's own losses. Few losses, which chance explains in the long run, are then no reason for a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragtag.network.control.controller import QUANTUM_S, WINDOW_FIRST, Delivery

WINDOW_MIN = 8
WINDOW_MAX = 1 << 16
_EXCESS = 0.02  # BBRv2's loss threshold (draft-cardwell-iccrg-bbr-congestion-control)
_SIGMAS = 3.0  # losses above what chance explains
_ENOUGH = 8.0  # losses of the path's own that a test waits for: none of them come once in 3,000 times
_AMBIENT_MAX = 0.6


@dataclass(slots=True)
class LossWindow:
    """A window that takes losses which do not fall with the load for the path's own; it does not pace.

    ambient: the share that the path loses of itself.
    """

    window: float = WINDOW_FIRST
    ambient: float = 0.0
    rate: float = math.inf
    busy: int = 1
    train_s: float = QUANTUM_S
    fair: float = 0.0
    part: float = 1.0
    crowded: bool = False
    makeup_s: float = math.inf
    bandwidth: float = 0.0
    found: bool = False
    _passed: int = 0  # since the last look
    _delivered: int = 0
    _peak: int = 0
    _looked_s: float = 0.0
    _slow_start: bool = True
    _tested: tuple[float, float] | None = None
    _test_passed: int = 0
    _test_lost: float = 0.0

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        """Do nothing: this window learns from answers only."""

    def acknowledged(self, sample: Delivery) -> None:
        """Look at what was lost, once a round trip."""
        self._passed += sample.passed
        self._delivered += sample.delivered
        self._peak = max(self._peak, sample.in_flight)
        if sample.now_s - self._looked_s >= sample.srtt_s and self._passed >= WINDOW_MIN:
            self._adapt(min(sample.granted, int(self.window)))
            self._passed = self._delivered = self._peak = 0
            self._looked_s = sample.now_s

    def _adapt(self, limit: int) -> None:
        """Grow, or find out whose losses these are. limit: what could be under way."""
        passed = self._passed
        lost = max(0.0, 1.0 - self._delivered / passed)
        usual = max(self.ambient, _EXCESS)
        noise = _SIGMAS * (usual * (1.0 - usual) / passed) ** 0.5
        # a doubled window that overflows loses a third and more; one that creeps, hardly more than chance
        worth = _EXCESS + noise if self._slow_start else max(_EXCESS, noise)
        used = 2 * self._peak >= limit
        if self._tested is not None:
            self._judge(passed, lost)
        elif lost > self.ambient + worth and (used or lost * passed >= _ENOUGH):
            self.window = max(WINDOW_MIN, min(self.window, float(self._peak)))
            self._tested, self._test_passed, self._test_lost = (self.window, lost), 0, 0.0
            self.window = max(WINDOW_MIN, self.window / 2)
        else:
            # only down: a window that creeps into a full queue would pass its own losses off as the path's
            self.ambient += 0.25 * min(0.0, lost - self.ambient)
            # a twentieth at most: what overflows before it is noticed is lost
            step = self.window if self._slow_start else min(WINDOW_MIN, self.window / 20)
            if used:
                self.window = min(WINDOW_MAX, self.window + step)

    def _judge(self, passed: int, lost: float) -> None:
        """Whose losses were these, once enough has passed to tell.

        A path loses the same share at half the load. A queue that lost a share L, at 1/(1-L) times what it
        carries, loses 2L-1 at half of that, or nothing.
        """
        assert self._tested is not None
        window, before = self._tested
        self._test_passed, self._test_lost = self._test_passed + passed, self._test_lost + lost * passed
        if before * self._test_passed < _ENOUGH:
            return
        self._tested = None
        share = self._test_lost / self._test_passed
        if share >= (before + max(0.0, 2.0 * before - 1.0)) / 2:
            self.ambient = min(_AMBIENT_MAX, share)
            self.window = window
        else:
            self._slow_start = False


@dataclass(slots=True)
class OverStream:
    """A window as large as the receiver grants, from the first answer on, for a path over TCP.

    TCP has a congestion control of its own, and no second one may fight it. A connection takes what it can
    carry and no more, so there is no pace either. What is granted bounds what is under way and may come late.
    """

    window: float = WINDOW_FIRST
    rate: float = math.inf
    busy: int = 1
    train_s: float = QUANTUM_S
    fair: float = 0.0
    part: float = 1.0
    crowded: bool = False
    makeup_s: float = math.inf
    bandwidth: float = 0.0
    found: bool = False

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        """Do nothing: TCP counts what is under way."""

    def acknowledged(self, sample: Delivery) -> None:
        """Take the rate at which the path delivers, for who asks."""
        self.window = WINDOW_MAX
        if sample.rate is not None and (sample.rate > self.bandwidth or not sample.app_limited):
            self.bandwidth = sample.rate
            self.found |= not sample.app_limited
