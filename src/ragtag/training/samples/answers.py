"""Which peers have acknowledged what one posted, and how long it waits for those that have not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ragtag.protocols.crew.board import Notices

PATIENCE, PATIENCE_MAX = 3.0, 8.0
"""Timeouts of the board that are waited for the last ones, once most know; and where most do not."""


@dataclass(slots=True)
class Answers:
    """What the notice board knows of peer ``me``'s posts.

    present: the peers that are not silent, ``me`` too.
    rto_s: the board's timeout (measured: RFC 6298).
    waited_s: how long the caller has waited so far, as far as it stood there and looked.
    """

    me: int
    present: frozenset[int] = frozenset()
    rto_s: float = 0.0
    waited_s: float = 0.0
    _peers: frozenset[int] = frozenset()
    _awaited: frozenset[int] = frozenset()
    _reached: Mapping[int, int] = field(default_factory=dict)
    _in_vain: dict[int, int] = field(default_factory=dict)

    def look(self, notices: Notices, live: Iterable[int], since_s: float) -> None:
        """Take the board as it is now, ``since_s`` after the look before.

        One look counts as a timeout's wait at most: a process that stood still has not waited for anybody.
        """
        self.present = (notices.peers - notices.silent) | {self.me}
        self.rto_s = notices.rto_s
        self.waited_s += min(since_s, self.rto_s)
        self._peers, self._reached = notices.peers, notices.reached
        self._awaited = (self.present & frozenset(live)) - {self.me}

    def moved_on(self) -> None:
        """The caller does not wait any longer for what it waited for."""
        self.waited_s = 0.0

    def behind(self, number: int) -> frozenset[int]:
        """Peers that have not acknowledged the post ``number``, nor a later one, silent ones too."""
        return frozenset(p for p in self._peers if self._reached.get(p, 0) < number)

    def all_know(self, number: int) -> bool:
        """Whether all peers that are awaited have acknowledged this post."""
        return not self._late(number)

    def enough_know(self, number: int) -> bool:
        """Whether not to wait any longer: all know, or a measured time is over.

        A peer that is not silent yet, and does not answer in several timeouts, is slow, or cannot be heard.
        Once it was waited for in vain, it is not waited for again until it has acknowledged anything: a
        peer that froze costs its patience once, not with each claim until it is known to be dead.
        """
        late = self._late(number)
        if all(self._in_vain.get(peer) == known for peer, known in late.items()):
            return True
        others = self.present - {self.me}
        most = 2 * len(others & self.behind(number)) <= len(others) and len(others) > 1
        if self.waited_s < (PATIENCE if most else PATIENCE_MAX) * self.rto_s:
            return False
        self._in_vain = late
        return True

    def vouched(self, told: Mapping[int, int], late: bool = False) -> int:
        """The highest number that two others tell, or exceed; where one other is there, its own; 0: none.

        So one that lies moves nobody beyond what an honest peer tells. Where nobody else can be asked, a peer
        that was away goes by the one that there is.

        told: by peer, those of peers that have left, too. A peer that is there and tells none is at 0.
        late: the crew has begun before this peer: those that tell none may be newcomers as it is, and do not
            count.
        """
        told = {peer: number for peer, number in told.items() if peer != self.me}
        there = self.present - {self.me}
        asked = (there & told.keys() if late else there) or told.keys()
        by_two = sorted(told.values())[-2:-1] or [0]
        return max([*by_two, *(told.get(peer, 0) for peer in asked if len(asked) == 1)])

    def _late(self, number: int) -> dict[int, int]:
        """The last post that each peer has acknowledged, of those that are awaited and lack this one."""
        return {p: known for p in self._awaited if (known := self._reached.get(p, 0)) < number}
