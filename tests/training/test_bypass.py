"""Rounds sent whole where a selection does not pay: who decides, what is measured, what is kept."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from ragtag.codecs.sparse.advice import Choice
from ragtag.codecs.sparse.gather import senders, whole_mark, whole_marks
from ragtag.core.channels import channel_of, topic_of
from ragtag.core.types import Average, Gathered, Noted, Offer, Outcome
from ragtag.training.exchange.bypass import WINDOW, Bypass, Corrected, delivered, read
from ragtag.training.exchange.compress import Compression, TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.training.simulated import SimulatedTransport, TappedCrew, run_peers
from tests.training.test_sparse import flat, loss_of, net, replica, sgd

N = 3
DENSE = channel_of("model/whole")
Times = Callable[[int, int], tuple[float, float]]
"""(peer, windows chosen so far) -> seconds of a whole round, and of one with a selection."""


def steps(model: nn.Module, optimizer: CrewOptimizer, peer: int, until: int, begin: int = 0) -> None:
    for step in range(begin, until):
        loss_of(model, peer, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def estimating(optimizer: CrewOptimizer, peer: int, times: Times) -> Bypass:
    """Have a peer measure what ``times`` says."""
    found = replica(optimizer)._bypass
    assert found is not None

    def estimate() -> Choice:
        dense_s, sparse_s = times(peer, found._chosen)
        return Choice(sparse_s < dense_s, dense_s, sparse_s, 1.0)

    found.estimate = estimate  # type: ignore[method-assign]
    return found


def trained(
    crew: TappedCrew, rounds: int, times: Times, notes: list[Noted] | None = None, **options: object
) -> tuple[list[nn.Sequential], list[CrewOptimizer], list[list[Compression]]]:
    models = [net() for _ in range(crew.n)]
    seen: list[list[Compression]] = [[] for _ in range(crew.n)]
    options = {"average": "gradients", "compress": TopK(ratio=0.05, resync=0)} | options

    def train(transport: SimulatedTransport) -> CrewOptimizer:
        model, me = models[transport.me], transport.me

        def look(_: Outcome) -> None:
            assert optimizer._averaged.compression is not None
            seen[me].append(optimizer._averaged.compression)

        note = notes.append if notes is not None and me == 0 else None
        optimizer = CrewOptimizer(
            sgd(model),
            transport,
            model=model,
            on_outcome=look,
            on_note=note,
            **options,  # type: ignore[arg-type]
        )
        estimating(optimizer, me, times)
        steps(model, optimizer, me, rounds)
        optimizer._averaged.settle()
        return optimizer

    return models, run_peers(crew, train), seen


def dense_rounds(seen: list[Compression]) -> list[int]:
    return [at for at, one in enumerate(seen) if one.dense]


# -- The rounds


def test_the_middle_of_all_peers_times_decides_for_all_at_the_same_round() -> None:
    notes: list[Noted] = []

    def times(peer: int, window: int) -> tuple[float, float]:
        # one peer of three is always of another mind; in its second window the crew finds that all is faster
        return (2.0, 1.0) if (peer == 2) == (window == 1) else (1.0, 2.0)

    crew = TappedCrew(N)
    models, _, seen = trained(crew, 3 * WINDOW, times, notes)
    # the first round measures the link; the second window goes by what was posted in the first one
    expected = [0, *range(2 * WINDOW, 3 * WINDOW)]
    assert [dense_rounds(one) for one in seen] == [expected] * N
    assert {tuple(flat(model).tolist()) for model in models} == {tuple(flat(models[0]).tolist())}
    assert [note.what for note in notes] == ["by-pass", "by-pass ends"]
    assert "1e+03 ms against 2e+03 ms with sampled top-k of 0.05" in notes[0].detail
    whole = [ask for ask in crew.asked if isinstance(ask, Average)]
    assert {ask.channel for ask in whole} == {DENSE}
    assert len(whole) == N * len(expected)


def test_a_selection_is_tried_by_all_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragtag.training.exchange.bypass.TRIALS_MAX", 1.0)
    notes: list[Noted] = []
    models, _, seen = trained(TappedCrew(N), 4 * WINDOW, lambda *_: (1.0, 2.0), notes)
    tried = {2 * WINDOW, 3 * WINDOW}  # once it is long enough ago
    assert [dense_rounds(one) for one in seen] == [[0, *sorted(set(range(WINDOW, 4 * WINDOW)) - tried)]] * N
    assert {tuple(flat(model).tolist()) for model in models} == {tuple(flat(models[0]).tolist())}
    assert [note.what for note in notes] == ["by-pass"], "a try is no change of mind"


def test_a_peer_tells_how_long_each_of_its_rounds_took(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[Bypass, list[tuple[float, float]]] = {}

    def took(self: Bypass, whole: bool, took_s: float) -> None:
        told.setdefault(self, []).append((took_s, self._transport.now_s()))

    monkeypatch.setattr(Bypass, "took", took)
    trained(TappedCrew(2), 12, lambda *_: (2.0, 1.0))
    assert len(told) == 2
    for rounds in told.values():
        assert len(rounds) > 3
        for (_, before_s), (took_s, now_s) in pairwise(rounds):
            assert 0 < took_s <= now_s - before_s


@pytest.mark.parametrize("average", ["gradients", "models"])
def test_a_whole_round_sends_all_that_was_held_back(average: str) -> None:
    """With plain SGD, what was selected and what was sent whole add up to what dense averaging does."""
    options = {"average": average, "compress": TopK(ratio=0.02, values="fp32", resync=0), "buffers": False}
    crew = TappedCrew(N)
    _, optimizers, seen = trained(crew, 2 * WINDOW, lambda *_: (1.0, 2.0), **options)
    assert dense_rounds(seen[0]) == [0, *range(WINDOW, 2 * WINDOW)]
    assert seen[0][10].residual_norm > 0
    for optimizer in optimizers:
        assert not replica(optimizer).feedback.residual.any()
        assert seen[0][-1].captured == seen[0][-1].density == 1.0
        assert seen[0][-1].bytes == seen[0][-1].dense_bytes


@pytest.mark.parametrize("momentum_correction", [0.0, 0.5])
def test_the_sum_of_what_is_applied_is_the_sum_of_what_was_given(momentum_correction: float) -> None:
    compress = TopK(ratio=0.05, values="fp32", resync=0, momentum_correction=momentum_correction)
    given = [np.zeros(0)] * N
    applied = [np.zeros(0)] * N
    models = [net() for _ in range(N)]

    def train(transport: SimulatedTransport) -> CrewOptimizer:
        me, model = transport.me, models[transport.me]
        optimizer = CrewOptimizer(sgd(model), transport, average="gradients", compress=compress, model=model)
        # as if there were noise: each window the other way, and one peer out of step
        estimating(optimizer, me, lambda peer, window: (1.0, 2.0) if window % 2 == 0 else (2.0, 1.0))
        inside = replica(optimizer)
        size = len(inside.bucket.flat)
        given[me], applied[me] = np.zeros(size), np.zeros(size)
        velocity = np.zeros(size)
        real_difference, real_moved = inside._difference, inside._moved

        def difference():  # type: ignore[no-untyped-def]
            vector = real_difference()
            velocity[:] = momentum_correction * velocity + vector
            given[me] += velocity
            return vector

        def moved():  # type: ignore[no-untyped-def]
            mean = real_moved()
            applied[me] += mean
            return mean

        inside._difference, inside._moved = difference, moved  # type: ignore[method-assign]
        steps(model, optimizer, me, 3 * WINDOW + 4)
        return optimizer

    optimizers = run_peers(TappedCrew(N), train)
    if momentum_correction:  # velocities are forgotten where a selection was sent: only replicas can agree
        assert np.array_equal(applied[0], applied[1])
        return
    kept = [replica(o).feedback.residual + replica(o).feedback.pending() for o in optimizers]
    committed = sum(g - k for g, k in zip(given, kept, strict=True)) / N
    for one in applied:
        np.testing.assert_allclose(one, committed, rtol=0, atol=1e-6 * float(np.abs(committed).max()))


def test_a_round_in_which_peers_disagree_comes_to_the_same_sum() -> None:
    """Two of three are for all, one has selected: its selection and the rest of it are in the sum once."""
    models = [net() for _ in range(N)]
    compress = TopK(ratio=0.05, values="fp32", resync=0)
    applied: dict[int, np.ndarray] = {}

    def train(transport: SimulatedTransport) -> CrewOptimizer:
        me, model = transport.me, models[transport.me]
        optimizer = CrewOptimizer(sgd(model), transport, average="gradients", compress=compress, model=model)
        inside, bypass = replica(optimizer), replica(optimizer)._bypass
        assert bypass is not None
        bypass._trial, bypass.on = False, me != 0
        loss_of(model, me, 0).backward()
        optimizer.step()
        applied[me] = inside._mean.copy()
        assert bypass.on, "the one follows the most"
        assert not inside.feedback.residual.any()
        assert optimizer._averaged.compression is not None
        assert optimizer._averaged.compression.dense
        return optimizer

    run_peers(TappedCrew(N), train)
    dense = [net() for _ in range(N)]

    def plainly(transport: SimulatedTransport) -> None:
        model = dense[transport.me]
        optimizer = CrewOptimizer(sgd(model), transport, average="gradients", model=model, buffers=False)
        loss_of(model, transport.me, 0).backward()
        optimizer.step()

    run_peers(TappedCrew(N), plainly)
    for one, other in zip(models, dense, strict=True):
        torch.testing.assert_close(flat(one), flat(other), rtol=1e-5, atol=1e-7)
    assert np.array_equal(applied[0], applied[1])
    assert np.array_equal(applied[0], applied[2])


def test_one_of_three_that_is_for_all_goes_with_the_others_and_keeps_its_gradient() -> None:
    models = [net() for _ in range(N)]

    def train(transport: SimulatedTransport) -> tuple[float, float]:
        me, model = transport.me, models[transport.me]
        compress = TopK(ratio=0.05, values="fp32", resync=0)
        optimizer = CrewOptimizer(sgd(model), transport, average="gradients", compress=compress, model=model)
        inside, bypass = replica(optimizer), replica(optimizer)._bypass
        assert bypass is not None
        bypass._trial, bypass.on = False, me == 2
        loss_of(model, me, 0).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert not bypass.on
        return float(gradient.norm()), float(np.linalg.norm(inside.feedback.residual))

    crew = TappedCrew(N)
    norms = run_peers(crew, train)
    assert not any(isinstance(ask, Average) for ask in crew.asked)
    assert norms[2][1] == pytest.approx(norms[2][0], rel=1e-5), "all of it is kept"
    assert norms[0][1] < norms[0][0]


@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_under_loss_replicas_stay_together(loss: float) -> None:
    def times(_: int, window: int) -> tuple[float, float]:
        return (1.0, 2.0) if window % 2 == 0 else (2.0, 1.0)

    models, optimizers, seen = trained(TappedCrew(4, loss=loss, seed=3), 4 * WINDOW, times)
    assert {len(dense_rounds(one)) for one in seen} == {len(dense_rounds(seen[0]))}
    assert 2 * WINDOW <= len(dense_rounds(seen[0])) < 3 * WINDOW
    scale = float(flat(models[0]).norm())
    assert max(float((flat(m) - flat(models[0])).norm()) for m in models) < 0.01 * scale
    assert all(
        o._averaged.compression is not None and o._averaged.compression.refused == 0 for o in optimizers
    )


def test_false_never_sends_all_and_opens_no_channel_for_it() -> None:
    crew = TappedCrew(2)

    def train(transport: SimulatedTransport) -> None:
        model = net()
        compress = TopK(ratio=0.05, resync=0, bypass=False)
        optimizer = CrewOptimizer(sgd(model), transport, average="gradients", compress=compress, model=model)
        steps(model, optimizer, transport.me, 2 * WINDOW)

    run_peers(crew, train)
    assert all(isinstance(ask, Offer) for ask in crew.asked)
    assert set(crew.schemas) == {channel_of("model"), channel_of("model/replicas")}
    assert TopK(bypass=False).name != TopK().name, "peers must agree on it"
    with pytest.raises(ValueError, match=r"bypass is True"):
        TopK(bypass=True)  # type: ignore[arg-type]


def test_a_crew_of_one_sends_nothing_whole() -> None:
    crew = TappedCrew(1)
    trained(crew, 2 * WINDOW, lambda *_: (1.0, 2.0))
    assert all(isinstance(ask, Offer) for ask in crew.asked)


# -- What is measured


def bypass(crew: TappedCrew, measured: bool = True, name: str = "model") -> Bypass:
    """Peer 0's; the others have one, too, or they would not be there."""
    return bypasses(crew, measured, name)[0]


