import pytest

from ragtag.recipes.grouping import compensation
from ragtag.recipes.grouping.compensation import Key, measured, rows, table
from ragtag.recipes.grouping.training import Look, Trial


def ended(accuracy: float) -> Trial:
    return Trial("x", 0, staleness={15: 1}, looks=[Look(1.0, 8, 0.5, accuracy)])


def test_gains_are_seed_by_seed_and_named() -> None:
    trials: dict[Key, list[Trial]] = {}
    for i, key in enumerate(measured()):
        trials[key] = [ended(0.5 + 0.01 * i), ended(0.6 + 0.02 * i)]
    found = rows(trials)
    assert len(found) == 3 * len(compensation.MODELS)
    assert all(r.error is not None for r in found)
    assert found[0].measured == pytest.approx(0.015)
    assert len(table(trials).rows) == len(trials)


def test_where_no_gentle_rate_was_measured_only_harsh_ones_are_compared() -> None:
    trials = {key: [ended(0.5)] for key in measured() if compensation.mends(key)}
    assert [r.quantity.split(",")[1] for r in rows(trials)] == [" rate 2", " rate 0.7"]
