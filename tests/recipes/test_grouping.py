import json

import pytest

from ragtag.recipes import RECIPES
from ragtag.recipes.grouping import compare as grouping_compare
from ragtag.recipes.grouping import compensation, counts, gossip
from ragtag.recipes.grouping import measure as grouping_measure
from ragtag.recipes.grouping import recipe as grouping
from ragtag.recipes.grouping.measure import BATCH, NAMES, SCENES, N, Plan, Results
from ragtag.recipes.grouping.methods import ASYNC, BACKUP, DSSP, PARTIAL, RINGMASTER, SSP
from ragtag.recipes.grouping.training import Trial

KEYS = tuple(key for key in compensation.measured() if compensation.mends(key))


@pytest.mark.slow
def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    tiny = Plan((0, 1), (0.0, 5.0), (BACKUP, gossip.NAME), ((3.0, 1),), 1, 6, 6, (30,), (15,), 1, 8, KEYS, 1)
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: tiny))
    for module in (grouping_measure, compensation):
        monkeypatch.setattr(module, "train_size", lambda: 240)
    monkeypatch.setattr(grouping_measure, "SCENE_STEPS", dict.fromkeys(SCENES, 12))
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
        "the slow one's",
        "SSP, s = 4: the most",
        "stale updates count 1/tau",
        "3 hidden layers, rate 0.7, lambda 3",
    ):
        assert part in names
    sure = ("How much an update counts", "A parabola")
    assert not [r for r in report.rows if r.group.startswith(sure) and not r.ok]
    assert len(report.tables[0].rows) == 2 and len(report.tables[1].rows) == 3
    assert {line[0] for line in report.tables[2].rows} == set(NAMES)
    assert [line[0] for line in report.tables[-1].rows] == [
        "Prague (random groups)",
        "AD-PSGD",
    ]
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["trials"]) == 8 and loaded["rows"][0]["source"]
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert page.count("<svg") == 2 and "range over 2 seeds" in page


def test_plans() -> None:
    full, quick = Plan.of(quick=False, seeds=5), Plan.of(quick=True, seeds=5)
    assert full.seeds == (0, 1, 2, 3, 4) and min(full.delays) == 0 and full.worst == quick.worst == 5
    assert len(quick.jobs()) < len(full.jobs()) / 4
    assert RECIPES["grouping"] == grouping.__name__


def test_every_method_is_judged_or_listed_as_not_reproduced() -> None:
    judged = grouping_compare.expected_times()
    listed = " ".join(what for what, _ in grouping_compare.NOT_REPRODUCED)
    assert all(name in judged or name.split(" of ")[0] in listed for name in NAMES)


def test_rows_of_times_turn_red_by_what_a_method_did() -> None:
    """Not by what was kept in a peer's own model."""
    results = Results()
    for name, (expected, _) in grouping_compare.expected_times().items():
        results.times[name] = Trial(name, 0, 200 * expected, 100 * expected, used=200 * N * BATCH, lead=5)
    slow = round(results.times[BACKUP].used / 61)  # of a crew with a peer of a quarter of the others' speed
    for name in (BACKUP, RINGMASTER):
        results.times[name].half_dropped, results.times[name].dropped = 0, slow // 2
        results.times[name].staleness = {0: 1}
    results.times[ASYNC].staleness = {15: 1}
    results.times[DSSP].lead = 7
    assert [row.quantity for row in grouping_compare._time_rows(results) if not row.ok] == []
    for name in (SSP, DSSP, PARTIAL):
        results.times[name].alone = slow
        failed = [row.quantity for row in grouping_compare._time_rows(results) if not row.ok]
        assert failed == [f"{name}: share in no average with others"]
        results.times[name].alone = 0
    assert gossip.NAME not in grouping_compare.expected_times(), "no row of what the recipe alone does"


def test_how_many_groups_there_were_is_read_from_notes() -> None:
    notes = [
        (5.0, "groups", "2 groups: 0 1 + 2"),
        (7.0, "barrier ended", "1 of 2"),
        (9.0, "groups", "1 group: 0"),
    ]
    trial = Trial("x", 0, notes=notes)
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


def test_an_update_counts_by_its_samples_and_no_more_than_one_over_its_staleness() -> None:
    """By the closed form, on the library's central state: a straggler, and a group that others overtake."""
    crew = counts.CREW - 1 + 1 / (1 + counts.DELAY)
    one_of_many = counts.shares(counts.DELAY)
    assert one_of_many[-1].movement == pytest.approx(0.25 / crew, rel=grouping_compare.COUNT)
    assert one_of_many[0].movement == pytest.approx(1 / crew, rel=grouping_compare.COUNT)
    small, *large = counts.shares()
    assert small.movement == pytest.approx(1 / 5, rel=grouping_compare.COUNT)
    for one in large:
        assert one.stale == pytest.approx(counts.RATIO, rel=grouping_compare.COUNT)
        expected = 1 / counts.RATIO / counts.LARGE_PEERS
        assert one.movement == pytest.approx(expected, rel=grouping_compare.COUNT)


def test_on_a_parabola_the_correction_decides_whether_training_converges() -> None:
    for corrected in (True, False):
        expected = counts.expected_growth(corrected)
        assert counts.growth(corrected) == pytest.approx(expected, rel=grouping_compare.COUNT)
    assert counts.expected_growth(True) < 1 < counts.expected_growth(False)
