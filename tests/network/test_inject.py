"""Injected faults: what they do, from named streams, and in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core.faults import BurstLoss, Faults, Freeze, Loss, LossStream, OneWay, Partition, Window
from ragtag.core.types import MessageKey, Run
from ragtag.network.link.inject import HELD_BYTES_MAX, Held, Injector


def a_run(dest: int, total: int, round_: int = 0) -> Run:
    payload = np.zeros((total, 8), np.uint8)
    weight, heard = np.ones(total, np.float32), np.zeros(total, np.uint64)
    return Run(dest, MessageKey(0, round_, 0, 0), 0, total, payload, weight, heard)


def test_nothing_is_injected_unless_asked_for() -> None:
    injector = Injector(Faults(), 1, 0)
    assert not injector.delays
    assert injector.draw(a_run(1, 50)) is None
    assert not any(injector.answer_lost(1) for _ in range(100))
    assert not injector.marker_lost(1, MessageKey(0, 0, 0, 0), 0)
    assert not injector.cut(1, 5.0)
    assert not injector.duplicated()
    assert injector.due_s(5.0, 10_000) == 5.0
    assert injector.frozen_until_s(5.0) == 5.0


@pytest.mark.parametrize("loss", [Loss(0.2), BurstLoss(0.05, 0.2)], ids=["independent", "bursts"])
def test_the_same_chunks_are_lost_as_in_a_simulated_world(loss: Loss | BurstLoss) -> None:
    faults = Faults(loss=loss)
    injector, world = Injector(faults, 9, 2), LossStream(faults, 9)
    runs = [a_run(dest, 300, round_) for round_ in range(3) for dest in (0, 1)]
    for run in [*runs, runs[0]]:  # the last one again: a repair draws anew
        mask, expected = injector.draw(run), world.draw(2, run.peer, run.key, 300)
        assert mask is not None
        assert np.array_equal(mask, expected)
        assert 0 < mask.sum() < 300


def test_losses_depend_on_seed_sender_receiver_message_and_attempt() -> None:
    faults = Faults(loss=Loss(0.5))
    base = Injector(faults, 1, 0).draw(a_run(1, 200))
    assert base is not None
    others = [
        Injector(faults, 2, 0).draw(a_run(1, 200)),
        Injector(faults, 1, 2).draw(a_run(1, 200)),
        Injector(faults, 1, 0).draw(a_run(2, 200)),
        Injector(faults, 1, 0).draw(a_run(1, 200, 1)),
    ]
    again = Injector(faults, 1, 0)
    assert np.array_equal(again.draw(a_run(1, 200)), base)
    others.append(again.draw(a_run(1, 200)))
    assert not any(np.array_equal(base, other) for other in others)


def test_answers_and_marks_get_lost_at_the_same_rate() -> None:
    injector = Injector(Faults(loss=Loss(0.3)), 1, 0)
    answers = np.mean([injector.answer_lost(1) for _ in range(4000)])
    marks = np.mean([injector.marker_lost(1, MessageKey(0, r, 0, 0), 0) for r in range(4000)])
    copies = np.mean([injector.marker_lost(1, MessageKey(0, 0, 0, 0), r) for r in range(4000)])
    for rate in (answers, marks, copies):
        assert rate == pytest.approx(0.3, abs=0.03)  # 4 standard deviations
    assert not any(Injector(Faults(loss=Loss(0.0)), 1, 0).answer_lost(1) for _ in range(100))


def test_a_line_delays_queues_jitters_and_reorders() -> None:
    assert Injector(Faults(latency_s=0.1), 1, 0).due_s(5.0, 1000) == pytest.approx(5.1)
    line = Injector(Faults(rate_bytes_per_s=1000.0, latency_s=1.0), 1, 0)
    assert [line.due_s(5.0, 500) for _ in range(3)] == pytest.approx([6.5, 7.0, 7.5])
    assert line.due_s(100.0, 500) == pytest.approx(101.5), "an idle line saves nothing up"
    jitter = Injector(Faults(jitter_s=0.02), 1, 0)
    added = np.array([jitter.due_s(5.0, 1) - 5.0 for _ in range(4000)])
    assert added.min() >= 0
    assert added.mean() == pytest.approx(0.02, rel=0.1)  # exponential: its deviation is its mean
    assert added.std() == pytest.approx(0.02, rel=0.15)
    late = Injector(Faults(reorder=0.25, reorder_s=3.0), 1, 0)
    dues = [late.due_s(5.0, 1) for _ in range(4000)]
    assert set(dues) == {5.0, 8.0}
    assert np.mean(np.array(dues) > 5.0) == pytest.approx(0.25, abs=0.03)
    twice = Injector(Faults(duplicate=0.25), 1, 0)
    assert np.mean([twice.duplicated() for _ in range(4000)]) == pytest.approx(0.25, abs=0.03)
    for injector in (jitter, late, line):
        assert injector.delays


def test_a_seed_repeats_what_it_did() -> None:
    faults = Faults(jitter_s=0.02, duplicate=0.5, loss=Loss(0.5))
    runs = []
    for seed in (3, 3, 4):
        injector = Injector(faults, seed, 0)
        runs.append(
            [(injector.due_s(0.0, 1), injector.duplicated(), injector.answer_lost(1)) for _ in range(50)]
        )
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_one_way_cuts_and_partitions_open_and_close() -> None:
    window = Window(10.0, 20.0)
    faults = Faults(one_way=(OneWay(0, 1, window),), partitions=(Partition(frozenset({0, 2}), window),))
    zero, one = Injector(faults, 1, 0), Injector(faults, 1, 1)
    assert [zero.cut(1, t) for t in (9.9, 10.0, 19.9, 20.0)] == [False, True, True, False]
    assert not zero.cut(2, 15.0)
    assert one.cut(0, 15.0)
    assert not one.cut(3, 15.0)


def test_a_freeze_says_when_it_ends() -> None:
    faults = Faults(freezes=(Freeze(0, 10.0, 5.0), Freeze(0, 12.0, 1.0), Freeze(1, 0.0, 99.0)))
    injector = Injector(faults, 1, 0)
    assert [injector.frozen_until_s(t) for t in (9.0, 10.0, 12.5, 14.9, 15.0)] == [
        9.0,
        15.0,
        15.0,
        15.0,
        15.0,
    ]


def test_what_is_held_comes_out_by_time_and_then_by_order() -> None:
    held = Held()
    held.push(3.0, 1, b"late")
    held.push(1.0, 1, b"first")
    held.push(1.0, 2, b"second")
    assert held.pop_due(0.5) is None
    assert [held.pop_due(2.0) for _ in range(3)] == [(1, b"first"), (2, b"second"), None]
    assert held.held_bytes == 4
    assert held.pop_due(3.0) == (1, b"late")
    assert held.held_bytes == 0


def test_what_is_held_is_bounded_in_bytes() -> None:
    held = Held()
    table = np.zeros((1024, 1024), np.uint8)
    fits = HELD_BYTES_MAX // table.nbytes
    for _ in range(fits + 3):
        held.push(1.0, 1, table)
    assert held.held_bytes == fits * table.nbytes == HELD_BYTES_MAX
    assert held.overflowed == 3
    held.push(1.0, 1, b"x")
    assert held.overflowed == 4
    assert held.pop_due(1.0) is not None
    held.push(1.0, 1, b"x")
    assert held.overflowed == 4
