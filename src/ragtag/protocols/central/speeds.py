"""What an owner at a central state knows of its peers' speeds, and who goes with whom by them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from ragtag.core.types import PeerId
from ragtag.protocols.central.owners import GONE_AFTER, Owners

Groups = tuple[tuple[PeerId, ...], ...]
PACE_WINDOW = 9
"""What a peer says its steps take is the median of so many."""
PAUSE = 0.5
"""They are looked at once in so many of the middle peer's steps, and whenever somebody misses a deadline."""
SEEN = 5
"""How much a group counts follows from so many steps of each peer."""
STEP_MIN_S = 1e-9
"""No step is shorter: a rate is finite."""
NEWS = 0.02
"""Groups are looked at again once a peer's steps take longer or shorter by this share."""


class Grouping(Protocol):
    """Who goes with whom, and how much a group's update counts (``ragtag.schedules.grouping``)."""

    def groups(self, step_s: Mapping[PeerId, float], now: Groups) -> Groups:
        """The groups to go on with; who is in none goes alone. step_s: positive. Never raises."""
        ...

    def share(self, group: Iterable[PeerId], rate: Mapping[PeerId, float]) -> float:
        """A group's part of the crew, from the samples per second of each peer. Never raises."""
        ...

    def scale(self, share: float, staleness: int) -> float:
        """Of a group that is this part of the crew. Never raises."""
        ...


class Speeds:
    """What one owner knows of speeds, and the groups that follow.

    changes: how often their number changed. doubted: whose speed the rule does not believe, and what it is.
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
        """Something of a peer's update ``number`` has come; its steps take so long (the middle of a few).

        Who has just missed a deadline is taken to be as slow as it was then, until that middle can show it.
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
        """A peer goes on."""
        self._answered_s[peer] = now_s
        self._computing.add(peer)

    def gave(self, peer: PeerId, weight: float) -> None:
        """An update of a peer weighs so much: its samples."""
        self._weight[peer] = weight

    def missed(self, now_s: float, peers: Iterable[PeerId]) -> None:
        """A deadline has passed without these: their steps take at least as long as they have by now."""
        for peer in peers:
            self._late[peer] = self._late.get(peer, 0) + 1
            if peer in self._answered_s:
                self._overdue_s[peer] = now_s - self._answered_s[peer]

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, or has come."""
        for known in (self._step_s, self._overdue_s, self._answered_s, self._weight):
            known.pop(peer, None)
        self._gaps_s.pop(peer, None)
        self._computing.discard(peer)
        for count in (self._late, self._turns):
            count.pop(peer, None)
        self._slow.pop(peer, None)

    def step_s(self) -> dict[PeerId, float]:
        """What is known of those who live; who has not said goes as the middle does."""
        known = {peer: self._step_s[peer] for peer in sorted(self._owners.live) if peer in self._step_s}
        if not known:
            return {}
        middle_s = sorted(known.values())[len(known) // 2]
        live = sorted(self._owners.live)
        return {peer: max(known.get(peer, middle_s), self._overdue_s.get(peer, 0.0)) for peer in live}

    def share(self, now_s: float, peers: Iterable[PeerId]) -> float:
        """What part of the crew these are: by samples per second, as their updates have come."""
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
        """How long a peer has computed in each of its last steps, whatever it says; one under way counts as
        soon as it takes longer: of who does not come any more, less and less is expected.

        A mean, since it moves by steps: of owners whose own speed and the others' change at one time, each
        knows its own a moment earlier.
        """
        gaps_s = list(self._gaps_s.get(peer, ()))
        seen_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
        if peer in self._computing:
            last_s = [*gaps_s[1 - SEEN :], now_s - self._answered_s[peer]]
            seen_s = max(seen_s, sum(last_s) / len(last_s))
        return max(seen_s, STEP_MIN_S)

    def slowest_s(self, peers: Iterable[PeerId]) -> float:
        """What the slowest of these is known to take; 0: nothing is known."""
        return max((self._step_s.get(peer, 0.0) for peer in peers), default=0.0)

    def look(self, now_s: float) -> None:
        """A step begins: look at who goes with whom, if some time has gone by since (it takes a while)."""
        if now_s >= self._next_s:
            self.review()
            middle_s = sorted(self._used_s.values())[len(self._used_s) // 2] if self._used_s else 0.0
            self._next_s = now_s + PAUSE * middle_s

    def review(self) -> bool:
        """Look at who goes with whom, if there is news; whether that has changed."""
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
        """Those a peer steps with, itself among them; before anything is known, all."""
        if not self._mates:
            return self._owners.live | {peer}
        return self._mates.get(peer, frozenset((peer,)))

    def waited_for(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Whose updates complete a step of these: their mates, but not who is away."""
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
