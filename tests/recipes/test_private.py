"""The recipe on private training: what is counted and judged, and that it can fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragtag.privacy import SecureAverage, epsilon_of
from ragtag.protocols.secagg import SecureSetting
from ragtag.recipes.cache import ResultCache
from ragtag.recipes.private import recipe, training
from ragtag.recipes.private.accounting import RENYI, STEP, exact_epsilon, renyi_epsilon
from ragtag.recipes.private.training import (
    CLIENTS,
    DELTA,
    METHODS,
    NOISE,
    ClientDigits,
    PrivateResult,
    PrivateSetup,
    averaged_payload,
    direct_bytes,
    train_by,
)

HIDDEN = {"split": 0.1, "split, NoPeek": 0.5, "federated, private": 0.95, "federated, secure": 0.4}


SUMS = "sums that were inverted, beside those of updates: apart, of their norm"


def result(method: str, seed: int = 0) -> PrivateResult:
    noised = 3.0 if "private" in method else None
    return PrivateResult(
        setup=PrivateSetup(method, seed, 15),
        accuracy=0.9 if noised else 0.97,
        counted_bytes=1005.0,
        formula_bytes=1000.0,
        survey_bytes=1300.0,
        flops=500.0 if "split" in method else 900.0,
        client_s=0.1,
        hidden=HIDDEN.get(method, 0.02),
        ssim=0.5,
        blind_ssim=0.3,
        epsilon=noised,
        planned_epsilon=noised,
        parameters=10,
        samples=40,
        width=25,
        least_epsilon=noised,
        exact_epsilon=2.6 if noised else None,
        sum_apart=1e-7 if "secure" in method else None,
    )


WELL = [result(method, seed) for seed in (0, 1) for method in METHODS]
AVERAGED = {101: 1000, 102: direct_bytes(102, 10)}


def rows(results: list[PrivateResult]) -> list[recipe.Row]:
    return [*recipe.payload(results, AVERAGED), *recipe.learned(results), *recipe.told(results)]


def changed(method: str, **how: object) -> list[PrivateResult]:
    """The second seed of a way came out otherwise."""
    return [
        replace(r, **how) if (r.setup.method, r.setup.seed) == (method, 1) else r  # type: ignore[arg-type]
        for r in WELL
    ]


def test_what_is_to_come_out_passes() -> None:
    assert recipe.around(WELL[2]) == (101, 102)
    assert [row.quantity for row in rows(WELL) if not row.ok] == []


@pytest.mark.parametrize(
    ("method", "how", "row"),
    [
        ("split", {"counted_bytes": 1011.0}, "split"),
        ("federated, secure", {"counted_bytes": 980.0}, "federated, secure"),
        ("large batch", {"accuracy": 0.9}, "large batch"),
        ("federated, private", {"accuracy": 0.7}, "federated, private"),
        ("federated", {"hidden": 0.3}, "federated, an update of one sample"),
        ("federated, private", {"hidden": 0.7}, "federated, private"),
        ("split", {"hidden": 0.21}, "split, codes"),
        ("split, NoPeek", {"hidden": 0.15}, "split, NoPeek over plain"),
        ("federated, secure", {"hidden": 0.01}, "a sum over clients, less an update alone"),
        ("federated, secure", {"sum_apart": 1e-5}, SUMS),
        ("federated, secure", {"sum_apart": None}, SUMS),
    ],
)
def test_one_seed_that_misses_is_enough_to_fail(method: str, how: dict[str, float | None], row: str) -> None:
    failed = {found.quantity for found in rows(changed(method, **how)) if not found.ok}
    assert row in failed


def test_a_step_that_was_not_counted_fails() -> None:
    for which in ("epsilon", "least_epsilon"):  # of any client, in any seed, to either side
        for by in (159 / 160, 161 / 160):
            one = changed("federated, private", **{which: 3.0 * by})
            missed = [row.quantity for row in rows(one) if not row.ok]
            assert missed == ["epsilon over that of all planned steps"]


@pytest.mark.parametrize("exact", [3.01, 2.49])
def test_an_epsilon_below_the_exact_one_fails_and_one_far_above(exact: float) -> None:
    one = changed("federated, private", exact_epsilon=exact)
    assert [row.quantity for row in rows(one) if not row.ok] == ["epsilon over the exact one"]


def test_other_reckonings_tell_one_step_of_the_plan() -> None:
    """What the recipe plans: Opacus' series agrees, and one step more or less does not."""
    pytest.importorskip("opacus")
    rate, steps = training.PRIVATE_BATCH / 352, 6 * recipe.EPOCHS
    told = renyi_epsilon(NOISE, rate, steps, DELTA)
    off = [epsilon_of({(NOISE, rate): steps + more}, DELTA) / told - 1 for more in (-1, 0, 1)]
    assert off[0] < -STEP and abs(off[1]) < STEP / 10 and off[2] > STEP
    over = epsilon_of({(NOISE, rate): steps}, DELTA) / exact_epsilon(NOISE, rate, steps, DELTA)
    assert 1 < over < 1 + RENYI


