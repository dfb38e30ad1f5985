import json

import pytest

from ragtag.recipes import RECIPES
from ragtag.recipes.grouping import compare as grouping_compare
from ragtag.recipes.grouping import measure as grouping_measure
from ragtag.recipes.grouping import recipe as grouping
from ragtag.recipes.grouping.measure import METHODS, SCENES, Plan
from ragtag.recipes.grouping.training import Trial


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    tiny = Plan(
        (0, 1), (0.0, 5.0), 2, 40, (1, 30), (15,), 60, complete=False, live_s=1.0, compensation_epochs=1
    )
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: tiny))
    told = []
    report = grouping.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1] == len(told) == len(tiny.jobs())
    names = " ".join(f"{r.group} {r.quantity}" for r in report.rows)
    for part in (
        "1 slow group, delayed 300% g = 8",
        "500%: time over",
        "groups after",
        "older than 2n",
        "fixed rate",
        "21 times slower: accuracy",
        "3 hidden layers, rate 0.7, lambda 3",
    ):
        assert part in names
    assert all(r.ok for r in report.rows if r.group.startswith("T(g)") or "staleness" in r.group)
    assert {line[0] for line in report.tables[0].rows} == set(METHODS)
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["trials"]) == 2 * 2 * len(METHODS) and loaded["rows"][0]["source"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.count("<svg") == 2 and "range over 2 seeds" in page


def test_plans() -> None:
    full, quick = Plan.of(quick=False, seeds=5), Plan.of(quick=True, seeds=5)
    assert full.seeds == (0, 1, 2, 3, 4) and min(full.delays) == 0 and max(full.delays) == 5
    assert len(quick.jobs()) < len(full.jobs()) / 4
    assert RECIPES["grouping"] == grouping.__name__


def test_how_many_groups_there_were_is_read_from_notes() -> None:
    trial = Trial("x", 0, notes=[(5.0, "2 groups: 15 + 1"), (7.0, "peer 3 waits"), (9.0, "1 group")])
    assert [grouping_compare.groups_at(trial, t) for t in (0, 5, 8, 9)] == [1, 2, 2, 1]


def test_scenes_are_what_they_say() -> None:
    changing, everywhere, still = SCENES.values()
    assert changing.slow[0].window.from_s == 80 and changing.slow[0].window.until_s == 200
    assert [s.peer // 4 for s in everywhere.slow] == [0, 1, 2, 3]
    assert still.freezes[0].for_s == 40
    assert grouping_measure.delayed(0.0).slow == () and grouping_measure.delayed(5.0).slow[0].factor == 6


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        grouping.reproduce(out=tmp_path, **wrong)


def test_other_data_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="digits only"):
        grouping.reproduce(out=tmp_path, data=tmp_path)
