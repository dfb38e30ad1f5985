"""What the papers on stragglers and staleness say, held against the schedules at work.

Basu, Saxena, Panja, Verma, HiPC 2018 (progressive grouping); Zhang, Gupta, Lian, Liu, IJCAI 2016
(n-softsync); Chen et al., 2016 (backup workers); Giladi et al., NeurIPS 2023 (DropCompute); Ho et al.,
NeurIPS 2013 (SSP).
"""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.recipes.grouping.measure import (
    PROGRESSIVE,
    SYNC,
    delayed,
    soft_times,
    soften,
    time_of_groups,
    train,
)


@pytest.mark.parametrize(("g", "ratio"), [(1, 4), (2, 1.60), (3, 1.33), (4, 1.23), (5, 1.18), (8, 1.10)])
def test_the_table_of_groups(g: int, ratio: float) -> None:
    """One slow group, delayed 300 %, one shared pool: T(g)/T0."""
    assert time_of_groups(g, 3.0, 1, 120) == pytest.approx(ratio, rel=0.05)


def test_a_straggler_costs_little_time_and_no_accuracy() -> None:
    """Basu et al.: over 300 % delay in a node ends within 20 %, at no more than 2.5 points. Here 10 %, 1."""
    calm = [train(SYNC, delayed(0.0), seed, 15) for seed in (0, 1)]
    for delay in (3.0, 5.0):
        slow = [train(PROGRESSIVE, delayed(delay), seed, 15) for seed in (0, 1)]
        for a, b in zip(slow, calm, strict=True):
            assert a.took_s <= 1.1 * b.took_s
        assert np.mean([b.accuracy - a.accuracy for a, b in zip(slow, calm, strict=True)]) <= 0.01


@pytest.mark.parametrize("n", [1, 2, 5, 15, 30])
def test_staleness_under_n_softsync_is_about_n(n: int) -> None:
    """Zhang et al.: the mean is about n, and P(tau > 2n) < 1e-3; lambda = 30."""
    trial = soft_times(n, 400)
    assert trial.staleness_mean == pytest.approx(n, rel=0.1)
    assert trial.beyond(2 * n) < 1e-3 and sum(trial.staleness.values()) >= 10_000


def test_only_the_corrected_rate_learns_from_stale_gradients() -> None:
    """Zhang et al.: at n >= 15 a fixed rate does not converge; alpha_0 / tau is as good as hard sync."""
    hard = soften(0, False, 0, 20)
    assert soften(15, True, 0, 20).accuracy >= hard.accuracy - 0.01
    assert soften(15, False, 0, 20).accuracy < 0.5 < 0.9 < hard.accuracy


def test_backup_workers_and_dropcompute_do_not_wait_but_ssp_does() -> None:
    """Chen et al.: the first N count. Giladi et al.: cut at a threshold. Ho et al.: the slowest decides."""
    calm = train(SYNC, delayed(0.0), 0, 4).took_s
    slow = {
        name: train(name, delayed(5.0), 0, 4).took_s / calm
        for name in (SYNC, "backup workers, 1 spare", "SSP, bound 4")
    }
    assert slow[SYNC] > 5 and slow["backup workers, 1 spare"] < 1.15 and slow["SSP, bound 4"] > 4
    cut = train("DropCompute, 8 micro-batches", delayed(5.0), 0, 4)
    assert cut.took_s - cut.notes[0][0] < 1.15 * calm  # once its threshold is measured
