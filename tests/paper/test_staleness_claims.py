"""What Dai et al. found, held against their model of delays on handwritten digits.

"Toward Understanding the Impact of Staleness in Distributed Machine Learning", ICLR 2019 (arXiv 1810.03264).
"""

from __future__ import annotations

from statistics import geometric_mean

import pytest

from ragtag.recipes.staleness.model import LEARNING_RATES, Study, run


def slow_down(depth: int, optimiser: str, workers: int, s: int, seeds: int = 1) -> float:
    """Batches to the target over those without delay: their geometric mean over seeds."""

    def batches(s: int, seed: int) -> float:
        rate = LEARNING_RATES[optimiser]
        study = Study(f"DNN {depth}", optimiser, workers, s, seed, rate, batches_max=6000)
        return min(run(study).batches, study.batches_max)

    return geometric_mean(batches(s, seed) / batches(0, seed) for seed in range(seeds))


def test_logistic_regression_hardly_suffers() -> None:
    assert slow_down(0, "SGD", 8, 16) <= 1.3


@pytest.mark.slow
def test_deeper_nets_suffer_more() -> None:
    """As the recipe finds it: single seeds of neighbouring depths come in either order."""
    shown = [slow_down(depth, "SGD", 8, 16, seeds=5) for depth in (1, 3, 5)]
    assert shown == sorted(shown) and shown[-1] > 2 * shown[0]


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", ["Adam", "Momentum", "RMSProp"])
def test_sgd_and_adagrad_suffer_least(optimiser: str) -> None:
    assert slow_down(1, optimiser, 8, 16) > max(slow_down(1, robust, 8, 16) for robust in ("SGD", "Adagrad"))


def test_more_workers_amplify_it() -> None:
    one, eight = (slow_down(3, "SGD", workers, 16) for workers in (1, 8))
    assert one < 1.3 and eight > 2 * one
