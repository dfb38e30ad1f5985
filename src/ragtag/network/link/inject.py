"""Faults on the way out of a real socket: the same names, streams and masks as in the simulator.

Loss of data is drawn per message, so that a live and a simulated run of one seed lose the same chunks. The
driver's answers have no counterpart in the simulator, so their losses come from a stream of their own.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from ragtag.core import seed as random
from ragtag.core.faults import Faults, LossStream
from ragtag.core.types import Bools, Bytes, MessageKey, PeerId, Run

HELD_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Held:
    """Datagrams that an injected delay keeps back. Beyond ``HELD_BYTES_MAX`` in all they are lost.

    overflowed: how many calls of ``push`` have lost theirs so.
    """

    heap: list[tuple[float, int, PeerId, Bytes | bytes]] = field(default_factory=list)
    held_bytes: int = 0
    overflowed: int = 0
    _count: int = 0

    def push(self, due_s: float, dest: PeerId, data: Bytes | bytes) -> None:
        """Keep ``data`` until ``due_s``."""
        size = len(data) if isinstance(data, bytes) else data.nbytes
        if self.held_bytes + size > HELD_BYTES_MAX:
            self.overflowed += 1
            return
        self._count += 1
        self.held_bytes += size
        heapq.heappush(self.heap, (due_s, self._count, dest, data))

    def pop_due(self, now_s: float) -> tuple[PeerId, Bytes | bytes] | None:
        """The next datagrams that are due, and their peer; ``None``: none are."""
        if not self.heap or self.heap[0][0] > now_s:
            return None
        _, _, dest, data = heapq.heappop(self.heap)
        self.held_bytes -= len(data) if isinstance(data, bytes) else data.nbytes
        return dest, data


class Injector:
    """Draws what happens to the datagrams that one peer sends.

    held: what delays keep back.
    dropped: datagrams of data that were lost by injection.
    """

    def __init__(self, faults: Faults, seed: int, me: PeerId) -> None:
        self.faults, self._seed, self._me = faults, seed, me
        self._losses = LossStream(faults, seed)
        self._shorts: dict[PeerId, int] = {}
        self._draws = 0
        self._line_free_s = 0.0
        self.held = Held()
        self.dropped = 0

    @property
    def delays(self) -> bool:
        """Whether datagrams may be kept back."""
        faults = self.faults
        return bool(
            faults.latency_s
            or faults.jitter_s
            or faults.reorder
            or faults.duplicate  # copies go through the heap, and all else with them lest it overtake
            or math.isfinite(faults.rate_bytes_per_s)
        )

    def draw(self, run: Run) -> Bools | None:
        """Which chunks of a run's message get through, bool ``[total]``; ``None``: all."""
        return self._losses.draw(self._me, run.peer, run.key, run.total)

    def marker_lost(self, dest: PeerId, key: MessageKey, repeat: int) -> bool:
        """Whether a copy of a message's end marker is lost."""
        return self._losses.marker_lost(self._me, dest, key, repeat)

    def answer_lost(self, dest: PeerId) -> bool:
        """Whether the next answer to ``dest`` is lost."""
        if self.faults.loss is None:
            return False
        index = self._shorts[dest] = self._shorts.get(dest, 0) + 1
        return (
            random.uniform(random.stream_key(self._seed, "answers", self._me, dest), index)
            < self.faults.loss.p
        )

    def cut(self, dest: PeerId, now_s: float) -> bool:
        """Whether nothing gets from this peer to ``dest`` now."""
        faults = self.faults
        return bool(faults.one_way or faults.partitions) and faults.cut(self._me, dest, now_s)

    def due_s(self, now_s: float, size: int) -> float:
        """When datagrams that leave now get out of the injected line; ``size``: their bytes in all."""
        faults = self.faults
        due = now_s
        if math.isfinite(faults.rate_bytes_per_s):
            self._line_free_s = max(self._line_free_s, now_s) + size / faults.rate_bytes_per_s
            due = self._line_free_s
        due += faults.latency_s
        if faults.jitter_s:
            due -= faults.jitter_s * math.log(1.0 - self._uniform("jitter"))
        if faults.reorder and self._uniform("reorder") < faults.reorder:
            due += faults.reorder_s
        return due

    def duplicated(self) -> bool:
        """Draw whether the next datagrams are sent twice."""
        return bool(self.faults.duplicate) and self._uniform("duplicate") < self.faults.duplicate

    def frozen_until_s(self, now_s: float) -> float:
        """Until when an injected freeze stops this peer; ``now_s``: none does."""
        ends = [
            f.at_s + f.for_s
            for f in self.faults.freezes
            if f.peer == self._me and f.at_s <= now_s < f.at_s + f.for_s
        ]
        return max(ends, default=now_s)

    def _uniform(self, name: str) -> float:
        self._draws += 1
        return random.uniform(random.stream_key(self._seed, name, self._me), self._draws)
