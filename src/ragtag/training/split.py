"""One data loader for a whole crew: each peer draws its share, and survivors take over a dead one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ragtag.training.averager import Peers
from ragtag.training.deal import Indices, every_nth, shuffled, skewed_shards, take_turns

__all__ = ["Split", "skewed_shards"]


class Split:
    """A loader of this peer's batches; the peers together see each sample once an epoch.

    loader: its batch size, collation, workers, pinning and drop_last stay as they are, and whether it
        shuffles; the order is drawn from ``seed`` and the epoch, the same on every peer.
    me: this peer; peers: who is alive (asked before each sample is drawn).
    shards: the indices of each peer, where they are not to be dealt evenly: data skewed by label
        (``skewed_shards``), or lying on certain machines.

    Once a peer is known to be dead, the living take turns with what is left of its share, taken to begin
    where they are themselves; when it is back, it draws its own share again. So samples may be drawn twice
    or be missed around such a moment, and at no other. Peers are not in step: an epoch ends on each when
    its share does.

    A loader with a sampler of its own (weighted, or of batches) or over an iterable data set is read by
    every peer, who keeps every n-th batch of it.

    Each ``iter`` begins epoch ``epoch`` and counts it up (set it to resume). Raises ValueError for a
    loader that is split already, and for shards that do not fit it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        me: int,
        peers: Peers,
        *,
        seed: int = 0,
        shards: Sequence[Sequence[int] | Indices] | None = None,
    ) -> None:
        if not 0 <= me < peers.n:
            raise ValueError(f"peer {me} of {peers.n}: a peer's number lies between 0 and {peers.n - 1}")
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError("the loader is split already, by its DistributedSampler: give a plain one")
        self.epoch = 0
        self._me, self._peers, self._seed = me, peers, seed
        self._source = self._loader = loader
        self._shards: list[Indices] | None = None
        self._all = None if isinstance(loader.dataset, IterableDataset) else _indices(loader)
        self._shuffle = not isinstance(loader.sampler, SequentialSampler)
        if shards is not None:
            if self._all is None:
                raise ValueError("shards take the sampler's place: give a loader without one of its own")
            self._shards = _fitting(shards, peers.n, _size(loader))
        self._order = _Order(self._begin)
        if not isinstance(loader.dataset, IterableDataset):
            self._loader = _rebuilt(loader, self._order)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch."""
        self._order.epoch, self.epoch = self.epoch, self.epoch + 1
        if isinstance(self._source.dataset, IterableDataset):
            return every_nth(self._me, self._peers.n, self._live, self._source)
        return iter(self._loader)

    def __len__(self) -> int:
        """About how many batches an epoch has on this peer, if nobody dies or returns."""
        dead = set(range(self._peers.n)) - self._live()
        living = self._peers.n - len(dead)
        if self._all is None:
            return -(-len(self._source) // living)
        lengths = self._lengths()
        samples = lengths[self._me] + sum(lengths[peer] for peer in dead) // living
        size = self._source.batch_size or 1
        return samples // size if self._source.drop_last else -(-samples // size)

    @property
    def dataset(self) -> Any:
        """The loader's."""
        return self._source.dataset

    @property
    def batch_size(self) -> int | None:
        """The loader's."""
        return self._source.batch_size

    def _live(self) -> frozenset[int]:
        return self._peers.live | {self._me}

    def _lengths(self) -> list[int]:
        if self._shards is not None:
            return [len(shard) for shard in self._shards]
        assert self._all is not None
        n = self._peers.n
        return [len(range(peer, len(self._all), n)) for peer in range(n)]

    def _shares(self, epoch: int) -> list[Indices]:
        """Everybody's indices in one epoch."""
        if self._shards is not None:
            if not self._shuffle:
                return self._shards
            return [shuffled(s, self._seed, "shard", epoch, peer) for peer, s in enumerate(self._shards)]
        assert self._all is not None
        order = shuffled(self._all, self._seed, "split", epoch) if self._shuffle else self._all
        return [order[peer :: self._peers.n] for peer in range(self._peers.n)]

    def _begin(self, epoch: int) -> Iterator[Any]:
        """One epoch's batches of indices (single indices where the loader makes no batches)."""
        size = self._source.batch_size
        if self._all is None:
            order: Any = self._source.batch_sampler or self._source.sampler
            return every_nth(self._me, self._peers.n, self._live, order)
        indices = self._draw(epoch)
        return indices if size is None else _batches(indices, size, self._source.drop_last)

    def _draw(self, epoch: int) -> Iterator[int]:
        shares = self._shares(epoch)
        for peer, at in take_turns(self._me, [len(share) for share in shares], self._live):
            yield int(shares[peer][at])


class _Order(Sampler[Any]):
    """An epoch's order; a loader with workers may ask for it more than once as it begins."""

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self.epoch)


def _batches(indices: Iterator[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in indices:
        batch.append(index)
        if len(batch) == size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch


def _size(loader: DataLoader[Any]) -> int:
    dataset: Any = loader.dataset
    return len(dataset)


def _indices(loader: DataLoader[Any]) -> Indices | None:
    """What the loader draws from in an epoch, each once; ``None`` when its sampler has other ideas."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) is SubsetRandomSampler:
        return np.asarray(list(sampler.indices), np.int64)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == _size(loader)
    )
    return np.arange(_size(loader)) if plain else None


def _fitting(shards: Sequence[Sequence[int] | Indices], n: int, size: int) -> list[Indices]:
    if len(shards) != n:
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


def _rebuilt(loader: DataLoader[Any], order: _Order) -> DataLoader[Any]:
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
