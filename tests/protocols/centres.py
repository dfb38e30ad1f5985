"""Crews at a central state in virtual time: each peer adds 1 to an element of its own, turn after turn.

So the state itself tells how often each update was counted. After each event its peer is looked at: no
version that it has goes back, and nobody's updates are counted more often than they were made.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ragtag.core.types import Arrived, Event, Floats, Joined, Left, Outcome, Run
from ragtag.protocols.central.block import Rule, Verdict
from ragtag.protocols.central.channel import CentreNode, centre
from ragtag.protocols.channel.averager import Averager
from tests.protocols.harness import TINY, World

TURNS, STEP_S = 8, 0.01


@dataclass(frozen=True)
class Each:
    """Every update is a step, whole."""

    barrier: bool = False

    def judge(self, peer: int, staleness: int, held: int, n: int) -> Verdict | None:
        return Verdict(1.0, close=True)


class Centres(World):
    """``n`` peers that take ``turns`` turns each, a step of ``step_s`` apart.

    slow: by how many times a peer's steps are longer. gone: when peers die; told_s: how much later the others
    are told (``None``: never).
    """

    def __init__(
        self,
        n: int = 4,
        rule: Rule | Averager | None = None,
        *,
        n_chunks: int = 9,
        turns: int = TURNS,
        loss: float = 0.0,
        seed: int = 1,
        slow: Mapping[int, float] | None = None,
        gone: Mapping[int, float] | None = None,
        told_s: float | None = None,
    ) -> None:
        rule = Each() if rule is None else rule
        method = rule if isinstance(rule, Averager) else centre("test", rule)
        super().__init__(n, method, n_chunks, loss=loss, seed=seed)
        self.turns, self.slow, self.made = turns, slow or {}, [0] * n
        self.batches = False
        self._known = [np.zeros(n_chunks, np.int64) for _ in range(n)]
        self.on_done = self._next
        for peer, at_s in (gone or {}).items():
            self.dead[peer] = at_s
            for other in range(n):
                if told_s is not None and other != peer:
                    self.push(at_s + told_s, other, Left(peer))
        for peer in range(n):
            self.average(peer, np.zeros((n_chunks, TINY.elements), np.float32), 0.0)

    def node(self, peer: int) -> CentreNode:
        machine = self.nodes[peer].channels[0]
        assert isinstance(machine, CentreNode)
        return machine

    def _next(self, peer: int, outcome: Outcome) -> None:
        if len(self.outcomes[peer]) <= self.turns:
            self.turn(peer)

    def turn(self, peer: int, weight: float = 1.0) -> None:
        """A step from the last outcome; weight 0: only take."""
        values = self.outcomes[peer][-1].mean.copy()
        if weight:
            values[:, peer] += 1
            self.made[peer] += 1
        self.average(peer, values, weight, after_s=STEP_S * self.slow.get(peer, 1.0))

    def _step(self, peer: int, event: Event, sent: bytes) -> None:
        if isinstance(event, Arrived) and self.batches:
            self._take_all(peer, event)
        else:
            super()._step(peer, event, sent)
        versions = self.node(peer).server.copies.versions
        assert (versions >= self._known[peer]).all(), "a version went back"
        self._known[peer] = versions.copy()
        for held in self.node(peer).server.copies.blocks:
            if held.values is not None:
                most = np.array(self.made, np.float32) + 1e-3
                assert (held.values[:, : self.n] <= most).all(), "an update was counted twice"

    def _take_all(self, peer: int, event: Arrived) -> None:
        """All that comes to a peer at one time, in one event, as a driver has it."""
        runs = list(event.runs)
        while self._heap and self._heap[0][0] <= self.now_s + 1e-9 and self._heap[0][2] == peer:
            _, _, _, more, _ = heapq.heappop(self._heap)
            if not isinstance(more, Arrived):
                self.push(self.now_s, peer, more)
                break
            runs += more.runs
        event = Arrived([replace(run, payload=run.payload.copy()) for run in runs])
        effects = self.nodes[peer].step(self.now_s, event)
        self.log.append((self.now_s, peer, event, effects))
        for effect in effects:
            self._do(peer, effect)

    # -- What tests look at

    @property
    def living(self) -> list[int]:
        return [peer for peer in range(self.n) if peer not in self.dead]

    def settle(self) -> Floats:
        """All that live take the state once more, twice (an owner may have to be found); they must agree."""
        self.on_done = lambda peer, outcome: None
        for _ in range(6):
            for peer in self.living:
                self.turn(peer, weight=0.0)
            self.run()
        last = [self.outcomes[peer][-1] for peer in self.living]
        assert all(outcome.averaged.all() for outcome in last), "no answer after all is well"
        for outcome in last[1:]:
            assert np.array_equal(outcome.mean, last[0].mean), "peers took different states"
        return last[0].mean

    def more(self, turns: int) -> None:
        """All that live take so many more turns."""
        left = dict.fromkeys(self.living, turns)

        def again(peer: int, outcome: Outcome) -> None:
            left[peer] -= 1
            if left[peer] > 0:
                self.turn(peer)

        self.on_done = again
        for peer in self.living:
            self.turn(peer)
        self.run()

    def noted(self, what: str) -> list[int]:
        """Who noted this."""
        return [peer for peer, note in self.notes if note.what == what]


def doubled(world: World) -> None:
    """The line delivers everything twice, the copy later."""

    def carry(source: int, run: Run) -> Iterable[tuple[float, Run]]:
        return [(0.0, run), (world.latency_s * 3, replace(run))]

    world.carry = carry


def in_batches(world: Centres, every_s: float = 0.003) -> None:
    """What comes is looked at now and then only, and then all at once."""
    world.batches = True

    def carry(source: int, run: Run) -> Iterable[tuple[float, Run]]:
        comes_s = world.now_s + world.latency_s
        return [(math.ceil(comes_s / every_s) * every_s - comes_s, run)]

    world.carry = carry


def comes(world: Centres, peer: int, at_s: float) -> None:
    """A peer that others had taken for gone is there again."""
    for other in range(world.n):
        if other != peer:
            world.push(at_s, other, Joined(peer))
