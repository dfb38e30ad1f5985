"""One data loader for a whole crew, as a script sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragtag.training.samples.portion import Portion


class Split:
    """A loader of this peer's batches (``crew.split``); the peers together use each sample once an epoch.

    The samples are one pool, from which peers draw at their own speed: a fast peer draws more, a newcomer
    finds work, and all end together. Speeds decide which peer draws a batch. They change neither the order,
    nor that each sample is used once. What a dead peer had claimed and not used is missed; log and trace say
    how much that was.

    Shards (``shards=``) stay with their peers; only once a peer is known to be dead the living share what is
    left of its shard. A loader with a sampler of its own (weighted, or of batches) or over an iterable data
    set is read by every peer, which keeps every n-th batch of it. So nobody draws what a slower peer leaves:
    in ``crew.epochs`` it goes on in the crew's epoch once it is through its own, or ends, where the others
    have done the last. What these loaders draw by random numbers of torch, numpy or Python, or by the
    sampler's generator, is the same on all peers; what shuffles by others needs the same seed on each. With
    workers, batches are drawn as the loader hands their indices to workers, some ahead of training.

    Each ``iter`` begins an epoch; a peer that comes late begins in the crew's. An epoch that is broken off
    gives back what it had claimed. Snapshots have the epoch, and which of its samples are used.
    """

    def __init__(self, portion: Portion) -> None:
        self._portion = portion

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises HasLeft once the crew was left; RuntimeError for a second time in one epoch of ``crew.epochs``.
        """
        return iter(self._portion)

    def __len__(self) -> int:
        """About how many batches an epoch has on this peer, if all are as fast and nobody dies or returns."""
        return len(self._portion)

    @property
    def dataset(self) -> Any:
        """The loader's."""
        return self._portion.dataset

    @property
    def batch_size(self) -> int | None:
        """The loader's."""
        return self._portion.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter`` begins."""
        return self._portion.epoch

    @property
    def samples(self) -> int:
        """How many samples this peer has been given, in all epochs."""
        return self._portion.samples
