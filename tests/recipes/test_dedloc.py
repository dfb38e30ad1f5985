"""DeDLOC's recipe: its rows turn red where a target batch is none, samples get lost, or roles are slow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from ragtag.codecs.dense import fp32
from ragtag.core.wire import n_chunks
from ragtag.optim import roles
from ragtag.recipes import RECIPES
from ragtag.recipes.base import Row
from ragtag.recipes.dedloc import compare, mixes, recipe, training
from ragtag.recipes.dedloc.compare import Outcomes, all_rows, all_tables, outside_band
from ragtag.recipes.dedloc.mixes import (
    MIXES,
    RULES,
    MixRates,
    brute_force,
    paper_mix,
    random_mix,
    random_mixes,
)
from ragtag.recipes.dedloc.training import (
    CALM,
    CHANGING,
    FAULTY,
    GATHERS,
    LOCKSTEP,
    CrewRun,
    CrewSetup,
    crew_run,
    first_model,
    large_batch,
    window_means,
)
from ragtag.training.optimizer.modes import Gradients

SETUP = CrewSetup(peers=4, target=64, batch=4, steps=20, change=5)
FALLING = [1.0 - 0.025 * step for step in range(20)]


@cache
def rates() -> tuple[MixRates, ...]:
    return tuple(paper_mix(name) for name in MIXES)


def ran(rule: str, world: str, **more: object) -> CrewRun:
    """A crew as it would be where all is well, but for ``more``."""
    pace_s = 1.0 if rule == GATHERS else 3.0
    found = CrewRun(
        SETUP,
        rule,
        world,
        0,
        losses=list(FALLING),
        ended_s=[pace_s * (1 + step) for step in range(20)],
        samples=[65.0] * 20,
        survivors=4,
    )
    if rule == GATHERS:
        found = replace(found, computed=1300.0, counted=1300.0, overshoot=0.02, replayed=list(FALLING))
    return replace(found, **more)  # type: ignore[arg-type]


def results(
    world: str = CALM, rule: str = GATHERS, at_random: dict[str, float] | None = None, **more: object
) -> Outcomes:
    """All is well, but for what one crew and the random mixes are given."""
    crews = {(r, w): [ran(r, w)] for r in (GATHERS, LOCKSTEP) for w in (CALM, FAULTY)}
    crews[GATHERS, CHANGING] = [ran(GATHERS, CHANGING)]
    crews[rule, world] = [ran(rule, world, **more)]
    alone = [[loss + shift for loss in FALLING] for shift in (-0.001, 0.0, 0.001)]
    found = mixes.RandomMixes([1.0, 1.2], [1.0, 1.1], [1.0], 1)
    for name, value in (at_random or {}).items():
        setattr(found, name, [1.0, value])
    return Outcomes(alone, crews, list(rates()), found, 6)


def failed(found: list[Row]) -> list[str]:
    return [one.quantity for one in found if not one.ok]


def test_all_is_well_and_each_row_turns_red_by_what_it_is_about() -> None:
    assert failed(all_rows(results())) == []
    late = [loss + 0.01 for loss in FALLING]
    apart = "calm: beside one process's on the samples that were counted, farthest"
    assert failed(all_rows(results(replayed=[loss + 1e-4 for loss in FALLING]))) == [apart]
    assert failed(all_rows(results(replayed=FALLING[:19]))) == [apart]
    assert failed(all_rows(results(losses=late, replayed=late))) == ["calm: of 2 windows, outside the band"]
    assert failed(all_rows(results(world=FAULTY, overshoot=0.13))) == [
        f"{FAULTY}: beyond the target, a share of it"
    ]
    dropped = {"dropped": {"late": 140.0}}
    assert failed(all_rows(results(world=FAULTY, **dropped))) == [f"{FAULTY}: dropped, of those computed"]
    assert failed(all_rows(results(world=CHANGING, losses=late))) == [
        f"{CHANGING}: of 2 windows, outside the band"
    ]
    assert failed(all_rows(results(**dropped))) == ["calm: dropped, of those computed"]
    assert failed(all_rows(results(unaccounted=1.0))) == ["calm: neither counted, dropped nor pending"]
    assert failed(all_rows(results(counted=1364.0))) == ["calm: counted by peers, over those in means"]
    slow = [2.5 * (1 + step) for step in range(20)]
    assert failed(all_rows(results(world=FAULTY, ended_s=slow))) == [
        f"{FAULTY}: time to a loss of {compare.LOSS:g}, over lockstep's"
    ]
    for what in ("program_over_rules", "over_brute"):
        assert len(failed(all_rows(results(at_random={what: 0.9})))) == 1


def test_a_rule_or_a_program_that_is_wrong_turns_the_roles_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best shares are not those of the slowest rule, and none are faster than the paper's program."""
    monkeypatch.setattr(mixes, "best_shares", lambda mix, computes: roles.equal_shares(mix))
    found = failed(all_rows(replace(results(), mixes=[paper_mix(name) for name in MIXES])))
    assert [what.split(":")[0] for what in found] == ["16 unlike, 4 auxiliaries", "both", "all of these"]
    assert min(random_mixes(3, 0).program_over_rules) < 1
    with monkeypatch.context() as broken:
        broken.setattr(mixes, "upper_bound", lambda mix, computes: 1e-3)
        found = failed(all_rows(replace(results(), mixes=[paper_mix("both")])))
        assert "all of these: over the paper's own program" in found


