"""The recipe of recipes for the internet: what it runs is what the page shows, and its rows can turn red."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

import ragtag
from ragtag.core.types import Arm, Effect, Outcome
from ragtag.protocols.rounds.progress import Waiting
from ragtag.recipes import RECIPES
from ragtag.recipes.diloco import training as shared
from ragtag.recipes.diloco.training import Method, Setup
from ragtag.recipes.internet import recipe as internet
from ragtag.recipes.internet import spot as spots
from ragtag.recipes.internet import training
from ragtag.recipes.internet.compare import (
    MISSING,
    WITH_MISSING,
    byte_rows,
    loss_rows,
    spot_rows,
    time_rows,
    ways_of,
)
from ragtag.recipes.internet.recipe import Plan
from ragtag.recipes.internet.training import (
    ALONE,
    DECOUPLED,
    DILOCO,
    EVERY_STEP,
    MULOCO,
    NOLOCO,
    QUORATE,
    SHORT,
    SPARSELOCO,
    WAYS,
    Attends,
    H,
    WayRun,
    train_way,
)
from ragtag.schedules.base import Average, Progress
from ragtag.training.exchange.combine import PUBLISHED

SMALL = {"n": 8, "width": 16, "layers": 1, "length": 8, "batch": 2, "looks": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """20 KB of random letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)))
    return path


