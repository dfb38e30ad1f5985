"""How the staleness recipe's learning rates were tuned: once, without delay, before any delayed run.

The rule takes, of a grid in half decades, the smallest rate that reaches the target within ``SLACK`` times
the fewest batches, at s = 0 with 8 workers, over seeds that are measured nowhere else. The fastest rate
itself is at the edge of divergence, where any delay ends training. ``python -m
ragtag.recipes.staleness.tune`` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ragtag.recipes.staleness.model import Study, run
from ragtag.recipes.staleness.others import OTHERS

SLACK = 2.0
SEEDS = (100, 101, 102)
WORKERS = 8
GRIDS: Mapping[str, Sequence[float]] = {
    "SGD": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
}


def batches(model: str, optimiser: str, rate: float, batches_max: int = 3200) -> float:
    """Mean batches to the target at s = 0; ``inf``: a seed did not reach it."""
    studies = [Study(model, optimiser, WORKERS, 0, seed, rate, batches_max) for seed in SEEDS]
    return sum(run(study).batches for study in studies) / len(SEEDS)


def choose(found: Mapping[float, float]) -> float:
    """The smallest rate within ``SLACK`` of the fewest batches. found: batches by rate.

    Raises:
        ValueError: no rate reaches the target.
    """
    best = min(found.values())
    if math.isinf(best):
        raise ValueError("no learning rate of the grid reaches the target")
    return min(rate for rate, needed in found.items() if needed <= SLACK * best)


def main() -> None:
    """Print batches by rate, and the choice, for every model and optimiser."""
    for model in OTHERS:
        for optimiser, rates in GRIDS.items():
            found = {rate: batches(model, optimiser, rate) for rate in rates}
            print(model, optimiser, choose(found), {r: round(b) for r, b in found.items() if b < math.inf})


if __name__ == "__main__":
    main()
