"""How a data set is dealt: the order of an epoch, the blocks it is cut into, and what peers take in turns.

Each peer knows the order (a permutation named by seed and epoch) and the blocks without a word between them;
which of them draws which is agreed upon on the notice board (``ragtag.training.samples.pool``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ragtag.core import seed as random
from ragtag.training.samples.blocks import Deck

T = TypeVar("T")
Indices = NDArray[np.int64]
Live = Callable[[], frozenset[int]]
BLOCKS_MAX = 1 << 14
"""Blocks of an epoch; where there are more batches, a block is several."""


def heir(peer: int, at: int, living: Sequence[int]) -> int:
    """The peer that draws position ``at`` of a dead peer's share: the living take turns."""
    return living[(at + peer) % len(living)]


def every_nth(me: int, n: int, live: Live, stream: Iterable[T]) -> Iterator[T]:
    """Keep what is this peer's of a stream that all peers read: every n-th, and its turns of the dead's."""
    for number, item in enumerate(stream):
        at, peer = divmod(number, n)
        if peer != me:
            now = live() | {me}
            if peer in now or heir(peer, at, sorted(now)) != me:
                continue
        yield item


def cut(
    lengths: Sequence[int], n: int, batch: int, drop_last: bool, exclusive: bool, *, name: str
) -> tuple[Deck, Indices]:
    """Cut parts of an order, ``lengths`` samples each and one after the other, into blocks of whole batches.

    exclusive: each peer has a part of its own; else ``n`` begin evenly spread over the blocks.
    drop_last: leave out what is left of a part after its last whole batch.
    name: tells decks apart.
    Returns the deck, and int64 ``[blocks]``: where in the order each block begins.
    """
    batches = sum(length // batch for length in lengths) + len(lengths)
    step = batch * -(-batches // BLOCKS_MAX)
    starts: list[int] = []
    sizes: list[int] = []
    edges, at = [0], 0
    for length in lengths:
        whole = length // batch * batch if drop_last else length
        for start in range(0, whole, step):
            starts.append(at + start)
            sizes.append(min(step, whole - start))
        at += length
        edges.append(len(starts))
    if not exclusive:
        edges = [len(starts) * peer // n for peer in range(n + 1)]
    arcs = tuple(pairwise(edges))
    told = f"{name}/{batch}/{drop_last}/{exclusive}/{list(lengths)}"  # not n: crews grow
    identity = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=4).digest(), "little")
    return Deck(tuple(sizes), arcs, exclusive, identity), np.asarray(starts, np.int64)


def shuffled(values: Indices, seed: int, name: str, *indices: int) -> Indices:
    """A permutation of ``values``, the same on every machine and with every version of numpy."""
    key = random.stream_key(seed, name, *indices)
    return values[np.argsort(random.bits(key, len(values)), kind="stable")]