def bypasses(crew: TappedCrew, measured: bool = True, name: str = "model") -> list[Bypass]:
    from ragtag.core.schema import Schema, TensorSpec

    schema = Schema((TensorSpec("w", (27_200,), "float32"),), "x", "gather", "gradients")
    return [
        Bypass(crew.transport(me), name, schema, selection="top-k", measured=measured) for me in range(crew.n)
    ]


def outcome(gather_s: float, expired: bool = False, heard: tuple[int, ...] = (3,)) -> Outcome:
    chunks = len(heard)
    return Outcome(
        channel=0,
        round=0,
        mean=np.zeros((chunks, 4), np.float32),
        weight=np.ones(chunks, np.float32),
        heard=np.array(heard, np.uint64),
        averaged=np.ones(chunks, np.bool_),
        missed=(),
        waited_for=(),
        started_s=0.0,
        scatter_s=0.0,
        gather_s=gather_s,
        total_s=gather_s,
        expired=expired,
    )


def test_the_times_are_made_of_what_was_measured() -> None:
    one = bypass(TappedCrew(2))
    assert one.message_bytes == 100 * 1088
    assert one.estimate() is None
    for took_s in (0.003, 0.5, 0.001):  # the middle one counts
        one.selected(took_s, 1088)
    one.added(0.002)
    one.sent_whole(one.message_bytes, outcome(0.01, expired=True))
    one.sent_whole(one.message_bytes, outcome(0.0))
    assert one.estimate() is None, "a round that ran out of time says nothing about the link"
    one.sent_whole(one.message_bytes, outcome(0.01))
    found = one.estimate()
    assert found is not None
    assert found.dense_s == pytest.approx(0.02)  # both stages
    # 1088 bytes to the other at the rate at which half of the message went in 10 ms
    assert found.sparse_s == pytest.approx(0.003 + 0.002 + 0.01 * 1088 / (50 * 1088))
    assert found.sparse
    parts = one._by_parts()
    assert parts is not None and found.break_even_bytes_per_s == parts.break_even_bytes_per_s > 0


