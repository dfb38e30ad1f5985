"""Data that is skewed on purpose: shards by label, for ``crew.split(loader, shards=...)``."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from ragtag.training.samples.deal import Indices, shuffled


def skewed_shards(
    labels: ArrayLike | torch.Tensor, n: int, classes_per_peer: int = 2, seed: int = 0
) -> list[Indices]:
    """Indices for each of ``n`` peers, so that each has but a few of the classes.

    labels: int ``[samples]``. The samples are sorted by label (in a seeded order of the classes, and within
    each class), cut into ``n * classes_per_peer`` pieces of equal size, and peer ``i`` gets the pieces
    ``i``, ``i + n``, ...: all samples are dealt, each once. Sorting by label as in RPS (ICML 2019), pieces
    as in "Communication-efficient learning of deep networks from decentralized data", McMahan et al.,
    AISTATS 2017, section 3. Raises ValueError when there are fewer samples than pieces.
    """
    given = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
    pieces = n * classes_per_peer
    if given.ndim != 1 or n < 1 or classes_per_peer < 1 or len(given) < pieces:
        raise ValueError(
            f"labels of shape {given.shape} cannot be cut into {n} x {classes_per_peer} pieces: "
            "give one label per sample, and at least as many samples as pieces"
        )
    classes = np.unique(given, return_inverse=True)[1].reshape(-1)
    rank = shuffled(np.arange(classes.max() + 1), seed, "classes")[classes]
    mixed = shuffled(np.arange(len(given)), seed, "shards")
    ordered = mixed[np.argsort(rank[mixed], kind="stable")]
    cut = np.array_split(ordered, pieces)
    return [np.concatenate(cut[peer::n]) for peer in range(n)]
