"""RPS on a crew: the mean where nothing is lost, the mean of who was heard where something is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragtag.core.types import Floats, MessageKey, Outcome, Run, Send
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import HEADROOM
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.base import GATHER, SCATTER
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.protocols.harness import World, mean_of_heard, members, vectors

METHODS = pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda m: m.name)
LOSSY = pytest.mark.parametrize("method", [rps, rps_repair], ids=lambda m: m.name)
SIZES = [(1, 1), (1, 7), (2, 1), (2, 9), (3, 2), (4, 64), (5, 3), (7, 50), (16, 16), (16, 5), (64, 70)]


def mean(inputs: list[Floats], weights: list[float] | None = None) -> Floats:
    return np.average(np.asarray(inputs, np.float64), axis=0, weights=weights)  # type: ignore[no-any-return]


def assert_close(got: Floats, want: Floats) -> None:
    """Within 1e-6 of the largest value."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1.0, float(np.abs(want).max())))


def assert_one_mind(outcomes: list[Outcome]) -> None:
    """Every peer that has an average of a chunk has the same bits, weight and contributors."""
    for chunk in range(len(outcomes[0].averaged)):
        held = {
            (o.mean[chunk].tobytes(), float(o.weight[chunk]), int(o.heard[chunk]))
            for o in outcomes
            if o.averaged[chunk]
        }
        assert len(held) <= 1, f"chunk {chunk}"


# -- Without loss


@METHODS
@pytest.mark.parametrize(("n", "n_chunks"), SIZES)
def test_without_loss_it_is_the_mean(method: Averager, n: int, n_chunks: int) -> None:
    inputs = vectors(n, n_chunks)
    outcomes = World(n, method, n_chunks).once(inputs)
    assert len(outcomes) == n
    for outcome in outcomes:
        assert_close(outcome.mean, mean(inputs))
        assert outcome.averaged.all()
        assert (outcome.heard == np.uint64(2**n - 1)).all()
        assert (outcome.weight == n).all()
        assert not outcome.expired
        assert outcome.missed == ()
    assert_one_mind(outcomes)


@METHODS
def test_weights_weigh(method: Averager) -> None:
    weights = [1.0, 0.25, 3.0, 7.5]
    inputs = vectors(4, 10)
    for outcome in World(4, method, 10).once(inputs, weights):
        assert_close(outcome.mean, mean(inputs, weights))
        assert (outcome.weight == sum(weights)).all()


@METHODS
def test_a_weight_of_zero_takes_and_does_not_give(method: Averager) -> None:
    inputs = vectors(4, 10)
    inputs[2][:] = 1e30
    outcomes = World(4, method, 10).once(inputs, [1.0, 1.0, 0.0, 1.0])
    for outcome in outcomes:
        assert_close(outcome.mean, mean([inputs[i] for i in (0, 1, 3)]))
        assert {tuple(members(heard)) for heard in outcome.heard} == {(0, 1, 3)}


@METHODS
def test_where_all_weigh_zero_each_keeps_its_own(method: Averager) -> None:
    inputs = vectors(3, 6)
    outcomes = World(3, method, 6).once(inputs, [0.0, 0.0, 0.0])
    for outcome, own in zip(outcomes, inputs, strict=True):
        assert np.array_equal(outcome.mean, own)
        assert not outcome.averaged.any()


@METHODS
def test_what_a_peer_gave_is_not_changed(method: Averager) -> None:
    inputs = vectors(4, 10)
    before = [values.copy() for values in inputs]
    World(4, method, 10, loss=0.2).once(inputs)
    assert all(np.array_equal(a, b) for a, b in zip(inputs, before, strict=True))


@METHODS
@pytest.mark.parametrize(("n", "n_chunks"), [(2, 1), (3, 2), (4, 9), (5, 3), (8, 3), (8, 20)])
def test_a_crew_without_faults_stays_whole(method: Averager, n: int, n_chunks: int) -> None:
    """Round after round: nobody is called silent for having had nothing to send."""
    world = World(n, method, n_chunks)
    world.rounds(12, lambda peer, round_: vectors(n, n_chunks, "v", round_)[peer])
    assert [note for _, note in world.notes] == []
    for round_ in range(12):
        for outcomes in world.outcomes:
            assert (outcomes[round_].heard == np.uint64(2**n - 1)).all()
            assert_close(outcomes[round_].mean, mean(vectors(n, n_chunks, "v", round_)))


