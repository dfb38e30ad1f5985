"""Values that cannot be averaged: they count for nothing, and nobody's model is touched by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import bf16, fp32, int8
from ragtag.core.seed import generator
from ragtag.core.types import WEIGHT_MAX, Floats, Outcome, Run
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.node import Channel
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.base import GATHER, SCATTER, UNSOUND
from ragtag.protocols.rounds.layout import layout_of
from ragtag.protocols.rounds.rps import rps, rps_repair
from tests.protocols.harness import World

N, N_CHUNKS = 4, 14
BAD, AT = 3, (2, 7)
"""Who sends something strange, and in which of its chunks."""
NAN, INF = float("nan"), float("inf")
METHODS = pytest.mark.parametrize("method", [rps, rps_repair, direct, ring], ids=lambda method: method.name)
CODECS = pytest.mark.parametrize("codec", [fp32, bf16, int8], ids=lambda codec: codec.name)


def own_of(codec: Codec) -> list[Floats]:
    return [
        generator(3, "unsound", peer).standard_normal((N_CHUNKS, codec.elements)).astype(np.float32)
        for peer in range(N)
    ]


def world(method: Averager, codec: Codec) -> World:
    made = World(N, method, N_CHUNKS)
    for node in made.nodes:
        node.configure(0, Channel(method, codec, N_CHUNKS, 0.05, 0.005, 0.02))
    return made


def averaged(made: World, values: list[Floats], weights: Iterable[float] = (1.0,) * N) -> list[Outcome]:
    for peer, (own, weight) in enumerate(zip(values, weights, strict=True)):
        made.average(peer, own, weight)
    made.run()
    return [outcomes[0] for outcomes in made.outcomes]


def check(outcomes: list[Outcome], values: list[Floats], bad: Iterable[int], atol: float) -> None:
    """Averages are means of those that they name, own values are kept where there is none."""
    for peer, outcome in enumerate(outcomes):
        assert not outcome.expired and outcome.missed == ()
        for chunk in range(N_CHUNKS):
            if not outcome.averaged[chunk]:
                assert chunk in bad and outcome.heard[chunk] == 1 << peer and outcome.weight[chunk] == 1.0
                assert np.array_equal(outcome.mean[chunk], values[peer][chunk], equal_nan=True)
                continue
            who = [other for other in range(N) if int(outcome.heard[chunk]) >> other & 1]
            assert len(who) == N or chunk in bad
            assert outcome.weight[chunk] == len(who)
            expected = np.mean([values[other][chunk].astype(np.float64) for other in who], axis=0)
            np.testing.assert_allclose(outcome.mean[chunk], expected, atol=atol, rtol=1e-2)


def noted(made: World) -> set[tuple[int, int]]:
    """Who noted whom, a few times in the round."""
    notes = [(peer, note.peer) for peer, note in made.notes if note.what == UNSOUND]
    assert len(notes) <= 2 * N * N
    return set(notes)


@METHODS
@CODECS
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_is_missing_and_its_sender_noted(
    method: Averager, codec: Codec, value: float
) -> None:
    values = own_of(codec)
    for chunk in AT:
        values[BAD][chunk, 5] = value
    made = world(method, codec)
    outcomes = averaged(made, values)
    check(outcomes, values, AT, atol=0.05)
    others = [outcome for peer, outcome in enumerate(outcomes) if peer != BAD]
    assert all(np.isfinite(outcome.mean).all() for outcome in others)
    assert {whom for _, whom in noted(made)} >= ({(BAD)} if method is not ring else set())
    assert noted(made)
    if method is not ring:
        assert any(
            not outcome.heard[chunk] >> np.uint64(BAD) & np.uint64(1) for outcome in others for chunk in AT
        )


@METHODS
@CODECS
def test_finite_values_whose_sum_is_not_are_no_average(method: Averager, codec: Codec) -> None:
    """Each peer keeps its own; nobody is told an average that nobody could go on with."""
    values = own_of(codec)
    for own in values:
        own[AT[0]] = 3e38
    made = world(method, codec)
    outcomes = averaged(made, values)
    for outcome in outcomes:
        assert np.isfinite(outcome.mean).all()
    check(outcomes, values, AT[:1], atol=0.05)
    of = {peer for _, peer in noted(made)}
    assert of and of <= set(range(N))


@pytest.mark.parametrize("method", [rps, rps_repair, direct], ids=lambda method: method.name)
def test_a_mean_that_rounds_to_more_than_may_count_is_no_average_and_each_that_gave_is_named(
    method: Averager,
) -> None:
    """What each gave may just count. The sum of four that weigh 7, times 1/28, is the next number up."""
    values = own_of(fp32)
    most = np.nextafter(np.float32(2.0**64), np.float32(0.0))
    for own in values:
        own[AT[0]] = 0.0
        own[AT[0], 5] = most
    assert np.float32(28) * most * (np.float32(1) / np.float32(28)) > most
    made = world(method, fp32)
    outcomes = averaged(made, values, [7.0] * N)
    for outcome, own in zip(outcomes, values, strict=True):
        assert not outcome.averaged[AT[0]] and (np.delete(outcome.averaged, AT[0])).all()
        assert np.array_equal(outcome.mean[AT[0]], own[AT[0]])
    owner = {peer for peer, _ in noted(made)}
    assert len(owner) == 1
    assert {peer for _, peer in noted(made)} == set(range(N))
    assert {note.detail for _, note in made.notes} == {
        "in round 0: what it and others sent has no finite mean, and is no average"
    }


@METHODS
@CODECS
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_huge_finite_value_counts_as_not_finite(method: Averager, codec: Codec, everywhere: bool) -> None:
    """In a mean it would break everybody's model. Its sender takes the others' mean, and is whole again."""
    values = own_of(codec)
    values[BAD][slice(None) if everywhere else AT[0], 5] = 1e30
    made = world(method, codec)
    outcomes = averaged(made, values)
    check(outcomes, values, range(N_CHUNKS) if everywhere else AT, atol=0.05)
    for outcome in outcomes[:BAD]:
        assert np.abs(outcome.mean).max() < 10
    assert noted(made)
    if method is not ring:  # where sums pass through, what comes after is lost, too
        assert {whom for _, whom in noted(made)} == {BAD}
    assert all(outcome.averaged.all() for outcome in outcomes)
    assert np.abs(outcomes[BAD].mean).max() < 10


@METHODS
def test_large_values_below_that_are_averaged_as_they_are(method: Averager) -> None:
    """That they mean nothing cannot be seen here: see ``training.checks``."""
    values = own_of(fp32)
    values[BAD][AT[0], 5] = 1e19
    made = world(method, fp32)
    for outcome in averaged(made, values):
        assert outcome.averaged.all() and (outcome.heard == 0b1111).all()
        assert outcome.mean[AT[0], 5] == pytest.approx(2.5e18)
    assert not noted(made)


def damage(run: Run, stage: int, value: float) -> Run:
    """The same run, with a value in its first chunk that no peer would send."""
    if run.key.stage != stage or not len(run.payload):
        return run
    payload = run.payload.copy()
    payload[0].view("<f4")[0] = value
    return replace(run, payload=payload)


@METHODS
@pytest.mark.parametrize("value", [NAN, INF])
def test_an_average_that_is_not_finite_never_reaches_a_model(method: Averager, value: float) -> None:
    values = own_of(fp32)
    made = world(method, fp32)
    made.carry = lambda source, run: [(0.0, damage(run, GATHER, value) if source == BAD else run)]
    outcomes = averaged(made, values)
    layout = layout_of(N_CHUNKS, N)
    check(
        outcomes,
        values,
        [start for start, size in zip(layout.starts, layout.sizes, strict=True) if size],
        0.05,
    )
    assert all(np.isfinite(outcome.mean).all() for outcome in outcomes)
    assert not all(outcome.averaged.all() for outcome in outcomes)
    assert {whom for _, whom in noted(made)} == {BAD}


@METHODS
@pytest.mark.parametrize("weight", [NAN, INF, -1.0, 2 * WEIGHT_MAX])
@pytest.mark.parametrize("stage", [SCATTER, GATHER])
def test_an_absurd_weight_counts_for_nothing(method: Averager, weight: float, stage: int) -> None:
    values = own_of(fp32)
    made = world(method, fp32)

    def tampered(source: int, run: Run) -> list[tuple[float, Run]]:
        if source == BAD and run.key.stage == stage:
            run = replace(run, weight=np.full_like(run.weight, weight))
        return [(0.0, run)]

    made.carry = tampered
    outcomes = averaged(made, values)
    for peer, outcome in enumerate(outcomes):
        assert np.isfinite(outcome.mean).all() and (outcome.weight <= N).all() and (outcome.weight > 0).all()
        kept = ~outcome.averaged
        assert (outcome.mean[kept] == values[peer][kept]).all()
    assert BAD in {whom for _, whom in noted(made)}


@METHODS
def test_a_tiny_weight_makes_no_infinite_average(method: Averager) -> None:
    values = own_of(fp32)
    outcomes = averaged(world(method, fp32), values, [1e-40] * N)
    for peer, outcome in enumerate(outcomes):
        assert np.isfinite(outcome.mean).all()
        kept = ~outcome.averaged
        assert (outcome.mean[kept] == values[peer][kept]).all()


def test_groups_name_the_sender_by_its_own_number() -> None:
    n = 6
    made = World(n, Moshpit(3), N_CHUNKS)
    for node in made.nodes:
        node.configure(0, Channel(Moshpit(3), fp32, N_CHUNKS, 0.05, 0.005, 0.02))
    for peer in range(n):
        own = np.full((N_CHUNKS, fp32.elements), float(peer), np.float32)
        if peer == 5:
            own[:] = NAN
        made.average(peer, own)
    made.run()
    assert all(np.isfinite(made.outcomes[peer][0].mean).all() for peer in range(5))
    assert {whom for peer, whom in noted(made) if peer != 5} == {5}
