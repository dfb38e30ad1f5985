"""What an owner at a central state knows of its peers' speeds, and the groups that follow from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from ragtag.core.types import PeerId
from ragtag.protocols.central.owners import GONE_AFTER, Owners

Groups = tuple[tuple[PeerId, ...], ...]
PACE_WINDOW = 9
"""A peer says how long its steps take: the median of so many."""
PAUSE = 0.5
"""Speeds are looked at once in so many of the middle peer's steps, and whenever a peer misses a deadline."""
SEEN = 5
"""How much a group counts follows from the last so many steps of each peer."""
STEP_MIN_S = 1e-9
"""The shortest step, so that rates are finite."""
NEWS = 0.02
"""Groups are formed anew once a peer's steps take longer or shorter by this share."""


class Grouping(Protocol):
    """Which peers step together, and how much a group's update counts (``ragtag.schedules.grouping``)."""

    def groups(self, step_s: Mapping[PeerId, float], now: Groups) -> Groups:
        """The groups from now on. A peer in none steps alone. step_s: positive. Never raises."""
        ...

    def share(self, group: Iterable[PeerId], rate: Mapping[PeerId, float]) -> float:
        """A group's part of the crew's samples per second. rate: each peer's. Never raises."""
        ...

    def scale(self, share: float, staleness: int) -> float:
        """What the update of a group with this part of the crew is multiplied by. Never raises."""
        ...


