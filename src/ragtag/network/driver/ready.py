"""Waiting for descriptors, and for a time to the microsecond."""

from __future__ import annotations

import select
from collections.abc import Sequence

SELECTED_MAX = 1024
"""select takes descriptors below this (FD_SETSIZE)."""


def ready(reads: Sequence[int], writes: Sequence[int], within_s: float) -> set[int]:
    """Those of some descriptors that can be read, or written, once one can be, or after a time.

    poll waits for whole milliseconds, rounded up: each train of datagrams would leave up to one later than it
    is due. So it is asked only where a process has more descriptors than select takes.
    """
    if max((*reads, *writes)) < SELECTED_MAX:
        readable, writable, _ = select.select(reads, writes, (), within_s)
        return {*readable, *writable}
    poll = select.poll()
    for fd in {*reads, *writes}:
        poll.register(fd, select.POLLIN * (fd in reads) | select.POLLOUT * (fd in writes))
    return {fd for fd, _ in poll.poll(1e3 * within_s)}
