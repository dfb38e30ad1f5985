"""What makes the other tests of parity ones that can fail: seeds and orders of arrival that do matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Arrived, Event
from ragtag.protocols.node import Node
from ragtag.protocols.rounds.allreduce import ring
from ragtag.protocols.rounds.rps import rps
from ragtag.simulation.check.replay import replay
from tests.network.crew import Crew
from tests.parity.test_worlds import N_CHUNKS, ROUNDS, real, simulated


def test_another_seed_loses_other_chunks() -> None:
    faults = Faults(loss=Loss(0.1))
    one, other = (real(2, rps, faults, seed)[0][0] for seed in (1, 2))
    assert not np.array_equal(one.heard, other.heard)


def test_a_ring_adds_in_one_order_in_both_worlds() -> None:
    """Whatever arrives when, and whatever is repaired: the sums go round, so even the bits are the same."""
    faults = Faults(loss=Loss(0.1))
    for virtual, live in zip(simulated(3, ring, faults, 2), real(3, ring, faults, 2), strict=True):
        assert [here.mean.tobytes() for here in virtual] == [there.mean.tobytes() for there in live]
        assert len(virtual) == ROUNDS


def test_another_order_of_arrival_differs_in_the_last_bits() -> None:
    """Sums of floats depend on their order; so a replay that gives the same bits had the same order."""
    n, seed = 4, 5
    with Crew(n, N_CHUNKS, seed=seed, record=True) as crew:
        crew.average()
    differing = 0
    for peer, recording in enumerate(crew.recordings):
        assert recording is not None
        log = list(recording)
        arrived = [
            at
            for at, (_, event) in enumerate(log)
            if isinstance(event, Arrived) and event.runs[0].key[:2] == (0, 0)
        ]
        backwards: list[tuple[float, Event]] = list(log)
        for at, other in zip(arrived, reversed(arrived), strict=True):
            event = log[other][1]
            assert isinstance(event, Arrived)
            # an end that came first would say that nothing more comes
            runs = tuple(replace(run, ended=False) for run in reversed(event.runs))
            backwards[at] = (log[at][0], Arrived(runs))
        means = []
        for entries in (log, backwards):
            node = Node(peer, n, seed)
            node.configure(0, crew.channel)
            (outcome,) = replay(node, entries)
            means.append(outcome.mean)
        np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-6)
        differing += means[0].tobytes() != means[1].tobytes()
    assert differing > 0
