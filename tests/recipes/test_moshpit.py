import json
from dataclasses import replace

import numpy as np
import pytest

from ragtag.recipes import RECIPES
from ragtag.recipes.base import Report
from ragtag.recipes.jobs import run_jobs
from ragtag.recipes.moshpit import compare as moshpit_compare
from ragtag.recipes.moshpit import plan as moshpit_plan
from ragtag.recipes.moshpit import recipe as moshpit
from ragtag.recipes.moshpit.plan import (
    Plan,
    Results,
    all_reduce_law,
    groups_law,
    mixed,
    push_sum_law,
    ring_law,
)
from ragtag.recipes.moshpit.run import METHODS, Case, Found, run


def full(report, out) -> None:
    raise OSError("the disk is full")


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch) -> None:
    line = moshpit_plan._line(16, (4, 4), 0.1, 7, None, None, (9, 4), (6, 4))
    calm = moshpit_plan._line(16, (4, 4), 0, 1, 50, (40, 14), (9, 4), (2, 2))
    monkeypatch.setattr(moshpit_plan, "TABLE", (calm, line))
    monkeypatch.setattr(moshpit_compare, "TABLE", (calm, line))
    errors_at = Case("moshpit", 16, (4, 4), 0.1, rounds=5, until=0.0)
    half, mixing, within = (8, (4, 4)), ((8, 4, 1),), ((16, (4, 4), 0.1),)
    for module in (moshpit_plan, moshpit_compare):
        monkeypatch.setattr(module, "ERRORS_AT", errors_at)
        monkeypatch.setattr(module, "HALF_EMPTY", half)
        monkeypatch.setattr(module, "MIXING", mixing)
        monkeypatch.setattr(module, "WITHIN", within)
    monkeypatch.setattr(moshpit_plan, "_DRAWS", 100)
    monkeypatch.setattr(moshpit_compare, "OWN", {16: (4, 4), 8: (3, 3)})
    whole = Plan.of(quick=False, seeds=2)
    few = {case: min(count, 3) for case, count in whole.seeds.items() if case.n <= 16}
    monkeypatch.setattr(Plan, "of", staticmethod(lambda **how: Plan(few)))
    monkeypatch.setattr(moshpit, "ERRORS_AT", errors_at)
    told, found = [], []
    monkeypatch.setattr(moshpit, "run_jobs", lambda *how: found.append(run_jobs(*how)) or found[-1])
    with monkeypatch.context() as cut, pytest.raises(OSError, match="full"):
        cut.setattr(Report, "write", full)
        moshpit.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1][0] == told[-1][1] == len(told)
    report = moshpit.reproduce(out=tmp_path / "out", jobs=1, progress=lambda *what: told.append(what))
    assert told[-1] == (*told[-2][:2], "parts kept from before") and found[1] == found[0]
    assert not (tmp_path / "out/parts").exists()
    groups = {r.group for r in report.rows}
    assert line.name in groups and "Peers die within the round" in groups and len(groups) == 6
    names = " ".join(r.quantity for r in report.rows)
    for part in (
        "all-reduce",
        "push-sum: potential",
        "gossip: variance",
        "8 peers, 2 groups, after 1 round",
        "recognised",
    ):
        assert part in names
    few_peers = (
        "push-sum",
        "all-reduce",
        "8 peers, 2 groups",
    )  # these vary more than rows of many peers allow
    failed = {row.quantity for row in report.rows if not row.ok and not row.group.startswith("Peers die")}
    assert not {name for name in failed if not name.startswith(few_peers)}
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == len(few) and loaded["rows"][0]["source"]
    assert (tmp_path / "out/index.html").read_text("utf-8").count("<svg") == 1


def test_the_recipe_is_registered() -> None:
    assert RECIPES["moshpit"] == "ragtag.recipes.moshpit.recipe"


def test_plans_cover_the_table_and_quick_is_a_part_of_it() -> None:
    full, quick = (Plan.of(quick=q, seeds=s) for q, s in ((False, 10), (True, 3)))
    for line in moshpit_plan.TABLE:
        for method in line.rounds:
            judged = line.p == 0 or method not in ("gossip", "push-sum")
            assert (moshpit_plan.table_case(line, method) in full.seeds) == judged
    assert set(quick.seeds) <= set(full.seeds)
    for plan in (full, quick):
        seeds = [(job.arguments[0], seed) for job in plan.jobs() for seed in job.arguments[1]]
        assert len(seeds) == len(set(seeds)) == sum(plan.seeds.values())


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}])
def test_nonsense_is_refused(tmp_path, wrong) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        moshpit.reproduce(out=tmp_path, **wrong)
    with pytest.raises(ValueError, match="takes no data"):
        moshpit.reproduce(out=tmp_path, data=tmp_path)
    with pytest.raises(ValueError, match="no method is called"):
        run(Case("prayer", 4, (4,)), 0)


