"""Chunks that are mixed before they are sent: a burst takes a little of many, and all peers undo it alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ragtag
from ragtag.core.types import Average, Floats, Outcome, Run
from ragtag.protocols.node import Channel
from ragtag.protocols.rounds.base import GATHER, SCATTER, UNSOUND
from ragtag.protocols.rounds.hadamard import Hadamard, mixing_of
from tests.protocols.harness import TINY, World, members, vectors

N, CHUNKS, SIZE = 4, 64, 16


def mean_of(values: list[Floats]) -> Floats:
    return np.asarray(np.mean(values, axis=0, dtype=np.float64), np.float32)


def one_round(world: World, values: list[Floats]) -> list[Outcome]:
    for peer, own in enumerate(values):
        world.average(peer, own)
    world.run()
    return [of[-1] for of in world.outcomes]


def table(n_chunks: int, elements: int = 8) -> Floats:
    return np.random.default_rng(n_chunks).standard_normal((n_chunks, elements)).astype(np.float32)


# -- The transform


@pytest.mark.parametrize("n_chunks", [1, 2, 3, 31, 64, 100, 257])
@pytest.mark.parametrize("edges", [(), (1, 5, 40)])
def test_it_keeps_lengths_and_angles_and_is_undone(n_chunks: int, edges: tuple[int, ...]) -> None:
    transform = Hadamard(7, n_chunks, 8, SIZE, edges)
    values, other = table(n_chunks), table(n_chunks)[::-1].copy()
    mixed = transform.forward(values)
    assert np.allclose(transform.inverse(mixed), values, atol=1e-6)
    assert np.isclose(np.vdot(mixed, transform.forward(other)), np.vdot(values, other), rtol=1e-4)


def test_a_chunk_becomes_a_sixteenth_of_the_energy_of_each_of_its_group_and_of_no_other() -> None:
    values = np.zeros((CHUNKS, 8), np.float32)
    values[20] = 1.0
    mixed = Hadamard(7, CHUNKS, 8, SIZE).forward(values)
    energy = np.square(mixed).sum(axis=1)
    assert sorted(energy) == [0.0] * (CHUNKS - SIZE) + [0.5] * SIZE
    gaps = np.diff(np.flatnonzero(energy))
    assert gaps.min() >= CHUNKS // SIZE - 2, "and these are sent far apart"


def test_nothing_is_mixed_across_tensors() -> None:
    values = np.zeros((40, 8), np.float32)
    values[:13] = 1.0
    transform = Hadamard(7, 40, 8, SIZE, (13,))
    mixed = transform.forward(values)
    assert (np.abs(mixed).sum(axis=1) > 0).sum() <= 13
    sizes = {many: len(first) for many, first in mixing_of(40, SIZE, (13,)).groups}
    assert sizes == {8: 2, 4: 1, 2: 1} | {16: 1}, "13 is 8, 4 and 1; 27 is 16, 8, 2 and 1"


def test_blocks_that_fit_no_cache_are_as_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    values = table(257)
    whole = Hadamard(7, 257, 8, SIZE).forward(values)
    monkeypatch.setattr("ragtag.protocols.rounds.hadamard._BLOCK_VALUES", 1)
    assert np.array_equal(Hadamard(7, 257, 8, SIZE).forward(values), whole)


# -- A round


def test_without_loss_it_is_the_mean_and_the_same_for_all() -> None:
    values = vectors(N, CHUNKS)
    outcomes = one_round(World(N, ragtag.RPS(hadamard=SIZE), CHUNKS), values)
    for outcome in outcomes:
        assert np.array_equal(outcome.mean, outcomes[0].mean)
        assert np.allclose(outcome.mean, mean_of(values), atol=1e-6)
        assert outcome.averaged.all()
        assert (outcome.weight == N).all()
        assert all(members(bits) == [0, 1, 2, 3] for bits in outcome.heard)


def burst(first: int, many: int, stage: int) -> World:
    """Chunks ``first`` to ``first + many`` of what peer 1 gets from each owner, or sends to it, are lost."""
    world = World(N, ragtag.RPS(), CHUNKS)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        hit = source == 1 if stage == SCATTER else run.peer == 1
        if run.key.channel != 0 or run.key.stage != stage or not hit or not len(run.payload):
            return [(0.0, run)]
        there = np.ones(len(run.payload), np.bool_)
        there[max(0, first - run.first) : max(0, first + many - run.first)] = False
        return [(0.0, replace(run, mask=there))]

    world.carry = carry
    return world


@pytest.mark.parametrize("stage", [SCATTER, GATHER])
def test_a_burst_takes_a_little_of_all_where_it_took_all_of_some(stage: int) -> None:
    values = vectors(N, CHUNKS)
    mean, errors = mean_of(values), []
    for averager in (ragtag.RPS(), ragtag.RPS(hadamard=SIZE)):
        world = burst(2, 6, stage)
        for node in world.nodes:
            node.configure(0, Channel(averager, TINY, CHUNKS, 0.05, 0.005, 0.02))
        outcome = one_round(world, values)[1]
        kept = np.square(values[1] - mean).sum(axis=1).mean()
        errors.append(np.square(outcome.mean - mean).sum(axis=1) / kept)
    plain, mixed = errors
    assert (plain < 1e-9).sum() >= CHUNKS // 2, "of most chunks nothing was lost"
    assert mixed.max() < 0.6 * plain.max()
    assert (mixed > 1e-3).all(), "all have a part of it"
    assert 0.4 < mixed.sum() / plain.sum() < 2.5, "and it is about as much in all"


def test_where_nothing_of_a_group_came_values_stay_as_they_are_bit_for_bit() -> None:
    own, transform = table(40), Hadamard(7, 40, 8, SIZE, (16, 37))
    mixed, came = transform.forward(own), np.zeros(40, np.bool_)
    came[transform._mixing.order.tolist().index(20)] = True
    weight, heard = np.where(came, 3.0, 1.0).astype(np.float32), np.where(came, 7, 2).astype(np.uint64)
    outcome = transform.undone(mixed, weight, heard, came, came, own)
    group = np.isin(np.arange(40), np.arange(16, 32))
    assert np.array_equal(outcome.averaged, group)
    assert np.array_equal(outcome.mean[~group], own[~group])
    assert np.allclose(outcome.mean, own, atol=1e-6)
    assert outcome.weight[group].tolist() == [1.125] * 16, "the mean of what its group's chunks weigh"
    assert (outcome.weight[~group] == 1).all()
    assert (outcome.heard[group] == 7).all()
    assert (outcome.heard[~group] == 2).all()
    assert np.array_equal(outcome.told, group), "a group is told of if any of it is"


def test_of_what_an_owner_that_died_had_alone_nothing_is_told() -> None:
    alone = CHUNKS  # one more than groups have room for: it is mixed with none
    untold = []
    for dead in range(N):
        world = World(N, ragtag.RPS(hadamard=SIZE), CHUNKS + 1)
        world.dead[dead] = 0.003  # it has the copies, and tells no average
        for outcome in world.once(vectors(N, CHUNKS + 1)):
            assert outcome.told is not None
            assert outcome.told[:alone].all(), "something of each group came"
            assert outcome.told[alone] == outcome.averaged[alone]
            untold.append(not outcome.told[alone])
    assert sum(untold) == N - 1, "where its owner died, and there on each peer"


def test_a_peer_that_nobody_hears_keeps_its_values() -> None:
    values = vectors(N, CHUNKS)
    world = World(N, ragtag.RPS(hadamard=SIZE), CHUNKS)
    world.carry = lambda source, run: [] if run.peer == 1 or source == 1 else [(0.0, run)]
    outcomes = one_round(world, values)
    assert np.allclose(outcomes[1].mean, values[1], atol=1e-6)
    assert {m for bits in outcomes[1].heard for m in members(bits)} == {1}


def test_signs_are_anew_in_each_round_and_channel() -> None:
    sent: dict[tuple[int, int], list[bytes]] = {}
    world = World(2, ragtag.RPS(hadamard=SIZE), CHUNKS)
    for node in world.nodes:
        node.configure(1, Channel(ragtag.RPS(hadamard=SIZE), TINY, CHUNKS, 0.05, 0.005, 0.02))

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        if run.key.stage == SCATTER and source == 0:
            sent.setdefault((run.key.channel, run.key.round), []).append(
                np.sort(np.abs(run.payload)).tobytes()
            )
        return [(0.0, run)]

    world.carry = carry
    own = vectors(2, CHUNKS)
    for _ in range(2):
        for peer in range(2):
            world.push(world.now_s, peer, Average(1, own[peer], 1.0))
        one_round(world, own)
    messages = [message for of in sent.values() for message in of]
    assert len(sent) == 4
    assert len(set(messages)) == len(messages)


def test_a_value_that_is_not_finite_costs_its_group_and_is_noted() -> None:
    values = vectors(N, CHUNKS)
    values[2][5, 1] = np.nan
    world = World(N, ragtag.RPS(hadamard=SIZE), CHUNKS)
    outcomes = one_round(world, values)
    good = mean_of([values[0], values[1], values[3]])
    for peer, outcome in enumerate(outcomes):
        if peer != 2:
            assert np.isfinite(outcome.mean).all()
            assert np.allclose(outcome.mean[SIZE:], mean_of(values)[SIZE:], atol=1e-6)
            assert np.allclose(outcome.mean[:SIZE, 1], good[:SIZE, 1], atol=1e-6)
    assert any(note.what == UNSOUND and note.peer == 2 for _, note in world.notes)


def test_repair_and_a_quorum_go_with_it() -> None:
    values = vectors(N, CHUNKS)
    averager = ragtag.RPS(repair=True, quorum=3, hadamard=SIZE)
    outcomes = one_round(World(N, averager, CHUNKS, loss=0.2, seed=3, probe_s=2.0), values)
    assert all(np.allclose(outcome.mean, mean_of(values), atol=1e-6) for outcome in outcomes)


def test_peers_compare_it() -> None:
    names = {
        averager.name
        for averager in (
            ragtag.RPS(),
            ragtag.RPS(hadamard=8),
            ragtag.RPS(hadamard=16),
            ragtag.RPS(quorum=3, hadamard=8),
            ragtag.RPS(repair=True, hadamard=8),
        )
    }
    assert len(names) == 5
    assert repr(ragtag.RPS(repair=True, quorum=3, hadamard=8)) == "RPS(repair=True, quorum=3, hadamard=8)"


@pytest.mark.parametrize("wrong", [1, 3, 48, 2048, -8, 8.0, True, "8"])
def test_what_is_no_power_of_two_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="power of two from 2 to 1024"):
        ragtag.RPS(hadamard=wrong)  # type: ignore[arg-type]
