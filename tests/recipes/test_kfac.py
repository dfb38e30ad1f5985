"""K-FAC's recipe: its rows turn red where K-FAC does nothing, peers do not agree, or faults cost much."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ragtag.optim.kfac.preconditioner import KFAC
from ragtag.recipes import RECIPES
from ragtag.recipes.base import Row
from ragtag.recipes.kfac import recipe, training
from ragtag.recipes.kfac.recipe import (
    BYTES,
    NOT_THERE,
    PLACEMENTS,
    STEPS,
    TIME,
    TUNED,
    Plan,
    Results,
    best,
    rows,
    steps_for,
    tables,
)
from ragtag.recipes.kfac.training import (
    CALM,
    EXTRAS,
    GRIDS,
    IMAGE_GRIDS,
    KFAC_NAME,
    KILL_AND_FREEZE,
    MUON_NAME,
    PEERS,
    SGD_NAME,
    Settings,
    TrainedNet,
    change_last_bits,
    first_at,
    in_crew,
    in_one_process,
    methods,
)

ROOT = Path(__file__).parents[2]


def ended(method: str, steps: int, accuracy: float, **more: float) -> TrainedNet:
    found = TrainedNet(
        TUNED[method], 0, steps, accuracy, step_cpu_s=1.0, curve=[accuracy] * 10, bytes_sent=1.0
    )
    return replace(found, **more)  # type: ignore[arg-type]


def results(**kfac: float) -> Results:
    """As they would be where all is well, but for what K-FAC's runs are given."""
    trained = {(m, s): [ended(m, s, 0.97 if s == 100 else 0.93)] * 2 for m in TUNED for s in (100, 60)}
    trained[KFAC_NAME, 60] = [ended(KFAC_NAME, 60, kfac.get("accuracy", 0.97))] * 2
    crews = {
        CALM: [
            ended(KFAC_NAME, 60, kfac.get("calm", 0.97), reached=kfac.get("calm_reached", 30), longest=1.1)
        ]
        * 2,
        KILL_AND_FREEZE: [
            ended(KFAC_NAME, 60, 0.97, reached=kfac.get("reached", 32), longest=kfac.get("longest", 1.4))
        ]
        * 2,
    }
    placed = {p: [ended(KFAC_NAME, 12, 0.5, values=[1.0, 2.0], bytes_sent=5.1e6)] * 2 for p in PLACEMENTS}
    memory = {"values": [1.0, 2.0 + kfac.get("apart", 0.0)], "bytes_sent": kfac.get("sent", 5.52e6)}
    placed["memory"] = [replace(placed["memory"][0], **memory)] * 2
    kink = [replace(placed["memory"][0], values=[1.0, 2.0 + by]) for by in (1e-7, 1e-3)]
    nudged = {1: kink, 2: [replace(kink[0], values=[1.0, 2.0 - 2e-7])] * 2}
    return Results([], dict(TUNED), trained, crews, placed, nudged)


PLAN = Plan.of(quick=True, digits=True, seeds=2)


def failed(found: list[Row]) -> list[str]:
    return [one.quantity for one in found if not one.ok]


def test_all_is_well_and_each_row_turns_red_by_what_it_is_about() -> None:
    assert failed(rows(PLAN, results())) == []
    assert failed(rows(PLAN, results(accuracy=0.964))) == ["accuracy below SGD's after all"]
    assert len(failed(rows(PLAN, results(accuracy=0.92)))) == 2
    assert failed(rows(PLAN, results(reached=34))) == [
        f"{KILL_AND_FREEZE}: steps to 95% over the calm crew's"
    ]
    assert failed(rows(PLAN, results(longest=3.1))) == [f"{KILL_AND_FREEZE}: longest step, in medians"]
    assert failed(rows(PLAN, results(apart=3e-7))) == []
    assert failed(rows(PLAN, results(apart=5e-7))) == [
        "placement memory: apart, over trainings that differ in last bits"
    ]
    travel = ["bytes with placement memory, over communication's"]
    assert failed(rows(PLAN, results(sent=5.1e6))) == failed(rows(PLAN, results(sent=5.9e6))) == travel
    assert tables(PLAN, results())[1].rows[0][-1] == "met"


def test_crews_that_never_come_to_the_target_are_no_better_for_a_calm_one_that_does_not_either() -> None:
    never = failed(rows(PLAN, results(reached=61, calm_reached=61)))
    assert never == [f"{KILL_AND_FREEZE}: steps to 95% over the calm crew's"]
    assert failed(rows(PLAN, results(reached=61, calm_reached=60))) == never
    assert failed(rows(PLAN, results(calm=0.1))) == [f"{CALM}: accuracy below one process's by SGD after all"]


