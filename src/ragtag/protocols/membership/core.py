"""What the parts of the membership machine share: time, timers, random choices, and effects."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ragtag.core import seed as random
from ragtag.protocols.membership.types import Identity, Limits, MemberEffect, Remarked, Transmit, Wake
from ragtag.protocols.membership.wire import Seal

T = TypeVar("T")
_NOTES_MAX = 64
_INSTANT_S = 1e-9
"""Times that differ by less count as equal, since a driver may round them."""


class Due(NamedTuple):
    """A timer of one of the parts. what: names what is due. nonce: says for which probe or pull."""

    at_s: float
    order: int
    what: str
    nonce: int = 0


class Core:
    """One peer's clock, timers, random stream and effects.

    The clock counts time awake. A timer that is served late shows that this process (or its machine) stood
    still. The time it slept is taken out, so that no member is accused for a time in which this peer listened
    to none (Lifeguard's local awareness, measured here rather than inferred).
    """

    def __init__(self, me: Identity, limits: Limits) -> None:
        self.me, self.limits = me, limits
        self.seal = Seal(me.key, me.epoch)
        self.now_s = 0.0
        self.slept_s = 0.0
        self.unix_ahead_s = 0.0
        """How far the wall clock is ahead of the caller's times."""
        self.effects: list[MemberEffect] = []
        self.counts: Counter[str] = Counter()
        self._timers: list[Due] = []
        self._order = 0
        self._armed_s = float("inf")
        self._real_s = float("-inf")
        self._stream = random.stream_key(me.seed, f"member/{me.name}", me.epoch)
        self._draws = 0

    # -- Time

    def advance(self, real_s: float, slack_s: float) -> None:
        """The time is ``real_s``. If the next timer is more than ``slack_s`` late, this process has slept."""
        self._real_s = max(self._real_s, real_s)
        if self._timers:
            late_s = self._real_s - self.slept_s - self._timers[0].at_s
            if late_s > slack_s:
                self.slept_s += late_s
                self.counts["slept"] += 1
        self.now_s = self._real_s - self.slept_s

    @property
    def unix_s(self) -> float:
        """The wall clock now."""
        return self._real_s + self.unix_ahead_s

    def after(self, delay_s: float, what: str, nonce: int = 0) -> None:
        """Set a timer."""
        self._order += 1
        heapq.heappush(self._timers, Due(self.now_s + delay_s, self._order, what, nonce))

    def due(self) -> Due | None:
        """The next timer that has run out; ``None``: none has."""
        if self._timers and self._timers[0].at_s <= self.now_s + _INSTANT_S:
            return heapq.heappop(self._timers)
        return None

    def finish(self) -> list[MemberEffect]:
        """The effects of this step, with a wake for the next timer."""
        if self._timers:
            at_s = max(self._timers[0].at_s + self.slept_s, self._real_s)
            if at_s < self._armed_s or self._armed_s <= self._real_s + _INSTANT_S:
                self._armed_s = at_s
                self.effects.append(Wake(at_s))
        effects, self.effects = self.effects, []
        return effects

    def halt(self) -> None:
        """Drop all timers."""
        self._timers.clear()

    # -- Chance

    def uniform(self) -> float:
        """The next number of this peer's own stream, in [0, 1)."""
        self._draws += 1
        return random.uniform(self._stream, self._draws)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order."""
        self._draws += 1
        return [items[i] for i in random.permutation(random.mix(self._stream ^ self._draws), len(items))]

    def some(self, items: Sequence[T], k: int) -> list[T]:
        """``k`` different items, or all."""
        if len(items) <= 3 * k:
            return self.shuffled(items)[:k]
        chosen: dict[int, T] = {}
        while len(chosen) < k:
            i = int(self.uniform() * len(items))
            chosen[i] = items[i]
        return list(chosen.values())

    # -- Out

    def send(self, dest: tuple[str, int], data: bytes) -> None:
        """A datagram for ``dest``."""
        self.effects.append(Transmit(dest, data))

    def remark(self, what: str, name: str, detail: str = "") -> None:
        """A line for the trace: of each kind the first few, then one at each power of two."""
        self.counts[what] += 1
        count = self.counts[what]
        if count <= _NOTES_MAX or count & (count - 1) == 0:
            self.effects.append(Remarked(what, name, detail))
