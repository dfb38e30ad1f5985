from dataclasses import replace

import numpy as np
import pytest

from ragtag.recipes.grouping.central import Training, train_centrally
from ragtag.schedules import Asynchronous, ProgressiveGrouping

CALM = Training("DNN 1", ProgressiveGrouping(), 4, 0.02, 0, 10.0)


def test_a_straggler_costs_the_others_no_throughput_and_the_model_no_progress() -> None:
    """Quality after a time that is too short to learn all: by heads, 3 points are lost."""
    pairs = [
        (train_centrally(replace(CALM, seed=seed)), train_centrally(replace(CALM, seed=seed, slower=21.0)))
        for seed in (0, 1)
    ]
    for calm, slowed in pairs:
        assert slowed.steps_per_s >= 0.95 * calm.steps_per_s
        assert 8 <= slowed.steps[-1] <= 10
        assert max(calm.groups, key=calm.groups.__getitem__) == 1
        assert max(slowed.groups, key=slowed.groups.__getitem__) == 2
        assert slowed.staleness > calm.staleness
        assert any(what == "groups" for _, _, what, _ in slowed.notes)
    assert np.mean([slowed.quality - calm.quality for calm, slowed in pairs]) >= -0.01


def test_a_run_of_one_seed_is_the_same_every_time() -> None:
    short = replace(CALM, until_s=1.0, slower=5.0)
    assert train_centrally(short) == train_centrally(short)


def test_strength_reaches_the_machines() -> None:
    """Updates are stale, and corrected; the learning rate is the peers' own."""
    stale = Training("DNN 1", Asynchronous(), 4, 0.5, 0, 1.0, jitter=0.1)
    plain, fixed = train_centrally(stale), train_centrally(replace(stale, strength=30.0))
    assert plain.steps == fixed.steps
    assert plain.staleness == pytest.approx(3.0, abs=0.5)
    assert plain.quality != fixed.quality
