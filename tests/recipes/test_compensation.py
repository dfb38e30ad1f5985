import numpy as np
import pytest
import torch

from ragtag.recipes.grouping import compensation
from ragtag.recipes.grouping.compensation import CompensatingCrew, measured, rows, table, train_compensated
from ragtag.recipes.grouping.training import Update, Work
from ragtag.recipes.tasks.digits import Net


def test_a_gradient_is_compensated_before_it_is_scaled() -> None:
    net, at = Net((8,)), np.arange(4)
    crews = [CompensatingCrew(Work(2, 4, 8, 0.1, 0, net=net), strength) for strength in (0.0, 2.0)]
    stale = net.initial(1)
    update = Update(0, at, stale, 0, 0.0, 1.0)
    plain, fixed = (crew.mean_gradient([(update, 0.5)]) for crew in crews)
    model = crews[1].model
    assert model is not None
    gradient = 2 * plain
    torch.testing.assert_close(fixed, 0.5 * (gradient + 2.0 * gradient * gradient * (model - stale)))
    both = crews[1].mean_gradient([(update, 0.5), (update, 0.5)])
    torch.testing.assert_close(both, fixed)


def test_what_is_not_stale_stays_as_it_is() -> None:
    crew = CompensatingCrew(Work(1, 4, 8, 0.1, 0, net=Net((8,))), 5.0)
    update = Update(0, np.arange(4), crew.model, 0, 0.0, 1.0)
    plain = CompensatingCrew(crew.work, 0.0).mean_gradient([(update, 1.0)])
    torch.testing.assert_close(crew.mean_gradient([(update, 1.0)]), plain)


def test_gains_are_seed_by_seed_and_named() -> None:
    trials = {key: [train_compensated(key, seed, 1) for seed in (0, 1)] for key in measured()}
    found = rows(trials)
    assert len(found) == 3 * len(compensation.MODELS)
    assert all(r.error is not None for r in found)
    assert len(table(trials).rows) == len(trials)


@pytest.mark.parametrize("model", compensation.MODELS)
def test_a_large_enough_strength_mends_what_staleness_breaks(model: str) -> None:
    """On a seed of those that the settings were not chosen on."""
    rate = compensation.HARSH[model]
    without, compensated = (train_compensated((model, rate, s), 0) for s in (0.0, compensation.LARGE))
    assert compensated.accuracy >= without.accuracy
