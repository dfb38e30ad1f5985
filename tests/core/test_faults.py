"""Faults: rates and bursts as theory says, the same losses in any order, bad values refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core import seed
from ragtag.core.faults import (
    BurstLoss,
    Crash,
    Faults,
    Freeze,
    Loss,
    LossStream,
    OneWay,
    Partition,
    Slow,
    Window,
)
from ragtag.core.types import Bools, MessageKey

N = 200_000


def drawn(loss: Loss | BurstLoss, n: int = N, name: str = "test") -> Bools:
    return loss.lost(seed.stream_key(1, name), n)


def bursts(lost: Bools) -> list[int]:
    """Lengths of the runs of losses."""
    edges = np.flatnonzero(np.diff(lost.astype(np.int8), prepend=0, append=0))
    return (edges[1::2] - edges[::2]).tolist()


# -- Independent loss


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_independent_loss_has_its_rate(p: float) -> None:
    assert drawn(Loss(p)).mean() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / N))


def test_loss_of_none_and_of_all() -> None:
    assert not drawn(Loss(0.0)).any()
    assert drawn(Loss(1.0)).all()


def test_independent_losses_come_in_geometric_bursts() -> None:
    assert np.mean(bursts(drawn(Loss(0.2)))) == pytest.approx(1 / 0.8, rel=0.02)


# -- Gilbert-Elliott


@pytest.mark.parametrize(
    "loss",
    [
        BurstLoss(enter=0.01, leave=0.2),
        BurstLoss(enter=0.05, leave=0.5),
        BurstLoss(enter=0.02, leave=0.1, good=0.01, bad=0.6),
        BurstLoss(enter=0.3, leave=0.3, good=0.0, bad=0.2),
    ],
)
def test_burst_loss_has_its_stationary_rate(loss: BurstLoss) -> None:
    """Autocorrelation decays by 1 - enter - leave, so the mean of N has about this deviation."""
    decay = 1 - loss.enter - loss.leave
    deviation = math.sqrt(loss.p * (1 - loss.p) / N * (1 + decay) / (1 - decay))
    assert drawn(loss).mean() == pytest.approx(loss.p, abs=4 * deviation)


def test_the_stationary_rate_is_the_textbooks() -> None:
    assert BurstLoss(enter=0.01, leave=0.19).p == pytest.approx(0.05)
    assert BurstLoss(enter=0.1, leave=0.3, good=0.02, bad=0.5).p == pytest.approx(0.25 * 0.5 + 0.75 * 0.02)


@pytest.mark.parametrize(("enter", "leave"), [(0.01, 0.1), (0.02, 0.5), (0.1, 0.25)])
def test_bursts_last_as_long_as_the_bad_state(enter: float, leave: float) -> None:
    """With good = 0 and bad = 1 a burst is a stay in the bad state: geometric, mean 1/leave."""
    lengths = bursts(drawn(BurstLoss(enter, leave)))
    deviation = math.sqrt(1 - leave) / leave / math.sqrt(len(lengths))
    assert np.mean(lengths) == pytest.approx(1 / leave, abs=4 * deviation)


def test_a_message_starts_in_the_stationary_state() -> None:
    """Short messages lose as much as long ones: no message starts with a fresh, good line."""
    loss = BurstLoss(enter=0.02, leave=0.1)
    first = [loss.lost(seed.stream_key(1, "messages", i), 3) for i in range(20_000)]
    # the three chunks of a message are nearly one sample: the deviation of 20,000 of them
    deviation = math.sqrt(loss.p * (1 - loss.p) / 20_000)
    assert np.mean(first) == pytest.approx(loss.p, abs=4 * deviation)


@given(
    st.tuples(*[st.floats(0, 1)] * 4).filter(lambda p: p[0] + p[1] > 0),
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
)
def test_any_chain_gives_a_bool_for_each_datagram(
    p: tuple[float, float, float, float], key: int, n: int
) -> None:
    lost = BurstLoss(*p).lost(key, n)
    assert lost.shape == (n,)
    assert lost.dtype == np.bool_
    assert np.array_equal(lost, BurstLoss(*p).lost(key, n))


def reference_chain(loss: BurstLoss, key: int, n: int) -> list[bool]:
    """Gilbert-Elliott step by step, from the same draws."""
    moves = seed.uniforms(key, n + 1)
    draws = seed.uniforms(seed.mix(key ^ 0x6C6F7373), n)
    bad = moves[n] < loss.enter / (loss.enter + loss.leave)
    lost = []
    for i in range(n):
        lost.append(bool(draws[i] < (loss.bad if bad else loss.good)))
        if moves[i] < (loss.leave if bad else loss.enter):
            bad = not bad
    return lost


@given(
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 200),
)
def test_the_fast_chain_is_the_plain_one(
    enter: float, leave: float, good: float, bad: float, key: int, n: int
) -> None:
    loss = BurstLoss(enter, leave, good, bad)
    assert loss.lost(key, n).tolist() == reference_chain(loss, key, n)


@given(st.integers(0, 2**64 - 1), st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_one_chunk_is_lost_as_in_a_message_of_one(
    key: int, enter: float, leave: float, good: float, bad: float
) -> None:
    for loss in (Loss(good), BurstLoss(enter, leave, good, bad)):
        assert loss.lost_one(key) == loss.lost(key, 1)[0]


# -- Which chunks of which message


MESSAGES = [
    (source, dest, MessageKey(0, round_, stage, block))
    for source in range(3)
    for dest in range(3)
    if source != dest
    for round_ in range(2)
    for stage in range(2)
    for block in range(2)
]


def test_losses_do_not_depend_on_the_order_of_events() -> None:
    shuffled = random.Random(4).sample(MESSAGES, len(MESSAGES))
    one, two = (LossStream(Faults(loss=Loss(0.3)), 9) for _ in range(2))
    in_order = {message: one.draw(*message, 50) for message in MESSAGES}
    out_of_order = {message: two.draw(*message, 50) for message in shuffled}
    for message in MESSAGES:
        assert np.array_equal(in_order[message], out_of_order[message])


def test_every_message_has_losses_of_its_own() -> None:
    stream = LossStream(Faults(loss=Loss(0.5)), 9)
    assert len({stream.draw(*message, 64).tobytes() for message in MESSAGES}) == len(MESSAGES)  # type: ignore[union-attr]


def test_each_attempt_draws_anew_and_repeats_with_the_seed() -> None:
    def attempts(seed_: int) -> list[bytes]:
        stream = LossStream(Faults(loss=Loss(0.5)), seed_)
        masks = [stream.draw(*MESSAGES[0], 64) for _ in range(5)]
        return [mask.tobytes() for mask in masks if mask is not None]

    assert len(set(attempts(1))) == 5
    assert attempts(1) == attempts(1)
    assert attempts(1) != attempts(2)


def test_a_drawn_mask_says_what_gets_through() -> None:
    through = [LossStream(Faults(loss=Loss(0.1)), s).draw(*MESSAGES[0], 1000) for s in range(20)]
    assert np.mean(through) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 20_000))


def test_messages_of_one_chunk_are_lost_at_the_same_rate() -> None:
    stream = LossStream(Faults(loss=Loss(0.3)), 5)
    drawn_ = [stream.draw(0, 1, MessageKey(0, r, 0, 0), 1) for r in range(10_000)]
    assert all(mask is None or mask.tolist() == [False] for mask in drawn_)
    lost = np.mean([mask is not None for mask in drawn_])
    assert lost == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 10_000))


def test_a_perfect_line_draws_nothing() -> None:
    stream = LossStream(Faults(), 1)
    assert stream.draw(*MESSAGES[0], 10) is None
    assert not stream.marker_lost(*MESSAGES[0], 0)


def test_markers_are_lost_at_the_lines_rate_each_copy_by_itself() -> None:
    stream = LossStream(Faults(loss=Loss(0.2)), 3)
    keys = [MessageKey(0, r, 0, 0) for r in range(5000)]
    copies = np.array([[stream.marker_lost(0, 1, key, repeat) for repeat in range(2)] for key in keys])
    assert copies.mean() == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / 10_000))
    assert copies.all(axis=1).mean() == pytest.approx(0.04, abs=4 * math.sqrt(0.04 * 0.96 / 5000))


def test_the_memory_of_attempts_is_bounded() -> None:
    """What was forgotten starts again from its first attempt; nothing grows."""
    stream = LossStream(Faults(loss=Loss(0.5)), 1, attempts_max=4)
    first = stream.draw(0, 1, MessageKey(0, 0, 0, 0), 64)
    for round_ in range(1, 10):
        stream.draw(0, 1, MessageKey(0, round_, 0, 0), 64)
    assert np.array_equal(first, stream.draw(0, 1, MessageKey(0, 0, 0, 0), 64))


# -- Who, and when


def test_windows_are_half_open() -> None:
    window = Window(1.0, 2.0)
    assert [window.covers(t) for t in (0.999, 1.0, 1.999, 2.0)] == [False, True, True, False]
    assert Window().covers(1e9)


def test_one_way_loss_cuts_one_way() -> None:
    faults = Faults(one_way=(OneWay(0, 1, Window(1.0, 2.0)),))
    assert faults.cut(0, 1, 1.5)
    assert not faults.cut(1, 0, 1.5)
    assert not faults.cut(0, 2, 1.5)
    assert not faults.cut(0, 1, 2.5)


def test_a_partition_cuts_between_its_sides_only() -> None:
    faults = Faults(partitions=(Partition(frozenset({0, 1}), Window(1.0, 2.0)),))
    cut = {(a, b) for a in range(4) for b in range(4) if faults.cut(a, b, 1.0)}
    assert cut == {(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)}
    assert not faults.cut(0, 2, 2.0)


def test_slowdowns_multiply() -> None:
    faults = Faults(slow=(Slow(1, 2.0), Slow(1, 3.0, Window(5.0, 6.0))))
    assert faults.slowdown(1, 0.0) == 2.0
    assert faults.slowdown(1, 5.0) == 6.0
    assert faults.slowdown(0, 5.0) == 1.0


def test_healing_takes_every_fault_but_death_off_the_line() -> None:
    sick = Faults(
        loss=Loss(0.5),
        latency_s=0.01,
        rate_bytes_per_s=1e6,
        duplicate=0.1,
        reorder=0.1,
        one_way=(OneWay(0, 1),),
        partitions=(Partition(frozenset({0}), Window()),),
        crashes=(Crash(2, 1.0),),
        freezes=(Freeze(1, 1.0, 1.0),),
        slow=(Slow(1, 2.0),),
    )
    assert sick.healed() == Faults(latency_s=0.01, rate_bytes_per_s=1e6, crashes=(Crash(2, 1.0),))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Loss(1.1), "loss is 1.1"),
        (lambda: Loss(float("nan")), "loss is nan"),
        (lambda: Loss(-0.1), "a probability lies between 0 and 1"),
        (lambda: BurstLoss(enter=2.0, leave=0.5), "burst enter is 2.0"),
        (lambda: BurstLoss(enter=0.1, leave=0.5, good=-1.0), "burst good is -1.0"),
        (lambda: BurstLoss(enter=0.1, leave=0.5, bad=7.0), "burst bad is 7.0"),
        (lambda: BurstLoss(enter=0.0, leave=0.0), "use Loss"),
        (lambda: Faults(duplicate=1.5), "duplicate is 1.5"),
        (lambda: Faults(reorder=-0.5), "reorder is -0.5"),
        (lambda: Faults(latency_s=-1.0), "latency_s is -1.0"),
        (lambda: Faults(jitter_s=float("nan")), "jitter_s is nan"),
        (lambda: Faults(reorder_s=-1.0), "reorder_s is -1.0"),
        (lambda: Faults(rate_bytes_per_s=0.0), "must be above 0"),
        (lambda: Faults(queue_bytes=-1.0), "must be above 0"),
    ],
)
def test_bad_values_are_refused_by_name(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()
