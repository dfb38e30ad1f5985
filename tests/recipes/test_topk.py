"""The top-k recipe in miniature, and that what it measures is what it says."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ragtag.recipes import RECIPES, topk, topk_training
from ragtag.recipes.rps_tasks import digits
from ragtag.recipes.topk import Plan
from ragtag.recipes.topk_training import Setup, train


@pytest.fixture(scope="module")
def trained():
    return train(Setup("top-k", 0.01, n=2, steps=12), None, points=3)


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(topk, "RATIOS", (0.01,))
    monkeypatch.setattr(topk, "LOSSES", (0.3,))
    monkeypatch.setattr(topk, "Plan", lambda task, seeds, steps, n: Plan(task, (0,), 6, 2))
    whole = digits()
    few = replace(whole, train_x=whole.train_x[:64], train_y=whole.train_y[:64])
    few = replace(few, test_x=whole.test_x[:20], test_y=whole.test_y[:20])
    monkeypatch.setattr(topk_training, "load", lambda data: few)
    told = []
    out = tmp_path / "out"
    report = topk.reproduce(out=out, jobs=1, progress=lambda *what: told.append(what))
    assert RECIPES["topk"] == topk.__name__
    assert told[-1][0] == told[-1][1] == len(told) == 8
    rows = {r.quantity: r for r in report.rows}
    assert rows["loss, SampledTopK less top-k"].ok
    assert all(r.ok for r in report.rows if r.quantity == "top-k, largest")
    assert "tickets, 30% lost" in rows
    loaded = json.loads((out / "results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == 8
    page = (out / "index.html").read_text("utf-8")
    assert page.count("<svg") == 2 and "GaussianK: entries selected over k" in page


def test_what_is_measured_of_u(trained) -> None:
    assert trained.size == 38_282 and trained.k == 382
    assert len(trained.off) == len(trained.off_random) == len(trained.share) == 12
    assert set(trained.share) == {1.0}
    assert all(0 < x < y <= 1 for x, y in zip(trained.off, trained.off_random, strict=True))
    assert trained.steps == [4, 8, 12] and trained.bytes_at[-1] == trained.bytes == 12 * 1088
    assert all(sum(h) == pytest.approx(1, abs=0.02) for h in trained.histograms.values())
    assert np.isfinite(trained.losses).all() and trained.losses[-1] < 2.4


def test_lost_fragments_come_back_with_tickets_only() -> None:
    base = {"selector": "top-k", "n": 2, "steps": 8}
    free, kept, cleared = (
        train(Setup(**base, **more), None, points=1)
        for more in ({}, {"loss": 0.4}, {"loss": 0.4, "tickets": False})
    )
    assert free.lost == 0 and kept.lost == cleared.lost > 2
    assert len({free.loss, kept.loss, cleared.loss}) == 3
    assert train(Setup(**base, loss=0.4), None, points=1).loss == kept.loss


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        topk.reproduce(out=tmp_path, **wrong)


def test_data_that_is_not_there_is_refused_before_anything_runs(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="CIFAR-10"):
        topk.reproduce(out=tmp_path, data=tmp_path / "none.tar.xz")