def test_a_crew_that_stops_short_is_outside_in_what_it_did_not_come_to() -> None:
    alone = [[loss + shift for loss in FALLING] for shift in (-0.001, 0.001)]
    assert outside_band([ran(GATHERS, CALM)], alone) == 0
    assert outside_band([ran(GATHERS, CALM, losses=FALLING[:19])], alone) == 1


def test_a_crew_or_a_lockstep_that_never_comes_to_the_loss_fails() -> None:
    high, what = (
        [loss + 1 for loss in FALLING],
        f"{FAULTY}: time to a loss of {compare.LOSS:g}, over lockstep's",
    )
    assert what in failed(all_rows(results(world=FAULTY, losses=high)))
    assert failed(all_rows(results(world=FAULTY, rule=LOCKSTEP, losses=high))) == [what]


def test_what_peers_can_compute_while_they_live_and_run() -> None:
    setup = CrewSetup(peers=4, target=500, batch=5, steps=20, change=4)
    faults, until_s = setup.faults(FAULTY), 60.0
    assert [crash.peer for crash in faults.crashes] == [1, 2] and faults.freezes[0].peer == 3
    assert setup.computable(CALM, until_s) == pytest.approx(setup.samples_per_s(CALM) * until_s)
    lost_s = [0.0, *(until_s - crash.at_s for crash in faults.crashes), faults.freezes[0].for_s]
    lost = sum(speed * s / training.SAMPLE_S for speed, s in zip(setup.speeds(FAULTY), lost_s, strict=True))
    assert setup.computable(FAULTY, until_s) == pytest.approx(setup.samples_per_s(FAULTY) * until_s - lost)
    with pytest.raises(ValueError, match="world"):
        setup.faults("stormy")


def test_where_members_change_as_many_come_as_die_and_no_more_than_there_are_seats_for() -> None:
    setup = CrewSetup(peers=8, target=1024, batch=16, steps=40, change=10)
    comes, dies = setup.comes(CHANGING), setup.faults(CHANGING).crashes
    assert list(comes) == [8, 9, 10] and [crash.peer for crash in dies] == [1, 2, 3]
    assert list(comes.values()) == [crash.at_s for crash in dies]
    assert list(comes.values()) == pytest.approx([at * setup.step_s(CHANGING) for at in (10, 20, 30)])
    assert setup.speeds(CHANGING)[8:] == setup.speeds(CHANGING)[1:4]
    until_s = 35 * setup.step_s(CHANGING)
    assert setup.computable(CHANGING, until_s) == pytest.approx(35 * 1024), "one goes as one comes"
    large = CrewSetup(peers=64, target=4096, batch=16, steps=40, change=5)
    for each in (setup, large):
        values = sum(parameter.numel() for parameter in first_model(each.hidden)[0].parameters())
        assert n_chunks(values, fp32.elements) == each.peers, "each peer owns a chunk"
    assert (large.founders(CHANGING), len(large.comes(CHANGING))) == (52, 12)
    assert len({crash.at_s for crash in large.faults(CHANGING).crashes}) == 3


