"""What a split takes from a data loader, and the loader made again with another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ragtag.training.deal import Indices


def samples_in(batch: Any, batch_size: int | None) -> int:
    """How many samples a collated batch has: the length of its first tensor, else of a full batch."""
    if batch_size is None:
        return 1
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape: Sequence[int] = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else batch_size


class Order(Sampler[Any]):
    """An epoch's order; a loader with workers may ask for it more than once as it begins."""

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self.epoch)


def size_of(loader: DataLoader[Any]) -> int:
    """How many samples the loader's data set has."""
    dataset: Any = loader.dataset
    return len(dataset)


def indices_of(loader: DataLoader[Any]) -> Indices | None:
    """What the loader draws from in an epoch, each once; ``None`` when its sampler has other ideas."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) is SubsetRandomSampler:
        return np.asarray(list(sampler.indices), np.int64)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size_of(loader)
    )
    return np.arange(size_of(loader)) if plain else None


def fitting(shards: Sequence[Sequence[int] | Indices], n: int, size: int) -> list[Indices]:
    """Shards as indices. Raises ValueError: they do not fit ``n`` peers or a data set of ``size`` samples."""
    if not 0 < len(shards) <= n:  # fewer: for those the crew began with
        raise ValueError(f"{len(shards)} shards for {n} peers: give each peer one (it may be empty)")
    lists = [np.asarray(shard, np.int64).reshape(-1) for shard in shards]
    for peer, shard in enumerate(lists):
        outside = shard[(shard < 0) | (shard >= size)]
        if len(outside):
            raise ValueError(
                f"shard {peer} has index {outside[0]}; the data set has {size} samples, numbered from 0"
            )
    if not any(len(shard) for shard in lists):
        raise ValueError("all shards are empty")
    return lists


def rebuilt(loader: DataLoader[Any], order: Order) -> DataLoader[Any]:
    """The same loader with another order."""
    how: dict[str, Any] = {"sampler" if loader.batch_sampler is None else "batch_sampler": order}
    if loader.batch_sampler is None:
        how["batch_size"] = None
    if loader.num_workers > 0:
        how["prefetch_factor"] = loader.prefetch_factor
        how["persistent_workers"] = loader.persistent_workers
        how["multiprocessing_context"] = loader.multiprocessing_context
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        in_order=loader.in_order,
        **how,
    )
