"""What the demo trains: a small convolutional net on scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ragtag.core import seed as random
from ragtag.core.errors import Error
from ragtag.training.samples.deal import Indices
from ragtag.training.samples.shards import skewed_shards

TEST_SAMPLES = 597
BATCH = 16
LEARNING_RATE = 0.1


class DataMissing(Error, RuntimeError):
    """The demo's data ships inside scikit-learn, which is not installed."""


@dataclass(frozen=True, slots=True)
class Digits:
    """1,797 handwritten digits of 8 x 8 pixels (Alpaydin, Kaynak 1998), 597 of them for testing.

    images: float32 ``[samples, 1, 8, 8]`` in 0 to 1.
    labels: int64 ``[samples]``.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def shards(self, n: int, seed: int) -> list[Indices]:
        """Training indices for each of ``n`` peers, of two or so classes each."""
        return skewed_shards(self.train_labels.numpy(), n, seed=seed)


def load_digits(seed: int) -> Digits:
    """Load and split the digits.

    Raises:
        DataMissing: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise DataMissing(
            "the demo trains on the digits that ship inside scikit-learn: pip install 'ragtag[demo]'"
        ) from None
    bunch = load()
    order = np.argsort(random.uniforms(random.stream_key(seed, "digits"), len(bunch.target)))
    images = torch.from_numpy(bunch.images[order].astype(np.float32) / 16.0).unsqueeze(1)
    labels = torch.from_numpy(bunch.target[order].astype(np.int64))
    train = len(labels) - TEST_SAMPLES
    return Digits(images[:train], labels[:train], images[train:], labels[train:])


def make_model(seed: int) -> nn.Sequential:
    """The same weights on every peer."""
    torch.manual_seed(random.stream_key(seed, "weights") % 2**63)
    return net()


def net() -> nn.Sequential:
    """A convolutional net of 38 thousand parameters, with weights as torch draws them next."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Loss and accuracy on the test samples."""
    logits = model(digits.test_images)
    loss = nn.functional.cross_entropy(logits, digits.test_labels)
    return float(loss), float((logits.argmax(1) == digits.test_labels).float().mean())
