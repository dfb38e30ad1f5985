"""Trains a convolutional net that is cut in two, with NoPeek at the cut, and measures what its codes tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.privacy.correlation import distance_correlation
from ragtag.privacy.meters import Leakage, codes, leakage
from ragtag.privacy.nopeek import NoPeek
from ragtag.recipes.tasks.images import load

BATCH = 128
LEARNING_RATE = 2e-3
DIGITS_EPOCHS, CIFAR_EPOCHS = 60, 8
CIFAR_HELD = 2000
"""Of CIFAR-10's 10,000 held-out images, dCor is measured on so many: pairs of them are its cost."""


@dataclass(frozen=True, slots=True)
class CutSetup:
    """One run.

    weight: a1, of the distance correlation; the task's loss has weight 1.
    epochs: over the training samples.
    """

    weight: float
    seed: int
    epochs: int


@dataclass(frozen=True, slots=True)
class CutResult:
    """The results of a run.

    accuracy: on held-out samples.
    training_accuracy, training_dcor: on samples that were trained on, the second on as many as are held out;
        they are no results.
    leak: of held-out samples.
    """

    setup: CutSetup
    accuracy: float
    training_accuracy: float
    training_dcor: float
    leak: Leakage


@dataclass(frozen=True, slots=True)
class Samples:
    """Images, float32 ``[n, channels, height, width]`` in 0 .. 1, with their labels."""

    train_x: Tensor
    train_y: Tensor
    held_x: Tensor
    held_y: Tensor

    @staticmethod
    def of(arrays: Path | None) -> Samples:
        """Digits, or CIFAR-10 from the arrays that ``tasks.cifar`` has decoded to the folder ``arrays``."""
        task = load(arrays)
        train, held = (x if x.is_floating_point() else x.float() / 255 for x in (task.train_x, task.test_x))
        return Samples(train, task.train_y, held, task.test_y)


def cut_net(image: tuple[int, ...], seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """The part that stays with the data, and the one that takes its codes to ten classes.

    image: channels, height and width.
    """
    channels, height, width = image
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.stream_key(seed, "weights of a cut net") % 2**63)
        below = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        if height <= 8:
            above = nn.Sequential(
                nn.Flatten(), nn.Linear(16 * (height // 2) * (width // 2), 64), nn.ReLU(), nn.Linear(64, 10)
            )
        else:
            above = nn.Sequential(
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(64 * (height // 8) * (width // 8), 10),
            )  # fmt: skip
    return below, above


def trained(setup: CutSetup, samples: Samples) -> tuple[nn.Sequential, nn.Sequential]:
    """Both parts after training, in evaluation mode."""
    below, above = cut_net(tuple(samples.train_x.shape[1:]), setup.seed)
    model = nn.Sequential(below, above)
    nopeek = NoPeek(model, "0", weight=setup.weight)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    draw = random.generator(setup.seed, "batches of a cut net")
    for _ in range(setup.epochs):
        order = torch.from_numpy(draw.permutation(len(samples.train_y)))
        for some in torch.split(order[: len(order) // BATCH * BATCH], BATCH):
            task = F.cross_entropy(model(samples.train_x[some]), samples.train_y[some])
            optimizer.zero_grad()
            nopeek(task).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    nopeek.remove()
    model.eval()
    return below, above


def measure_cut(setup: CutSetup, arrays: Path | None) -> CutResult:
    """Train, and measure. arrays: see ``Samples.of``."""
    torch.set_num_threads(1)
    samples = Samples.of(arrays)
    below, above = trained(setup, samples)
    held = samples.held_x[:CIFAR_HELD]
    train = samples.train_x[: len(held)]  # dCor of more samples is lower
    return CutResult(
        setup=setup,
        accuracy=accuracy(below, above, samples.held_x, samples.held_y),
        training_accuracy=accuracy(below, above, samples.train_x, samples.train_y),
        training_dcor=float(distance_correlation(train.double(), codes(below, train))),
        leak=leakage(below, samples.train_x, held, seed=setup.seed),
    )


@torch.no_grad()
def accuracy(below: nn.Module, above: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of samples whose class is found."""
    right = [
        (above(below(some)).argmax(1) == labels).sum()
        for some, labels in zip(torch.split(x, 512), torch.split(y, 512), strict=True)
    ]
    return int(torch.stack(right).sum()) / len(y)
