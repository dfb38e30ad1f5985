"""What giving away a state may cost a donor: a share of one core, and of its link to the newcomers."""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections import deque

_TCP_INFO_BYTES = 168
_DELIVERY_RATE = struct.Struct("=Q")
_DELIVERY_RATE_AT = 160  # linux/tcp.h, struct tcp_info: tcpi_delivery_rate (since Linux 4.9)


class CpuBudget:
    """A share of one core: a bucket of processor time that real time fills, up to ``burst_s``.

    The cost of a piece of work is known only once it is done. So it is measured then, and if it emptied the
    bucket, no work is done before the bucket is full again. In any t seconds the work takes at most
    ``share * t + burst_s`` seconds and the cost of its last piece. It comes in slices: each slice interrupts
    the trainer's thread once, where small pieces would interrupt it each time.

    Raises ValueError: the share is not above 0 and at most 1.
    """

    def __init__(self, share: float, burst_s: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"donor: the share of a core is {share}; it must lie above 0 and be at most 1")
        self._share, self._burst_s = share, burst_s
        self._left_s, self._filled_s, self._free_s = burst_s, -math.inf, -math.inf

    def spend(self, now_s: float, used_s: float) -> None:
        """Take ``used_s`` seconds of a core's time out of the bucket."""
        filled_s = max(self._filled_s, now_s)
        left_s = min(self._burst_s, self._left_s + self._share * (filled_s - self._filled_s)) - used_s
        self._left_s, self._filled_s = left_s, filled_s
        if left_s <= 0:
            self._free_s = filled_s + (self._burst_s - left_s) / self._share

    def pause_s(self, now_s: float) -> float:
        """For how many seconds to do nothing."""
        return max(0.0, self._free_s - now_s)


class LinkBudget:
    """A share of the rate at which paths take bytes, as the kernel measures it on each burst.

    A chunk leaves as fast as its path takes it. Then nothing is sent until the mean rate is down to the
    share. The highest of the last eight rates counts, whichever newcomers they are of, as in BBR (Cardwell
    et al., ACM Queue 14(5), 2016): a burst that the sender itself held up shows less than the path can do.

    free_s: when the next chunk may leave.

    Raises ValueError: the share is not above 0 and at most 1.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"donor: the share of a path is {share}; it must lie above 0 and be at most 1")
        self._share = share
        self._rates: deque[float] = deque(maxlen=8)
        self.free_s = -math.inf

    def sent(self, now_s: float, n_bytes: int, rate_bytes_per_s: float | None) -> None:
        """A chunk of ``n_bytes`` has left. Where no rate was ever known (``None``), nothing is held back."""
        if rate_bytes_per_s:
            self._rates.append(rate_bytes_per_s)
        if self._rates:
            self.free_s = max(self.free_s, now_s) + n_bytes / (self._share * max(self._rates))


def delivery_rate(sock: socket.socket) -> float | None:
    """Bytes per second that the path takes, as Linux has measured; ``None``: not known."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    return float(_DELIVERY_RATE.unpack_from(info, _DELIVERY_RATE_AT)[0]) or None
