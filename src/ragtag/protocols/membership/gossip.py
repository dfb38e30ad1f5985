"""Rumours: records on each datagram, so that news reach all in a time like the logarithm of the crew."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence

from msgspec import Raw

from ragtag.protocols.membership.core import Core

_COLD = 2
"""So many records that are no news go on each datagram, in turn, in case a rumour was lost (anti-entropy)."""
_HOT_MAX = 16
PAGE_BYTES = 960


class Rumours:
    """How often each name's news were told. record: gives a name's record, which the view has."""

    def __init__(self, core: Core, names: Collection[str], record: Callable[[str], Raw]) -> None:
        self.core, self.names, self._record = core, names, record
        self._told: dict[str, int] = {}
        self._cold: list[str] = []

    def news(self, name: str) -> None:
        """There is something new about a name."""
        self._told[name] = 0

    def forget(self, name: str) -> None:
        """Tell no member of a name any more."""
        self._told.pop(name, None)

    def gossip(self, first: str | None, n: int) -> list[Raw]:
        """The records on a datagram in a crew of ``n``: that of ``first``, then news, then others.

        News that were told least come first (SWIM, section 4.1). Each is told 3 log2(n + 1) times.
        """
        room = self.core.limits.gossip_bytes
        chosen: dict[str, Raw] = {}

        def put(name: str) -> bool:
            nonlocal room
            raw = self._record(name)
            if name in chosen or len(raw) > room:
                return name in chosen
            chosen[name] = raw
            room -= len(raw)
            return True

        if first is not None:
            put(first)
        if self._told:
            most = math.ceil(3 * math.log2(n + 1))
            for name in heapq.nsmallest(_HOT_MAX, self._told, key=self._told.__getitem__):
                if name != first and put(name):
                    self._told[name] += 1
                    if self._told[name] >= most:
                        del self._told[name]
        for _ in range(min(_COLD, len(self.names))):
            if not self._cold:
                self._cold = self.core.shuffled(list(self.names))
            name = self._cold.pop()
            if name in self.names:
                put(name)
        return list(chosen.values())


def page(names: Sequence[str], record: Callable[[str], Raw]) -> tuple[list[Raw], bool]:
    """The records of the first names, as many as fit into a datagram, and whether there are more."""
    records: list[Raw] = []
    room = PAGE_BYTES
    for name in names:
        raw = record(name)
        if len(raw) > room:
            return records, True
        records.append(raw)
        room -= len(raw)
    return records, False
