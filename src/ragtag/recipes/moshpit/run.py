"""One run of averaging: peers of one method in a simulated world, round by round, until they agree.

Values are drawn from N(0, 1). In every round each peer is away with probability p, for the whole round or,
``within``, from a random moment on. No message reaches a peer that is away, even if it is the host of a
group, and it keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.dense import fp32
from ragtag.core import seed as random
from ragtag.core.faults import Faults
from ragtag.core.types import Average, Effect, Event, Floats, Outcome, PeerId
from ragtag.protocols.groups.channel import GroupNode
from ragtag.protocols.groups.gossip import Gossip
from ragtag.protocols.groups.grid import Grid
from ragtag.protocols.groups.keys import MoshpitKeys, RandomKeys, View
from ragtag.protocols.groups.machine import GroupChannel, PartialMachine
from ragtag.protocols.groups.pushsum import PushSum
from ragtag.protocols.groups.tree import TreeAllReduce
from ragtag.simulation.worlds.rounds import World

METHODS = (
    "all-reduce",
    "gossip",
    "random pairs",
    "push-sum",
    "push-sum, hops",
    "random groups",
    "moshpit",
    "moshpit, own grid",
)
TOLERANCE = 1e-9
COARSE = 1e-4
ROUNDS_MAX = 50
LATENCY_S = 0.01

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """What is run.

    n: peers.
    sides: the given grid; empty: none.
    p: the probability that a peer is away in a round.
    within: it goes away within the round.
    chunks: the vector's length, in chunks of 272 values.
    rounds: how many at most.
    until: the variance at which the run ends.
    """

    method: str
    n: int
    sides: tuple[int, ...] = ()
    p: float = 0.0
    within: bool = False
    chunks: int = 1
    rounds: int = ROUNDS_MAX
    until: float = TOLERANCE

    @property
    def group(self) -> int:
        """Peers in a group, where the method has groups: the grid's longest side."""
        return max(self.sides)


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of a run, averaged over its scalars.

    rounds: until the variance over peers was below ``TOLERANCE``, capped.
    coarse: until it was below ``COARSE``, capped.
    variance: by round, from before the first one on.
    potential: of push-sum, by round: how far sums lie from their weights' share of the mean, mean square.
    drift: squared distance of the peers' mean from the true one, at the end.
    mosaic: share of outcomes whose chunks have different contributors.
    failed: share of outcomes of which no chunk was averaged.
    """

    rounds: float
    coarse: float
    variance: tuple[float, ...]
    drift: float
    events: int
    virtual_s: float
    mosaic: float
    failed: float
    potential: tuple[float, ...] = ()


class Away:
    """A machine that can be away: then it does nothing, and events for it are lost."""

    def __init__(self, inner: PartialMachine) -> None:
        self.inner, self.away = inner, False

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The machine's effects; none while it is away."""
        return [] if self.away else self.inner.step(now_s, event)


def machine(case: Case, seed: int) -> Callable[[PeerId, View], PartialMachine]:
    """A function that makes a peer's machine. Raises ValueError: there is no such method."""
    channel = GroupChannel(0, fp32, case.chunks, probe_s=2 * LATENCY_S, rtt_s=2 * LATENCY_S)

    def groups(me: PeerId, view: View) -> PartialMachine:
        if case.method == "random groups":
            return GroupNode(me, view, seed, RandomKeys(me, seed, case.group), channel)
        grid = Grid(case.sides) if case.method == "moshpit" else None
        return GroupNode(me, view, seed, MoshpitKeys(me, seed, case.group, grid), channel)

    makers: dict[str, Callable[[PeerId, View], PartialMachine]] = {
        "all-reduce": lambda me, view: TreeAllReduce(me, view, seed, channel),
        "gossip": lambda me, view: Gossip(me, view, seed, channel, ring=True),
        "random pairs": lambda me, view: Gossip(me, view, seed, channel),
        "push-sum": lambda me, view: PushSum(me, view, seed, channel),
        "push-sum, hops": lambda me, view: PushSum(me, view, seed, channel, exponential=True),
    }
    if case.method not in METHODS:
        raise ValueError(f"no method is called {case.method!r}; there are: {', '.join(METHODS)}")
    return makers.get(case.method, groups)


def span_s(case: Case) -> float:
    """How long an undisturbed round takes: announce, roster, scatter, gather; or up and down the tree."""
    return LATENCY_S * (2 * (case.n.bit_length() - 1) if case.method == "all-reduce" else 4)