@pytest.mark.parametrize("broken", [False, True])
def test_a_crew_takes_the_large_batchs_steps(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So closely that steps that are a tenth too long are seen."""
    setup = CrewSetup(peers=4, target=256, batch=16, steps=10, change=4)
    if broken:
        apply = Gradients.apply

        def longer(self: Gradients) -> None:
            for total in self._sums:
                total.mul_(1.1)
            apply(self)

        monkeypatch.setattr(Gradients, "apply", longer)
    found = crew_run(setup, GATHERS, CALM, 1)
    apart = abs(window_means(found.losses, 10)[0] - window_means(large_batch(setup, 7), 10)[0])
    assert (apart > 0.003) is broken
    assert found.unaccounted == 0.0 and found.survivors == 4
    assert (found.replay_apart > compare.REPLAYED) is broken
    if not broken:
        assert found.counted == sum(found.samples) >= 10 * 256 and found.goodput > 0.6


@pytest.mark.parametrize("broken", [False, True])
def test_steps_of_half_of_their_samples_are_told_apart(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses lie as near to the large batch's as others'."""
    if broken:
        gather, number = Gradients._gather, count()

        def every_other(self: Gradients) -> None:
            for parameter in self._parameters:
                parameter.grad.mul_(2.0 * (next(number) // len(self._parameters) % 2))
            gather(self)

        monkeypatch.setattr(Gradients, "_gather", every_other)
    setup = CrewSetup(peers=4, target=256, batch=16, steps=10, change=4)
    alone = [large_batch(setup, seed) for seed in range(5)]
    found = crew_run(setup, GATHERS, CALM, 1)
    assert outside_band([found], alone) == 0
    assert (found.replay_apart > compare.REPLAYED) is broken


@pytest.mark.slow
def test_the_loss_against_steps_is_that_of_one_process_with_the_large_batch() -> None:
    setup = CrewSetup(peers=8, target=1024, batch=16, steps=40, change=10)
    alone = [large_batch(setup, recipe.BAND_SEED + seed) for seed in range(5)]
    for world, survivors in ((FAULTY, 8 - 3), (CHANGING, 8)):
        found = [crew_run(setup, GATHERS, world, seed) for seed in range(3)]
        assert outside_band(found, alone) == 0 and {run.survivors for run in found} == {survivors}
    assert min(run.used for run in found) > 0.7, "what comes in holds nobody up"


def test_a_crew_that_peers_leave_accounts_for_all_and_lockstep_waits() -> None:
    setup = CrewSetup(peers=4, target=256, batch=16, steps=5, change=3)
    found, beside = (crew_run(setup, rule, FAULTY, 1) for rule in (GATHERS, LOCKSTEP))
    assert (found.survivors, beside.survivors) == (3, 3) and found.unaccounted < 1e-6
    assert found.computed == pytest.approx(found.counted + found.pending + sum(found.dropped.values()))
    assert sum(found.dropped.values()) > 0 and found.goodput < found.used
    assert beside.computed == 0.0 and 0 < max(beside.samples) <= 256.0
    with pytest.raises(ValueError, match="rule"):
        crew_run(setup, "waits", CALM, 0)


def test_a_mix_by_all_rules_and_by_brute_force() -> None:
    found = paper_mix("16 unlike, 4 auxiliaries")
    assert found.shares["auxiliary of 500 Mbit/s"] > 0.2 and found.computing == 16
    assert found.averages.keys() == {*RULES, mixes.PROGRAM, mixes.BOUND}
    few = random_mixes(4, 5)
    assert len(few.over_rules) == 4 and min(few.over_rules) >= 1
    small = next(mix for seed in range(20) if (mix := random_mix(seed)).n <= 4)
    assert brute_force(small) >= roles.assign(small).steps_per_s * (1 - 1e-9)


def test_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "run_parts", lambda *_: results())
    report = recipe.reproduce(quick=True, out=tmp_path / "out")
    page = (tmp_path / "out/index.html").read_text("utf-8")
    assert report.ok and page.count("<svg") == 2 and "hivemind" in page
    assert RECIPES["dedloc"] == recipe.__name__
    assert [len(table.columns) for table in all_tables(results())] == [5, 7, 8, 6, 2]
    with pytest.raises(ValueError, match="takes no data"):
        recipe.reproduce(out=tmp_path, data=tmp_path)


def test_all_parts_are_run_and_come_back_in_their_places(tmp_path: Path) -> None:
    parts = recipe.Parts(CrewSetup(2, 32, 8, steps=2, change=5), 2, 1, 2, 4)
    found = recipe.run_parts(parts, 1, None, tmp_path)
    assert [len(losses) for losses in found.alone] == [2, 2] and len(found.mixes) == len(MIXES)
    for (rule, world), (run,) in found.crews.items():
        assert (run.rule, run.world, run.setup) == (rule, world, parts.crew)
    assert len(found.at_random.over_rules) == 2
    again = recipe.run_parts(parts, 1, None, tmp_path)
    assert again == found, "parts are kept until the report is written"