def test_a_slow_link_gets_selections_and_a_fast_one_all() -> None:
    for gather_s, sparse in ((0.5, True), (0.0005, False)):
        one = bypass(TappedCrew(2))
        one.selected(0.004, 2 * 1088)
        one.added(0.001)
        one.sent_whole(one.message_bytes, outcome(gather_s))
        found = one.estimate()
        assert found is not None
        assert found.sparse == sparse


def corrected(*took: tuple[float, float]) -> Corrected:
    found = Corrected()
    for took_s, estimated_s in took:
        found.took(took_s, estimated_s)
    return found


def test_what_rounds_took_beyond_the_estimate_is_added_and_a_smaller_share_is_a_factor() -> None:
    none = Corrected()
    assert none.correct(0.5, none) == 0.5
    longer = corrected((0.025, 0.003), (0.9, 0.003), (0.025, 0.003))  # the middle one counts
    assert longer.correct(0.003, none) == pytest.approx(0.025)
    assert longer.correct(0.030, none) == pytest.approx(0.052), "the link has become slower, and that only"
    shorter = corrected((4.0, 8.0))
    assert shorter.correct(0.8, none) == pytest.approx(0.4)
    # of a kind that has had no round yet only what is in all rounds is known
    assert none.correct(0.1, longer) == pytest.approx(0.122)
    assert none.correct(0.1, shorter) == pytest.approx(0.1)
    old = corrected(*[(9.0, 1.0)] * 5, *[(2.0, 1.0)] * 5)
    assert old.correct(1.0, none) == pytest.approx(2.0), "five rounds count"


