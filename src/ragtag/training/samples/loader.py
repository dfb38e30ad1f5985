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

from ragtag.training.samples.deal import Indices


def require_loader(loader: object) -> None:
    """Raise TypeError, saying what to write, for what is no data loader."""
    if isinstance(loader, DataLoader):
        return
    kind = type(loader).__name__
    if hasattr(loader, "__len__") and hasattr(loader, "__getitem__"):
        raise TypeError(
            f"crew.split takes a torch.utils.data.DataLoader, and this is a {kind}: wrap it, as "
            "crew.split(DataLoader(data, batch_size=32, shuffle=True)), once, before the loop over epochs"
        )
    raise TypeError(
        f"crew.split takes a torch.utils.data.DataLoader, and this is a {kind}: give the loader itself "
        "(what a generator yields can be wrapped in a torch.utils.data.IterableDataset)"
    )


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader; where it was given a plain ``BatchSampler``, as if it had made that by itself."""
    batches: Any = loader.batch_sampler
    if loader.batch_size is not None or type(batches) is not BatchSampler:
        return loader
    made: dict[str, Any] = {
        "sampler": batches.sampler,
        "batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
    }
    return _again(loader, made)


def samples_in(batch: Any, loader: DataLoader[Any]) -> int:
    """How many samples a batch of a loader has: the length of its first tensor, else of a full batch."""
    if loader.batch_sampler is None:
        return 1
    batch_size = loader.batch_size or 1
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
    if not hasattr(shards, "__len__"):
        raise TypeError(f"shards is a {type(shards).__name__}; it is a list of each peer's list of indices")
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
    return _again(loader, how)


def _again(loader: DataLoader[Any], how: dict[str, Any]) -> DataLoader[Any]:
    """A loader of the same data and workers that draws otherwise."""
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
