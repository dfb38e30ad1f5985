"""Text for recipes, and the language models: what they are given, and that no byte sees the next one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from ragtag.recipes.tasks import texts
from ragtag.recipes.tasks.texts import (
    CharLSTM,
    CharTransformer,
    load_text,
    lstm,
    lstm_parameters,
    stacked_lstm,
    stacked_transformer,
    text_task,
    transformer,
    transformer_parameters,
)

MODELS = [CharLSTM(8, 12), CharTransformer(16, 1, 32)]
models = pytest.mark.parametrize("model", MODELS, ids=["LSTM", "transformer"])


def test_the_library_is_the_same_each_time_and_is_python() -> None:
    text = load_text()
    assert len(text) == texts.LIBRARY_BYTES and text == load_text()
    assert text.count(b"def ") > 2000 and "Python 3." in texts.describe_text()


def test_a_machine_without_library_source_is_told_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "two.py").write_text("y" * texts.LIBRARY_BYTES)
    with pytest.raises(FileNotFoundError, match="--data"):
        load_text()


def test_a_text_by_file_or_by_folder(tmp_path) -> None:
    path = tmp_path / "plays.txt"
    path.write_bytes(b"to be " * 2000)
    assert load_text(path) == load_text(tmp_path) == b"to be " * 2000
    assert texts.describe_text(tmp_path) == "plays.txt"


def test_texts_that_are_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no text"):
        load_text(Path(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"0 \.txt files"):
        load_text(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"2 \.txt files"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="1 bytes"):
        load_text(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="windows of 8"):
        texts.windows(b"12345678", 8)
    with pytest.raises(ValueError, match="3 peers"):
        texts.batches(b"12345678", batch=1, length=4, seed=0, peers=3)
    with pytest.raises(ValueError, match="heads"):
        CharTransformer(width=18)
    with pytest.raises(ValueError, match="LSTM, transformer"):
        text_task("GRU")


def test_windows_and_what_is_held_out() -> None:
    text = bytes(range(100))
    train, held = texts.split_text(text, 0.2)
    assert train + held == text and len(held) == 20
    x, y = texts.windows(train, 7)
    assert x.shape == y.shape == (11, 7)
    assert x.flatten().tolist() == list(range(77)) and y.flatten().tolist() == list(range(1, 78))


def test_batches_are_each_peers_own_part() -> None:
    text = bytes(range(200))
    for peer in (0, 1):
        drawn = list(islice(texts.batches(text, batch=3, length=5, seed=1, peer=peer, peers=2), 50))
        again = next(texts.batches(text, batch=3, length=5, seed=1, peer=peer, peers=2))
        assert torch.equal(drawn[0][0], again[0])
        for x, y in drawn:
            assert x.shape == (3, 5) and torch.equal(y, x + 1)
            assert (x // 100 == peer).all() and (y // 100 == peer).all()


@models
def test_no_score_depends_on_what_comes_after(model: nn.Module) -> None:
    x = torch.arange(40).reshape(2, 20)
    other = x.clone()
    other[:, 11:] = 7
    with torch.no_grad():
        scores, changed = model(x), model(other)
    assert scores.shape == (2, 256, 20)
    assert torch.allclose(scores[:, :, :11], changed[:, :, :11], atol=1e-6)
    assert not torch.allclose(scores[:, :, 11:], changed[:, :, 11:])


@models
def test_models_learn_and_stack_under_vmap(model: nn.Module) -> None:
    x = torch.tensor([[1, 2, 3, 4] * 4])
    y = x.roll(-1, 1)

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, w, (x,)), y)

    w = {name: p.detach().clone() for name, p in model.named_parameters()}
    slope = grad(loss)(w, x, y)
    stacked = vmap(grad(loss), in_dims=(None, 0, 0))(w, torch.stack([x, x]), torch.stack([y, y]))
    for name, one in slope.items():
        assert torch.allclose(stacked[name][1], one, atol=1e-6)
    before = float(loss(w, x, y))
    for _ in range(60):
        slope = grad(loss)(w, x, y)
        w = {name: p - 0.5 * slope[name] for name, p in w.items()}
    assert float(loss(w, x, y)) < 0.2 * before


@pytest.mark.parametrize(
    ("one", "many", "parameters"),
    [
        (lstm, stacked_lstm, lstm_parameters(8, 12)),
        (transformer, stacked_transformer, transformer_parameters(16, 2, 12)),
    ],
    ids=["LSTM", "transformer"],
)
def test_stacked_models_are_each_their_own(one, many, parameters) -> None:
    rng = torch.Generator().manual_seed(4)
    models = [[p.initial(seed, i) for i, p in enumerate(parameters)] for seed in range(3)]
    x = torch.randint(0, 256, (3, 2, 9), generator=rng)
    stacked = [torch.stack(parts).requires_grad_() for parts in zip(*models, strict=True)]
    scores = many(stacked, x)
    assert scores.shape == (3, 2, 256, 9)
    seen = torch.randn(scores.shape, generator=rng)
    slopes = torch.autograd.grad((scores * seen).sum(), stacked)
    for p, model in enumerate(models):
        mine = [part.requires_grad_() for part in model]
        alone = one(mine, x[p])
        assert torch.allclose(scores[p], alone, atol=1e-5)
        for slope, whole in zip(torch.autograd.grad((alone * seen[p]).sum(), mine), slopes, strict=True):
            assert torch.allclose(whole[p], slope, atol=1e-4)


def test_models_start_the_same_by_seed_and_have_the_sizes_said() -> None:
    one, same, other = CharLSTM(), CharLSTM(seed=0), CharLSTM(seed=1)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and not torch.equal(pairs[0][0], pairs[0][2])
    assert sum(p.numel() for p in one.parameters()) == 82_560
    assert sum(p.numel() for p in CharTransformer().parameters()) == 135_808


@pytest.mark.parametrize("name", ["LSTM", "transformer"])
def test_a_task_of_a_text(name: str, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(97, 123)) * 1000)
    task = text_task(name, path, length=16, batch=2)
    assert torch.equal(task.train_y[:, :-1], task.train_x[:, 1:].long())
    w = [p.initial(0, i) for i, p in enumerate(task.parameters)]
    scores = task.forward(w, task.train_x[:3])
    assert float(F.cross_entropy(scores, task.train_y[:3])) == pytest.approx(5.55, abs=0.4)