def run(case: Case, seed: int) -> Found:
    """Average until all scalars' variance is below ``case.until``, or for ``case.rounds`` rounds."""
    return _Trial(case, seed).run()


class _Trial:
    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._seed = case, seed
        shape = (case.n, case.chunks, fp32.elements)
        drawn = random.generator(seed, "moshpit/values").standard_normal(shape, np.float32)
        self._values: list[Floats] = list(drawn)
        self._weights = [1.0] * case.n
        self._truth = drawn.mean(axis=0, dtype=np.float64)
        view, make = View(range(case.n)), machine(case, seed)
        self._peers = [Away(make(me, view)) for me in range(case.n)]
        self._world = World(self._peers, Faults(latency_s=LATENCY_S), seed, on_done=self._done)
        self._round, self._left = 0, 0
        self._span_s = span_s(case)
        self._history: list[Doubles] = [self._variance()]
        self._potential = [self._beyond()] if case.method.startswith("push-sum") else []
        self._outcomes = self._mosaics = self._failures = 0

    def run(self) -> Found:
        self._world.call(0.0, self._begin)
        self._world.run()
        table = np.array(self._history).reshape(len(self._history), -1)
        drift = float(np.mean((np.mean(self._values, axis=0, dtype=np.float64) - self._truth) ** 2))
        total = max(1, self._outcomes)
        return Found(
            rounds=first_below(table, TOLERANCE, self._case.rounds),
            coarse=first_below(table, COARSE, self._case.rounds),
            variance=tuple(table.mean(axis=1).tolist()),
            drift=drift,
            events=self._world.events,
            virtual_s=self._world.now_s,
            mosaic=self._mosaics / total,
            failed=self._failures / total,
            potential=tuple(self._potential),
        )

    def _beyond(self) -> float:
        """Push-sum's potential, mean over scalars: weights are 1 at first, so it begins as the variance."""
        weights = np.array(self._weights)[:, None]
        values = np.stack(self._values).reshape(self._case.n, -1).astype(np.float64)
        return float(np.square(weights * (values - (weights * values).sum(0) / weights.sum())).mean())

    def _variance(self) -> Doubles:
        return np.asarray(np.var(np.stack(self._values), axis=0, dtype=np.float64), np.float64).ravel()

    def _begin(self, now_s: float) -> None:
        case, world = self._case, self._world
        drawn = random.uniforms(random.stream_key(self._seed, "moshpit/away", self._round), case.n)
        gone = (drawn < case.p).tolist()
        self._left = case.n if case.within else case.n - sum(gone)
        moments = random.uniforms(random.stream_key(self._seed, "moshpit/moment", self._round), case.n)
        for peer, away in enumerate(gone):
            node = self._peers[peer]
            node.away = away and not case.within
            if node.away:
                node.inner.skip()
                continue
            world.at(now_s, peer, Average(0, self._values[peer], self._weights[peer]))
            if away:
                world.call(now_s + float(moments[peer]) * self._span_s, self._dies(peer))
        if self._left == 0:
            world.call(now_s, self._end)

    def _dies(self, peer: PeerId) -> Callable[[float], None]:
        """A peer dies in mid-round. What it had received is lost with it."""
        round_ = self._round

        def die(now_s: float) -> None:
            node = self._peers[peer]
            if self._round != round_:
                return
            node.away = True
            if node.inner.active is not None:
                node.inner.skip()
                self._one_less(now_s)

        return die

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self._values[peer] = outcome.mean
        if self._case.method.startswith("push-sum"):
            self._weights[peer] = float(outcome.weight[0])
        self._outcomes += 1
        self._mosaics += bool((outcome.heard != outcome.heard[0]).any())
        self._failures += not outcome.averaged.any()
        self._one_less(now_s)

    def _one_less(self, now_s: float) -> None:
        self._left -= 1
        if self._left == 0:
            self._world.call(now_s, self._end)

    def _end(self, now_s: float) -> None:
        self._round += 1
        self._history.append(self._variance())
        if self._potential:
            self._potential.append(self._beyond())
        if self._round < self._case.rounds and self._history[-1].max() >= self._case.until:
            self._begin(now_s)


def first_below(table: Doubles, below: float, cap: int) -> float:
    """The first round after which a scalar's variance is below, mean over scalars; never: ``cap``."""
    under = table < below
    first = np.where(under.any(axis=0), under.argmax(axis=0), cap)
    return float(first.mean())