def setup(way: str, steps: int = 12, every: int = 3, **more: object) -> Setup:
    """Three steps between averages in place of thirty."""
    return Setup(Method(way, every), 0, steps, 0.01, **(SMALL | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [DILOCO, SPARSELOCO, NOLOCO, DECOUPLED, MULOCO])
def test_it_runs_what_the_page_shows(way: str) -> None:
    """DiLoCo's and NoLoCo's papers take more local steps; all else is as it is written."""
    shown = next(written for written in PUBLISHED if written.name == way)
    options = eval(f"dict({shown.options})", {"ragtag": ragtag})
    alike = {"every": H} if way in (DILOCO, NOLOCO) else {}
    assert repr(sorted((options | alike).items())) == repr(sorted(WAYS[way].items()))


def written_out(asked: Setup, text: Path, pairs: list[list[set[int]]]) -> float:
    """NoLoCo as its paper has it, with g = b: the final loss of the mean of all models. pairs: by round."""
    read = shared.split_text(text.read_bytes())[0]
    begun = shared.pretrained(asked, read)
    models = []
    for _ in range(asked.n):
        models.append(shared.text_model(asked))
        models[-1].load_state_dict(begun.state_dict())
    inner = [shared.text_adamw(model, asked) for model in models]
    paces = [LambdaLR(one, shared.warm_cosine(asked.steps)) for one in inner]
    texts = [shared.text_batches(read, asked, peer, asked.n) for peer in range(asked.n)]
    slow: dict[int, torch.Tensor] = {}
    momentum: dict[int, torch.Tensor] = {}
    for step in range(1, asked.steps + 1):
        for model, optimizer, pace, source in zip(models, inner, paces, texts, strict=True):
            shared.learn_text(model, optimizer, *next(source))
            pace.step()
        if step % 3:
            continue
        fast = [parameters_to_vector(model.parameters()).detach().clone() for model in models]
        for pair in pairs[step // 3 - 1]:
            mean = torch.stack([fast[peer] for peer in pair]).mean(0)
            if step == 3:  # the first average is taken as it is
                for peer in pair:
                    slow[peer], momentum[peer] = mean.clone(), torch.zeros_like(mean)
                continue
            moved = torch.stack([fast[peer] - slow[peer] for peer in pair]).mean(0)
            middle = torch.stack([slow[peer] for peer in pair]).mean(0)
            for peer in pair:
                momentum[peer] = 0.5 * momentum[peer] + 0.7 * moved + 0.7 * (middle - slow[peer])
            for peer in pair:
                slow[peer] = slow[peer] + momentum[peer]
        for peer, model in enumerate(models):
            vector_to_parameters(slow[peer].clone(), model.parameters())
    every = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
    return training.TextJudge(asked, text).loss(every.mean(0))


def test_noloco_is_what_the_paper_says_step_by_step(text, monkeypatch) -> None:
    met: list[list[set[int]]] = [[] for _ in range(4)]
    made = training.CrewOptimizer

    def watched(inner: object, peer: object, *, on_outcome: object, **more: object) -> object:
        def over(outcome: Outcome) -> None:
            if set(outcome.members) not in met[outcome.round]:
                met[outcome.round].append(set(outcome.members))
            on_outcome(outcome)  # type: ignore[operator]

        return made(inner, peer, on_outcome=over, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "CrewOptimizer", watched)
    asked = setup(NOLOCO)
    run = train_way(asked, 0.0, text)
    assert run.without == 0
    assert all(sorted(map(len, pairs)) == [2] * 4 for pairs in met), "all meet one other in each round"
    assert len({frozenset(map(frozenset, pairs)) for pairs in met}) > 1, "not the same each time"
    assert run.loss == pytest.approx(written_out(asked, text, met), rel=1e-5)


def test_sparse_outer_steps_send_a_hundredth(text) -> None:
    """One round in ten is of whole models, and there is one for thirty of averages at every step."""
    ways = (EVERY_STEP, SPARSELOCO)
    every, sparse = (train_way(setup(way, 20, 1, width=32), 0.0, text) for way in ways)
    assert (every.rounds, sparse.rounds) == (20, 20)
    assert sparse.bytes / H < every.bytes / 100
    assert sparse.without == 0


def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest(text) -> None:
    asked = setup(MULOCO)
    model = shared.text_model(asked)
    muon, adamw = training.muon_and_adamw(model, asked)
    shapes = [tuple(p.shape) for p in muon.param_groups[0]["params"]]
    assert shapes == [(48, 16), (16, 16), (64, 16), (16, 64)]
    rest = adamw.param_groups[0]["params"]
    assert len(shapes) + len(rest) == len(list(model.parameters()))
    run = train_way(asked, 0.0, text)
    assert run.rounds == 4 and np.isfinite(run.loss)
    assert run.loss != train_way(setup(DILOCO), 0.0, text).loss


def test_peers_miss_the_share_of_rounds_that_is_asked_for() -> None:
    def comes(missing: float, me: int) -> list[bool]:
        asked = Attends(30, missing, 0, me)
        found = [asked.decide(Progress(30 * at, 30, 8, frozenset(range(8)))) for at in range(400)]
        return [isinstance(one, Average) for one in found]

    assert all(comes(0.0, 0))
    assert 0.65 < np.mean([comes(0.3, me) for me in range(8)]) < 0.75
    assert comes(0.3, 0) != comes(0.3, 1) and comes(0.3, 0) == comes(0.3, 0)
    off = Attends(30, 0.0, 0, 0).decide(Progress(31, 1, 8, frozenset(range(8))))
    assert not isinstance(off, Average)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == DECOUPLED else [pytest.mark.slow]) for way in WITH_MISSING]
)
def test_with_peers_missing_they_train_on(text, way: str) -> None:
    run = train_way(setup(way, 30), 0.3, text)
    assert 0 < run.rounds < 10
    assert np.isfinite(run.loss) and run.losses[-1] != run.losses[0]


def made_up(way: str, missing: float, loss: float, sent: float, computing: float = 0.95) -> WayRun:
    return WayRun(
        setup(way), missing, 1000, [60], [loss], sent, 2.0, 0.0, computed_s=computing, elapsed_s=1.0
    )


def as_wished() -> list[WayRun]:
    kinds = [(way, 0.0) for way in (ALONE, EVERY_STEP, MULOCO, SHORT)]
    kinds += [(way, missing) for way in WITH_MISSING for missing in MISSING]
    sent = {EVERY_STEP: 3e3, SPARSELOCO: 3.0, SHORT: 9.0, NOLOCO: 100 / 1.75, ALONE: 0.0}
    loss = {ALONE: 2.0, MULOCO: 1.45, EVERY_STEP: 1.49}
    return [made_up(way, m, loss.get(way, 1.5), sent.get(way, 100.0)) for way, m in kinds]


def test_rows_are_green_where_all_is_as_the_papers_say() -> None:
    runs = as_wished()
    assert all(row.ok for row in [*loss_rows(runs), *byte_rows(runs), *time_rows(runs)])


