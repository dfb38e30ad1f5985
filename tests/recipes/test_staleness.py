import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from ragtag.recipes import RECIPES, staleness, staleness_model
from ragtag.recipes.staleness_compare import spearman
from ragtag.recipes.staleness_measure import Plan, Results, dips
from ragtag.recipes.staleness_model import Found


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    tiny = Plan((0,), (0, 8), (0, 1), (1,), 160, complete=False)
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: tiny))
    told = []
    report = staleness.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1] == len(tiny.studies()) == len(set(tiny.studies()))
    groups = " ".join(r.group for r in report.rows)
    for part in ("Depth", "Optimiser", "Workers", "Coherence"):
        assert part in groups
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["studies"]) == len(tiny.studies()) and loaded["rows"][0]["source"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.count("<svg") == 2 and "> " in page.replace("&gt;", ">")


def test_plans_cover_the_study() -> None:
    full, quick = Plan.of(quick=False, seeds=5), Plan.of(quick=True, seeds=5)
    assert full.depths == quick.depths == (0, 1, 2, 3, 4, 5, 6) and full.s == quick.s == 16
    asked = full.studies()
    assert {x.optimiser for x in asked} == set(staleness_model.LEARNING_RATES)
    assert {x.workers for x in asked} == {1, 8, 16} and {x.seed for x in asked} == {0, 1, 2, 3, 4}
    assert len(quick.jobs()) < len(asked) / 3
    assert RECIPES["staleness"] == staleness.__name__


@given(st.lists(st.integers(0, 6), min_size=3, max_size=9), st.data())
def test_rank_correlation(x, data) -> None:
    y = data.draw(st.lists(st.integers(0, 6), min_size=len(x), max_size=len(x)))
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert spearman(x, y) == pytest.approx(spearmanr(x, y)[0])
    else:
        assert spearman(x, y) == 0.0


def test_slow_down_is_over_no_delay_and_a_lower_bound_where_the_target_was_not_reached() -> None:
    plan = Plan((0, 1), (0, 8), (0,), (), 1000, complete=False)
    results = Results(plan)
    for s, batches in ((0, (100, 50)), (8, (300, math.inf))):
        for seed in (0, 1):
            study = plan.study(0, "SGD", 8, s, seed)
            results.found[study] = Found(study, batches[seed])
    assert results.slow_downs(0, "SGD", 8, 8) == [3.0, 20.0]
    assert results.mean_slow_down(0, "SGD", 8, 8) == pytest.approx(math.sqrt(60))


def test_the_pace_in_dips_is_told_from_the_pace_elsewhere() -> None:
    plan = Plan.of(quick=True, seeds=1)
    found = Found(plan.study(0, "SGD", 8, 16, 0))
    mu = [0.5] * 32 + [-0.5] * 32 + [0.0] * 66
    falls = np.where(np.array(mu) < 0, 0.01, 0.05)
    logs = 3.0 - np.concatenate([[0.0], np.cumsum(falls)[:-1]])
    found.coherence = list(enumerate(mu))
    found.losses = list(enumerate(np.exp(logs)))
    assert dips(found) == pytest.approx((0.01, 0.05))
    found.coherence = [(i, 1.0) for i in range(len(mu))]
    assert math.isnan(dips(found)[0])


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        staleness.reproduce(out=tmp_path, **wrong)


def test_other_data_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="digits only"):
        staleness.reproduce(out=tmp_path, data=tmp_path)