@METHODS
def test_two_runs_of_one_seed_are_the_same(method: Averager) -> None:
    def told() -> list[object]:
        world = World(5, method, 13, loss=0.2)
        world.rounds(4, lambda peer, round_: vectors(5, 13, "v", round_)[peer])
        return [
            (t, peer, type(event), [type(e) for e in effects]) for t, peer, event, effects in world.log
        ] + [outcome.mean.tobytes() for outcomes in world.outcomes for outcome in outcomes]

    assert told() == told()


# -- With loss


@LOSSY
@pytest.mark.parametrize("loss", [0.01, 0.1, 0.4, 0.9])
def test_each_chunk_is_the_mean_of_who_was_heard(method: Averager, loss: float) -> None:
    for seed in range(3):
        inputs = vectors(6, 31)
        outcomes = World(6, method, 31, loss=loss, seed=seed).once(inputs)
        assert len(outcomes) == 6
        for me, outcome in enumerate(outcomes):
            assert_close(outcome.mean, mean_of_heard(outcome, inputs))
            for chunk, heard in enumerate(outcome.heard):
                assert outcome.weight[chunk] == len(members(heard))
                if not outcome.averaged[chunk]:
                    assert members(heard) == [me]
                    assert np.array_equal(outcome.mean[chunk], inputs[me][chunk])
        assert_one_mind(outcomes)


@LOSSY
def test_weights_travel_with_chunks(method: Averager) -> None:
    weights = [1.0, 2.0, 0.5, 4.0, 1.5]
    inputs = vectors(5, 23)
    for me, outcome in enumerate(World(5, method, 23, loss=0.3).once(inputs, weights)):
        assert_close(outcome.mean, mean_of_heard(outcome, inputs, weights))
        for chunk, heard in enumerate(outcome.heard):
            assert outcome.weight[chunk] == pytest.approx(sum(weights[i] for i in members(heard)))
            assert outcome.averaged[chunk] or outcome.weight[chunk] == weights[me]


def test_what_was_lost_is_what_the_seed_says() -> None:
    """Which contributors are in an owner's chunk follows from the loss streams alone."""
    n, n_chunks, inputs = 5, 23, vectors(5, 23)
    outcomes = World(n, rps, n_chunks, loss=0.3, seed=4).once(inputs)
    replay = World(n, rps, n_chunks, loss=0.3, seed=4).loss
    layout, owners = layout_of(n_chunks, n), rotating_owners(4, 0, n, frozenset(range(n)))
    for block, owner in enumerate(owners):
        expected = np.full(layout.sizes[block], 1 << owner, np.uint64)
        for peer in range(n):
            if peer != owner:
                through = replay.draw(peer, owner, MessageKey(0, 0, SCATTER, block), layout.sizes[block])
                assert through is not None or layout.sizes[block] == 1
                bits = np.uint64(1 << peer)
                expected |= bits if through is None else np.where(through, bits, np.uint64(0))
        assert np.array_equal(outcomes[owner].heard[layout.spans[block]], expected)


def test_repair_within_the_deadline_brings_back_what_was_lost() -> None:
    """Averages differ from plain RPS's only by hearing more."""
    inputs = vectors(6, 31)
    plain = World(6, rps, 31, loss=0.2).once(inputs)
    repaired = World(6, rps_repair, 31, loss=0.2).once(inputs)
    heard = [np.mean([len(members(h)) for o in outcomes for h in o.heard]) for outcomes in (plain, repaired)]
    assert heard[0] < 5.5
    assert heard[1] > 5.95


def test_a_round_under_loss_lasts_as_long_as_the_line_needs() -> None:
    """End markers close what will not come: a round waits for their repetition, never for its deadline."""
    world = World(4, rps, 40, loss=0.1, probe_s=0.5)
    world.rounds(20, lambda peer, round_: vectors(4, 40, "v", round_)[peer])
    outcomes = [outcome for outcomes in world.outcomes for outcome in outcomes]
    assert len(outcomes) == 80
    assert not any(outcome.expired for outcome in outcomes)
    assert np.median([outcome.total_s for outcome in outcomes]) <= 4.001 * world.latency_s
    assert max(outcome.total_s for outcome in outcomes) <= 20 * world.latency_s


