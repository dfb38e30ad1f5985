"""Many small crews under many faults: no invariant breaks, and all go on once the network heals."""

from __future__ import annotations

import math

import pytest

from ragtag.core.faults import BurstLoss, Faults, Loss
from ragtag.simulation.trials.rounds import QUORUM, storm, trial

GROUPS = ["moshpit/8", "random-groups/8", "moshpit/3", "random-groups/3"]
"""In one group, and in several: a crew has three to eight peers."""


@pytest.mark.parametrize("seed", range(60))
def test_rps_in_a_storm(seed: int) -> None:
    trial(seed, "rps", rounds=6)


@pytest.mark.parametrize("seed", range(20))
def test_a_quorum_in_a_storm(seed: int) -> None:
    trial(seed, QUORUM.name, rounds=6)


@pytest.mark.parametrize("method", ["allreduce", "rps+repair"])
@pytest.mark.parametrize("seed", [2, 4, 5, 6, 8])  # among the quick ones
def test_repair_in_a_storm(seed: int, method: str) -> None:
    trial(seed, method, rounds=3)


@pytest.mark.parametrize("method", GROUPS)
@pytest.mark.parametrize("seed", range(40))
def test_groups_in_a_storm(seed: int, method: str) -> None:
    trial(seed, method, rounds=6)


def test_two_that_are_out_of_step_with_all_others_and_meet_each_other_come_into_step() -> None:
    trial(147, "moshpit/3", rounds=6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rps", QUORUM.name, "rps+repair", "allreduce", *GROUPS])
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_long_storms(seed: int, method: str) -> None:
    trial(seed, method, rounds=12)


def test_a_trial_is_one_history() -> None:
    first, again = trial(5, rounds=4), trial(5, rounds=4)
    assert first == again and first.events > 100 and sum(first.rounds_done) > 0


def test_storms_have_every_kind_of_fault_and_spare_two_peers() -> None:
    storms = [storm(seed, 5, 12.0, 1e5) for seed in range(200)]
    perfect = Faults()
    for name in set(Faults.__slots__) - {"lines"}:  # a peer's own line is no fault
        some = sum(getattr(faults, name) != getattr(perfect, name) for faults in storms)
        assert some > 20, name
    assert {type(faults.loss) for faults in storms} == {Loss, BurstLoss, type(None)}
    assert max(len(faults.crashes) for faults in storms) == 3
    assert all(2 * (faults.latency_s + faults.jitter_s) < 0.12 for faults in storms)
    assert all(faults.rate_bytes_per_s == math.inf or faults.rate_bytes_per_s >= 1e5 for faults in storms)
