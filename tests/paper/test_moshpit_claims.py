"""What the Moshpit paper says, held against the machines in a simulated world.

"Moshpit SGD: Communication-Efficient Decentralized Training on Heterogeneous Unreliable Devices", Ryabinin,
Gorbunov, Plokhotnyuk, Pekhimenko, NeurIPS 2021 (arXiv 2103.03239). Each test names its claim, in
our words but for what stands in quotation marks.
"""

from __future__ import annotations

import numpy as np
import pytest

from ragtag.core import seed as random
from ragtag.protocols.groups.grid import Grid, cells_of
from ragtag.recipes.moshpit.plan import mixed
from ragtag.recipes.moshpit.run import Case, run


@pytest.mark.parametrize(("n", "sides"), [(64, (8, 8)), (125, (5, 5, 5)), (16, (2, 2, 2, 2))])
def test_a_full_grid_without_faults_averages_exactly_in_d_rounds(n: int, sides: tuple[int, ...]) -> None:
    """Section 3.1: with a full grid of M^d peers and no failures, the mean is exact after d rounds."""
    found = run(Case("moshpit", n, sides, rounds=len(sides), until=0.0), seed=1)
    assert found.variance[-1] < 1e-12 < 1e-3 < found.variance[-2]
    assert found.drift < 1e-12


def test_random_groups_mix_by_r_minus_1_over_n_minus_1() -> None:
    """Section 3.2 gives (r-1)/N + r/N^2 per round for r random groups; exact is (r-1)/(N-1)."""
    n, r = 8, 2
    found = mixed(run(Case("random groups", n, (4,), rounds=1, until=0.0), seed) for seed in range(60))
    exact, paper = (r - 1) / (n - 1), (r - 1) / n + r / n**2
    assert found.factor[0] == pytest.approx(exact, rel=0.03)
    assert abs(found.factor[0] - exact) < abs(found.factor[0] - paper)
    assert paper > exact  # the paper's is an upper bound


def test_the_mixing_rate_does_not_depend_on_the_spectral_gap_as_gossip_does() -> None:
    """Section 3.2: the rate follows from the sizes of groups, not from a graph's spectral gap."""
    variances = {
        method: run(Case(method, 144, (12, 12), rounds=4, until=0.0), seed=0).variance[-1]
        for method in ("moshpit", "random groups", "random pairs", "gossip")
    }
    assert variances["moshpit"] < variances["random groups"] < variances["random pairs"] < variances["gossip"]


def test_all_reduce_is_best_without_faults_and_stops_with_them_where_moshpit_goes_on() -> None:
    """Introduction: "if any single participant fails [...] all other nodes are stalled"; else it is best."""
    calm = run(Case("all-reduce", 144, (12, 12)), seed=0)
    faulty = run(Case("all-reduce", 144, (12, 12), p=0.04, rounds=8), seed=0)
    moshpit = run(Case("moshpit", 144, (12, 12), p=0.04), seed=0)
    assert calm.rounds == 1 and faulty.rounds == 8 and faulty.failed == 1.0
    assert moshpit.rounds < 14 and moshpit.failed < 0.05


def test_peers_that_miss_rounds_cost_what_the_formula_of_a_fixed_grid_says() -> None:
    """Section 4.1's simulation, as arithmetic: cells are fixed, who is there averages with its line.

    The machines find each other, exchange messages and wait by deadlines; the variance must be the same.
    """
    n, sides, p, seed = 64, (8, 8), 0.05, 3
    found = run(Case("moshpit", n, sides, p=p, rounds=5, until=0.0), seed)
    grid = Grid(sides)
    at = cells_of(grid, random.stream_key(seed, "cells", *sides), tuple(range(n)))
    cells = np.array([grid.cell(int(number)) for number in at])
    values = random.generator(seed, "moshpit/values").standard_normal((n, 1, 272), np.float32).astype(float)
    for round_ in range(5):
        there = random.uniforms(random.stream_key(seed, "moshpit/away", round_), n) >= p
        other = cells[:, 1 - grid.axis(round_)]
        for line in range(8):
            members = there & (other == line)
            if members.any():
                values[members] = values[members].mean(axis=0)
        expected = values.var(axis=0).mean()
        assert found.variance[round_ + 1] == pytest.approx(expected, rel=1e-3, abs=1e-13)


def test_deaths_within_the_round_cost_more_than_missed_rounds_and_are_reported() -> None:
    """Section 3.1: a group goes on without a peer that fails while it averages."""
    missed = run(Case("moshpit", 144, (12, 12), p=0.03, rounds=4, until=0.0, chunks=6), seed=0)
    within = run(Case("moshpit", 144, (12, 12), p=0.03, rounds=4, until=0.0, chunks=6, within=True), seed=0)
    assert missed.mosaic == 0.0 < 0.05 < within.mosaic
    assert missed.variance[-1] < within.variance[-1] < 1e-2
