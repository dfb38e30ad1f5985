"""``ragtag leak``: of a user's cut, and of nets trained on digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragtag.privacy import meters
from ragtag.recipes.nopeek import training
from tests.app.command import error_of, invoke

GIVEN = """
import torch
import beside
generator = torch.Generator().manual_seed(0)
train_x, held_x = torch.rand(64, 1, 4, 4, generator=generator), torch.rand(24, 1, 4, 4, generator=generator)
def build():
    return (lambda x: x.flatten(1)[:, : beside.WIDTH]), train_x, held_x
def nothing():
    return train_x
def lists():
    return torch.nn.Flatten(), [1.0], [2.0]
def client():
    return torch.nn.Conv2d(1, 2, 3), train_x, held_x
def batch():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(16, 8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.Tanh(), last)
    return model, held_x[:2, None], torch.tensor([[0], [2]])
def zeros():
    model, x, y = batch()
    return model, x, y, {name: torch.zeros(2, *p.shape) for name, p in model.named_parameters()}
def one_update():
    model, x, y = batch()
    return model, x, y, {name: torch.zeros(1, *p.shape) for name, p in model.named_parameters()}
def other_names():
    return *batch(), {"0.weight": torch.zeros(2, 1)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meters, "EPOCHS", 3)
    (tmp_path / "cuts").mkdir()
    (tmp_path / "cuts" / "mine.py").write_text(GIVEN)
    (tmp_path / "cuts" / "beside.py").write_text("WIDTH = 5\n")
    return tmp_path


def test_a_cut_of_a_script(here: Path) -> None:
    shown = invoke("leak", "cuts/mine.py:build", width=120)
    assert shown.code == 0, shown.err
    assert "What codes tell of samples held out" in shown.out and "cuts/mine.py:build" in shown.out
    for line in ("distance correlation", "codes beside other samples", "variance that stays hidden", "SSIM"):
        assert line in shown.out
    assert "measured on 24 samples held out; the attacker has 64 leaked pairs" in shown.out
    assert "accuracy" not in shown.out
    told = json.loads(invoke("leak", "cuts/mine.py:build", "--json").out)
    (cut,) = told["cuts"]
    assert told["measured_on"] == "samples held out"
    assert (cut["cut"], cut["held"], cut["accuracy"]) == ("cuts/mine.py:build", 24, None)
    assert 0 < cut["dcor"] < 1 and cut["hidden"] > 0.4, "5 of 16 values are told"


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ("cuts/mine.py", "write FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("cuts/other.py:build", "there is no script cuts/other.py"),
        ("cuts/mine.py:missing", "has no function 'missing'"),
        ("cuts/mine.py:nothing", "it must give (cut, train_x, held_x); it gave a Tensor"),
        ("cuts/mine.py:lists", "must be tensors"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("cuts/mine.py:build --steps 3", "--steps goes with --attack hijacking or inversion"),
        ("cuts/other.py:build --weight 3", "--weight is of NoPeek, and goes with --attack hijacking"),
        ("cuts/other.py:batch --weight 0 --attack inversion", "what CUT gives is measured as it is"),
        ("cuts/mine.py:build --attack hijacking", "its first is a function; it must be a torch.nn.Module"),
        (
            "cuts/mine.py:zeros --attack hijacking",
            "must give (cut, private_x, public_x); it gave a tuple of 4",
        ),
        ("--attack inversion", "needs CUT, a function that gives (model, x, y) or (model, x, y, updates)"),
        ("cuts/mine.py:client --attack inversion", "[updates, batch, ...]"),
        ("cuts/mine.py:one_update --attack inversion", "they must be [updates, ...], [2, 8, 16]"),
        ("cuts/mine.py:other_names --attack inversion", "a tensor for each of the model's parameters"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(here: Path, cut: str, said: str) -> None:
    shown = invoke("leak", *cut.split())
    assert shown.code == 2
    assert said in error_of(shown)


def test_updates_of_a_users_model(here: Path) -> None:
    command = ("leak", "--attack", "inversion", "--steps", "60", "cuts/mine.py:batch")
    shown = invoke(*command, width=120)
    assert shown.code == 0, shown.err
    assert "What updates tell of their samples" in shown.out and "cosine of updates found" in shown.out
    assert "2 updates of 1 samples each" in shown.out
    told = json.loads(invoke(*command, "--json").out)
    (model,) = told["cuts"]
    assert told["attack"] == "inversion" and model["hidden"] < 0.5 and model["cosine"] > 0.9
    other = json.loads(invoke(*command[:-1], "cuts/mine.py:zeros", "--json").out)
    assert abs(other["cuts"][0]["cosine"]) < 1e-3, "updates that are given count, and not the gradients"


def test_a_users_client_is_hijacked_with_nopeek_and_without(here: Path) -> None:
    command = ("leak", "--attack", "hijacking", "--steps", "2", "--weight", "3", "cuts/mine.py:client")
    shown = invoke(*command, width=120)
    assert shown.code == 0, shown.err
    assert "What a server gets that hijacks the cut" in shown.out and "NoPeek, weight 3" in shown.out
    assert "64 samples of a client that trained on 2 batches; the server has 24 samples" in shown.out
    told = json.loads(invoke(*command, "--json").out)
    assert [(cut["cut"], cut["steps"]) for cut in told["cuts"]] == [("plain", 2), ("NoPeek, weight 3", 2)]


def test_without_a_cut_nets_on_digits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "DIGITS_EPOCHS", 2)
    shown = invoke("leak", "--weight", "30", width=120)
    assert shown.code == 0, shown.err
    assert "plain" in shown.out and "NoPeek, weight 30" in shown.out and "accuracy" in shown.out
    assert "measured on 360 samples held out" in shown.out
