import math

import numpy as np
import pytest
import torch

from ragtag.recipes.staleness.others import ITEMS, LATENT, OTHERS, RATINGS, USERS, ratings, subject
from ragtag.recipes.staleness.tune import choose


@pytest.mark.parametrize("model", OTHERS)
def test_each_workers_gradient_is_that_of_its_own_loss(model) -> None:
    task = subject(model)
    models = torch.stack([task.initial(0), task.initial(1)])
    at = torch.from_numpy(np.random.default_rng(0).integers(0, task.samples, (2, 4)))
    found = task.gradients(models, at, np.random.default_rng(1))
    noise = np.random.default_rng(1).standard_normal((2, 4, LATENT), np.float32)
    for p in range(2):
        leaf = models[p].clone().requires_grad_()
        columns = [column[at[p]] for column in task.train]
        columns += [torch.from_numpy(noise[p])] if model == "VAE" else []
        task.loss(task._parts(leaf), columns).backward()
        assert torch.allclose(found[p], leaf.grad, atol=1e-5)
    assert (task.initial(0) == task.initial(0)).all() and found.abs().max() > 0


@pytest.mark.parametrize("model", OTHERS)
def test_training_improves_the_quality(model) -> None:
    task = subject(model)
    model_ = task.initial(0)
    first, (_, loss) = task.quality(model_), task.whole(model_)
    assert task.quality(model_) == first and math.isfinite(loss)
    for _ in range(12):
        gradient, _ = task.whole(model_)
        model_ = model_ - 0.5 * task.rates["SGD"] * gradient
    assert (task.quality(model_) > first) == task.rises
    assert task.whole(model_)[1] < loss


def test_ratings_are_whole_stars_like_movielens_in_shape() -> None:
    user, item, stars = ratings()
    assert len(user) == len(item) == len(stars) == RATINGS
    assert set(stars.tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0} and 3 < stars.mean() < 4
    assert len(set(zip(user.tolist(), item.tolist(), strict=True))) == RATINGS
    assert user.max() < USERS and item.max() < ITEMS
    counts = np.sort(np.bincount(item.numpy(), minlength=ITEMS))
    assert counts[-ITEMS // 10 :].sum() > 2 * RATINGS / 10  # a few items have many of the ratings
    assert all((a == b).all() for a, b in zip(ratings(), (user, item, stars), strict=True))
    assert (ratings(1)[2] != stars).any()


def test_the_resnet_takes_cifar_from_arrays_and_the_lstm_a_text(tmp_path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 64), ("test", 32)):
        np.save(tmp_path / f"{part}_x.npy", rng.integers(0, 256, (count, 32, 32, 3), np.uint8))
        np.save(tmp_path / f"{part}_y.npy", rng.integers(0, 10, count).astype(np.uint8))
    images = subject("ResNet", tmp_path)
    assert images.samples == 64 and images.target < subject("ResNet").target
    assert 0 <= images.quality(images.initial(0)) <= 1
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, " * 1000)
    assert subject("LSTM", text).samples < subject("LSTM").samples


def test_the_rule_of_tuning_is_the_smallest_rate_that_is_nearly_the_fastest() -> None:
    assert choose({0.01: 900.0, 0.03: 390.0, 0.1: 200.0, 0.3: math.inf}) == 0.03
    with pytest.raises(ValueError, match="no learning rate"):
        choose({0.1: math.inf})


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no model is called 'GPT'"):
        subject("GPT")
