"""The end of a simulated run: the network heals, and progress is demanded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragtag.core.types import Average, Outcome, PeerId
from ragtag.protocols.rounds.base import peers_in
from ragtag.simulation.worlds.rounds import World

_TRIES = 4  # until all hear all, at most so many times the demanded rounds


def demand_progress(
    world: World,
    ask: Callable[[PeerId, float], Average],
    rounds: int = 6,
    pause_s: float = 0.0,
    within_s: float = 600.0,
    in_groups: bool = False,
) -> int:
    """Heal a world. Demand that every live peer does its next rounds, and that all come to hear each other.

    Use it once nothing else asks for averages: ``world.on_done`` is not called meanwhile. A round that a peer
    is still in does not count.

    Returns the first round in which every chunk of every live peer was averaged over all of them; in groups,
    the round in which the last peer had the values of all.

    ask: makes a peer's next average at a virtual time, all on one channel.
    pause_s: the average is delivered so much later, after computing.
    in_groups: averages are over a few peers, and each one's values must come to all through others.

    Raises:
        InvariantBroken: a live peer did not do ``rounds`` rounds in ``within_s`` of virtual time, or all
            heard all in none of four times as many (deadlines adapt meanwhile).
    """
    demand = (_Reach if in_groups else _Demand)(world, ask, rounds, pause_s)
    before, world.on_done = world.on_done, demand.done
    try:
        world.heal()
        for peer in sorted(world.live):
            if not world.busy(peer):
                demand.next(peer, world.now_s)
        world.run(until_s=world.now_s + within_s)
    finally:
        world.on_done = before
    return demand.verdict()


class _Demand:
    never = "in no round did all of {} hear all"

    def __init__(
        self, world: World, ask: Callable[[PeerId, float], Average], rounds: int, pause_s: float
    ) -> None:
        self._world, self._ask, self._rounds, self._pause_s = world, ask, rounds, pause_s
        self._asked = dict.fromkeys(sorted(world.live), 0)
        self._done = dict.fromkeys(self._asked, 0)
        self._everyone = sum(1 << peer for peer in self._asked)
        self._whole: dict[int, set[PeerId]] = {}  # rounds, and the peers that heard all in them
        self._missing: dict[PeerId, list[PeerId]] = {}

    def next(self, peer: PeerId, now_s: float) -> None:
        """Ask a peer for one more round, until nothing more is to be demanded."""
        over = self._met() is not None and min(self._done.values()) >= self._rounds
        if not over and self._asked[peer] < _TRIES * self._rounds:
            self._asked[peer] += 1
            self._world.at(now_s + self._pause_s, peer, self._ask(peer, now_s))

    def done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        """Note which peers a round heard in all its chunks."""
        if peer not in self._asked:
            return
        if self._asked[peer]:
            self._done[peer] += 1
            missing = self._everyone & ~self._has(peer, outcome)
            if not missing:
                self._whole.setdefault(outcome.round, set()).add(peer)
            self._missing[peer] = [other for other in self._asked if missing >> other & 1]
        self.next(peer, now_s)

    def _has(self, peer: PeerId, outcome: Outcome) -> int:
        """The peers (bits) whose values a peer has, now that it has an outcome."""
        return _in_all(outcome)

    def verdict(self) -> int:
        """The first round in which all heard all."""
        behind = {peer: done for peer, done in self._done.items() if done < self._rounds}
        if behind:
            raise self._world.broken(
                f"no progress after healing: rounds done of {self._rounds} demanded, by peer: {behind}"
            )
        met = self._met()
        if met is None:
            raise self._world.broken(
                f"after healing, {self.never.format(sorted(self._asked))}; missing somewhere in "
                f"each one's last round: {self._missing}"
            )
        return met

    def _met(self) -> int | None:
        rounds = [number for number, peers in self._whole.items() if len(peers) == len(self._asked)]
        return min(rounds, default=None)


class _Reach(_Demand):
    """The same where values go from peer to peer: a peer brings to a round all that it had before."""

    never = "the values of all of {} never came to all"

    def __init__(
        self, world: World, ask: Callable[[PeerId, float], Average], rounds: int, pause_s: float
    ) -> None:
        super().__init__(world, ask, rounds, pause_s)
        self._had = {peer: (-1, 1 << peer) for peer in self._asked}
        self._now = {peer: 1 << peer for peer in self._asked}

    def _has(self, peer: PeerId, outcome: Outcome) -> int:
        before = self._now[peer]
        for other in peers_in(_in_all(outcome)):
            if other in self._asked and other != peer:
                number, had = self._had[other]
                self._now[peer] |= had if number == outcome.round else self._now[other]
        self._had[peer] = outcome.round, before
        return self._now[peer]

    def _met(self) -> int | None:
        first: dict[PeerId, int] = {}
        for number in sorted(self._whole):
            for peer in self._whole[number]:
                first.setdefault(peer, number)
        return max(first.values()) if len(first) == len(self._asked) else None


def _in_all(outcome: Outcome) -> int:
    """The peers (bits) whose values are in all chunks. A group numbers its members."""
    common = int(np.bitwise_and.reduce(outcome.heard))
    return sum(1 << outcome.members[i] for i in peers_in(common)) if outcome.members else common
