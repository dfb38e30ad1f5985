"""Who draws what: how a data set is dealt among peers, without a word between them.

Each peer knows the deal (a permutation named by seed and epoch), how far it has come itself, and who is
alive; a dead peer is taken to have come as far as oneself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragtag.core import seed as random

T = TypeVar("T")
Indices = NDArray[np.int64]
Live = Callable[[], frozenset[int]]


def heir(peer: int, at: int, living: Sequence[int]) -> int:
    """Who draws position ``at`` of a dead peer's share: the living take turns."""
    return living[(at + peer) % len(living)]


def take_turns(me: int, lengths: Sequence[int], live: Live) -> Iterator[tuple[int, int]]:
    """Yield each ``(peer, position)`` that this peer is to draw: one's own in order, and beside position
    ``j`` of one's own the position ``j`` of each peer that is dead at that moment, if it is one's turn.
    """
    at, most = 0, max(lengths)
    while at < most:
        now = live() | {me}
        if at < lengths[me]:
            yield me, at
        if len(now) < len(lengths):
            living = sorted(now)
            for peer, length in enumerate(lengths):
                if peer not in now and at < length and heir(peer, at, living) == me:
                    yield peer, at
        elif at >= lengths[me]:
            return
        at += 1


def every_nth(me: int, n: int, live: Live, stream: Iterable[T]) -> Iterator[T]:
    """Keep what is this peer's of a stream that all peers read: every n-th, and its turns of the dead's."""
    for number, item in enumerate(stream):
        at, peer = divmod(number, n)
        if peer != me:
            now = live() | {me}
            if peer in now or heir(peer, at, sorted(now)) != me:
                continue
        yield item


def shuffled(values: Indices, seed: int, name: str, *indices: int) -> Indices:
    """A permutation of ``values``, the same on every machine and with every version of numpy."""
    key = random.stream_key(seed, name, *indices)
    return values[np.argsort(random.bits(key, len(values)), kind="stable")]


def skewed_shards(labels: ArrayLike, n: int, classes_per_peer: int = 2, seed: int = 0) -> list[Indices]:
    """Indices for each of ``n`` peers, so that each has but a few of the classes.

    labels: int ``[samples]``. The samples are sorted by label (in a seeded order of the classes, and within
    each class), cut into ``n * classes_per_peer`` pieces of equal size, and peer ``i`` gets the pieces
    ``i``, ``i + n``, ...: all samples are dealt, each once. Sorting by label as in RPS (ICML 2019), pieces
    as in "Communication-efficient learning of deep networks from decentralized data", McMahan et al.,
    AISTATS 2017, section 3. Raises ValueError when there are fewer samples than pieces.
    """
    given = np.asarray(labels)
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
