"""All-reduce: whole under loss, the same bits on every peer; a dead peer holds it no longer than agreed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ragtag.core.types import Left, Send
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import HEADROOM
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.base import GATHER, NACK, SCATTER
from tests.protocols.harness import World, mean_of_heard, vectors

BOTH = pytest.mark.parametrize("method", [direct, ring], ids=lambda m: m.name)
PROBE_S = 1.0
"""Long enough that repair, not luck, makes it whole: the line needs some dozens of milliseconds."""


@BOTH
@pytest.mark.parametrize("loss", [0.05, 0.3])
@pytest.mark.parametrize(("n", "n_chunks"), [(2, 3), (4, 30), (5, 3), (7, 64)])
def test_under_loss_all_is_there_and_the_same_on_every_peer(
    method: Averager, loss: float, n: int, n_chunks: int
) -> None:
    for seed in range(3):
        inputs = vectors(n, n_chunks)
        outcomes = World(n, method, n_chunks, loss=loss, seed=seed, probe_s=PROBE_S).once(inputs)
        assert len(outcomes) == n
        for outcome in outcomes:
            assert outcome.averaged.all()
            assert (outcome.heard == np.uint64(2**n - 1)).all()
            assert not outcome.expired
            assert outcome.mean.tobytes() == outcomes[0].mean.tobytes()
        np.testing.assert_allclose(outcomes[0].mean, np.mean(inputs, 0), rtol=0, atol=2e-6)


@BOTH
def test_round_after_round_under_loss(method: Averager) -> None:
    world = World(4, method, 21, loss=0.3, probe_s=PROBE_S)
    world.rounds(8, lambda peer, round_: vectors(4, 21, "v", round_)[peer])
    for round_ in range(8):
        first = world.outcomes[0][round_]
        np.testing.assert_allclose(first.mean, np.mean(vectors(4, 21, "v", round_), 0), rtol=0, atol=2e-6)
        assert all(outcomes[round_].mean.tobytes() == first.mean.tobytes() for outcomes in world.outcomes)


@BOTH
def test_a_late_beginner_is_waited_for_and_repaired_for(method: Averager) -> None:
    """Who begins last asks last: those who are done by then still answer."""
    inputs = vectors(4, 21)
    world = World(4, method, 21, loss=0.3, probe_s=PROBE_S, seed=3)
    for peer in range(4):
        world.average(peer, inputs[peer], after_s=0.2 * (peer == 2))
    world.run()
    for (outcome,) in world.outcomes:
        assert (outcome.heard == np.uint64(0b1111)).all()
        assert outcome.mean.tobytes() == world.outcomes[0][0].mean.tobytes()


@BOTH
def test_requests_ask_only_for_what_is_missing(method: Averager) -> None:
    """At most twice as many chunks are sent again as were lost."""
    world = World(4, method, 400, loss=0.1, probe_s=PROBE_S)
    world.once(vectors(4, 400))
    chunks: Counter[bool] = Counter()
    first: set[tuple[int, object]] = set()
    for _, peer, _, effects in world.log:
        for effect in effects:
            if isinstance(effect, Send) and not effect.run.key.stage & NACK:
                run, name = effect.run, (peer, (effect.run.peer, effect.run.key))
                again = name in first
                first.add(name)
                chunks[again] += len(run.payload) if run.mask is None else int(run.mask.sum())
    assert chunks[False] == 2 * 3 * 400  # both ways of all-reduce send 2 (n-1)/n of the vector per peer
    lost = 0.1 * chunks[False]
    assert 0.8 * lost < chunks[True] < 2 * lost


def test_a_ring_sends_to_the_next_peer_only() -> None:
    world = World(5, ring, 20)
    world.once(vectors(5, 20))
    sent = Counter(
        (peer, e.run.peer, e.run.key.stage)
        for _, peer, _, effects in world.log
        for e in effects
        if isinstance(e, Send)
    )
    assert sent == {(i, (i + 1) % 5, stage): 4 for i in range(5) for stage in (SCATTER, GATHER)}


@BOTH
def test_a_dead_peer_bounds_the_round_by_its_deadline(method: Averager) -> None:
    inputs = vectors(4, 20)
    world = World(4, method, 20, probe_s=0.05)
    world.dead[3] = 0.0
    outcomes = world.once(inputs)
    assert len(outcomes) == 3
    for me, outcome in enumerate(outcomes):
        assert outcome.expired
        assert outcome.total_s <= 2 * HEADROOM * method.patience * 0.05 + 1e-9
        np.testing.assert_allclose(outcome.mean, mean_of_heard(outcome, inputs), rtol=0, atol=2e-6)
        assert not any(int(heard) >> 3 & 1 for heard in outcome.heard)
        if method is direct or me == 0:
            assert outcome.missed == (3,)


@BOTH
def test_who_has_left_is_not_waited_for(method: Averager) -> None:
    """The rest are whole again at once, each block with as many values as before."""
    inputs = vectors(4, 21)
    world = World(4, method, 21)
    world.dead[1] = 0.0
    for peer in (0, 2, 3):
        world.push(0.0, peer, Left(1))
    outcomes = world.once(inputs)
    for outcome in outcomes:
        assert not outcome.expired
        assert (outcome.heard == np.uint64(0b1101)).all()
        np.testing.assert_allclose(
            outcome.mean, np.mean([inputs[i] for i in (0, 2, 3)], 0), rtol=0, atol=2e-6
        )


@BOTH
def test_peers_that_disagree_about_who_left_never_mix_values_up(method: Averager) -> None:
    """Peer 0 knows that 3 has left, the others do not yet: the round may fail, but no value goes astray."""
    inputs = vectors(4, 10)
    world = World(4, method, 10, probe_s=0.02)
    world.dead[3] = 0.0
    world.push(0.0, 0, Left(3))
    for outcome in world.once(inputs):
        np.testing.assert_allclose(outcome.mean, mean_of_heard(outcome, inputs), rtol=0, atol=2e-6)


def test_a_ring_with_a_gap_ends_when_the_gap_is_known() -> None:
    world = World(3, ring, 9, probe_s=10.0)
    world.dead[2] = 0.003
    for peer in (0, 1):
        world.push(0.1, peer, Left(2))
    for outcome in world.once(vectors(3, 9)):
        assert outcome.total_s <= 0.1 + 1e-9
        assert outcome.expired
