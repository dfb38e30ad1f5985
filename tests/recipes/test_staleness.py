import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from ragtag.recipes import RECIPES
from ragtag.recipes.staleness import recipe as staleness
from ragtag.recipes.staleness import tasks as staleness_tasks
from ragtag.recipes.staleness.coherent import comparable, dips, early
from ragtag.recipes.staleness.compare import spearman, suffers_more
from ragtag.recipes.staleness.measure import Plan, Results
from ragtag.recipes.staleness.model import Found
from ragtag.recipes.staleness.others import OTHERS


@pytest.mark.slow
def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    tiny = Plan((0,), (0,), (0, 8, 16), (0, 1), (1,), ("MF",), (1, 8), 160)
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: tiny))
    told = []
    report = staleness.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1] == len(tiny.studies()) == len(set(tiny.studies()))
    groups = " ".join(r.group for r in report.rows)
    for part in ("Depth", "Optimiser", "Other models", "Coherence"):
        assert part in groups
    # in so few batches no target is reached: two lower bounds are not compared, and that is said
    assert "Workers" not in groups and any("was not measured" in note for note in report.notes)
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["studies"]) == len(tiny.studies()) and loaded["rows"][0]["source"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.count("<svg") == 3 and "MF, Adam" in page


def test_plans_cover_the_study() -> None:
    full, quick = Plan.of(quick=False, seeds=5), Plan.of(quick=True, seeds=5)
    assert full.depths == quick.depths == (0, 1, 2, 3, 4, 5, 6)
    assert full.delays == (0, 4, 8, 16, 32) and full.optimiser_depths == (1, 2, 3, 4, 5, 6)
    asked = full.studies()
    assert {x.optimiser for x in asked} == set(staleness_tasks.LEARNING_RATES)
    assert {x.workers for x in asked} == {1, 8, 16} and {x.seed for x in asked} == {0, 1, 2, 3, 4}
    assert {x.model for x in asked} == {*(f"DNN {d}" for d in range(7)), *OTHERS}
    assert len(quick.jobs()) < len(asked) / 3
    assert RECIPES["staleness"] == staleness.__name__


@given(st.lists(st.integers(0, 6), min_size=3, max_size=9), st.data())
def test_rank_correlation(x, data) -> None:
    y = data.draw(st.lists(st.integers(0, 6), min_size=len(x), max_size=len(x)))
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert spearman(x, y) == pytest.approx(spearmanr(x, y)[0])
    else:
        assert spearman(x, y) == 0.0


def results_of(plan: Plan, batches: dict[tuple[str, int], tuple[float, ...]]) -> Results:
    """Of nets of one hidden layer: batches by (optimiser, s), seed by seed."""
    results = Results(plan)
    for (optimiser, s), per_seed in batches.items():
        for seed, count in zip(plan.seeds, per_seed, strict=True):
            study = plan.study("DNN 1", optimiser, 8, s, seed)
            results.found[study] = Found(study, count)
    return results


PAIR = Plan((0, 1), (0,), (0, 8), (0, 1), (1,), (), (8,), 1000)


def test_slow_down_is_over_no_delay_and_a_lower_bound_where_the_target_was_not_reached() -> None:
    results = results_of(PAIR, {("SGD", 0): (100, 50), ("SGD", 8): (300, math.inf)})
    assert results.slow_downs("DNN 1", "SGD", 8, 8) == [3.0, 20.0]
    assert results.mean_slow_down("DNN 1", "SGD", 8, 8) == pytest.approx(math.sqrt(60))
    assert results.open("DNN 1", "SGD", 8, 8) and not results.open("DNN 1", "SGD", 8, 0)


def test_nothing_is_compared_with_a_target_that_was_not_reached_without_delay() -> None:
    results = results_of(PAIR, {("SGD", 0): (100, math.inf), ("SGD", 8): (300, 400)})
    assert results.slow_downs("DNN 1", "SGD", 8, 8)[0] == 3.0
    assert math.isnan(results.mean_slow_down("DNN 1", "SGD", 8, 8))


def test_who_suffers_more_is_counted_by_seeds_against_both_robust_optimisers() -> None:
    at_0 = {(o, 0): (100, 100) for o in ("SGD", "Adagrad", "Adam")}
    late = {("SGD", 16): (200, 200), ("Adagrad", 16): (150, 500), ("Adam", 16): (300, 300)}
    assert suffers_more(results_of(PAIR, {**at_0, **late}), "Adam", [1]) == 0.5
    late["Adam", 16] = (300, 600)
    assert suffers_more(results_of(PAIR, {**at_0, **late}), "Adam", [1]) == 1.0


def run_of(mu: list[float], falls: list[float]) -> Found:
    """A run with this coherence, whose loss's logarithm falls so at each step."""
    found = Found(Plan.of(quick=True, seeds=1).study("DNN 0", "SGD", 8, 16, 0))
    found.coherence = list(enumerate(mu))
    found.losses = list(enumerate(np.exp(3.0 - np.concatenate([[0.0], np.cumsum(falls)[:-1]]))))
    return found


def test_the_pace_in_dips_is_told_from_the_pace_elsewhere() -> None:
    mu = [0.5] * 32 + [-0.5] * 32 + [0.0] * 66
    run = run_of(mu, [0.01 if value < 0 else 0.05 for value in mu])
    low, high = dips([run, run])
    assert low == pytest.approx([0.01] * 8) and high == pytest.approx([0.05] * 6)
    assert comparable(low, high) and not comparable([], high) and not comparable([], [])
    assert not comparable([0.01], [0.05] * 10) and comparable([0.01], [0.05] * 9)


def test_a_delayed_run_is_looked_at_as_long_as_the_one_without_delay_lasts() -> None:
    nan = math.nan
    calm = run_of([nan, 0.5, 0.5, 0.5], [0.2] * 4)
    delayed = run_of([nan, -0.5, 0.0, -0.1, 9.0, 9.0], [0.1, 0.1, 0.1, 5.0, 5.0, 5.0])
    assert early(delayed, calm) == pytest.approx((-0.7, 0.5))
    assert all(math.isnan(value) for value in early(delayed, run_of([nan], [0.1])))


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        staleness.reproduce(out=tmp_path, **wrong)


def test_a_text_that_is_too_short_is_refused(tmp_path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match="bytes"):
        staleness.reproduce(out=tmp_path / "out", data=short)
