"""Faults that are done to processes: SIGSTOP and SIGCONT for a freeze, SIGKILL for a crash.

No I/O here: this says what to do when, and the launcher does it. What is done to datagrams (loss, delay, ...)
is done by each peer's driver; here it only gets its record in the trace.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ragtag.core import trace
from ragtag.core.faults import Faults, Slow, Window
from ragtag.core.faultspec import named_parts, parse_faults
from ragtag.core.types import PeerId

SLICE_S = 0.1
"""A slowed process runs for 1/factor of each slice and stands still for the rest."""

OF_PROCESSES = frozenset({"kill", "freeze", "slow"})
"""Names of faults that the launcher does to a process; others are done to datagrams."""

What = Literal["stop", "continue", "kill", "record"]


@dataclass(frozen=True, slots=True)
class Act:
    """Something to do to a peer's process now.

    record: what goes to the trace, where anything does.
    """

    peer: PeerId
    what: What
    record: trace.Fault | None = None


def fault_records(faults: Faults, start_t: float = 0.0) -> list[trace.Fault]:
    """A record for each fault, in order of time; ``start_t``: when the faults' clock began."""
    records: list[trace.Fault] = []
    for part in named_parts(faults):
        name = part.partition("=")[0]
        peer, window = _target(parse_faults(part))
        until_t = None if math.isinf(window.until_s) else start_t + window.until_s
        records.append(
            trace.Fault(t=start_t + window.from_s, peer=peer, name=name, detail=part, until_t=until_t)
        )
    return sorted(records, key=lambda record: record.t)


def _target(one: Faults) -> tuple[PeerId, Window]:
    """The peer (-1: the crew) and the time of the only fault in ``one``."""
    for crash in one.crashes:
        return crash.peer, Window(crash.at_s)
    for freeze in one.freezes:
        return freeze.peer, Window(freeze.at_s, freeze.at_s + freeze.for_s)
    for slow in one.slow:
        return slow.peer, slow.window
    for way in one.one_way:
        return way.dest, way.window
    for partition in one.partitions:
        return trace.CREW, partition.window
    return trace.CREW, Window()


class ProcessFaults:
    """The acts of ``faults``, in order of time; times are seconds since ``start_s``."""

    def __init__(self, faults: Faults, start_s: float, start_t: float) -> None:
        self._start_s = start_s
        self._heap: list[tuple[float, int, PeerId, What, trace.Fault | Slow | None]] = []
        self._order = 0
        self._holds: Counter[PeerId] = Counter()
        doing: dict[str, What] = {"kill": "kill", "freeze": "stop"}
        for record in fault_records(faults, start_t):
            self._push(record.t - start_t, record.peer, doing.get(record.name, "record"), record)
        for freeze in faults.freezes:
            self._push(freeze.at_s + freeze.for_s, freeze.peer, "continue", None)
        for slow in faults.slow:
            if slow.factor > 1:
                self._push(slow.window.from_s, slow.peer, "stop", slow)

    @property
    def next_s(self) -> float | None:
        """When there is something to do (on the clock of ``start_s``), or ``None``: never again."""
        return self._start_s + self._heap[0][0] if self._heap else None

    @property
    def left(self) -> list[trace.Fault]:
        """The faults that have not come yet, in order of time."""
        return [why for *_, why in sorted(self._heap, key=lambda e: e[:2]) if isinstance(why, trace.Fault)]

    def due(self, now_s: float) -> list[Act]:
        """What is to be done by now. A peer that several faults stop goes on once all have ended."""
        acts: list[Act] = []
        while self._heap and self._start_s + self._heap[0][0] <= now_s:
            _, _, peer, what, why = heapq.heappop(self._heap)
            record = why if isinstance(why, trace.Fault) else None
            if isinstance(why, Slow):
                self._slice(now_s - self._start_s, why)
            if what == "stop":
                self._holds[peer] += 1
                acts.append(Act(peer, "stop" if self._holds[peer] == 1 else "record", record))
            elif what == "continue":
                self._holds[peer] -= 1
                if self._holds[peer] == 0:
                    acts.append(Act(peer, "continue", record))
            else:
                acts.append(Act(peer, what, record))
        return acts

    def _slice(self, now_s: float, slow: Slow) -> None:
        """Plan one slice from now on (a launcher that was late does not make up for it)."""
        self._push(now_s + SLICE_S * (1 - 1 / slow.factor), slow.peer, "continue", None)
        if now_s + SLICE_S < slow.window.until_s:
            self._push(now_s + SLICE_S, slow.peer, "stop", slow)

    def _push(self, at_s: float, peer: PeerId, what: What, why: trace.Fault | Slow | None) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, peer, what, why))
