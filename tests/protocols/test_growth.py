"""Peers that come while the crew averages: into a free place, or into a new one, for which the crew grows."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import (
    Arrived,
    Average,
    Joined,
    Left,
    MessageKey,
    Outcome,
    PeerId,
    Run,
    Tell,
    Visits,
)
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.crew.meet import MEET, TELL
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.allreduce import direct
from ragtag.protocols.rounds.base import BLOCK_BITS
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.worlds.rounds import World
from tests.protocols.harness import members

CHUNKS = 40
STEP_S = 0.01
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))]
SMOOTH = pytest.mark.parametrize("method", [rps, direct], ids=lambda m: m.name)


class Crew:
    """``founded`` peers that average every ``STEP_S``, and ``late`` ones that come when they are let in."""

    def __init__(
        self, founded: int, late: int, method: Averager = rps, faults: Faults | None = None, seed: int = 0
    ) -> None:
        self.founded = founded
        places = [max(founded, i + 1) for i in range(founded + late)]
        self.nodes = [Node(i, n, seed, founded) for i, n in enumerate(places)]
        self.outcomes: dict[PeerId, list[tuple[float, Outcome]]] = {i: [] for i in range(founded + late)}
        for node in self.nodes:
            node.configure(0, Channel(method, fp32, CHUNKS, probe_s=0.05, rtt_s=0.002))
        self.values = [np.full((CHUNKS, fp32.elements), float(i), np.float32) for i in range(founded + late)]
        self.world = World(
            self.nodes, faults or Faults(latency_s=0.001), seed, on_done=self._done, check=True
        )
        for i in range(founded):
            self.average(0.0, i)

    def average(self, at_s: float, peer: PeerId) -> None:
        self.world.at(at_s, peer, Average(0, self.values[peer], 1.0))

    def _done(self, peer: PeerId, at_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append((at_s, outcome))
        self.average(at_s + STEP_S, peer)

    def let_in(self, at_s: float, peer: PeerId, learns: list[float]) -> None:
        """The founders learn of it one after the other, ``learns`` seconds after ``at_s``.

        Its claim all have heard by then: that is told to all at once, and holds after some protocol periods.
        """
        for other, after_s in enumerate(learns):
            self.world.at(at_s, other, Visits(peer))
            self.world.at(at_s + after_s, other, Joined(peer))

    def heard(self, peer: PeerId, since_s: float) -> list[set[int]]:
        return [
            {p for chunk in outcome.heard for p in members(chunk)}
            for at_s, outcome in self.outcomes[peer]
            if at_s > since_s
        ]


@SMOOTH
@pytest.mark.parametrize("seed", range(6))
def test_a_newcomer_in_a_new_place_takes_part_whenever_each_one_learns_of_it(
    method: Averager, seed: int
) -> None:
    crew = Crew(4, 1, method, seed=seed)
    learns = np.random.default_rng(seed).uniform(0, 0.3, 4).tolist()
    crew.let_in(0.5, 4, learns)
    crew.world.run(0.5)
    crew.nodes[4].resume(0, crew.outcomes[0][-1][1].round)
    crew.average(0.6, 4)
    crew.world.run(2.0)
    assert [node.n for node in crew.nodes] == [5] * 5
    for peer in range(5):
        assert all(heard == {0, 1, 2, 3, 4} for heard in crew.heard(peer, 1.2))
    longest_s = max(o.total_s for runs in crew.outcomes.values() for t, o in runs if t > 0.5)
    typical_s = np.median([o.total_s for _, o in crew.outcomes[0]])
    first = crew.outcomes[4][0][1]
    assert first.total_s < 0.2
    assert longest_s < max(0.2, 20 * typical_s)


def test_the_first_average_of_a_newcomer_takes_and_does_not_give() -> None:
    crew = Crew(3, 1)
    crew.let_in(0.3, 3, [0.0, 0.0, 0.0])
    crew.world.run(0.3)
    crew.nodes[3].resume(0, crew.outcomes[0][-1][1].round)
    crew.average(0.3, 3)
    crew.world.run(1.0)
    _, first = crew.outcomes[3][0]
    assert {p for chunk in first.heard[first.averaged] for p in members(chunk)} <= {0, 1, 2}
    assert {p for chunk in crew.outcomes[3][-1][1].heard for p in members(chunk)} == {0, 1, 2, 3}
    assert float(crew.outcomes[3][-1][1].mean[0, 0]) == pytest.approx(1.5)


@pytest.mark.slow
def test_one_round_is_spoilt_where_views_differ() -> None:
    """Peer 0 learns of the newcomer long before the others: its next message tells them.

    Where that round leaves it out of step with them, deadlines take some rounds to bring it back.
    """
    counts = []
    for seed in range(9):
        crew = Crew(4, 1, faults=Faults(latency_s=0.001, jitter_s=0.0005), seed=seed)
        crew.let_in(0.5, 4, [0.0, 2.0, 2.0, 2.0])
        crew.world.run(1.5)
        assert crew.nodes[2].n == 5
        late = [heard for peer in range(4) for heard in crew.heard(peer, 1.0)]
        assert all(heard == {0, 1, 2, 3} for heard in late)
        poor = {
            o.round
            for peer in range(4)
            for t, o in crew.outcomes[peer]
            if t > 0.5 and {p for c in o.heard for p in members(c)} != {0, 1, 2, 3}
        }
        counts.append(len(poor))
    assert sorted(counts)[4] == 1


def test_values_are_never_put_where_others_mean_other_values() -> None:
    """Seven chunks in 4 and in 5 blocks: block 3 has one chunk in both, and is another chunk in each."""
    old, new = Node(0, 4, 0), Node(1, 5, 0, founded=4)
    for node in (old, new):
        node.configure(0, Channel(direct, fp32, 7, probe_s=0.05, rtt_s=0.002))
    values = np.arange(7 * fp32.elements, dtype=np.float32).reshape(7, -1)
    old.step(0.0, Visits(4))
    old.step(0.0, Average(0, values, 1.0))
    for block in range(5):
        payload = np.full((1, 1088), 65, np.uint8)
        key = MessageKey(0, 0, 0, 1 << BLOCK_BITS | block)
        run = Run(1, key, 0, 1, payload, np.ones(1, np.float32), np.full(1, 2, np.uint64))
        old.step(0.001, Arrived([run]))
    assert old.n == 5
    machine = old.channels[0].rounds[0]
    assert machine.spec.growth == 0
    assert not any(machine.lesson().owed.values())


def test_growth_beyond_the_limit_is_not_believed() -> None:
    node = Node(0, 10, 0)
    node.configure(0, Channel(rps, fp32, 7, probe_s=0.05, rtt_s=0.002))
    key = MessageKey(0, 0, 0, 60 << BLOCK_BITS)
    payload = np.zeros((1, 1088), np.uint8)
    node.step(0.0, Arrived([Run(1, key, 0, 1, payload, np.ones(1, np.float32), np.ones(1, np.uint64))]))
    assert node.n == 10


def test_growth_for_nobody_is_not_believed() -> None:
    """A number in a datagram can be made up, in the name of a peer and from its address: who comes cannot."""
    node = Node(0, 4, 0)
    node.configure(0, Channel(rps, fp32, 7, probe_s=0.05, rtt_s=0.002))
    payload = np.zeros((1, 1088), np.uint8)

    def told(growth: int) -> tuple[int, int]:
        key = MessageKey(0, 0, 0, growth << BLOCK_BITS)
        node.step(0.0, Arrived([Run(1, key, 0, 1, payload, np.ones(1, np.float32), np.ones(1, np.uint64))]))
        return node.n, node.cut

    assert [told(growth) for growth in (1, 2, 60)] == [(4, 4)] * 3
    node.step(0.1, Visits(5))
    assert told(60) == told(1) == (4, 4)
    assert told(2) == (6, 6), "others know already that it averages"
    node.step(0.2, Left(5))
    assert told(60) == told(2) == (6, 4)


def test_a_visitor_is_answered_and_takes_no_part() -> None:
    node = Node(0, 2, 0)
    node.configure(0, Channel(rps, fp32, 7, probe_s=0.05, rtt_s=0.002))
    node.step(0.0, Tell(1, b"hello", 1.0))
    node.step(0.0, Visits(2))
    assert node.n == 2
    assert 2 not in node.live
    payload = np.zeros((1, 1088), np.uint8)
    payload[0, 0] = 2
    key = MessageKey(MEET, 1, TELL, 0)
    zeros = np.zeros(1, np.float32), np.zeros(1, np.uint64)
    effects = node.step(0.1, Arrived([Run(2, key, 0, 1, payload, *zeros, ended=True)]))
    assert any(getattr(e, "run", None) is not None and e.run.peer == 2 for e in effects)  # type: ignore[union-attr]
    assert 2 not in node.live
    node.step(0.2, Joined(2))
    assert node.n == 3
    assert 2 in node.live
    node.step(0.3, Left(2))
    assert 2 not in node.live


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_a_newcomer_and_a_death_at_once(seed: int) -> None:
    faults = Faults(latency_s=0.001, loss=Loss(0.1))
    crew = Crew(5, 2, rps, faults, seed)
    crew.let_in(0.5, 5, [0.0, 0.05, 0.1, 0.15, 0.2])
    crew.let_in(0.52, 6, [0.2, 0.15, 0.1, 0.05, 0.0])
    crew.world.at(0.52, 5, Joined(6))
    crew.world.at(0.55, 6, Joined(5))
    for other in range(1, 7):
        crew.world.at(0.8, other, Left(0))
    crew.world.run(0.5)
    for late in (5, 6):
        crew.nodes[late].resume(0, crew.outcomes[1][-1][1].round)
        crew.average(0.6, late)
    crew.world.run(2.0)
    for peer in range(1, 7):
        assert set(range(1, 7)) <= crew.heard(peer, 1.9)[-1], (seed, peer)


GHOST = 11


@SMOOTH
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_place_that_nobody_has_any_more_costs_no_blocks(method: Averager, seed: int) -> None:
    """One claims a place far above the others, is believed, and is gone: each hears of it at its own time."""
    crew = Crew(4, GHOST - 3, method, seed=seed)
    draws = np.random.default_rng(seed)
    crew.let_in(0.3, GHOST, draws.uniform(0, 0.1, 4).tolist())
    crew.world.run(0.5)
    assert [node.cut for node in crew.nodes[:4]] == [GHOST + 1] * 4
    for other, after_s in enumerate(draws.uniform(0, 0.3, 4).tolist()):
        crew.world.at(0.6 + after_s, other, Left(GHOST))
    crew.world.run(2.0)
    assert [(node.cut, node.growth) for node in crew.nodes[:4]] == [(4, 0)] * 4
    assert [node.n for node in crew.nodes[:4]] == [GHOST + 1] * 4, "places are still known"
    for peer in range(4):
        assert all(heard == {0, 1, 2, 3} for heard in crew.heard(peer, 1.2))
    assert {r.spec.growth for node in crew.nodes[:4] for r in node.channels[0].rounds.values()} == {0}
    crew.let_in(2.0, 4, draws.uniform(0, 0.3, 4).tolist())  # the next one takes the lowest free place
    crew.world.at(2.0, 4, Left(GHOST))
    crew.nodes[4].resume(0, crew.outcomes[0][-1][1].round)
    crew.average(2.1, 4)
    crew.world.run(3.5)
    assert [node.cut for node in crew.nodes[:5]] == [5] * 5
    for peer in range(5):
        assert all(heard == {0, 1, 2, 3, 4} for heard in crew.heard(peer, 2.8))


def test_peers_that_have_heard_of_a_death_are_not_made_to_grow_again() -> None:
    """Another that has not deals as many blocks as before; and a third peer's coming makes all grow."""
    node = Node(0, 4, 0)
    node.configure(0, Channel(rps, fp32, 7, probe_s=0.05, rtt_s=0.002))
    payload = np.zeros((1, 1088), np.uint8)

    def told(growth: int) -> int:
        key = MessageKey(0, 0, 0, growth << BLOCK_BITS)
        one = np.ones(1, np.float32), np.full(1, 2, np.uint64)
        node.step(0.1, Arrived([Run(1, key, 0, 1, payload, *one)]))
        return node.cut

    node.step(0.0, Joined(7))
    node.step(0.0, Joined(5))
    assert node.cut == 8
    node.step(0.0, Left(7))
    assert node.cut == 6 and told(4) == 6, "the place of one that is gone"
    assert told(3) == 7, "of one that this peer has not heard of yet"
    node.step(0.2, Visits(7))
    assert told(4) == 8, "somebody else has the place"
    node.step(0.3, Joined(7))
    assert node.cut == 8


def test_a_peer_in_a_later_place_has_a_block_whoever_goes() -> None:
    node = Node(6, 8, 0, founded=4)
    assert node.cut == 8
    for peer in (7, 5, 4, 0):
        node.step(0.0, Left(peer))
    assert node.cut == 7


def test_a_visitor_has_no_blocks() -> None:
    node = Node(4, 9, 0, founded=4)
    for peer in (5, 6, 7):
        node.step(0.0, Left(peer))
    node.step(0.0, Visits(8))
    assert node.cut == 5
    node.step(0.0, Left(8))
    assert node.cut == 5
