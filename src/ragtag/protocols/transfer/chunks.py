"""Which chunks are there, which are on their way from which donor, and which to ask for next."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping

from ragtag.protocols.transfer.donor import Donor
from ragtag.protocols.transfer.types import Came, Offer

HOLDERS_MAX = 2
"""A chunk is asked of at most so many donors at a time."""


class Chunks:
    """The chunks of one state.

    versions: how many are there, by the version of their snapshot (``Offer.version``).
    came: how many are there.
    wasted_bytes: bytes that came twice or damaged.
    """

    def __init__(self) -> None:
        self.versions: Counter[tuple[int, int]] = Counter()
        self.came = self.wasted_bytes = 0
        self._todo: deque[int] = deque()
        self._have = bytearray()
        self._holders: dict[int, list[str]] = {}

    def expect(self, offer: Offer) -> None:
        """Expect the chunks of this offer."""
        self._todo = deque(range(offer.n_chunks))
        self._have = bytearray(offer.n_chunks)

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return 0 < len(self._have) == self.came

    def take(self, donor: Donor, offer: Offer, event: Came) -> None:
        """A chunk that ``donor`` was asked for came."""
        if not event.intact:
            self.wasted_bytes += event.n_bytes
            self.release(donor.name, event.index)
        elif self._have[event.index]:
            self.wasted_bytes += event.n_bytes
        else:
            self._have[event.index] = 1
            self.came += 1
            donor.given += event.n_bytes
            self.versions[offer.version] += 1
            self._holders.pop(event.index, None)

    def release(self, name: str, index: int) -> None:
        """A chunk will not come from this donor: ask another for it, unless that is done already."""
        holders = self._holders.get(index, [])
        if name in holders:
            holders.remove(name)
            if not holders:
                del self._holders[index]
                self._todo.appendleft(index)

    def next_for(
        self, now_s: float, donor: Donor, donors: Mapping[str, Donor], slowest_s: float
    ) -> int | None:
        """The chunk to ask ``donor`` for, noted as asked; ``None``: none for now."""
        index = self._todo.popleft() if self._todo else self._steal(now_s, donor, donors, slowest_s)
        if index is not None:
            self._holders.setdefault(index, []).append(donor.name)
        return index

    def _steal(self, now_s: float, donor: Donor, donors: Mapping[str, Donor], slowest_s: float) -> int | None:
        """The chunk that another will send last, if this donor is likely to send it sooner."""
        best, longest_s = None, (donor.typical_s or 0.0) * (len(donor.outstanding) + 1)
        for index, holders in self._holders.items():
            if len(holders) < HOLDERS_MAX and donor.name not in holders:
                remaining_s = donors[holders[0]].remaining_s(now_s, index, slowest_s)
                measured = donor.pace is not None or math.isinf(remaining_s)
                if remaining_s > longest_s and measured:
                    best, longest_s = index, remaining_s
        return best