class Speeds:
    """What one owner knows of speeds, and the groups that follow.

    changes: how often the number of groups changed.
    doubted: peers whose speed the rule does not believe, and what they say a step takes.
    """

    def __init__(self, grouping: Grouping, owners: Owners) -> None:
        self.grouping, self._owners = grouping, owners
        self.groups: Groups = ()
        self.changes = 0
        self.doubted: dict[PeerId, float] = {}
        self._step_s: dict[PeerId, float] = {}
        self._used_s: dict[PeerId, float] = {}
        self._overdue_s: dict[PeerId, float] = {}
        self._answered_s: dict[PeerId, float] = {}
        self._computing: set[PeerId] = set()
        self._gaps_s: dict[PeerId, deque[float]] = {}
        self._weight: dict[PeerId, float] = {}
        self._late: dict[PeerId, int] = {}
        self._turns: dict[PeerId, int] = {}
        self._slow: dict[PeerId, tuple[float, int]] = {}
        self._next_s = -math.inf
        self._told = 0
        self._mates: dict[PeerId, frozenset[PeerId]] = {}

    def pushed(self, now_s: float, peer: PeerId, number: int, step_s: float | None) -> None:
        """Something of a peer's update ``number`` has come.

        step_s: how long its steps take, the median of a few. A peer that has just missed a deadline is taken
            to be as slow as it was then until that median can show it.
        """
        if self._turns.get(peer) == number:
            return
        self._turns[peer] = number
        self._late.pop(peer, None)
        if peer in self._computing:
            self._computing.discard(peer)
            gaps_s = self._gaps_s.setdefault(peer, deque(maxlen=SEEN))
            gaps_s.append(now_s - self._answered_s[peer])
        took_s, turns = self._slow.pop(peer, (0.0, 0))
        if self._overdue_s.pop(peer, None) is not None:
            took_s, turns = now_s - self._answered_s[peer], PACE_WINDOW // 2 + 1
        if turns > 1:
            self._slow[peer] = took_s, turns - 1
        if step_s is not None:
            self._step_s[peer] = max(step_s, took_s)

    def answered(self, now_s: float, peer: PeerId) -> None:
        """A peer has been answered, and computes from now on."""
        self._answered_s[peer] = now_s
        self._computing.add(peer)

    def gave(self, peer: PeerId, weight: float) -> None:
        """A peer's update has this weight: its samples."""
        self._weight[peer] = weight

    def missed(self, now_s: float, peers: Iterable[PeerId]) -> None:
        """A deadline has passed without these peers: their steps take at least as long as until now."""
        for peer in peers:
            self._late[peer] = self._late.get(peer, 0) + 1
            if peer in self._answered_s:
                self._overdue_s[peer] = now_s - self._answered_s[peer]

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or a new process has its number."""
        for known in (self._step_s, self._overdue_s, self._answered_s, self._weight):
            known.pop(peer, None)
        self._gaps_s.pop(peer, None)
        self._computing.discard(peer)
        for count in (self._late, self._turns):
            count.pop(peer, None)
        self._slow.pop(peer, None)

    def step_s(self) -> dict[PeerId, float]:
        """How long the living peers' steps take. A peer that has not said counts as the middle one."""
        known = {peer: self._step_s[peer] for peer in sorted(self._owners.live) if peer in self._step_s}
        if not known:
            return {}
        middle_s = sorted(known.values())[len(known) // 2]
        live = sorted(self._owners.live)
        return {peer: max(known.get(peer, middle_s), self._overdue_s.get(peer, 0.0)) for peer in live}

    def share(self, now_s: float, peers: Iterable[PeerId]) -> float:
        """These peers' part of the crew's samples per second, as their updates have come."""
        peers = set(peers)
        all_ = sorted(self._owners.live | peers)
        seen = {peer: self._seen_s(now_s, peer) for peer in all_}
        known = sorted(s for peer, s in seen.items() if peer in self._gaps_s)
        if not known:
            return len(peers) / len(all_)
        middle_s = known[len(known) // 2]
        weights = sorted(self._weight.values())
        middle = weights[len(weights) // 2] if weights else 1.0
        rate = {
            peer: self._weight.get(peer, middle) / (s if peer in self._gaps_s else max(s, middle_s))
            for peer, s in seen.items()
        }
        return self.grouping.share(peers, rate)

    def _seen_s(self, now_s: float, peer: PeerId) -> float:
        """How long a peer's last steps have taken on average, as seen here, whatever it says.

        A step under way counts as soon as it takes longer, so less and less is expected of a peer that does
        not come any more. It is a mean since that moves by steps: where an owner's own speed and the others'
        change at one time, it knows its own a moment earlier.
        """
        gaps_s = list(self._gaps_s.get(peer, ()))
        seen_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
        if peer in self._computing:
            last_s = [*gaps_s[1 - SEEN :], now_s - self._answered_s[peer]]
            seen_s = max(seen_s, sum(last_s) / len(last_s))
        return max(seen_s, STEP_MIN_S)

    def slowest_s(self, peers: Iterable[PeerId]) -> float:
        """How long the slowest of these peers takes for a step; 0: nothing is known."""
        return max((self._step_s.get(peer, 0.0) for peer in peers), default=0.0)

    def look(self, now_s: float) -> None:
        """A step begins: form groups anew if some time has gone by. It takes a while to form them."""
        if now_s >= self._next_s:
            self.review()
            middle_s = sorted(self._used_s.values())[len(self._used_s) // 2] if self._used_s else 0.0
            self._next_s = now_s + PAUSE * middle_s

    def review(self) -> bool:
        """Form groups anew if speeds have changed. Returns whether the groups have changed."""
        step_s, used = self.step_s(), self._used_s
        if step_s.keys() == used.keys() and all(
            abs(step_s[peer] - used[peer]) <= NEWS * used[peer] for peer in step_s
        ):
            return False
        self._used_s = step_s
        live = tuple(sorted(self._owners.live))
        found = self.grouping.groups(step_s, self.groups) if step_s else (live,)
        named = {peer for group in found for peer in group}
        self.doubted = {peer: s for peer, s in step_s.items() if peer not in named}
        if found == self.groups:
            return False
        changed = len(found) != len(self.groups) or set(found) != set(self.groups)
        self.groups = found
        self._mates = {peer: frozenset(group) for group in found for peer in group}
        self.changes += len(found) != self._told
        self._told = len(found)
        return changed

    def mates(self, peer: PeerId) -> frozenset[PeerId]:
        """The peers that a peer steps with, itself among them. Before anything is known: all."""
        if not self._mates:
            return self._owners.live | {peer}
        return self._mates.get(peer, frozenset((peer,)))

    def waited_for(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """The peers whose updates complete a step of these: their mates that are not away."""
        mates = frozenset[PeerId]().union(*(self.mates(peer) for peer in peers))
        return frozenset(p for p in mates & self._owners.live if self._late.get(p, 0) < GONE_AFTER)

    def told(self) -> str:
        """The groups in words."""
        known = self.step_s()
        many = f"{len(self.groups)} groups" if len(self.groups) != 1 else "1 group"
        return f"{many}: {' + '.join(self._named(group, known) for group in self.groups)}"

    def _named(self, group: tuple[PeerId, ...], step_s: Mapping[PeerId, float]) -> str:
        slowest_s = max((step_s[peer] for peer in group if peer in step_s), default=0.0)
        return f"{' '.join(map(str, group))} ({slowest_s * 1e3:.3g} ms)"
