"""What the papers on stragglers and staleness say, held against the schedules at work.

Basu, Saxena, Panja, Verma, HiPC 2018 (progressive grouping); Zhang, Gupta, Lian, Liu, IJCAI 2016
(n-softsync); Chen et al., 2016 (backup workers); Giladi et al., NeurIPS 2023 (DropCompute).
"""

from __future__ import annotations

import pytest

from ragtag.recipes.grouping.measure import (
    delayed,
    soft_times,
    soften,
    time_of,
    time_of_groups,
    train,
)
from ragtag.recipes.grouping.methods import BACKUP, DROP, PROGRESSIVE, SYNC


@pytest.mark.parametrize(("g", "ratio"), [(1, 4), (2, 1.60), (3, 1.33), (4, 1.23), (5, 1.18), (8, 1.10)])
def test_the_table_of_groups(g: int, ratio: float) -> None:
    """One slow group, delayed 300 %, one shared pool: T(g)/T0, on the library's machines."""
    assert time_of_groups(g, 3.0, 1, 30) == pytest.approx(ratio, rel=0.05)


def test_a_straggler_costs_little_time_and_no_accuracy() -> None:
    """Basu et al.: over 300 % delay in a node ends within 20 %, at no more than 2.5 points. Here 10 %, 1."""
    assert delayed(5.0).slow[0].factor == 6
    calm, slow = train(SYNC, 0.0, 0, 10), train(PROGRESSIVE, 5.0, 0, 10)
    assert slow.took_s <= 1.1 * calm.took_s
    assert calm.accuracy - slow.accuracy <= 0.01


@pytest.mark.parametrize(("n", "steps"), [(1, 40), (5, 40), pytest.param(30, 80, marks=pytest.mark.slow)])
def test_staleness_under_n_softsync_is_about_n(n: int, steps: int) -> None:
    """Zhang et al.: the mean is about n, and P(tau > 2n) < 1e-3; lambda = 30."""
    trial = soft_times(n, steps)
    assert trial.staleness_mean == pytest.approx(n, rel=0.1)
    assert trial.beyond(2 * n) < 1e-3 and sum(trial.staleness.values()) >= 30 * (steps - 5)


def test_only_the_corrected_rate_learns_from_stale_gradients() -> None:
    """Zhang et al.: at n >= 15 a fixed rate does not converge; alpha_0 / tau learns."""
    assert soften(15, True, 0, 4).accuracy > 0.85
    assert soften(15, False, 0, 2).accuracy < 0.5


def test_backup_workers_and_dropcompute_do_not_wait_but_one_group_does() -> None:
    """Chen et al.: the first N count. Giladi et al.: cut at a threshold."""
    steps = 24
    assert time_of(SYNC, steps).settled_s == pytest.approx(4 * steps, rel=0.05)
    for name in (BACKUP, DROP):
        assert time_of(name, steps).settled_s < 1.15 * steps
