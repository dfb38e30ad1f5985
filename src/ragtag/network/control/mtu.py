"""How many packets a datagram may hold on a path: path MTU discovery by probes (RFC 8899, DPLPMTUD).

Packets have one size (``core.wire``). One of them is RFC 8899's BASE_PLPMTU of 1,200 bytes, which is always
sent. So a size is a number of packets, and there are few to choose from: 1 on a path with an MTU of 1,500
bytes, 7 with frames of 9,000 bytes, 56 on loopback.

A probe is a datagram of that size with nothing in it. It is answered, and counts neither as data nor as a
loss. The search begins with the largest size and goes on by halves. What the first hop does not take the
operating system refuses at once, so a path over Ethernet costs no probe. An end that does not know probes
answers none, and gets one packet in a datagram.

No ICMP message is needed or believed. A path that takes less than it did (a black hole, RFC 8899, section
4.3) shows in the answers: of several large datagrams in a row none came, while smaller ones did. Then
datagrams hold one packet again, and the search begins anew.
"""

from __future__ import annotations

PACKETS_MAX = 56
"""Packets in a datagram at most: UDP's payload is 65,507 bytes at most."""
PROBES_MAX = 3
"""Probes of one size that are lost before it counts as too large, at least (RFC 8899, section 5.1.2)."""
RAISE_S = 600.0
"""After so long a path may take more (RFC 8899, section 5.1.1, PMTU_RAISE_TIMER)."""


class Search:
    """One path's search.

    packets: how many a datagram may hold, as far as is known (RFC 8899's PLPMTU).
    due_s: before then no probe is due.
    """

    def __init__(self) -> None:
        self.packets = 1
        self._most = PACKETS_MAX  # the largest size that is not known to be too large
        self._first = True  # whether the next size is the first one of a search
        self._over = False
        self.due_s = 0.0
        self._tried = self._times = 0  # the size that is probed (0: none), and how often it was
        self._numbers = range(0)  # of its probes

    def next(self, now_s: float, timeout_s: float, tries: int, most: int) -> int:
        """The size of the probe to send now; 0: none is due.

        timeout_s: when an answer is overdue. tries: how many probes of one size may be lost by chance.
        most: a size above which nothing is to be gained.
        """
        if now_s < self.due_s:
            return 0
        if self._over:
            self._begin(self.packets, PACKETS_MAX)
        if self._tried and self._times >= tries:
            self.refused()
        most = max(self.packets, min(self._most, most))
        if self.packets == most:
            self._over, self._tried, self.due_s = True, 0, now_s + RAISE_S
            return 0
        if not 0 < self._tried <= most:
            self._tried = most if self._first else (self.packets + most + 1) // 2
            self._first, self._times = False, 0
        self._times += 1
        self.due_s = now_s + timeout_s
        return self._tried

    def sent(self, number: int) -> None:
        """The probe has left, with this number."""
        self._numbers = range(number if self._times == 1 else self._numbers.start, number + 1)

    def refused(self) -> None:
        """The path does not take the size that is probed, or the first hop does not."""
        self._most, self._tried, self.due_s = self._tried - 1, 0, 0.0

    def acknowledged(self, number: int) -> None:
        """The probe of this number has come."""
        if self._tried and number in self._numbers:
            self.packets, self._tried, self.due_s = self._tried, 0, 0.0

    def shrink(self, most: int) -> None:
        """The path does not take any more what it took. most: what it may take, as far as is known."""
        self._begin(1, max(1, most))

    def _begin(self, packets: int, most: int) -> None:
        self.packets, self._most = packets, most
        self._first, self._over, self._tried, self.due_s = True, False, 0, 0.0