def test_the_law_of_all_reduce() -> None:
    assert all_reduce_law(10, 0.0, 50) == 1.0
    assert all_reduce_law(1024, 0.001, 50) == pytest.approx(2.79, abs=0.01)
    draws = np.random.default_rng(0).geometric(0.99**100, 100_000)
    assert all_reduce_law(100, 0.01, 5) == pytest.approx(np.minimum(draws, 5).mean(), rel=0.01)


def test_the_definition_gives_the_papers_table() -> None:
    line = next(line for line in moshpit_plan.TABLE if (line.n, line.p) == (1024, 0.005))
    agrees(line, "moshpit")
    full = groups_law(Case("moshpit", 64, (8, 8)))
    assert full["rounds"][0][:2] == (2.0, 0.0) and full["coarse"][0].tolerance(3) == 0.0


@pytest.mark.slow
def test_the_definition_gives_the_papers_whole_table() -> None:
    for line in moshpit_plan.TABLE:
        for method in ("moshpit", "random groups"):
            agrees(line, method)
    n, sides = moshpit_plan.HALF_EMPTY
    half, drawn = (groups_law(Case(m, n, sides))["rounds"][0].mean for m in ("moshpit", "random groups"))
    assert 8.2 <= half <= 8.8 and 6.1 <= drawn <= 6.6


def agrees(line: moshpit_plan.Line, method: str) -> None:
    """A mean over ten runs of the authors' lies where the definition's may, and within a tenth."""
    law = groups_law(moshpit_plan.table_case(line, method))
    for what, theirs in (("rounds", line.rounds[method]), ("coarse", line.coarse[method])):
        assert law[what][0].mean == pytest.approx(theirs, rel=0.1), (line.name, method, what)


def test_push_sum_and_a_ring_mix_as_their_laws_say() -> None:
    n, rounds = 128, 6
    ours = [run(Case("push-sum", n, (n,), rounds=rounds, until=0.0), seed).potential for seed in range(3)]
    assert all(len(run) == rounds + 1 for run in ours)
    assert np.mean([run[-1] / run[0] for run in ours]) == pytest.approx(push_sum_law(n, rounds), rel=0.1)
    law = ring_law(n, rounds, 272)
    found = run(Case("gossip", n, (n,), rounds=rounds, until=0.0), 0).variance[-1]
    assert abs(found - law.mean) < law.tolerance(1) < 0.08 * law.mean


def test_rows_are_red_on_both_sides_of_a_law() -> None:
    line = next(line for line in moshpit_plan.TABLE if (line.n, line.p) == (1024, 0))
    case = moshpit_plan.table_case(line, "moshpit")
    for rounds, ok in ((2.0, True), (1.9, False), (2.1, False)):
        found = Found(rounds, 2.0, (1.0,), 0.0, 1, 1.0, 0.0, 0.0)
        rows = moshpit_compare.table_rows(Results({case: [found] * 3}))
        assert [row.ok for row in rows] == [ok, True]


def test_random_groups_in_the_grids_place_pass_only_where_both_come_to_the_same() -> None:
    """In the quick form: by three deviations of what they come to."""
    seeds = Plan.of(quick=True, seeds=3).seeds
    alike = set()
    lines = [line for line in moshpit_plan.TABLE if (line.n, line.p) in moshpit_plan._QUICK]
    cases = [(moshpit_plan.table_case(line, "moshpit"), line.name) for line in lines]
    cases.append((moshpit_plan.ERRORS_AT, "variance"))
    for case, name in cases:
        laws, others = groups_law(case), groups_law(replace(case, method="random groups"))
        kinds = ("log variance",) if name == "variance" else ("rounds", "coarse")
        for kind in kinds:
            pairs = list(zip(laws[kind], others[kind], strict=False))[kind == "log variance" :]
            for t, (law, other) in enumerate(pairs, start=1):
                allowed = max(law.tolerance(seeds[case]), moshpit_plan.UNSEEN)
                if abs(law.mean - other.mean) <= allowed + 0.75 * other.tolerance(seeds[case]):
                    alike.add((name, kind, t))
    assert alike == {
        ("768 peers, 32^2, p = 0", "coarse", 1),
        ("1024 peers, 32^2, p = 0.005", "coarse", 1),
        ("variance", "log variance", 1),
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("within", [False, True])
def test_every_method_ends_and_says_what_it_did(method: str, within: bool) -> None:
    case = Case(method, 20, (5, 5), p=0.1, within=within, rounds=6, until=0.0)
    found = run(case, seed=2)
    assert len(found.variance) == 7 and found.variance[-1] < found.variance[0] * 1.01
    assert found == run(case, seed=2)  # of one seed, all is the same


def test_averages_over_seeds() -> None:
    case = Case("random groups", 8, (4,), rounds=2, until=0.0)
    runs = [run(case, seed) for seed in range(4)]
    results = Results({case: runs})
    assert results.mean(case) == np.mean([r.rounds for r in runs])
    assert results.variance(case)[0] == pytest.approx(np.mean([r.variance[0] for r in runs]))
    assert mixed(runs).factor[0] == pytest.approx(results.variance(case)[1] / results.variance(case)[0])
    assert results.error(replace(case)) is not None