@pytest.mark.parametrize(("sparse_s", "sparse"), [(0.025, False), (0.006, True)])
def test_own_rounds_of_either_kind_decide_where_the_parts_say_otherwise(
    sparse_s: float, sparse: bool
) -> None:
    one = bypass(TappedCrew(2))
    one.took(False, 1.0)
    assert one.estimate() is None, "without the parts there is nothing to correct"
    one.selected(0.001, 1088)
    one.added(0.001)
    one.sent_whole(one.message_bytes, outcome(0.005))
    found = one.estimate()
    assert found is not None
    assert found.sparse
    assert found.dense_s == pytest.approx(0.01)
    assert not one.tried, "so selecting is rehearsed"
    for _ in range(3):
        one.took(False, sparse_s)
    assert one.tried
    alike = one.estimate()
    assert alike is not None
    assert alike.sparse, "what sparse rounds take longer may be in all rounds"
    assert alike.sparse_s == pytest.approx(sparse_s)
    one.took(True, 0.012)
    found = one.estimate()
    assert found is not None
    assert (found.dense_s, found.sparse_s) == pytest.approx((0.012, sparse_s))
    assert found.sparse == sparse


@pytest.mark.parametrize("sparse", [True, False])
def test_the_other_kind_is_tried_again_in_few_rounds(sparse: bool) -> None:
    crew = TappedCrew(2)
    one, other = bypasses(crew)
    times = (0.02, 0.01) if sparse else (0.01, 0.02)
    for each in (one, other):
        each.estimate = lambda: Choice(sparse, *times, 1.0)  # type: ignore[method-assign]
    tried = []
    for round_ in range(1000):
        for each in (one, other):
            if round_ > WINDOW and each.wanted == sparse:
                tried.append(round_)
            each.ended(round_, each.wanted)
    assert len(tried) == 2 * len(set(tried)), "both at once"
    assert 3 <= len(set(tried)) <= 1000 * 0.01 * 0.01 / 0.02 + 1
    assert one.on == (not sparse)