# -- Markers, duplicates, order, runs cut in pieces


@LOSSY
def test_without_end_markers_the_deadline_ends_the_round(method: Averager) -> None:
    """One peer's messages lose a chunk and their end: the round is as long as its deadline, not longer."""
    inputs = vectors(4, 20)
    world = World(4, method, 20, probe_s=0.1)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        if source != 2 or run.key.stage not in (SCATTER, GATHER):
            return [(0.0, run)]
        mask = np.arange(len(run.payload)) > 0
        return [(0.0, replace(run, mask=mask, ended=False))]

    world.carry = carry
    outcomes = world.once(inputs)
    assert len(outcomes) == 4
    for me, outcome in enumerate(outcomes):
        assert_close(outcome.mean, mean_of_heard(outcome, inputs))
        assert outcome.total_s <= 2 * HEADROOM * 0.1 + 1e-9
        if me != 2 and method is rps:
            assert outcome.expired
            assert outcome.missed == (2,)


@METHODS
def test_duplicates_count_once(method: Averager) -> None:
    """Every run comes twice, the copy a little later; every average is the plain mean all the same."""
    inputs = vectors(5, 17)
    world = World(5, method, 17)
    world.carry = lambda source, run: [(0.0, run), (0.0005, run)]
    for outcome in world.once(inputs):
        assert_close(outcome.mean, mean(inputs))
        assert (outcome.weight == 5).all()


@METHODS
def test_runs_may_come_in_any_pieces_and_order(method: Averager) -> None:
    """A message in single chunks, the last one first, overlapping: the receiver puts it together."""
    inputs = vectors(4, 26)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        k = len(run.payload)
        pieces = []
        for a in reversed(range(k)):
            b = min(k, a + 2)  # overlaps the piece before by one
            part = replace(
                run,
                first=run.first + a,
                payload=run.payload[a:b],
                weight=run.weight[a:b],
                heard=run.heard[a:b],
                mask=None if run.mask is None else run.mask[a:b],
                ended=a == 0,
            )
            pieces.append(((k - a) * 1e-5, part))
        return pieces

    world = World(4, method, 26)
    world.carry = carry
    outcomes = world.once(inputs)
    for outcome in outcomes:
        assert_close(outcome.mean, mean(inputs))
        assert not outcome.expired
    assert_one_mind(outcomes)


@METHODS
def test_jitter_and_reordering_change_only_the_order_of_addition(method: Averager) -> None:
    inputs = vectors(5, 23)
    world = World(5, method, 23)
    world.carry = lambda source, run: [((source * 7 + run.peer * 3 + run.key.block) % 11 * 1e-3, run)]
    for outcome in world.once(inputs):
        assert_close(outcome.mean, mean(inputs))


@METHODS
def test_early_arrivals_count(method: Averager) -> None:
    """One peer begins long after the others' messages have come, and misses nothing."""
    inputs = vectors(4, 18)
    world = World(4, method, 18, probe_s=0.2)
    for peer in range(4):
        world.average(peer, inputs[peer], after_s=0.03 if peer == 1 else 0.0)
    world.run()
    for (outcome,) in world.outcomes:
        assert_close(outcome.mean, mean(inputs))
        assert not outcome.expired
    if method is not ring:
        assert world.outcomes[1][0].scatter_s == 0.0  # all had come before it began


def test_owners_send_what_they_average_and_nothing_else() -> None:
    """Messages of a round: a copy of each block to its owner, an average of each to everyone."""
    n = 5
    world = World(n, rps, 20)
    world.once(vectors(n, 20))
    owners = rotating_owners(1, 0, n, frozenset(range(n)))
    sent = [
        (peer, e.run.peer, e.run.key.stage, e.run.key.block)
        for _, peer, _, effects in world.log
        for e in effects
        if isinstance(e, Send)
    ]
    scatter = [(i, owners[j], SCATTER, j) for i in range(n) for j in range(n) if owners[j] != i]
    gather = [(owners[j], i, GATHER, j) for i in range(n) for j in range(n) if owners[j] != i]
    assert sorted(sent) == sorted(scatter + gather)
