import numpy as np
import torch

from ragtag.recipes.tasks.cifar import SIDE
from ragtag.recipes.tasks.images import Batches, cifar, digits, shards


def test_digits_are_split_alike_every_time_and_share_no_image() -> None:
    a, b = digits(), digits()
    assert torch.equal(a.train_x, b.train_x) and a.size == 38_282
    assert len(a.train_y) == 1437 and len(a.test_y) == 360
    assert float(a.train_x.min()) >= 0 and float(a.train_x.max()) == 1.0


def test_shards_cover_the_data_once_and_sorted_ones_have_few_labels() -> None:
    task = digits()
    for by_label, at_most in ((False, 10), (True, 3)):
        parts = shards(task, 16, 1, by_label)
        assert sorted(np.concatenate(parts)) == list(range(len(task.train_y)))
        assert max(len(set(task.train_y[part].tolist())) for part in parts) <= at_most
    assert not np.array_equal(shards(task, 16, 1, False)[0], shards(task, 16, 2, False)[0])


def test_batches_go_through_a_shard_before_they_repeat() -> None:
    shard = np.arange(100, 124)
    batches = Batches(shard, 8, seed=1, peer=0)
    first = [batches.next() for _ in range(3)]
    second = [batches.next() for _ in range(3)]
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(shard)
    assert not np.array_equal(first, second)


def test_initial_weights_depend_on_the_seed_only() -> None:
    weight = digits().parameters[2]
    assert torch.equal(weight.initial(3, 2), weight.initial(3, 2))
    assert not torch.equal(weight.initial(3, 2), weight.initial(4, 2))
    assert float(weight.initial(3, 2).abs().max()) <= (16 * 9) ** -0.5


def test_the_resnet_learns_from_arrays(tmp_path) -> None:
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_x.npy", rng.integers(0, 255, (40, SIDE, SIDE, 3), np.uint8))
        np.save(tmp_path / f"{part}_y.npy", rng.integers(0, 10, 40).astype(np.uint8))
    task = cifar(tmp_path)
    w = [p.initial(0, i).requires_grad_() for i, p in enumerate(task.parameters)]
    out = task.forward(w, task.train_x[:6])
    loss = torch.nn.functional.cross_entropy(out, task.train_y[:6])
    grads = torch.autograd.grad(loss, w)
    assert out.shape == (6, 10) and task.size == 19_954
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)


def test_the_first_images_are_of_all_classes_although_an_archive_goes_class_by_class(tmp_path) -> None:
    labels = np.repeat(np.arange(10, dtype=np.uint8), 100)
    for part in ("train", "test"):
        images = np.broadcast_to(labels[:, None, None, None], (1000, SIDE, SIDE, 3))
        np.save(tmp_path / f"{part}_x.npy", images)
        np.save(tmp_path / f"{part}_y.npy", labels)
    task = cifar(tmp_path)
    for x, y in ((task.train_x, task.train_y), (task.test_x, task.test_y)):
        assert torch.bincount(y[:200], minlength=10).min() >= 8
        assert torch.equal(x[:, 0, 0, 0].long(), y), "each image keeps its label"
