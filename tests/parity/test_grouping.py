"""Progressive grouping over real drivers, and simulated: one scenario, the same groups, staleness and model.

Who computes how long is the real run's, told to the simulated one: what is left is the order of what happens
at nearly the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.faults import Faults
from ragtag.core.types import Average, Done, Event, Floats, Outcome, PeerId
from ragtag.protocols.central import channel as centre
from ragtag.protocols.central import grouping as centre_groups
from ragtag.protocols.node import Node
from ragtag.schedules import ProgressiveGrouping
from ragtag.simulation.check.replay import replay
from ragtag.simulation.worlds.rounds import World
from ragtag.training.exchange.central import Centre
from tests.network.crew import PATIENCE_S, Crew

N, SLOW, SLOWER, CHUNKS, STEPS, STEP_S = 3, 2, 8, 12, 60, 0.03
GOALS = (1.0, 2.0, -9.0)
"""Each peer's own, so that the state tells how much each has counted: the slow one's is far off."""
NEVER = threading.Event()


@dataclass
class Ran:
    """Of each peer: outcomes, and how long it computed before each of its turns but the first."""

    outcomes: list[list[Outcome]] = field(default_factory=lambda: [[] for _ in range(N)])
    computed_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(N)])

    @property
    def stale(self) -> float:
        """The mean staleness of the slow one's updates."""
        return float(np.mean([s for outcome in self.outcomes[SLOW] for s in outcome.stale or ()]))

    def together(self) -> float:
        """For what share of its turns peer 0 knew that it goes with peer 1, and the slow one alone."""
        known = [outcome.groups for outcome in self.outcomes[0] if outcome.groups]
        return float(np.mean([groups == ((0, 1), (SLOW,)) for groups in known]))

    def path(self) -> Floats:
        """The state as peer 0 saw it: its mean, turn by turn."""
        return np.array([outcome.mean.mean() for outcome in self.outcomes[0]], np.float32)


def stepped(peer: PeerId, outcome: Outcome) -> Floats:
    """A fifth of the way to the peer's own goal."""
    moved: Floats = outcome.mean + np.float32(0.2) * (np.float32(GOALS[peer]) - outcome.mean)
    return moved


def first() -> Average:
    """A first turn only takes."""
    return Average(0, np.zeros((CHUNKS, fp32.elements), np.float32), 0.0)


def real(crew: Crew) -> Ran:
    """Over UDP on loopback, each peer in a thread."""
    ran, over = Ran(), threading.Event()

    def work(peer: PeerId) -> None:
        ask = first()
        while True:
            outcome = crew.drivers[peer].average(ask).result(PATIENCE_S)
            ran.outcomes[peer].append(outcome)
            if (peer == SLOW and over.is_set()) or len(ran.outcomes[peer]) > STEPS:
                over.set()
                return
            values = stepped(peer, outcome)
            NEVER.wait(STEP_S * (SLOWER if peer == SLOW else 1))
            ask = Average(0, values, 1.0)

    with ThreadPoolExecutor(N) as pool:
        for future in [pool.submit(work, peer) for peer in range(N)]:
            future.result(2 * PATIENCE_S)
    for peer, recording in enumerate(crew.recordings):
        assert recording is not None
        ran.computed_s[peer] = computed_s(fresh(crew, peer), list(recording))
    return ran


def fresh(crew: Crew, peer: PeerId) -> Node:
    """A machine that nothing has happened to."""
    node = Node(peer, N, crew.seed)
    node.configure(0, crew.channel)
    return node


def computed_s(node: Node, log: list[tuple[float, Event]]) -> list[float]:
    """What lies between a turn's end and the next one's beginning, as a machine was told."""
    took_s, ended_s = [], None
    for now_s, event in log:
        if isinstance(event, Average) and ended_s is not None:
            took_s.append(now_s - ended_s)
        if any(isinstance(effect, Done) for effect in node.step(now_s, event)):
            ended_s = now_s
    return took_s


def simulated(crew: Crew, live: Ran) -> Ran:
    """The same in virtual time: as long computed, and as long a way (the slow one waits for nobody else)."""
    ran, computed_s = Ran(computed_s=live.computed_s), live.computed_s
    way_s = float(np.median([outcome.total_s for outcome in live.outcomes[SLOW][2:]])) / 2
    nodes = [fresh(crew, peer) for peer in range(N)]

    def on_done(peer: PeerId, now_s: float, outcome: Outcome) -> None:
        turn = len(ran.outcomes[peer])
        ran.outcomes[peer].append(outcome)
        if turn < len(computed_s[peer]):
            world.at(now_s + computed_s[peer][turn], peer, Average(0, stepped(peer, outcome), 1.0))

    world = World(nodes, Faults(latency_s=way_s), crew.seed, on_done=on_done)
    for peer in range(N):
        world.at(0.0, peer, first())
    world.run(until_s=1e3)
    return ran


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """No deadline ends a turn or a barrier, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (centre, centre_groups):
            patched.setattr(module, "HEADROOM", 50.0)
        yield


@pytest.fixture(scope="module")
def lived(patience: None) -> tuple[Crew, Ran]:
    """One real run, and the crew whose it was."""
    with Crew(N, CHUNKS, method=Centre(ProgressiveGrouping()), record=True) as crew:
        return crew, real(crew)


def test_groups_staleness_and_model_are_the_same_in_both_worlds(lived: tuple[Crew, Ran]) -> None:
    """A busy machine's jitter parts peers 0 and 1 now and then, in both, if perhaps a turn apart."""
    crew, live = lived
    virtual = simulated(crew, live)
    assert [len(outcomes) for outcomes in virtual.outcomes] == [len(outcomes) for outcomes in live.outcomes]
    for ran in (live, virtual):
        assert not any(outcome.expired for outcomes in ran.outcomes for outcome in outcomes)
        assert all((SLOW,) in outcome.groups for outcome in ran.outcomes[0][2 * SLOWER :])
    assert live.together() == pytest.approx(virtual.together(), abs=0.25)
    assert live.stale == pytest.approx(virtual.stale, abs=1.0)
    turns, slow_turns = len(live.outcomes[0]), len(live.outcomes[SLOW])  # a machine's own lag is in both
    assert virtual.stale > 0.7 * turns / slow_turns > 2
    assert live.path()[-STEPS // 2 :].mean() == pytest.approx(virtual.path()[-STEPS // 2 :].mean(), abs=0.15)
    assert live.path()[8] == pytest.approx(virtual.path()[8], abs=0.3)  # on its way: 0.2 of it in a step


def test_the_real_order_of_arrival_replayed_gives_the_same_bits(lived: tuple[Crew, Ran]) -> None:
    crew, live = lived
    for peer, recording in enumerate(crew.recordings):
        assert recording is not None
        again = replay(fresh(crew, peer), list(recording))
        assert len(again) == len(live.outcomes[peer])
        for here, there in zip(again, live.outcomes[peer], strict=True):
            assert here.mean.tobytes() == there.mean.tobytes()
            assert here.groups == there.groups
            assert here.stale == there.stale
