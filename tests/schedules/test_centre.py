"""The rules of a centre: backup workers, n-softsync, asynchronous with a discard threshold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.schedules.asynchronous import Asynchronous, threshold
from ragtag.schedules.backup import SYNCHRONOUS, BackupWorkers
from ragtag.schedules.centre import Arrival, Drop, Take, inverse
from ragtag.schedules.softsync import SoftSync

crews = st.integers(2, 64)


def fed(rule, n: int, updates: int, staleness: int = 0) -> list[int]:
    """How many updates each step took."""
    steps, held = [], 0
    for i in range(updates):
        verdict = rule.judge(Arrival(i % n, staleness, held + 1, n))
        if isinstance(verdict, Drop):
            continue
        held += 1
        if verdict.close:
            steps.append(held)
            held = 0
    return steps


@given(crews, st.data())
def test_backup_workers_step_by_the_first_of_a_version(n, data) -> None:
    spare = data.draw(st.integers(0, n - 1))
    assert fed(BackupWorkers(spare), n, 5 * (n - spare)) == [n - spare] * 5
    assert isinstance(BackupWorkers(spare).judge(Arrival(0, 1, 1, n)), Drop)
    assert BackupWorkers(spare).judge(Arrival(0, 0, 1, n)) == Take(1.0, close=n - spare <= 1)
    assert fed(SYNCHRONOUS, n, 3 * n) == [n] * 3
    assert BackupWorkers(spare).barrier


@given(crews, st.data())
def test_softsync_steps_after_a_share_of_the_crew_however_old(n, data) -> None:
    splits, staleness = data.draw(st.integers(1, n)), data.draw(st.integers(0, 200))
    c = n // splits
    assert fed(SoftSync(splits), n, 4 * c, staleness) == [c] * 4
    corrected = SoftSync(splits).judge(Arrival(0, staleness, 1, n))
    plain = SoftSync(splits, corrected=False).judge(Arrival(0, staleness, 1, n))
    assert isinstance(corrected, Take) and corrected.scale == inverse(staleness) == 1 / max(1, staleness)
    assert isinstance(plain, Take) and plain.scale == 1.0


@given(crews, st.integers(1, 100), st.integers(0, 200))
def test_ringmaster_drops_what_has_reached_its_threshold(n, limit, staleness) -> None:
    verdict = Asynchronous(limit).judge(Arrival(0, staleness, 1, n))
    assert verdict == (Drop() if staleness >= limit else Take(1 / n, close=True))
    assert Asynchronous().judge(Arrival(0, staleness, 1, n)) == Take(1 / n, close=True)


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ringmasters_threshold_is_the_ratio_rounded_up(variance, epsilon) -> None:
    r = threshold(variance, epsilon)
    assert r >= 1 and r >= variance / epsilon and (r == 1 or r - 1 < variance / epsilon)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BackupWorkers(-1), "spare is -1"),
        (lambda: BackupWorkers(1.0), "whole number"),
        (lambda: BackupWorkers(4).judge(Arrival(0, 0, 1, 4)), "leaves none to wait for; spare at most 3"),
        (lambda: SoftSync(0), "n-softsync: n is 0"),
        (lambda: SoftSync(5).judge(Arrival(0, 0, 1, 4)), "more than the 4 peers"),
        (lambda: Asynchronous(0), "discard threshold is 0"),
        (lambda: Asynchronous(True), "discard threshold is True"),
        (lambda: threshold(-1.0, 1.0), "variance -1"),
        (lambda: threshold(1.0, 0.0), "epsilon 0"),
        (lambda: threshold(math.nan, 1.0), "nan"),
        (lambda: Arrival(0, -1, 1, 4), "staleness"),
        (lambda: Arrival(0, 0, 0, 4), "held"),
    ],
)
def test_bad_input_says_what_to_do(make, says) -> None:
    with pytest.raises(ValueError, match=says):
        make()
