"""Progressive grouping at a central state, in virtual time: a straggler comes, and goes; peers die; loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Crash, Faults, Freeze, Loss, Slow, Window
from ragtag.core.types import Average, Left, Noted, Outcome, PeerId
from ragtag.protocols.node import Channel, Node
from ragtag.schedules import ProgressiveGrouping
from ragtag.schedules.centre import Centre as Rule
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.worlds.rounds import World
from ragtag.training.exchange.central import Centre

CHUNKS, STEP_S, GOAL = 12, 1.0, 3.0
CALM = Faults(latency_s=0.002, rate_bytes_per_s=1e8)
STRAGGLER = replace(CALM, slow=(Slow(3, 21.0, Window(30.0, 120.0)),))
ROUGH = Faults(
    loss=Loss(0.03), latency_s=0.01, jitter_s=0.005, rate_bytes_per_s=1e7, duplicate=0.05, reorder=0.1,
    reorder_s=0.02, crashes=(Crash(2, 42.5),), freezes=(Freeze(4, 65.0, 12.0),),
    slow=(Slow(5, 8.0, Window(20.0, 100.0)),),
)  # fmt: skip


@dataclass
class Run:
    """Each of ``n`` peers goes a tenth of its way to ``GOAL`` in a step; a death is told after ``told_s``."""

    n: int = 4
    faults: Faults = CALM
    rule: Rule | ProgressiveGrouping = field(default_factory=ProgressiveGrouping)
    speed: tuple[float, ...] = ()
    told_s: float = 1.0
    until_s: float = 200.0
    sigma: float = 0.02
    seed: int = 3

    def __post_init__(self) -> None:
        self.outcomes: dict[PeerId, list[tuple[float, Outcome]]] = {peer: [] for peer in range(self.n)}
        self.notes: list[tuple[float, PeerId, Noted]] = []
        nodes = [Node(peer, self.n, self.seed) for peer in range(self.n)]
        for node in nodes:
            node.configure(0, Channel(Centre(self.rule), fp32, CHUNKS, probe_s=0.1, rtt_s=0.01))
        self.cost = ComputeCost(STEP_S, self.speed, sigma=self.sigma, seed=self.seed)
        self.world = World(
            nodes,
            self.faults,
            self.seed,
            on_done=self._done,
            on_note=lambda peer, now_s, note: self.notes.append((now_s, peer, note)),
        )
        for peer in range(self.n):
            self.world.at(0.0, peer, Average(0, np.zeros((CHUNKS, fp32.elements), np.float32), 0.0))
            for crash in self.faults.crashes:
                if crash.peer != peer:
                    self.world.at(crash.at_s + self.told_s, peer, Left(crash.peer))
        self.world.run(until_s=2 * self.until_s)

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append((now_s, outcome))
        ends_s = self.cost.ends_s(peer, len(self.outcomes[peer]), 1, now_s, self.faults)
        if ends_s < self.until_s:
            values = outcome.mean + np.float32(0.1) * (np.float32(GOAL) - outcome.mean)
            self.world.at(ends_s, peer, Average(0, values, 1.0))

    def turns(self, peer: PeerId, from_s: float = 0.0, until_s: float = 1e9) -> int:
        return sum(from_s <= at_s < until_s for at_s, _ in self.outcomes[peer])

    def groups(self, at_s: float) -> tuple[tuple[PeerId, ...], ...]:
        """As the last of the owners that had a turn by then saw them."""
        seen = [(t, one.groups) for all_ in self.outcomes.values() for t, one in all_ if one.groups]
        return max((t, groups) for t, groups in seen if t <= at_s)[1]


def test_a_straggler_holds_nobody_up_and_comes_back_into_the_group() -> None:
    calm, run = Run(), Run(faults=STRAGGLER)
    for peer in (0, 1, 2):
        assert run.turns(peer) >= 0.95 * calm.turns(peer)
        assert run.turns(peer, 30, 120) >= 0.95 * calm.turns(peer, 30, 120)
    assert run.groups(29.0) == ((0, 1, 2, 3),)
    assert run.groups(100.0) == ((0, 1, 2), (3,))
    assert run.groups(199.0) == ((0, 1, 2, 3),)
    assert 3 <= run.turns(3, 30, 120) <= 6
    assert run.turns(3, 150) >= 0.95 * calm.turns(3, 150)
    told = [note.detail.split(":")[0] for _, _, note in run.notes if note.what == "groups"]
    assert told == ["1 group", "2 groups", "1 group"]
    stale = [set(outcome.stale or ()) for at_s, outcome in run.outcomes[3] if 60 <= at_s < 120]
    assert all(min(one) >= 15 for one in stale)  # of about twenty steps of the others


@pytest.mark.parametrize(("slower", "of_calm"), [(21.0, 0.97), (4.0, 0.92)])
def test_the_model_moves_as_far_in_a_given_time_as_without_the_straggler(
    slower: float, of_calm: float
) -> None:
    """The issue: accuracy within a point, in as much time. A step goes a tenth of the way: they are counted.

    By heads it would be 3/4 + 1/4 of what the slow one does. Before 25 s nobody knows how slow that is.
    """

    def steps_per_s(run: Run) -> float:
        at_s, means = zip(
            *((t, float(one.mean.mean())) for t, one in run.outcomes[0] if 25 < t < 80), strict=True
        )
        ways = [1 - mean / GOAL for mean in means]
        return float(np.log(ways[-1] / ways[0]) / np.log(0.9) / (at_s[-1] - at_s[0]))

    slow = replace(CALM, slow=(Slow(3, slower),))
    assert steps_per_s(Run(faults=slow, until_s=85.0)) >= of_calm * steps_per_s(Run(until_s=85.0))


@pytest.mark.slow
def test_as_many_groups_as_speeds_ask_for() -> None:
    run = Run(8, speed=(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.1, 1.0))
    assert run.groups(199.0) == ((0, 1, 2, 3, 7), (4, 5), (6,))
    assert run.turns(0) > 0.95 * 200
    assert run.turns(4) > 0.95 * 100
    assert run.turns(6) > 0.9 * 20


@pytest.mark.slow
def test_of_sixteen_one_six_times_slower_costs_a_tenth_at_most() -> None:
    """Issue and paper: with 500 % of delay the work takes at most 1.1 times as long; 5.5 % is the limit."""
    calm = Run(16, until_s=60.0)
    run = Run(16, CALM, speed=(*[1.0] * 15, 1 / 6), until_s=60.0)
    took = [sum(one.turns(peer) for peer in range(16)) for one in (calm, run)]
    assert 1 / 1.1 <= took[1] / took[0] < 1 / 1.05
    assert run.groups(59.0) == (tuple(range(15)), (15,))


@pytest.mark.parametrize(("sigma", "as_one", "of_calm"), [(0.05, 0.95, 0.9), (0.1, 0.6, 0.85)])
def test_jitter_parts_peers_of_one_speed_seldom(sigma: float, as_one: float, of_calm: float) -> None:
    """The median of a few steps errs by a third of the jitter; groups are parted below .93 of efficiency."""
    run = Run(sigma=sigma)
    sizes = np.array([len(outcome.groups) for _, outcome in run.outcomes[0][10:]])
    assert (sizes == 1).mean() >= as_one
    assert run.turns(0) > of_calm * 200


def test_it_gets_there_whatever_goes_wrong() -> None:
    run = Run(8, ROUGH, sigma=0.05)
    for peer in {*range(8)} - {2}:
        _, last = run.outcomes[peer][-1]
        assert last.averaged.all()
        np.testing.assert_allclose(last.mean, GOAL, atol=0.1)
    assert run.groups(199.0) == ((0, 1, 3, 4, 5, 6, 7),)
    assert run.turns(0) >= 0.8 * 200
    assert max(outcome.total_s for at_s, outcome in run.outcomes[0] if at_s > 120) < STEP_S


@pytest.mark.slow
def test_a_run_of_one_seed_is_the_same_every_time() -> None:
    rough = [Run(8, ROUGH, until_s=60.0).world.digest() for _ in range(2)]
    assert rough[0] == rough[1]