def test_a_nudge_changes_last_bits_only() -> None:
    nets = [nn.Linear(50, 20) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    change_last_bits(nets[1], 1)
    before, after = (nn.utils.parameters_to_vector(net.parameters()).detach() for net in nets)
    ulps = before.view(torch.int32) - after.view(torch.int32)
    assert set(ulps.tolist()) == {-1, 0, 1}
    assert 0.6 < float((ulps != 0).float().mean()) < 0.73
    with torch.no_grad():
        nets[0].weight.zero_()
    change_last_bits(nets[0], 1)
    assert not nets[0].weight.any(), "a zero stays: it has no bit to change"


def test_as_many_settings_are_tried_for_each_method_and_the_best_counts() -> None:
    assert {len(grid) for grid in GRIDS.values()} == {6}
    assert {len(grid) for grid in IMAGE_GRIDS.values()} == {7}
    assert all(TUNED[method] in grid for method, grid in GRIDS.items())
    low, high = (Settings(SGD_NAME, lr) for lr in (0.1, 0.2))
    tried = [
        TrainedNet(how, 0, 9, accuracy=a, loss=0.1) for how, a in ((low, 0.9), (high, 0.95), (low, 0.96))
    ]
    assert best(tried) == high
    full, quick = (Plan.of(quick=q, digits=True, seeds=3) for q in (False, True))
    assert (
        full.tuning_seeds
        and not quick.tuning_seeds
        and full.equal
        and set(quick.worlds) < set(full.worlds)
        and full.fewer == 60
    )


def test_a_report_says_with_which_seeds_its_settings_were_tried_and_of_crews_where_there_are_some() -> None:
    """On CIFAR-10 there are no crews."""
    full, quick = (Plan.of(quick=q, digits=True, seeds=3) for q in (False, True))
    images = Plan.of(quick=False, digits=False, seeds=3)
    assert ["seeds: 100, 101)" in " ".join(recipe.notes(plan)) for plan in (full, quick, images)] == [
        True,
        False,
        True,
    ]
    one = replace(images, tuning_seeds=(100,))
    assert "seeds: 100)" in " ".join(recipe.notes(one))
    assert "six settings" not in " ".join(recipe.notes(quick))
    assert ["In a crew" in " ".join(recipe.notes(plan)) for plan in (full, quick, images)] == [
        True,
        True,
        False,
    ]


def test_what_the_quick_form_takes_is_what_the_stored_sweep_chose() -> None:
    stored = json.loads((ROOT / "benchmarks/results/reproduce_kfac.json").read_text("utf-8"))
    (table,) = (table for table in stored["tables"] if table["title"] == "Settings")
    chosen = dict(table["rows"])
    assert chosen.keys() >= GRIDS.keys() - set(EXTRAS)
    assert chosen == {method: TUNED[method].text for method in chosen}


def test_the_first_step_at_a_target() -> None:
    assert first_at(0.9, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 6
    assert first_at(0.7, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 5
    assert first_at(0.9, [0.0] * 10) == 11


@pytest.mark.parametrize("broken", [False, True])
def test_k_fac_pays_and_without_its_work_does_not(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By so much that the rows see it; without it the same settings are worse than SGD's."""
    if broken:
        monkeypatch.setattr(KFAC, "step", lambda self: None)
    kfac = in_one_process(TUNED[KFAC_NAME], 0, 40)
    sgd = in_one_process(TUNED[SGD_NAME], 0, 40)
    assert (kfac.accuracy < sgd.accuracy + 0.02) is broken


def test_a_crew_comes_to_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers with parts of the joint batch take the steps of one process with all of it."""
    how = replace(TUNED[KFAC_NAME], lr=0.03)
    alone, together = in_one_process(how, 1, 6), in_crew(how, CALM, 1, 6, nudge=0)
    assert together.loss == pytest.approx(alone.loss, rel=0.02)
    assert together.longest < 1.5 and together.bytes_sent > 0 and len(together.values) == 9802
    assert PEERS == 8 and training.WORLDS[CALM].faults == {}
    assert together.step_s > training.STEP_S
    muon = in_crew(TUNED[MUON_NAME], CALM, 1, 3)
    assert 0.0 < muon.accuracy < 1.0


def test_equal_bytes_and_equal_time_are_as_many_steps_as_these_pay_for() -> None:
    """K-FAC sends four times as much in a step, and computes for twice as long."""
    found = results()
    for method, sent, cpu_s in ((SGD_NAME, 1e3, 1.0), (KFAC_NAME, 4e3, 2.0)):
        run = ended(method, 100, 0.9, bytes_sent=100 * sent, step_s=training.STEP_S)
        found.equal[method, STEPS] = [run] * 2
        found.trained[method, 100] = [ended(method, 100, 0.9, step_cpu_s=cpu_s)] * 2
    assert [steps_for(what, SGD_NAME, found, PLAN) for what in (BYTES, TIME)] == [100, 100]
    assert [steps_for(what, KFAC_NAME, found, PLAN) for what in (BYTES, TIME)] == [25, 50]


def test_methods_that_are_not_installed_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(methods()) == GRIDS.keys() - set(EXTRAS)
    assert set(Plan.of(quick=False, digits=True, seeds=1).methods).isdisjoint(EXTRAS)
    monkeypatch.setattr(recipe, "ran", lambda *_: results())
    assert NOT_THERE in recipe.reproduce(quick=True, out=tmp_path, seeds=2).notes


@pytest.mark.parametrize("method", EXTRAS)
def test_soap_and_shampoo_learn_alone_and_in_a_crew(method: str) -> None:
    pytest.importorskip("pytorch_optimizer", reason="ragtag[optimizers] is not installed")
    alone = in_one_process(TUNED[method], 0, 40)
    crew = in_crew(TUNED[method], CALM, 0, 2, nudge=0)
    assert alone.accuracy > 0.8 and crew.bytes_sent > 0 and len(crew.values) == 9802


def test_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "ran", lambda *_: results())
    report = recipe.reproduce(quick=True, out=tmp_path / "out", seeds=2)
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert report.ok and page.count("<svg") == 1 and "MISSED" not in page
    assert RECIPES["kfac"] == recipe.__name__
    with pytest.raises(ValueError, match="both must be 1"):
        recipe.reproduce(out=tmp_path, seeds=0)
