"""One data loader for a whole crew: its samples are one pool, from which peers draw at their own speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
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
from ragtag.training.deal import Indices, cut, every_nth, shuffled, skewed_shards
from ragtag.training.drawer import Drawer
from ragtag.training.ledger import EpochReport

__all__ = ["EpochReport", "Split", "skewed_shards"]

_log = logging.getLogger("ragtag")


class Split:
    """A loader of this peer's batches; the peers together use each sample once an epoch.

    loader: its batch size, collation, workers, pinning and drop_last stay as they are, and whether it
        shuffles; the order is drawn from ``seed`` and the epoch, the same on every peer.
    me: this peer; peers: who is alive, and the notice board on which peers tell what they draw.
    shards: the indices of each peer, where they are not one pool: data skewed by label
        (``skewed_shards``), or lying on certain machines. Who comes when the crew has grown gives the same
        list, and draws of dead peers' shards.
    ordinal: which split of this process it is; peers make theirs in the same order.
    on_epoch: is told what each epoch came to, once all are done with it: usually in the next one.

    The order is cut into blocks, of a batch each (several, in an epoch of more than 16,384). Every peer
    begins at its own part of the order; it claims blocks a little ahead of use (about a second of its work),
    so that who is fast draws more, who comes late finds work, and all end together. So who draws a batch
    depends on how fast peers are; the order, and that each sample is used once, do not. Shards stay with
    their peers; only once a peer is known to be dead the living share what is left of its shard. What it had
    claimed and not yet reported as used is missed, and counted as such (``report``).

    With workers, batches are drawn as the loader hands their indices to workers, some ahead of training;
    "used" means drawn.

    A loader with a sampler of its own (weighted, or of batches) or over an iterable data set is read by
    every peer, who keeps every n-th batch of it.

    Each ``iter`` begins epoch ``epoch`` and counts it up (set it to resume); who comes late begins in the
    crew's epoch. An epoch that is broken off gives back what it had claimed. Raises ValueError for a loader
    that is split already, and for shards that do not fit it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        me: int,
        peers: Peers,
        *,
        seed: int = 0,
        shards: Sequence[Sequence[int] | Indices] | None = None,
        ordinal: int = 0,
        on_epoch: Callable[[EpochReport], None] | None = None,
    ) -> None:
        if not 0 <= me < peers.n:
            raise ValueError(f"peer {me} of {peers.n}: a peer's number lies between 0 and {peers.n - 1}")
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError("the loader is split already, by its DistributedSampler: give a plain one")
        self.epoch = 0
        self.samples = 0
        """How many samples this peer has been given, in all epochs."""
        self.report: EpochReport | None = None
        self._me, self._peers, self._seed, self._on_epoch = me, peers, seed, on_epoch
        self._ordinal = ordinal
        self._source = self._loader = loader
        self._shards: list[Indices] | None = None
        self._all = None if isinstance(loader.dataset, IterableDataset) else _indices(loader)
        self._shuffle = not isinstance(loader.sampler, SequentialSampler)
        if shards is not None:
            if self._all is None:
                raise ValueError("shards take the sampler's place: give a loader without one of its own")
            self._shards = _fitting(shards, peers.n, _size(loader))
        if self._all is not None:
            self._deal(self._all, ordinal)
        self._order = _Order(self._begin)
        if not isinstance(loader.dataset, IterableDataset):
            self._loader = _rebuilt(loader, self._order)

    def _deal(self, everything: Indices, ordinal: int) -> None:
        """Cut the order into blocks."""
        n, size = self._peers.n, self._source.batch_size
        lengths = [len(everything)] if self._shards is None else [len(shard) for shard in self._shards]
        drop = size is not None and self._source.drop_last
        self._deck, self._starts = cut(
            lengths, n, size or 1, drop, self._shards is not None, name=f"{ordinal}/{self._seed}"
        )
        self._drawer = Drawer(self._me, self._peers, self._deck, ordinal, self._take_report)
        self._order_of = lru_cache(maxsize=2)(self._draw_order)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch."""
        self._order.epoch, self.epoch = self.epoch, self.epoch + 1
        if isinstance(self._source.dataset, IterableDataset):
            return _Counted(every_nth(self._me, self._peers.n, self._live, self._source), self)
        return _Counted(iter(self._loader), self)

    def __len__(self) -> int:
        """About how many batches an epoch has on this peer, if all are as fast and nobody dies or returns."""
        living = self._live()
        if self._all is None:
            return -(-len(self._source) // len(living))
        size = self._source.batch_size or 1
        batches = [sum(-(-samples // size) for samples in self._deck.sizes[a:b]) for a, b in self._deck.arcs]
        dead = sum(count for peer, count in enumerate(batches) if peer not in living)
        if self._shards is None:
            return -(-sum(batches) // len(living))
        mine = batches[self._me] if self._me < len(batches) else 0
        return mine + -(-dead // len(living))

    def moved(self, me: int) -> None:
        """This peer has another number: what it draws under the old one ends, the next epoch begins anew."""
        self._me = me
        if self._all is not None:
            self._drawer.stop()
            self._deal(self._all, self._ordinal)

    def close(self, deadline_s: float = 1.0) -> None:
        """Nothing more will be drawn: give back what is claimed, and report what epochs came to.

        deadline_s: how long to wait for others to say that they are done with the last one.
        """
        if self._all is not None:
            self._drawer.close(deadline_s)

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

    def _take_report(self, report: EpochReport) -> None:
        self.report = report
        level = logging.WARNING if report.missed or report.twice else logging.INFO
        _log.log(
            level,
            "epoch %d: %d samples, %d of them drawn here, %d missed, %d used twice",
            *(report.epoch, report.samples, report.used_by_me, report.missed, report.twice),
        )
        if self._on_epoch is not None:
            self._on_epoch(report)

    def _draw_order(self, epoch: int) -> Indices:
        """All indices of one epoch, in its order."""
        if self._shards is None:
            assert self._all is not None
            return shuffled(self._all, self._seed, "split", epoch) if self._shuffle else self._all
        if not self._shuffle:
            return np.concatenate(self._shards)
        return np.concatenate(
            [shuffled(s, self._seed, "shard", epoch, peer) for peer, s in enumerate(self._shards)]
        )

    def _begin(self, epoch: int) -> Iterator[Any]:
        """One epoch's batches of indices (single indices where the loader makes no batches)."""
        size = self._source.batch_size
        if self._all is None:
            order: Any = self._source.batch_sampler or self._source.sampler
            yield from every_nth(self._me, self._peers.n, self._live, order)
            return
        for of, block in self._drawer.draw(epoch):
            self.epoch = max(self.epoch, self._drawer.epoch + 1)
            start = int(self._starts[block])
            indices = self._order_of(of)[start : start + self._deck.sizes[block]].tolist()
            if size is None:
                yield from indices
            else:
                yield from (indices[at : at + size] for at in range(0, len(indices), size))


class _Counted:
    """Batches, whose samples are counted as they are handed out."""

    def __init__(self, batches: Iterator[Any], of: Split) -> None:
        self._batches, self._of = batches, of

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._of.samples += samples_in(batch, self._of.batch_size)
        return batch


def samples_in(batch: Any, batch_size: int | None) -> int:
    """How many samples a collated batch has: the length of its first tensor, else of a full batch."""
    if batch_size is None:
        return 1
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape: Sequence[int] = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else batch_size


class _Order(Sampler[Any]):
    """An epoch's order; a loader with workers may ask for it more than once as it begins."""

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self.epoch)


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
