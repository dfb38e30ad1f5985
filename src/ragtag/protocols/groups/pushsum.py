"""Push-sum: each peer keeps half of its sum and weight, and sends half to another.

"Gossip-based computation of aggregate information", Kempe, Dobra, Gehrke, FOCS 2003, section 2: targets are
drawn uniformly. ``exponential``: the peer ``2^(t mod log2 n)`` places on, as in "Stochastic gradient push for
distributed deep learning", Assran, Loizou, Ballas, Rabbat, ICML 2019, section 4.

A peer's estimate is its sum over its weight. Without weights it would be no mean, as peers receive unequally
often. A message that comes late counts in the next round. One that is lost takes its share of sum and weight
along, so estimates stay means of what is left.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ragtag.core import seed as random
from ragtag.core.deadline import Deadline
from ragtag.core.types import Average, Effect, Floats, PeerId, Run, Timer
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine
from ragtag.protocols.rounds.base import Incoming

_MASS = 0
_SENDERS_MAX = 63
_ROUNDS_SEEN = 8
"""Of each peer so many messages are known by their rounds, the newest. An older one could be a copy."""


@lru_cache(maxsize=8)
def _targets(seed: int, round_: int, n: int, exponential: bool) -> tuple[int, ...]:
    if exponential:
        hop = 1 << round_ % max(1, (n - 1).bit_length())
        return tuple((rank + hop) % n for rank in range(n))
    keys = random.stream_keys(seed, "push", [round_] * n, range(n))
    drawn = (random.first_uniforms(keys) * (n - 1)).astype(np.int64)
    return tuple((drawn + (drawn >= np.arange(n))).tolist())


@lru_cache(maxsize=8)
def _sources(seed: int, round_: int, n: int, exponential: bool) -> dict[int, tuple[int, ...]]:
    sources: dict[int, tuple[int, ...]] = {}
    for rank, target in enumerate(_targets(seed, round_, n, exponential)):
        sources[target] = (*sources.get(target, ()), rank)
    return sources


class PushSum(PartialMachine):
    """One peer of push-sum. ``Average.weight`` is its weight: 1 at first, then that of its last outcome."""

    def __init__(
        self, me: PeerId, view: View, seed: int, channel: GroupChannel, *, exponential: bool = False
    ) -> None:
        super().__init__(me, view, seed, channel)
        self._exponential = exponential
        self._restart()
        self._sum: Floats = np.zeros((channel.n_chunks, channel.codec.elements), np.float32)
        self._weight: Floats = np.zeros(channel.n_chunks, np.float32)
        self._seen: dict[PeerId, dict[int, Incoming]] = {}
        self._open: set[PeerId] = set()
        self._heard: dict[PeerId, None] = {}

    def _restart(self) -> None:
        self._wait = Deadline(self.channel.probe_s, floor_s=self.channel.rtt_s)

    def _begin(self, now_s: float, ask: Average) -> list[Effect]:
        assert self.active is not None
        n = len(self.view)
        if n == 1:
            return self.alone(now_s, expired=False)
        rank, peers = self.view.rank(self.me), self.view.peers
        target = peers[_targets(self.seed, self.active, n, self._exponential)[rank]]
        sources = _sources(self.seed, self.active, n, self._exponential).get(rank, ())
        self._open = {peers[source] for source in sources}
        for peer in tuple(self._open):
            seen = self._seen.get(peer, {}).get(self.active)
            if seen is not None and seen.closed:
                self._open.discard(peer)
        until_s = now_s + self._wait.budget_s()
        send = self._vector(target, _MASS, ask.values, ask.weight / 2, until_s)
        if not sources:  # a peer to which none sends keeps pace with the others
            return [send, self._arm("push", now_s + self._wait.typical_s())]
        return [send, self._arm("push", until_s), *self._end_if_whole(now_s)]

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        if run.key.stage != _MASS or run.key.round < self.done - _ROUNDS_SEEN:
            return []  # so old that a copy could not be recognised
        if run.total != self.channel.n_chunks or run.first + len(run.payload) > run.total:
            return []
        by_round = self._seen.setdefault(run.peer, {})
        seen = by_round.get(run.key.round)
        if seen is None:
            if len(by_round) == _ROUNDS_SEEN:
                oldest = min(by_round)
                if run.key.round < oldest:
                    return []
                del by_round[oldest]
            seen = by_round[run.key.round] = Incoming(run.total)
        for a, b in seen.fresh(run):
            rows = slice(run.first + a, run.first + b)
            with np.errstate(over="ignore", invalid="ignore"):
                self.channel.codec.accumulate(run.payload[a:b], run.weight[a:b], self._sum[rows])
            self._weight[rows] += run.weight[a:b]
            self._heard[run.peer] = None
        if run.key.round == self.active and seen.closed:
            self._open.discard(run.peer)
            return self._end_if_whole(now_s)
        if run.key.round == self.done:
            self._wait.late(now_s - self.started_s)
        return []

    def _expired(self, now_s: float, timer: Timer) -> list[Effect]:
        if timer.round != self.active:
            return []
        if self._open:
            self._wait.missed()
        return self._end(now_s, bool(self._open))

    def _end_if_whole(self, now_s: float) -> list[Effect]:
        if self._open:
            return []
        if now_s > self.started_s:
            self._wait.completed(now_s - self.started_s)
        return self._end(now_s, False)

    def _end(self, now_s: float, expired: bool) -> list[Effect]:
        ask = self._ask
        assert ask is not None and self.active is not None
        half = np.float32(ask.weight / 2)
        weight = self._weight + half
        mean = self._sum + ask.values * half
        mean /= np.where(weight > 0, weight, 1)[:, None]
        members = (self.me, *self._heard)[: _SENDERS_MAX + 1]
        came = np.where(self._weight > 0, (1 << len(members)) - 1, 1).tolist()
        outcome = self.outcome(now_s, mean, weight, came, members, tuple(sorted(self._open)), expired)
        self._sum, self._weight = np.zeros_like(self._sum), np.zeros_like(self._weight)
        self._heard, self._open = {}, set()
        for by_round in self._seen.values():
            for old in [number for number in by_round if number < self.active - _ROUNDS_SEEN]:
                del by_round[old]
        return self._finish(now_s, outcome)
