"""A crew that averages in groups in a simulated world, with every outcome checked against what was asked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.core.types import Average, Done, Effect, Event, Floats, Noted, Outcome, PeerId
from ragtag.protocols.groups.channel import GroupNode
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine
from ragtag.simulation.worlds.rounds import World

RTT_S = 0.02
Make = Callable[[PeerId, View], PartialMachine]


def channel(n_chunks: int = 4) -> GroupChannel:
    return GroupChannel(0, fp32, n_chunks, probe_s=2 * RTT_S, rtt_s=RTT_S)


class Watched:
    """Remembers under which number a machine did each round that it was asked for."""

    def __init__(self, inner: PartialMachine, asked: dict[tuple[int, PeerId], Average]) -> None:
        self.inner, self._asked = inner, asked
        self._ask: Average | None = None

    def step(self, now_s: float, event: Event) -> list[Effect]:
        if isinstance(event, Average):
            self._ask = event
        before = self.inner.active
        effects = self.inner.step(now_s, event)
        number = self.inner.active
        for effect in effects:
            if isinstance(effect, Done) and self._ask is not None:
                self._asked[effect.outcome.round, self.inner.me] = self._ask
        if number is not None and number != before and self._ask is not None:
            self._asked[number, self.inner.me] = self._ask
        return effects


class GroupCrew:
    """``n`` peers do ``rounds`` rounds each, at their own pace, from values of their own.

    exact: outcomes are means of the members' values (push-sum's and the tree's carry others' values too).
    """

    def __init__(
        self,
        n: int,
        make: Make,
        *,
        rounds: int = 4,
        n_chunks: int = 4,
        faults: Faults = Faults(latency_s=RTT_S / 2),  # noqa: B008  (frozen)
        seed: int = 0,
        exact: bool = True,
        start_s: Callable[[PeerId], float] = lambda peer: 0.0,
        weight: Callable[[PeerId], float] = lambda peer: 1.0,
    ) -> None:
        view = View(range(n))
        self.asked: dict[tuple[int, PeerId], Average] = {}
        self.nodes = [Watched(make(me, view), self.asked) for me in range(n)]
        self.outcomes: dict[PeerId, list[Outcome]] = {me: [] for me in range(n)}
        self.notes: list[tuple[PeerId, Noted]] = []
        self.values: list[Floats] = [
            generator(seed, "values", me).standard_normal((n_chunks, fp32.elements), np.float32)
            for me in range(n)
        ]
        self.start = np.stack(self.values)
        self._rounds, self._exact, self._weight = rounds, exact, weight
        self._asked_s, self._bound_s = [0.0] * n, [0.0] * n
        self.world = World(
            self.nodes,
            faults,
            seed,
            on_done=self._done,
            on_note=lambda p, t, note: self.notes.append((p, note)),
        )
        for me in range(n):
            self.ask(me, start_s(me))

    def ask(self, peer: PeerId, at_s: float, weight: float | None = None) -> None:
        node = self.nodes[peer].inner
        self._asked_s[peer] = at_s
        bounded = isinstance(node, GroupNode) and not self.world.faults.freezes
        self._bound_s[peer] = node.deadline_s() if bounded else np.inf
        self.world.at(
            at_s, peer, Average(0, self.values[peer], self._weight(peer) if weight is None else weight)
        )

    def run(self, until_s: float = 1e4) -> GroupCrew:
        self.world.run(until_s=until_s)
        return self

    def variance(self) -> float:
        return float(np.var(np.stack(self.values), axis=0, dtype=np.float64).mean())

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append(outcome)
        assert now_s - self._asked_s[peer] <= self._bound_s[peer] + 1e-9, "later than its deadline"
        ask = self.asked.get((outcome.round, peer))
        if ask is not None and self._exact:
            self.check(peer, outcome, ask)
        self.values[peer] = outcome.mean
        if len(self.outcomes[peer]) < self._rounds:
            self.ask(peer, now_s)

    def check(self, peer: PeerId, outcome: Outcome, ask: Average) -> None:
        """Every chunk is the weighted mean of those it names; where nothing came, one's own, bit for bit."""
        assert peer in outcome.members
        kept = ~outcome.averaged
        assert np.array_equal(outcome.mean[kept], ask.values[kept])
        assert not (outcome.heard[kept] & ~np.uint64(1 << outcome.members.index(peer))).any()
        for heard in np.unique(outcome.heard[outcome.averaged]).tolist():
            chunks = outcome.averaged & (outcome.heard == heard)
            named = [outcome.members[i] for i in range(64) if heard >> i & 1]
            asks = [self.asked[outcome.round, other] for other in named]
            weight = sum(a.weight for a in asks)
            mean = sum(a.values[chunks].astype(np.float64) * a.weight for a in asks) / weight
            assert np.allclose(outcome.mean[chunks], mean, atol=2e-6)
            assert np.allclose(outcome.weight[chunks], weight)
