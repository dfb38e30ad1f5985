"""Deadlines: a quantile with head-room, longer after misses, corrected by what comes late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.deadline import Deadline

TIMES = st.floats(1e-4, 100.0)


def with_history(*took_s: float, **options: float) -> Deadline:
    deadline = Deadline(1.0, **options)  # type: ignore[arg-type]
    for sample_s in took_s:
        deadline.completed(sample_s)
    return deadline


def test_without_history_the_probe_counts() -> None:
    assert Deadline(0.2).budget_s() == pytest.approx(0.3)
    assert Deadline(0.2, headroom=4.0).budget_s() == pytest.approx(0.8)


@pytest.mark.parametrize("probe_s", [0.0, -1.0, float("nan")])
def test_a_probe_of_nothing_is_refused(probe_s: float) -> None:
    with pytest.raises(ValueError, match="probe measured"):
        Deadline(probe_s)


def test_the_quantile_of_recent_completions() -> None:
    deadline = with_history(*(i / 100 for i in range(1, 21)))
    assert deadline.budget_s() == pytest.approx(1.5 * 0.19)  # 18 of 20 samples lie below .19
    assert with_history(0.1).budget_s() == pytest.approx(0.15)


def test_the_longest_of_recent_completions() -> None:
    deadline = Deadline(1.0, window=3)
    assert deadline.longest_s() == 1.0
    for took_s in (5.0, 2.0, 3.0, 1.0):
        deadline.completed(took_s)
    assert deadline.longest_s() == 3.0


def test_one_straggler_in_ten_does_not_set_the_deadline() -> None:
    assert with_history(*[0.1] * 30, 5.0, 5.0).budget_s() == pytest.approx(0.15)


def test_what_is_old_is_forgotten() -> None:
    deadline = with_history(*[9.0] * 32, *[0.1] * 32)
    assert deadline.budget_s() == pytest.approx(0.15)


def test_a_miss_lengthens_and_a_completion_resets() -> None:
    deadline = with_history(*[0.1] * 20)
    waits = []
    for _ in range(6):
        waits.append(deadline.budget_s())
        deadline.missed()
    assert waits == pytest.approx([0.15, 0.225, 0.225, 0.225, 0.225, 0.225])  # one step
    deadline.completed(0.1)
    assert deadline.budget_s() == pytest.approx(0.15)


def test_a_miss_lengthens_the_probe_too() -> None:
    deadline = Deadline(0.1)
    deadline.missed()
    assert deadline.budget_s() == pytest.approx(0.225)


def test_a_late_completion_corrects_a_deadline_that_was_too_short() -> None:
    """A line that became ten times slower is followed although every round is cut off."""
    deadline = with_history(*[0.1] * 32)
    rounds = 0
    while deadline.budget_s() < 1.0:
        deadline.missed()
        deadline.late(1.0)
        rounds += 1
        assert rounds < 32
    assert rounds == 12, "three doublings; each takes the four samples that move nine tenths of 32"


def test_one_late_straggler_teaches_at_most_twice_what_is_typical() -> None:
    deadline = with_history(0.1)
    deadline.late(1000.0)
    assert deadline.budget_s() == pytest.approx(1.5 * 2 * 0.1)


def test_the_floor_holds_before_and_after_history() -> None:
    assert Deadline(0.001, floor_s=0.05).budget_s() == 0.05
    assert with_history(0.001, floor_s=0.05).budget_s() == 0.05


@given(st.lists(TIMES, min_size=1, max_size=80), st.integers(0, 20))
def test_bounds(samples: list[float], misses: int) -> None:
    """Whatever happened, a deadline lies between recent samples, with head-room and back-off."""
    deadline = with_history(*samples)
    for _ in range(misses):
        deadline.missed()
    recent = samples[-32:]
    assert 1.5 * min(recent) * 0.999 <= deadline.budget_s() <= 4.0 * 1.5 * max(recent) * 1.001


@given(st.lists(st.tuples(st.sampled_from(["completed", "late", "missed"]), TIMES), max_size=60))
def test_a_deadline_is_always_positive_and_never_grows_without_bound(events: list[tuple[str, float]]) -> None:
    deadline = Deadline(0.01)
    longest = 0.01
    for what, took_s in events:
        before = deadline.budget_s()
        if what == "missed":
            deadline.missed()
            assert deadline.budget_s() <= 1.5 * before * 1.001
        else:
            getattr(deadline, what)(took_s)
            longest = max(longest, took_s)
        assert 0 < deadline.budget_s() <= 4.0 * 1.5 * longest * 1.001
