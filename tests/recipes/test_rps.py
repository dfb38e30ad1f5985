import json
from dataclasses import replace

import pytest

from ragtag.recipes.base import Report
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.rps import compare as rps_compare
from ragtag.recipes.rps import measure as rps_measure
from ragtag.recipes.rps import recipe as rps
from ragtag.recipes.rps import training as rps_training
from ragtag.recipes.rps.faulty import FAULTS, SILENT
from ragtag.recipes.rps.measure import Plan, Results
from ragtag.recipes.rps.training import Curve, Point, Setup
from ragtag.recipes.tasks.images import digits


def full(report, out) -> None:
    raise OSError("the disk is full")


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    tiny = Plan("digits", 2, (0, 1), (1.0, 0.6), (0.95,), 4, (4, 8), complete=False)
    monkeypatch.setattr(rps_measure, "LOSSES", (0.1, 0.4))
    monkeypatch.setattr(rps_measure, "FAULTS", {SILENT: FAULTS[SILENT]})
    for module in (rps_measure, rps_compare):
        monkeypatch.setattr(module, "STEADY", ((4, 0.1),))
        monkeypatch.setattr(module, "N", 8)
    whole = digits()
    few = replace(whole, train_x=whole.train_x[:64], train_y=whole.train_y[:64])
    few = replace(few, test_x=whole.test_x[:20], test_y=whole.test_y[:20])
    monkeypatch.setattr(rps_training, "load", lambda data: few)
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: tiny))
    told, found = [], []
    monkeypatch.setattr(rps, "run_jobs", lambda *how: found.append(run_jobs(*how)) or found[-1])
    with monkeypatch.context() as cut, pytest.raises(OSError, match="full"):
        cut.setattr(Report, "write", full)
        rps.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1] == len(told)
    report = rps.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1] == (*told[-2][:2], "parts kept from before") and found[1] == found[0]
    assert not (tmp_path / "out/parts").exists()
    names = " ".join(r.quantity for r in report.rows)
    for part in ("alpha1, p = 0.4", "slope of log alpha2", "ring all-reduce", "fixed owner", "95% arrive"):
        assert part in names
    theory = [r for r in report.rows if r.group == "What follows" and "owner" not in r.quantity]
    assert len(theory) == 3 and all(r.ok for r in theory[1:])
    weights = [r for r in report.rows if r.quantity.startswith(SILENT)]
    assert len(weights) == 2 and all(r.ok for r in weights)
    assert report.tables[-1].title == "Not judged"
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["curves"]) == 2 * 2 * 3 and loaded["rows"][0]["source"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.count("<svg") == 2 and "range over 2 seeds" in page and "60 %" in page
    assert not list((tmp_path / "out").glob(".cifar*"))


def test_plans_cover_the_papers_figure() -> None:
    full = Plan.of(quick=False, digits=True, seeds=3)
    assert full.models == (1.0, 0.99, 0.95, 0.9, 0.8, 0.6) and full.gradients == (1.0, 0.99, 0.95)
    assert full.seeds == (0, 1, 2) and len(full.jobs(None)) > 54
    quick = Plan.of(quick=True, digits=True, seeds=3)
    assert quick.seeds == (0,) and len(quick.jobs(None)) < len(full.jobs(None)) / 2


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        rps.reproduce(out=tmp_path, **wrong)


def test_data_that_is_not_there_is_refused_before_anything_runs(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="CIFAR-10"):
        rps.reproduce(out=tmp_path, data=tmp_path / "none.tar.xz")


def test_runs_beyond_the_paper_train_and_are_shown() -> None:
    plan = replace(Plan.of(quick=False, digits=True, seeds=1), steps=2)
    found = rps_measure.Results()
    for name, setup in plan._extras().items():
        found.extras[name] = rps_training.train(replace(setup, n=4), None, points=1)
    shown = rps_compare.tables(plan, found)[-2]
    assert [line[0] for line in shown.rows] == list(plan._extras())
    assert all(len(line) == len(shown.columns) for line in shown.rows)
    kept = {name: curve.kept for name, curve in found.extras.items()}
    assert kept["models, 90 %, datagrams lost, asked for again"] < 0.01
    assert 0.02 < kept["models, 90 %, datagrams lost"] < 0.15


def ended(what: str, arrival: float, seed: int, by_label: bool, end: tuple[float, float, float]) -> Curve:
    setup = Setup(what, "RPS", arrival, by_label, seed, 600)
    loss, accuracy, lowest = end
    spread = 1.0 if what == "gradients" and arrival < 1 else 0.01
    point = Point(600, loss, accuracy, lowest, loss, accuracy, spread)
    return Curve(setup, [point], kept=(1 - arrival) * 15 / 16)


def judged(change: dict[tuple[bool, str, float], tuple[float, float, float]]) -> set[str]:
    """The training rows that fail where the runs end as the earlier one did, but for some."""
    plan, results = Plan.of(quick=False, digits=True, seeds=2), Results()
    for key, setup in plan._setups():
        by_label, what, arrival = key
        known = rps_compare.EXPECTED[by_label]
        end = change.get(key, known.get((what, arrival), known["gradients", 1.0]))
        results.curves[key].append(ended(what, arrival, setup.seed, by_label, end))
    end = change.get((True, "divided by n", 0.99), rps_compare.EXPECTED[True]["gradients", 0.99])
    results.extras[rps_measure.DIVIDED] = ended("gradients", 0.99, 0, True, end)
    return {row.quantity for row in rps_compare.training_rows(plan, results) if not row.ok}


def test_training_is_judged_on_both_sides_and_by_the_lowest_peer_too() -> None:
    assert judged({}) == set()
    assert judged({(True, "models", 0.9): (0.063, 0.959, 0.85)}) == {"RPS, 90% arrive: lowest accuracy"}
    slower = judged({(False, "models", 0.8): (0.16, 0.959, 0.937)})
    assert slower == {"RPS, 80% arrive: training loss above the baseline's"}
    assert judged({(True, "gradients", 0.99): (1.5, 0.185, 0.096)}) == {
        "gradients, 99% arrive: log2 of the training loss over the earlier run's"
    }
    assert judged({(True, "divided by n", 0.99): (0.5, 0.96, 0.96)}) == {
        "gradients, 99% arrive, divided by n: training loss above the baseline's",
        "gradients, 99% arrive, divided by n: accuracy below the baseline's",
    }
    faster = judged({(False, "models", 1.0): (0.05, 0.99, 0.99)})
    assert "no loss: accuracy" in faster


@pytest.mark.parametrize(("loss", "accuracy"), [(-0.2, 0.0), (0.2, 0.0), (0.0, -0.1), (0.0, 0.1)])
def test_what_tracks_the_baseline_lies_neither_above_it_nor_below(loss: float, accuracy: float) -> None:
    plan, results = Plan.of(quick=True, digits=True, seeds=1), Results()
    for key, setup in plan._setups():
        by_label, what, arrival = key
        end = (0.5, 0.8, 0.7)
        if arrival == 0.6 and by_label:
            end = (0.9, 0.7, 0.6)
        if what == "gradients" and by_label:
            end = (6.0, 0.2, 0.1)
        if key == (False, "models", 0.9):
            end = (0.5 + loss, 0.8 + accuracy, 0.7)
        results.curves[key].append(ended(what, arrival, setup.seed, by_label, end))
    failed = {row.quantity for row in rps_compare.training_rows(plan, results) if not row.ok}
    assert failed == {
        f"RPS, 90% arrive: {'training loss above' if loss else 'accuracy below'} the baseline's"
    }


def test_a_tolerance_does_not_grow_with_the_spread_of_seeds() -> None:
    plan, results = Plan.of(quick=False, digits=True, seeds=2), Results()
    for key, setup in plan._setups():
        by_label, what, arrival = key
        known = rps_compare.EXPECTED[by_label]
        loss, accuracy, lowest = known.get((what, arrival), known["gradients", 1.0])
        apart = 0.5 * setup.seed if key == (True, "models", 0.9) else 0.0
        results.curves[key].append(
            ended(what, arrival, setup.seed, by_label, (loss + apart, accuracy, lowest))
        )
    failed = [row for row in rps_compare.training_rows(plan, results) if not row.ok]
    assert [row.tolerance for row in failed] == [rps_compare.LOSS_TOLERANCE[0.9]]