@pytest.mark.parametrize(
    ("way", "missing", "loss"),
    [
        (SPARSELOCO, 0.0, 1.52),
        (SHORT, 0.0, 1.52),
        (NOLOCO, 0.0, 1.57),
        (NOLOCO, 0.0, 1.43),
        (QUORATE, 0.0, 1.503),
        (DECOUPLED, 0.0, 1.54),
        (MULOCO, 0.0, 1.51),
        (ALONE, 0.0, 1.5),
        (EVERY_STEP, 0.0, 1.4),
        (NOLOCO, 0.3, 1.55),
        (SPARSELOCO, 0.1, 1.52),
    ],
)
def test_a_loss_that_is_not_turns_a_row_red(way: str, missing: float, loss: float) -> None:
    runs = [replace(r, losses=[loss]) if (r.way, r.missing) == (way, missing) else r for r in as_wished()]
    assert not all(row.ok for row in loss_rows(runs))


@pytest.mark.parametrize("broken", [False, True])
def test_a_quorum_leaves_nobody_out_who_is_there(text, monkeypatch, broken: bool) -> None:
    """One that waits for nobody else is told apart by less than a percent of the loss."""
    if broken:
        enough = Waiting.enough

        def at_once(self: Waiting, now_s: float) -> list[Effect]:
            grace = enough(self, now_s)
            self._enough_s = now_s
            return [replace(effect, at_s=now_s) for effect in grace if isinstance(effect, Arm)]

        monkeypatch.setattr(Waiting, "enough", at_once)
    runs = [train_way(setup(way), 0.0, text) for way in (DILOCO, QUORATE)]
    others = [run for run in as_wished() if run.missing or run.way not in (DILOCO, QUORATE)]
    found = next(row for row in loss_rows([*others, *runs]) if row.quantity == QUORATE)
    assert found.ok is not broken and found.measured == pytest.approx(1.0, abs=0.01)


def test_bytes_and_time_that_are_not_turn_rows_red() -> None:
    runs = as_wished()
    for way, sent in ((SPARSELOCO, 31.0), (SHORT, 31.0), (NOLOCO, 100.0), (DILOCO, 120.0)):
        wrong = [replace(r, bytes=sent) if r.way == way else r for r in runs]
        assert [row.quantity for row in byte_rows(wrong) if not row.ok] == [way]
    slow = [replace(r, computed_s=0.8) if r.way == DECOUPLED else r for r in runs]
    assert not any(row.ok for row in time_rows(slow))


@pytest.mark.parametrize("life_s", [1200.0, 120.0])
def test_all_of_spot_machines_time_is_accounted_for(monkeypatch, life_s: float) -> None:
    monkeypatch.setattr(spots, "LIFE_S", life_s)
    run = spots.spot(spots.SpotSetup(12, until_s=900.0))
    assert run.useful + run.died + run.joined + run.waited == pytest.approx(run.all)
    assert run.rounds > 0 and run.deaths > 0
    assert spot_rows(run)[0].ok == (run.goodput >= 0.88)


def test_machines_that_live_shorter_do_less_of_use(monkeypatch) -> None:
    calm = spots.spot(spots.SpotSetup(12, until_s=600.0))
    monkeypatch.setattr(spots, "LIFE_S", 60.0)
    assert spots.spot(spots.SpotSetup(12, until_s=600.0)).goodput < calm.goodput - 0.2


@pytest.mark.slow
def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch, text) -> None:
    def tiny(self: Plan, way: str, seed: int) -> Setup:
        return setup(way, 6, looks=1)

    monkeypatch.setattr(Plan, "setup", tiny)
    monkeypatch.setattr(internet, "SpotSetup", lambda peers: spots.SpotSetup(12, until_s=300.0))
    report = internet.reproduce(quick=True, data=text, out=tmp_path / "out", jobs=1)
    assert {r.ok for r in report.rows} == {True, False}, "six steps show little"
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == 4 + len(MISSING) * len(WITH_MISSING)
    assert len(report.tables[0].rows) == len(loaded["data"]["runs"])
    assert (tmp_path / "out/index.html").read_text("utf-8").count("<svg") == 1
    assert RECIPES["internet"] == internet.__name__
    assert ways_of([], DILOCO) == []


def test_reproduce_refuses_nonsense(tmp_path) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        internet.reproduce(out=tmp_path, seeds=0)
    with pytest.raises(FileNotFoundError, match="no text"):
        internet.reproduce(out=tmp_path, data=tmp_path / "nothing.txt")