def test_the_table_has_every_way_and_the_figure_too() -> None:
    table = recipe.comparison(WELL)
    assert [line[0] for line in table.rows] == list(METHODS)
    cells = dict(zip(table.columns, table.rows[4], strict=True))
    assert (cells["epsilon"], cells["accuracy"]) == ("3", "0.9")
    assert dict(zip(table.columns, table.rows[0], strict=True))["epsilon"] == "none"
    assert "pq/N = 100" in recipe.drawn(WELL).caption


def test_clients_parts_are_equal_and_apart() -> None:
    digits, parts = ClientDigits.drawn(3)
    assert len({len(part) for part in parts}) == 1
    assert len(torch.cat(parts).unique()) == CLIENTS * len(parts[0])
    assert not torch.equal(torch.cat(parts), torch.cat(ClientDigits.drawn(4)[1]))
    assert len(digits.train_y) - CLIENTS * len(parts[0]) < CLIENTS * training.BATCH


def test_an_average_is_counted_as_by_its_formula() -> None:
    size = sum(p.numel() for part in training.private_net(0) for p in part.parameters())
    assert averaged_payload(3, 0) == pytest.approx(direct_bytes(3, size), rel=recipe.COUNTED)


def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data, and weak attacks."""
    monkeypatch.setattr(training, "INVERTED", CLIENTS)
    monkeypatch.setattr(training, "inversion", partial(training.inversion, steps=2))
    monkeypatch.setattr(training, "DECODED", 64)
    monkeypatch.setattr("ragtag.privacy.meters.EPOCHS", 1)
    monkeypatch.setattr(training, "load", few)


def test_messages_of_secure_averages_that_leave_twice_are_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little(monkeypatch)
    once = SecureAverage._send_all

    def twice(self: SecureAverage, *message: Any) -> None:
        once(self, *message)
        once(self, *message)

    monkeypatch.setattr(SecureAverage, "_send_all", twice)
    found = train_by(PrivateSetup("federated, secure", 0, 1))
    assert found.counted_bytes > 1.2 * found.formula_bytes


def test_sums_that_are_inverted_are_those_that_secure_averages_give(monkeypatch: pytest.MonkeyPatch) -> None:
    little(monkeypatch)
    monkeypatch.setattr(SecureSetting, "values", lambda self, total: VALUES(self, total) * np.float32(1.001))
    found = train_by(PrivateSetup("federated, secure", 0, 1))
    assert found.sum_apart == pytest.approx(1e-3, rel=0.01)


SAME = ("large batch", "split, NoPeek")
"""By the code of another way."""


@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m in SAME)) for m in METHODS])
def test_each_way_trains_and_is_measured(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    little(monkeypatch)
    if "private" in method:
        pytest.importorskip("opacus")
    found = train_by(PrivateSetup(method, 0, 1))
    assert found.counted_bytes == pytest.approx(found.formula_bytes, rel=recipe.COUNTED)
    assert 0 < found.accuracy < 1 and found.client_s > 0 and found.hidden >= 0
    if "private" in method:
        assert found.epsilon == pytest.approx(epsilon_of({(NOISE, 1.0): 1}, DELTA))
        assert found.least_epsilon == found.epsilon
        assert found.planned_epsilon == pytest.approx(found.epsilon, rel=STEP)
        assert found.exact_epsilon is not None and found.exact_epsilon < found.epsilon
    if "secure" in method:
        assert found.sum_apart is not None and found.sum_apart < recipe.SUMMED
    ResultCache(tmp_path).store(train_by, (found.setup,), found)
    assert ResultCache(tmp_path).find(train_by, (found.setup,)) == (True, found)


def test_epsilon_of_a_run_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that have a part of the samples only, and several of them in an epoch."""
    pytest.importorskip("opacus")
    monkeypatch.setattr(training, "INVERTED", CLIENTS)
    monkeypatch.setattr(training, "inversion", partial(training.inversion, steps=2))
    monkeypatch.setattr(training, "load", few)
    monkeypatch.setattr(training, "PRIVATE_BATCH", 16)
    found = train_by(PrivateSetup("federated, private", 0, 2))
    told = renyi_epsilon(NOISE, 0.25, 8, DELTA)
    assert found.planned_epsilon == told
    assert (found.epsilon, found.least_epsilon) == pytest.approx((told, told), rel=STEP)


def few(_: object) -> object:
    task = REAL(None)
    return replace(
        task,
        train_x=task.train_x[:256],
        train_y=task.train_y[:256],
        test_x=task.test_x[:64],
        test_y=task.test_y[:64],
    )


REAL = training.load
VALUES = SecureSetting.values


def test_only_digits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is of digits"):
        recipe.reproduce(data=tmp_path, out=tmp_path)


@pytest.mark.slow
def test_the_quick_form_comes_out_as_is_told(tmp_path: Path) -> None:
    """NoPeek does not double the decoder's error in so few epochs: the README says so."""
    report = recipe.reproduce(quick=True, out=tmp_path, jobs=2)
    assert [row.quantity for row in report.rows if not row.ok] in ([], ["split, NoPeek over plain"])
