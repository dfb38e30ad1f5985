"""Numbers about RPS (Yu et al., ICML 2019): the closed forms, and what the real machines come to."""

import pytest

from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.rps.theory import Closed, difference, line, mixing, slope, steady_disagreement

TABLE = {  # n = 16: alpha1, alpha2
    0.01: (0.0100, 0.00124),
    0.05: (0.0502, 0.00597),
    0.1: (0.1005, 0.01136),
    0.2: (0.2010, 0.02037),
    0.4: (0.4028, 0.03137),
}


@pytest.mark.parametrize("p", TABLE)
def test_the_closed_forms_give_the_alpha_table(p: float) -> None:
    closed = Closed(16, p)
    assert (round(closed.alpha1, 4), round(closed.alpha2, 5)) == TABLE[p]


@pytest.mark.parametrize(("n", "p", "steady"), [(8, 0.1, 0.0857), (16, 0.1, 0.0978), (16, 0.4, 0.591)])
def test_the_closed_forms_give_the_steady_disagreement(n: int, p: float, steady: float) -> None:
    assert Closed(n, p).steady == pytest.approx(steady, rel=1e-3)


def test_alpha2_is_about_2_p_q_over_n_and_falls_as_1_over_n() -> None:
    ns = (4, 8, 16, 32, 64)
    assert Closed(64, 0.01).alpha2 == pytest.approx(2 * 0.01 * 0.99 / 64, rel=0.05)
    assert slope(ns, [Closed(n, 0.1).alpha2 for n in ns]) == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_the_machines_have_the_tables_mixing_matrix(p: float) -> None:
    found = mixing(16, line(p), method=rps, rounds=8, chunks_per_block=16, seed=1)
    for e, expected in zip((found.alpha1, found.alpha2), TABLE[p], strict=True):
        assert abs(e.value - expected) < 4 * e.error and e.error < 0.04 * expected
    kept = p * 15 / 16
    assert abs(found.kept.value - kept) < 4 * found.kept.error


def test_with_one_chunk_per_block_the_datagram_is_the_papers_block() -> None:
    found = mixing(8, line(0.2), method=rps, rounds=60, chunks_per_block=1, seed=1)
    closed = Closed(8, 0.2)
    assert abs(found.alpha1.value - closed.alpha1) < 4 * found.alpha1.error < 0.2 * closed.alpha1
    assert abs(found.alpha2.value - closed.alpha2) < 4 * found.alpha2.error < 0.2 * closed.alpha2


def test_disagreement_under_unit_noise_settles_where_beta_says() -> None:
    e = steady_disagreement(8, line(0.1), method=rps, rounds=100, chunks_per_block=8, seed=1)
    assert e.value == pytest.approx(Closed(8, 0.1).steady, rel=0.04) and e.error < 0.002


def test_without_loss_rps_is_all_reduce() -> None:
    for other in (direct, ring):
        assert difference(rps, other, n=16, n_chunks=32, seed=1) < 1e-6
