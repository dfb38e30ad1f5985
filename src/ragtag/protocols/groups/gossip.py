"""Pairwise gossip: in each round peers average in pairs.

"Randomized gossip algorithms", Boyd, Ghosh, Prabhakar, Shah, IEEE Transactions on Information Theory 52 (6),
2006, section II, in its synchronous form: a matching is drawn each round. On a ring the matchings are its
even and its odd edges, which take the order of n^2 rounds. Random matchings halve the variance each round.
"""

from __future__ import annotations

import numpy as np

from ragtag.core import seed as random
from ragtag.core.deadline import Deadline
from ragtag.core.types import Average, Effect, Floats, Outcome, PeerId, Run, Timer
from ragtag.protocols.groups.grid import places, shuffled
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine, Vector

_VALUES = 0


class Gossip(PartialMachine):
    """One peer of pairwise gossip. ring: only neighbours on a ring meet."""

    def __init__(
        self, me: PeerId, view: View, seed: int, channel: GroupChannel, *, ring: bool = False
    ) -> None:
        super().__init__(me, view, seed, channel)
        self._ring = ring
        self._restart()
        self._partner: PeerId | None = None
        self._theirs: Vector | None = None

    def partner(self, round_: int) -> PeerId | None:
        """The peer that this one meets; ``None``: the number of peers is odd, and this one is left over."""
        n, rank = len(self.view), self.view.rank(self.me)
        if self._ring:
            other = rank ^ 1 if round_ % 2 == 0 else ((rank - 1) ^ 1) + 1
            if n % 2 == 0:
                other %= n
        else:
            key = random.stream_key(self.seed, "pairs", round_)
            at = places(key, n)[rank] ^ 1
            other = shuffled(key, n)[at] if at < n else n
        return self.view.peers[other] if 0 <= other < n else None

    def _restart(self) -> None:
        self._wait = Deadline(self.channel.probe_s, floor_s=self.channel.rtt_s)

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        assert self.active is not None
        self._partner = self.partner(self.active)
        if self._partner is None or self._partner == self.me:
            return self.alone(now_s, expired=False)
        self._theirs = Vector(self.channel.n_chunks, self.channel.codec.elements)
        until_s = now_s + self._wait.budget_s()
        send = self._vector(self._partner, _VALUES, ask.values, ask.weight, until_s)
        return [send, self._arm("pair", until_s)]

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        if run.key.round > (self.active if self.active is not None else self.done):
            self._keep(run)
            return []
        if run.key.round != self.active or run.peer != self._partner or self._theirs is None:
            if run.key.round == self.done and run.peer == self._partner:
                self._wait.late(now_s - self.started_s)
            return []
        self._theirs.take(run, self.channel.codec)
        return self._end(now_s, False) if self._theirs.closed else []

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        if timer.round != self.active or self._theirs is None:
            return []
        self._wait.missed()
        return self._end(now_s, True)

    def _end(self, now_s: float, expired: bool) -> list[Effect]:
        theirs, ask, partner = self._theirs, self._ask, self._partner
        assert theirs is not None and ask is not None and partner is not None
        self._theirs = None
        if not expired:
            self._wait.completed(now_s - self.started_s)
        mean, weight = weighted(ask.values, ask.weight, theirs)
        members = (self.me, partner)
        outcome: Outcome = self.outcome(
            now_s,
            mean,
            weight,
            (1 + 2 * theirs.got).tolist(),
            members,
            (partner,) if expired else (),
            expired,
        )
        return self._finish(now_s, outcome)


def weighted(values: Floats, weight: float, theirs: Vector) -> tuple[Floats, Floats]:
    """The weighted mean of this peer's values and another's, and its weight. Where nothing came: its own."""
    total = np.where(theirs.got, theirs.weight, 0).astype(np.float32) + np.float32(weight)
    share = np.divide(
        np.where(theirs.got, theirs.weight, 0), total, where=total > 0, out=np.zeros_like(total)
    )
    mean = values + share.astype(np.float32)[:, None] * (theirs.values - values)
    return np.ascontiguousarray(mean, np.float32), total