def test_without_a_measurement_the_first_round_is_whole_and_then_one_in_each_window() -> None:
    crew = TappedCrew(2)
    one = bypass(crew, measured=False)
    whole = []
    for round_ in range(3 * WINDOW):
        if one.wanted:
            whole.append(round_)
        one.ended(round_, one.wanted)  # each of them ran out of time
    assert whole == [0, WINDOW, 2 * WINDOW]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"x" * 20,
        struct.pack("<BIdd", 2, 5, 1.0, 1.0),
        struct.pack("<BIdd", 1, 6, 1.0, 1.0),
        struct.pack("<BIdd", 1, 5, math.nan, 1.0),
        struct.pack("<BIdd", 1, 5, 1.0, -1.0),
        struct.pack("<BIdd", 1, 5, math.inf, 1.0),
    ],
)
def test_posts_that_cannot_be_do_not_count(blob: bytes) -> None:
    assert read(blob, 5) is None
    assert read(struct.pack("<BIdd", 1, 5, 2.0, 1.0), 5) == (2.0, 1.0)


def test_each_name_has_a_channel_and_a_topic_of_its_own() -> None:
    crew = TappedCrew(2)
    found = [bypass(crew, name=name) for name in ("a", "b")]
    assert [one._channel for one in found] == [channel_of("a/whole"), channel_of("b/whole")]
    assert [one._topic for one in found] == [topic_of("a/whole"), topic_of("b/whole")]
    assert set(crew.schemas) == {one._channel for one in found}


# -- What became of a vector


def test_what_was_taken_in_is_not_kept_and_what_was_not_is() -> None:
    both, mine, others = 3, 1, 2
    came = replace(outcome(0.1, heard=(both, others, mine)), averaged=np.array([True, True, False]))
    into, kept = delivered(came, 0, 1.0)
    assert into.tolist() == [True, True, True]
    assert kept.tolist() == [False, True, False]
    into, kept = delivered(came, 0, 0.0)
    assert into.tolist() == [True, True, False]
    assert kept.all()
    alone = outcome(0.1, heard=(mine, mine))
    into, kept = delivered(alone, 0, 1.0)
    assert not into.any()
    assert kept.all()


def test_marks_say_who_and_are_no_fragments() -> None:
    rows = np.concatenate([whole_mark(3, 70_000), np.zeros((1, 1088), np.uint8)])
    assert whole_marks(rows).tolist() == [True, False]
    assert senders(rows[:1]) == {3}


def test_a_word_that_did_not_count_is_seen() -> None:
    one = bypass(TappedCrew(3))
    marks = np.concatenate([whole_mark(1, 0), whole_mark(2, 0)])
    ones = np.ones(2, np.float32)
    blocks = np.ones(2, np.bool_)
    found = Gathered(marks, ones, np.zeros(2, np.int64), blocks, ~blocks)
    assert one.agreed(found) == (True, False)
    assert one.on, "it follows the most"


def test_what_decoding_takes_is_of_all_that_came_in_a_round() -> None:
    """Where nothing else takes time, so does a round with a selection."""
    one = bypass(TappedCrew(4))
    one.selected(0.0, 0)
    one.added(0.9)
    one.sent_whole(one.message_bytes, replace(outcome(0.1, heard=(15, 15, 15)), gather_s=1.0))
    found = one.estimate()
    assert found is not None
    assert found.sparse_s == pytest.approx(0.9)
