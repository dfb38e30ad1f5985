"""Selections of exactly k entries: exact top-k, SampledTopK (the default), random-k, chunked top-k.

Top-k sparsification: Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017;
Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018. Studied in Shi, Chu, Cheung, See,
"Understanding top-k sparsification in distributed deep learning", 2019 (arXiv 1911.08772).
"""

from __future__ import annotations

import math

import numpy as np

from ragtag.codecs.sparse.selection import (
    INFINITE,
    NONE,
    Bits,
    Selection,
    Selector,
    State,
    at_least,
    exactly,
    largest_of,
    magnitudes,
    not_finite,
    require_finite,
    require_k,
    require_vector,
    select_at,
    stateless,
)
from ragtag.core.seed import uniform
from ragtag.core.types import Floats

SAMPLE = 1 << 15
"""How many magnitudes SampledTopK looks at to guess a threshold."""
CHUNK = 4096
"""Entries from which chunked top-k takes its share: DeMo and SparseLoCo cut so."""


def top_k(u: Floats, k: int) -> Selection:
    """The k largest in magnitude, by partitioning all magnitudes.

    Raises: see ``Selector``.
    """
    require_k(k, len(require_vector(u)))
    if not len(u):
        return NONE
    return _top_k(u, k)


def _top_k(u: Floats, k: int) -> Selection:
    bits = magnitudes(u)
    at = len(bits) - k
    bits.partition(at)
    if int(bits[at:].max()) >= INFINITE:
        raise not_finite(u)
    least = int(bits[at])
    if least == 0:  # fewer than k values are not zero
        return largest_of(u, np.arange(len(u)), k)
    return largest_of(u, at_least(u, least)[0], k)


def sampled_top_k(u: Floats, k: int, key: int = 0, sample: int = SAMPLE) -> Selection:
    """The k largest in magnitude, exactly, in little more than one read of the vector.

    A sample of |u| at a stride (from an offset named by ``key``) gives a threshold that nearly always lets a
    few more than k pass: its r-th largest, r = e + 3 sqrt(e) + 4, e being how many of the top k a sample
    holds on average. One pass collects what passes; among that the top k are chosen exactly. When too few
    pass, r doubles; when far too many do (the stride met a pattern), or the sample is no smaller than the
    vector, all magnitudes are partitioned.

    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    if not d:
        return NONE
    stride = d // max(1, sample)
    if stride < 2:
        return _top_k(u, k)
    drawn: Bits = magnitudes(u, slice(int(uniform(key) * stride), None, stride))
    expected = k * len(drawn) / d
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 4)
    room = 4 * rank * stride
    while rank < len(drawn) // 2:
        least = max(1, int(np.partition(drawn, len(drawn) - rank)[len(drawn) - rank]))
        found, count = at_least(u, least, room)
        if count > room:
            break
        if count >= k:
            return largest_of(u, found, k)
        rank, room = 2 * rank, 2 * room
    return _top_k(u, k)


def random_k(u: Floats, k: int, key: int) -> Selection:
    """k entries drawn without replacement, the same for the same ``key`` and size.

    Raises: see ``Selector``.
    """
    d = len(require_vector(u))
    require_k(k, d)
    require_finite(u)
    if not d:
        return NONE
    drawn = np.random.Generator(np.random.Philox(key=key)).choice(d, k, replace=False, shuffle=False)
    return select_at(u, np.sort(drawn).astype(np.int64, copy=False))


def chunked_top_k(u: Floats, k: int, chunk: int = CHUNK) -> Selection:
    """The top ``k chunk / d`` (rounded, at least 1) of each ``chunk`` consecutive entries; of the last,
    as many as their number asks for.

    What DeMo (Peng, Quesnelle, Kingma 2024) and SparseLoCo (Sarfi et al. 2025) send: every part of the model
    gets its share, and a GPU selects all chunks at once.

    Raises: see ``Selector``; ValueError for a chunk below 1.
    """
    d = len(require_vector(u))
    require_k(k, d)
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} entries: give 1 or more")
    require_finite(u)
    if not d:
        return NONE
    whole = d // chunk * chunk
    parts = []
    if whole:
        share = _share(k, d, chunk)
        bits = magnitudes(u, slice(0, whole)).reshape(-1, chunk)
        least = np.partition(bits, chunk - share, axis=1)[:, chunk - share, None]
        above, ties = bits > least, bits == least
        left = share - above.sum(axis=1, keepdims=True)
        above |= ties & (np.cumsum(ties, axis=1, dtype=np.int32) <= left)
        parts.append(np.flatnonzero(above))
    if whole < d:
        rest = _top_k(u[whole:], _share(k, d, d - whole))
        parts.append(rest.indices + whole)
    return select_at(u, np.concatenate(parts))


def _chunked_most(k: int, d: int, chunk: int) -> int:
    return min(d, math.ceil(d / chunk) * _share(k, d, chunk))


def _share(k: int, d: int, length: int) -> int:
    return max(1, round(k * length / d))


exact = Selector("top-k", stateless, lambda u, k, state, key: top_k(u, k), exactly)
"""The k largest: the yardstick."""

sampled = Selector("sampled top-k", stateless, lambda u, k, state, key: sampled_top_k(u, k, key), exactly)
"""The k largest, found fast: the default."""

randomly = Selector("random-k", stateless, lambda u, k, state, key: random_k(u, k, key), exactly)
"""Any k."""


def chunked(chunk: int = CHUNK) -> Selector:
    """The largest of each ``chunk`` entries (see ``chunked_top_k``)."""

    def select(u: Floats, k: int, state: State, key: int) -> Selection:
        return chunked_top_k(u, k, chunk)

    return Selector(f"top-k of each {chunk}", stateless, select, lambda k, d: _chunked_most(k, d, chunk))
