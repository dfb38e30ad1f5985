"""One process of the demo: a peer of the crew, or a run that the crew is compared with.

Started by ``ragtag demo``; prints nothing, and leaves its model's figures and weights in a folder.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.crew.crew import Crew
from ragtag.app.demo.task import BATCH, LEARNING_RATE, Digits, evaluate, load_digits, make_model
from ragtag.training.optimizer.optimizer import CrewOptimizer

EVALUATE_EVERY = 20
"""Rounds between two looks at the test samples."""


class PeerResult(msgspec.Struct, frozen=True):
    """How a peer of the demo ended.

    rounds: how many the crew had done.
    samples: that this peer trained on.
    trained_s: how long that took, averaging included.
    """

    peer: int
    rounds: int
    steps: int
    samples: int
    loss: float
    accuracy: float
    trained_s: float


def result_file(folder: Path, peer: int) -> Path:
    """Where a peer leaves its figures."""
    return folder / f"result-{peer:02d}.json"


def weights_file(folder: Path, peer: int) -> Path:
    """Where a peer leaves its weights, float32 ``[parameters]``."""
    return folder / f"weights-{peer:02d}.npy"


def train(crew: Crew, arguments: argparse.Namespace) -> PeerResult:
    """Train until the crew has done its rounds, and say how good this peer's own model is."""
    seed, folder = int(arguments.seed), Path(arguments.out)
    digits = load_digits(seed)
    model = make_model(seed)
    optimizer = crew.optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model=model, every=arguments.every
    )
    steps = samples = logged = 0
    last = -1
    _look(crew, model, digits)  # the first look takes several times as long as later ones
    began_s = time.monotonic()
    for inputs, targets in _batches(crew, digits, arguments, seed):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        steps, samples = steps + 1, samples + len(targets)
        done = _round_of(optimizer)
        if done == last:
            continue
        last = done
        crew.log_step(float(loss), samples - logged, arguments.every)
        logged = samples
        _set_learning_rate(optimizer, (done + 1) / arguments.rounds)
        if done % EVALUATE_EVERY == 0 and done > 0:
            _look(crew, model, digits)
        if done + 1 >= arguments.rounds:
            break
    trained_s = time.monotonic() - began_s
    test_loss, accuracy = _look(crew, model, digits)
    np.save(weights_file(folder, crew.rank), _flat(model), allow_pickle=False)
    return PeerResult(crew.rank, last + 1, steps, samples, test_loss, accuracy, trained_s)


def _look(crew: Crew, model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Loss and accuracy on the test samples, which go into the trace."""
    test_loss, accuracy = evaluate(model, digits)
    crew.log_eval(accuracy, test_loss, n=len(digits.test_labels))
    return test_loss, accuracy


def _batches(
    crew: Crew, digits: Digits, arguments: argparse.Namespace, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end: of this peer's shard, of one shard alone, or of all the data."""
    data = TensorDataset(digits.train_images, digits.train_labels)
    if arguments.alone_with is not None:
        shard = digits.shards(arguments.of, seed)[arguments.alone_with]
        data = TensorDataset(digits.train_images[shard], digits.train_labels[shard])
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=False)
    shards = digits.shards(crew.size, seed) if crew.size > 1 else None
    split = crew.split(loader, shards=shards, seed=seed)
    while True:
        yield from split


def _round_of(optimizer: CrewOptimizer) -> int:
    return -1 if optimizer.outcome is None else optimizer.outcome.round


def _set_learning_rate(optimizer: CrewOptimizer, progress: float) -> None:
    """Cosine annealing by the crew's rounds, so that a peer that was away is where the others are."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _flat(model: nn.Module) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def main() -> None:
    """Run one process of the demo."""
    parser = argparse.ArgumentParser(description="one process of `ragtag demo`")
    parser.add_argument("--out", required=True, help="folder for this process's figures and weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="local steps in a round")
    parser.add_argument("--alone-with", type=int, help="train on this shard only")
    parser.add_argument("--of", type=int, default=6, help="how many shards there are")
    arguments = parser.parse_args()
    with ragtag.join() as crew:
        ended = train(crew, arguments)
        result_file(Path(arguments.out), crew.rank).write_bytes(msgspec.json.encode(ended))


if __name__ == "__main__":
    main()
