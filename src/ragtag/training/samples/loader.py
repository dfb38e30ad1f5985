"""What a split takes from a data loader, and the loader made again with another order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ragtag.training.samples.deal import Indices

T = TypeVar("T")
_AHEAD = 64  # batches of indices are drawn so many at once; of a stream's samples each when it is asked for


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


def loader_form(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """What a loader has in common with one that a script makes anew in the same way."""
    loader = plain(loader)
    indices = None if isinstance(loader.dataset, IterableDataset) else indices_of(loader)
    kinds = [type(each) for each in (loader.dataset, loader.sampler, loader.batch_sampler)]
    return *kinds, None if indices is None else len(indices), loader.batch_size, loader.drop_last


def drawn_alike(loader: DataLoader[Any], key: int) -> Iterator[Any]:
    """What a loader with a sampler of its own draws (indices, as its sampler gives them), or yields where it
    reads a stream: alike on all peers, whatever else these have drawn.

    Random numbers of Python, numpy and torch, and of the generators of loader and sampler, come from ``key``
    meanwhile; all else finds these where it left them.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    holders = (loader, batches, sampler, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    generators = {id(g): g for g in (torch.default_generator, *found) if isinstance(g, torch.Generator)}
    if isinstance(loader.dataset, IterableDataset):
        return _drawn(loader, tuple(generators.values()), key, 1)
    return _drawn(sampler if batches is None else batches, tuple(generators.values()), key, _AHEAD)


def _drawn(items: Iterable[T], generators: Sequence[torch.Generator], key: int, ahead: int) -> Iterator[T]:
    """Each of the items, ``ahead`` of them at once, with random numbers that come from ``key``."""
    begun: Iterator[T] | None = None
    inside = None
    while True:
        outside = _states(generators)
        try:
            if begun is None:
                _seed(generators, key)
                begun = iter(items)
            else:
                _put_back(generators, inside)
            drawn = list(islice(begun, ahead))
            inside = _states(generators)
        finally:
            _put_back(generators, outside)
        yield from drawn
        if len(drawn) < ahead:
            return


def _states(generators: Sequence[torch.Generator]) -> Any:
    """Where random numbers are; numpy's are those of its one generator that all scripts share."""
    of_numpy = np.random.get_state()  # noqa: NPY002
    return random.getstate(), of_numpy, [each.get_state() for each in generators]


def _put_back(generators: Sequence[torch.Generator], states: Any) -> None:
    """Go on from there."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    for each, state in zip(generators, of_torch, strict=True):
        each.set_state(state)


def _seed(generators: Sequence[torch.Generator], key: int) -> None:
    random.seed(key)
    np.random.seed(key % (1 << 32))  # noqa: NPY002
    for each in generators:
        each.manual_seed(key)


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
