"""One event loop for all that runs in virtual time: a clock, a heap, and processes that freeze or end.

Events are planned for a time and happen in the order of their times. Of events at one time the one that was
planned first comes first. Many share a time, since what a peer sends at once arrives at once. So the heap is
one of times, and each time has a list of events.

A ``Port`` is one machine's process: an event for it waits while it is frozen, and is dropped once it has
ended. Nothing here sleeps: a second of virtual time takes as long as its events do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_LOG_BYTES = 1 << 16

Call = Callable[[], object]
_Planned = tuple[int, "Port | None", Any]
"""An event: its order, the port that it is for (``None``: the event is a call), and the event itself."""


class Port:
    """One machine's process on a loop.

    take: gives the machine an event, and carries out its effects.
    ends_s: from then on nothing comes to it; ``inf``: it does not end.
    last: when it thaws, events of this class come after all others (timers: a driver reads its socket first).
    drop: told the order of each event that would have come after its end.
    halts: how many freezes hold it now.
    """

    __slots__ = ("drop", "ends_s", "halts", "held", "last", "take")

    def __init__(
        self,
        take: Callable[[Any], object],
        *,
        ends_s: float = math.inf,
        last: type | None = None,
        drop: Callable[[int], object] | None = None,
    ) -> None:
        self.take, self.ends_s, self.last, self.drop = take, ends_s, last, drop
        self.halts = 0
        self.held: list[tuple[int, Any]] | None = None
        """The events that wait until the process thaws, with their order; ``None``: it is not frozen."""


class Loop:
    """Virtual time.

    now_s: the time.
    events: how many events have happened.
    order: the place in the order of the event that happens now.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = self.order = 0
        self._times: list[float] = []
        self._at: dict[float, list[_Planned]] = {}
        """What is planned for each time in the heap, in its order."""
        self._now: list[_Planned] = []
        """What is left of this time's events, the last first. What is planned for now comes after them."""
        self._planned = 0
        self._halted: dict[Port, None] = {}
        self._healed = False
        self._digest = hashlib.blake2b(digest_size=16)
        self._log = bytearray()

    # -- Planning

    def at(self, at_s: float, call: Call) -> None:
        """Call something at a time. Raises ValueError: that time has passed, or is NaN."""
        self.post(at_s, None, call)

    def post(self, at_s: float, port: Port | None, event: Any) -> int:
        """Give a port an event at a time, or call the event where the port is ``None``.

        Returns its place in the order. Raises ValueError: the time has passed, or is NaN.
        """
        if not at_s >= self.now_s:
            raise ValueError(f"it is {self.now_s} s already; nothing can be planned for {at_s} s")
        self._planned = order = self._planned + 1
        planned = self._at.get(at_s)
        if planned is None:
            planned = self._at[at_s] = []
            heappush(self._times, at_s)
        planned.append((order, port, event))
        return order

    def give(self, port: Port, event: Any) -> None:
        """Give a port an event now, before all that is planned."""
        self._planned += 1
        self._give(self._planned, port, event)

    def freeze(self, port: Port, at_s: float, for_s: float) -> None:
        """A process will be frozen for so long."""
        self.at(at_s, lambda: self._halt(port))
        self.at(at_s + for_s, lambda: self._go_on(port))

    def heal(self) -> None:
        """Thaw all processes. None freezes any more."""
        self._healed = True
        for port in list(self._halted):
            self._thaw(port)

    # -- Going on

    @property
    def due_s(self) -> float:
        """When the next event happens; ``inf``: there is none."""
        if self._now:
            return self.now_s
        return self._times[0] if self._times else math.inf

    def next(self) -> bool:
        """Let the next event happen. Returns whether there was one."""
        if not self._now and not self._go_to(math.inf):
            return False
        order, port, event = self._now.pop()
        self.events += 1
        if port is None:
            event()
        else:
            self._give(order, port, event)
        return True

    def run(self, until_s: float = math.inf, events_max: int = 100_000_000) -> None:
        """Go on until no event is left, or to ``until_s``.

        Raises:
            RuntimeError: more than ``events_max`` events have happened.
        """
        stop = self.events + events_max
        while (self._now and self.now_s <= until_s) or self._go_to(until_s):
            if self.events >= stop:
                raise RuntimeError(
                    f"{events_max} events and not done at {self.now_s} s of virtual time: "
                    f"machines that answer each other for ever, or raise events_max"
                )
            order, port, event = self._now.pop()  # as ``next``, without its calls
            self.events += 1
            if port is not None and port.held is None and self.now_s < port.ends_s:
                self.order = order
                port.take(event)
            elif port is None:
                event()
            else:
                self._give(order, port, event)
        if self.now_s < until_s < math.inf:
            self.now_s = until_s

    def _go_to(self, until_s: float) -> bool:
        """Go on to the next time for which anything is planned, if it is ``until_s`` or sooner."""
        if self._now or not self._times or self._times[0] > until_s:
            return False
        self.now_s = heappop(self._times)
        self._now = self._at.pop(self.now_s)
        self._now.reverse()
        return True

    def _give(self, order: int, port: Port, event: Any) -> None:
        if self.now_s >= port.ends_s:
            if port.drop is not None:
                port.drop(order)
        elif port.held is not None:
            port.held.append((order, event))
        else:
            self.order = order
            port.take(event)

    # -- Frozen processes

    def _halt(self, port: Port) -> None:
        if not self._healed:
            port.halts += 1
            if port.held is None:
                port.held = []
                self._halted[port] = None

    def _go_on(self, port: Port) -> None:
        if port in self._halted:
            port.halts -= 1
            if port.halts == 0:
                self._thaw(port)

    def _thaw(self, port: Port) -> None:
        """Give a process the events that waited, in their order."""
        self._halted.pop(port, None)
        held, port.held, port.halts = port.held or [], None, 0
        last = port.last
        if last is not None:
            held.sort(key=lambda entry: isinstance(entry[1], last))
        for order, event in held:
            self._give(order, port, event)

    # -- The digest

    def log(self, what: bytes) -> None:
        """Add to the bytes that ``digest`` hashes."""
        self._log += what
        if len(self._log) > _LOG_BYTES:
            self._flush()

    def digest(self) -> str:
        """A hash of all that was logged, equal for two runs of one seed."""
        self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        self._digest.update(self._log)
        self._log.clear()
