"""The top-k recipe in miniature, and that what it measures is what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ragtag.codecs.sparse.threshold import gaussian_threshold
from ragtag.recipes import RECIPES
from ragtag.recipes.tasks.images import Task
from ragtag.recipes.topk import compare as topk_compare
from ragtag.recipes.topk import plan as topk_plan
from ragtag.recipes.topk import recipe as topk
from ragtag.recipes.topk.local import methods, train_locally
from ragtag.recipes.topk.plan import Part, Plan, Results, select
from ragtag.recipes.topk.tasks import IMAGES, LSTM, Sources, prepared
from ragtag.recipes.topk.training import Setup, Trained, train

HERE = Sources()


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(Setup("top-k", 0.01, n=2, steps=12), HERE, points=3)


@pytest.fixture
def few(monkeypatch) -> None:
    """Less to look at."""
    load = Sources.load

    def shortened(self: Sources, task: str) -> Task:
        whole = load(self, task)
        small = replace(whole, train_x=whole.train_x[:64], train_y=whole.train_y[:64])
        return replace(small, test_x=whole.test_x[:20], test_y=whole.test_y[:20])

    monkeypatch.setattr(Sources, "load", shortened)


@pytest.mark.usefixtures("few")
def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    parts = Part(IMAGES, 2, 4, 1, 1), Part(IMAGES, 3, 3, 1, 1)
    small = Plan(parts, tuple(replace(m, local_steps=1) for m in methods(2, 2)[::4]))
    monkeypatch.setattr(Plan, "of", lambda **how: small)
    told = []
    out = tmp_path / "out"
    report = topk.reproduce(out=out, jobs=1, progress=lambda *what: told.append(what))
    assert RECIPES["topk"] == topk.__name__
    assert told[-1][0] == told[-1][1] == len(told) == 2 + (11 + 4) + (11 + 4)
    quantities = [r.quantity for r in report.rows]
    assert quantities.count("top-k, largest") == 4 and quantities.count("tickets, 30% lost") == 2
    rows = {r.quantity: r for r in report.rows}
    assert rows["loss, SampledTopK less top-k"].ok
    assert quantities.count("top-k, beside the least") == 4
    assert all(r.ok for r in report.rows if r.quantity.startswith("top-k, "))
    assert {t.title.split(":")[0] for t in report.tables} == {
        "The end of training",
        "Messages lost",
        "GaussianK",
        "What the paper says of training, measured here (the paper",
        "Outer steps after local ones",
    }
    assert sum(note.startswith("GaussianK at") for note in report.notes) == 4
    loaded = json.loads((out / "results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == 30 and len(loaded["data"]["outer"]) == 2
    page = (out / "index.html").read_text("utf-8")
    assert page.count("<svg") == 7 and "GaussianK misses because" in page


def test_the_plans() -> None:
    quick, full = Plan.of(quick=True, seeds=3), Plan.of(quick=False, seeds=3)
    assert {part.n for part in full.parts} == {8, 16}
    assert {part.task for part in full.parts} == {part.task for part in quick.parts} == {IMAGES, LSTM}
    assert not any(s.loss for part in quick.parts for s in part.setups())
    for part in full.parts:
        setups = part.setups()
        assert len(set(setups)) == len(setups)
        free = {s.seed for s in setups if s.selector == "sampled top-k" and not s.loss and s.ratio == 0.01}
        assert {s.seed for s in setups if s.loss} <= free, "each is compared with the same seed"


def test_what_is_measured_of_u(trained) -> None:
    assert trained.size == 38_282 and trained.k == 382
    per_step = ("off", "off_chosen", "off_least", "off_random", "share", "fit", "leap", "rest", "shape")
    assert all(len(getattr(trained, name)) == 12 for name in per_step)
    assert set(trained.share) == {1.0}
    assert all(0 < x < y <= 1 for x, y in zip(trained.off, trained.off_random, strict=True))
    assert trained.off_chosen == pytest.approx(trained.off_least, abs=1e-9)
    assert all(low >= 1 > high for low, high in zip(trained.leap, trained.rest, strict=True))
    assert trained.steps == [4, 8, 12] and trained.bytes_at[-1] == trained.bytes == 12 * 1088
    assert list(trained.histograms) == [0, 3, 11]
    assert all(sum(h) == pytest.approx(1, abs=0.02) for h in trained.histograms.values())
    assert np.isfinite(trained.losses).all() and trained.losses[-1] < 2.4 and trained.held < 2.4


def test_of_a_normal_vector_the_fit_is_right_and_of_a_cut_one_it_is_not() -> None:
    from ragtag.recipes.topk.training import _look_at

    u = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    found = Trained(Setup("top-k", steps=2), len(u))
    _look_at(u, 0, 1000, found)
    assert found.fit[0] == pytest.approx(1, abs=0.02) and found.shape[0] == pytest.approx(0, abs=0.1)
    cut = np.clip(u, -2, 2)
    _look_at(cut, 1, 100, found)
    assert found.fit[1] == pytest.approx(gaussian_threshold(cut, 100) / 2) and found.fit[1] > 1.2
    assert "too high (excess" in topk_compare.reason([replace(found, fit=[1.5], share=[0.1])])
    assert "too low (excess" in topk_compare.reason([replace(found, fit=[0.7], share=[3.0])])


def test_lost_fragments_come_back_with_tickets_only() -> None:
    base = {"selector": "top-k", "n": 2, "steps": 8}
    free, kept, cleared = (
        train(Setup(**base, **more), HERE, points=1)
        for more in ({}, {"loss": 0.4}, {"loss": 0.4, "tickets": False})
    )
    assert free.lost == 0 and kept.lost == cleared.lost > 2
    assert abs(kept.loss - free.loss) < 0.5 * abs(cleared.loss - free.loss)
    assert train(Setup(**base, loss=0.4), HERE, points=1).loss == kept.loss


def _ended(loss: float, at: float, tickets: bool = True, seed: int = 0) -> Trained:
    return Trained(Setup("sampled top-k", 0.01, at, tickets, seed=seed), 1000, losses=[9.0, 9.0, 9.0, loss])


def test_the_cost_of_loss_is_held_where_the_loss_says_something() -> None:
    runs = [_ended(2.0, 0.0), _ended(2.05, 0.1), _ended(2.2, 0.3), _ended(3.0, 0.0, seed=1)]
    ten, thirty = topk_compare._lossy(runs, "here")
    assert ten.ok and ten.measured == pytest.approx(1.025), "the seed that lost nothing does not count"
    assert not thirty.ok
    assert not topk_compare._lossy([_ended(0.01, 0.0), _ended(0.02, 0.1)], "here")


@pytest.mark.parametrize(("cleared", "ok"), [(2.2, True), (2.05, False), (1.9, False)])
def test_tickets_are_held_against_what_is_cleared_too(cleared: float, ok: bool) -> None:
    """Where little is lost a run without tickets loses little, too."""
    runs = [_ended(2.0, 0.0), _ended(2.05, 0.1), _ended(cleared, 0.1, tickets=False)]
    kept, saved = topk_compare._lossy(runs, "here")
    assert kept.ok and saved.ok is ok


@pytest.mark.usefixtures("few")
def test_outer_steps_sparse_and_dense() -> None:
    runs = [train_locally(replace(m, local_steps=3), HERE) for m in methods(2, 3)]
    results = Results.of(runs)
    assert len(results.local) == 5 and not results.runs
    dense, _, full, _, two_bit = runs
    assert dense.bytes_at[-1] == 3 * 4 * dense.size and not dense.kept
    assert two_bit.bytes_at[-1] < 0.5 * full.bytes_at[-1] < dense.bytes_at[-1] / 10
    for run in runs:
        assert len(run.losses) == 3 and run.losses[-1] < run.losses[0] < math.log(256) + 0.5
        assert all(0.01 < share < 1 for share in run.kept)


def test_runs_are_found_by_what_they_are(trained) -> None:
    assert select([trained], "top-k", 0.01) == [trained]
    assert not select([trained], "top-k", 0.001) and not select([trained], "top-k", 0.01, 0.1)
    assert topk_plan.name_of(trained.setup) == "images, 2 peers, top-k 1.0%, seed 0"


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        topk.reproduce(out=tmp_path, **wrong)


def test_data_that_is_not_there_is_refused_before_anything_runs(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="tar archive of images"):
        topk.reproduce(out=tmp_path, data=tmp_path / "none.tar.xz")
    with pytest.raises(FileNotFoundError, match="a text"):
        topk.reproduce(out=tmp_path, data=tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"0 tar archives and 0 \.txt files"):
        topk.reproduce(out=tmp_path / "out", data=tmp_path)


def test_a_folder_may_hold_a_text_alone(tmp_path) -> None:
    text = tmp_path / "plays.txt"
    text.write_bytes(b"to be or not " * 1000)
    with prepared(tmp_path, tmp_path / "out") as found:
        assert found == Sources(None, text)
        assert found.names == {"images": "digits", "text": "plays.txt"}
