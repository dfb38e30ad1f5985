import itertools
import math

import numpy as np
import pytest

from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.rps.theory import Closed, Estimate, bursts, fixed_owner_rps, line, mixing, slope


def _enumerated(n: int, p: float) -> tuple[float, float, float]:
    """alpha1, alpha2 and the owner's weight by trying every pattern of loss of one block."""
    squares = sums = owner = 0.0
    for pattern in itertools.product((0, 1), repeat=2 * (n - 1)):
        chance = math.prod(p if lost else 1 - p for lost in pattern)
        arrived = [0, *(i for i in range(1, n) if not pattern[i - 1])]
        average = np.zeros(n)
        average[arrived] = 1 / len(arrived)
        w = np.eye(n)
        for i in [0, *(i for i in range(1, n) if not pattern[n - 2 + i])]:
            w[i] = average
        squares += chance * np.square(w).sum()
        sums += chance * np.square(w.sum(0)).sum()
        owner += chance * w.sum(0)[0]
    return (squares - 1) / (n - 1), (sums / n - 1) / (n - 1), owner


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.4])
def test_closed_forms_equal_the_sum_over_all_patterns_of_loss(n: int, p: float) -> None:
    closed = Closed(n, p)
    assert (closed.alpha1, closed.alpha2, closed.owner_weight) == pytest.approx(_enumerated(n, p), rel=1e-12)


def test_without_loss_one_round_agrees_on_the_mean() -> None:
    closed = Closed(16, 0.0)
    assert closed.alpha1 == pytest.approx(0) and closed.alpha2 == pytest.approx(0)
    found = mixing(5, line(0.0), method=rps, rounds=2, chunks_per_block=1, seed=1)
    assert found.alpha1.value == pytest.approx(0, abs=1e-6) and found.kept.value == 0.0
    assert found.own.value == pytest.approx(1, abs=1e-6)


def test_fixed_owners_weigh_more_and_rotating_ones_do_not() -> None:
    p, n = 0.5, 4
    for method, expected in (
        (at_once("fixed", fixed_owner_rps), Closed(n, p).owner_weight),
        (rps, 1.0),
    ):
        own = mixing(n, line(p), method=method, rounds=120, chunks_per_block=8, seed=2).own
        assert abs(own.value - expected) < 4 * own.error < 0.08
    assert Closed(n, p).owner_weight > 1.15


def test_an_estimate_has_the_standard_error_of_its_mean() -> None:
    e = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert e.value == 2.5 and e.error == pytest.approx(math.sqrt(5 / 3) / 2)


def test_slope_of_a_power() -> None:
    assert slope([4, 8, 16], [4**-1.5, 8**-1.5, 16**-1.5]) == pytest.approx(-1.5)


def test_bursts_have_the_share_and_length_asked_for() -> None:
    loss = bursts(0.1, 8.0).loss
    assert loss is not None and loss.p == pytest.approx(0.1)
    lost = loss.lost(7, 200_000)
    lengths = np.diff(np.flatnonzero(np.diff(lost.astype(int), prepend=0, append=0)))[::2]
    assert lost.mean() == pytest.approx(0.1, abs=0.01) and lengths.mean() == pytest.approx(8, rel=0.05)
