import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ragtag.optim.outer import Nesterov
from ragtag.recipes import RECIPES
from ragtag.recipes.diloco import recipe as diloco
from ragtag.recipes.diloco.recipe import (
    ALONE,
    DILOCO,
    EVERY_GRADIENT,
    EVERY_MODEL,
    METHODS,
    STREAMING,
    Plan,
    of,
)
from ragtag.recipes.diloco.training import Method, Run, Setup, _Crew, train

SMALL = {"n": 3, "width": 8, "layers": 1, "length": 8, "batch": 2, "looks": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """20 KB of random letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)))
    return path


def setup(method: Method, steps: int = 8, seed: int = 0) -> Setup:
    return Setup(method, seed, steps, 0.01, **SMALL)


def ends(text: Path, method: Method, steps: int = 8) -> list[float]:
    return train(setup(method, steps), text).losses


def test_plain_averages_are_those_of_an_outer_step_of_one_without_momentum(text) -> None:
    # one average after all steps: every method that averages models comes to the mean of the same models
    assert ends(text, Method("a", 8)) == ends(text, Method("b", 8, Nesterov(1.0, 0.0)))
    alone = _Crew(setup(ALONE), text)
    alone.local_steps(8)
    mean = alone.models.detach().mean(0)
    assert ends(text, Method("a", 8))[-1] == pytest.approx(float(alone._loss(mean, *alone._held)), rel=1e-5)


def test_gradients_averaged_keep_all_models_equal_and_match_one_optimiser(text) -> None:
    crew = _Crew(setup(EVERY_GRADIENT), text)
    table = crew.first()
    single = torch.nn.Parameter(crew.models.detach()[0].clone())
    mean = torch.from_numpy(np.mean(table, 0).reshape(-1)[: crew.run.size])
    single.grad = mean
    torch.optim.AdamW([single], 0.01, weight_decay=0.01).step()
    crew._take(mean.repeat(3, 1))
    moved = crew.models.detach()
    assert (moved == moved[0]).all()
    assert torch.allclose(moved[0], single.detach(), atol=1e-7)


def test_the_outer_step_is_nesterovs_on_what_the_peers_moved(text) -> None:
    outer = Nesterov(0.7, 0.9)
    crew = _Crew(setup(Method("d", 2, outer)), text)
    begun = crew._anchor[0].copy()
    first = np.mean(crew.first(), 0)
    expected, _ = outer.update(begun, first, outer.init(begun))
    crew._outer_step(0, np.stack([first] * 3))
    assert np.allclose(crew._table(crew.models.detach())[0], expected, atol=1e-7)
    assert np.allclose(crew._anchor[1], expected, atol=1e-7)


def test_each_fragment_is_averaged_once_in_h_steps_and_no_other_value_moves(text) -> None:
    crew = _Crew(setup(Method("s", 4, Nesterov(1.0, 0.0), 2)), text)
    before = crew.first()
    assert crew._step == 2  # H / fragments
    own = crew._table(crew.models.detach())
    crew._outer_step(0, np.stack([np.mean(before, 0)] * 3))
    after = crew._table(crew.models.detach())
    half = len(own[0]) // 2
    assert np.allclose(after[:, :half], np.mean(before, 0), atol=1e-7)
    assert (after[:, half:] == own[:, half:]).all()
    run = train(setup(Method("s", 4, Nesterov(), 2)), text)
    assert run.rounds == 4 and run.steps == [0, 4, 8]


def test_bytes_are_those_of_the_lines(text) -> None:
    every, seldom = train(setup(EVERY_MODEL), text), train(setup(Method("d", 4)), text)
    assert (every.rounds, seldom.rounds) == (8, 2)
    assert seldom.bytes / every.bytes == pytest.approx(0.25)
    # all-reduce: each value goes out (n - 1)/n times to owners and as often to the others
    assert every.round_bytes > 2 * 2 / 3 * 4 * every.size
    assert every.bytes_at[-1] == every.bytes and every.bytes_at[0] == 0
    assert train(setup(ALONE), text).bytes == 0


def test_a_run_depends_on_its_seed_alone(text) -> None:
    assert ends(text, DILOCO) == ends(text, DILOCO)
    assert train(setup(DILOCO, seed=1), text).losses != ends(text, DILOCO)


def report_runs(setups: list[Setup], text: Path) -> list[Run]:
    return [train(replace(s, steps=2), text) for s in setups]


def test_pretraining_is_one_model_for_all_and_better_than_none(text) -> None:
    crews = [_Crew(replace(setup(m), pretrained=60), text) for m in (DILOCO, EVERY_MODEL)]
    first, second = (crew.models.detach() for crew in crews)
    assert (first == first[0]).all() and (first == second).all()
    assert crews[0].run.losses[0] < _Crew(setup(DILOCO), text).run.losses[0] - 0.5


def test_reproduce_in_miniature_compares_and_writes_everything(tmp_path, monkeypatch, text) -> None:
    tiny = [Setup(method, 0, 50, 0.003, **SMALL) for method in METHODS]
    monkeypatch.setattr(Plan, "setups", lambda self: tiny)
    report = diloco.reproduce(quick=True, data=text, out=tmp_path / "out", jobs=1)
    assert not any(r.group.startswith("Final") for r in report.rows)  # too early to compare
    assert len(diloco.losses(report_runs(tiny, text))) == 5
    sent = {r.quantity: r for r in report.rows if r.group.startswith("Bytes")}
    assert all(r.ok for name, r in sent.items() if name.startswith("DiLoCo"))
    loaded = json.loads((tmp_path / "out/results.json").read_text("utf-8"))
    assert len(loaded["data"]["runs"]) == len(METHODS) and loaded["settings"]["text"] == "text.txt"
    assert (tmp_path / "out/index.html").read_text("utf-8").count("<svg") == 1
    assert RECIPES["diloco"] == diloco.__name__


def test_a_table_shows_how_far_diloco_is_by_length(text) -> None:
    runs = [train(setup(method, steps), text) for steps in (50, 100) for method in diloco.BY_LENGTH]
    table = diloco._lengths(runs)
    assert [line[:2] for line in table.rows] == [("50", "1"), ("100", "2")]
    assert table.rows[1][3] == f"{100 * (runs[5].loss / runs[4].loss - 1):+.2f} %"


def test_plans_have_every_method() -> None:
    for quick, count in ((True, 1), (False, 3)):
        setups = Plan.of(quick=quick, seeds=3).setups()
        longest = [s for s in setups if s.steps == max(s.steps for s in setups)]
        assert len(longest) == count * len(METHODS) and {s.n for s in setups} == {8}
        assert {s.seed for s in setups if s not in longest} <= {0}
        assert all(s.steps % 50 == 0 for s in setups)


@pytest.mark.parametrize(
    "wrong", [{"every": -1}, {"every": 10, "fragments": 3}, {"every": 2, "gradients": True}]
)
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="x: "):
        Method("x", **wrong)


def test_reproduce_refuses_nonsense(tmp_path) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        diloco.reproduce(out=tmp_path, seeds=0)
    with pytest.raises(FileNotFoundError, match="no text"):
        diloco.reproduce(out=tmp_path, data=tmp_path / "nothing.txt")
    assert math.isclose(STREAMING.every / STREAMING.fragments, 10) and of([], DILOCO) == []
