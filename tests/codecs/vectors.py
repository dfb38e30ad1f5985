"""Vectors that selections meet: shapes, ties, zeros, signs, scales."""

from __future__ import annotations

from functools import cache

import numpy as np

from ragtag.core.seed import generator
from ragtag.core.types import Floats


def heavy(d: int, seed: int = 1) -> Floats:
    """Bell-shaped with long tails, as error feedback makes them."""
    return (generator(seed, "heavy", d).standard_normal(d) ** 3).astype(np.float32)


def vector(kind: str, d: int) -> Floats:
    """One of ``kinds``, for the caller to change."""
    return kinds(d)[kind].copy()


@cache
def kinds(d: int) -> dict[str, Floats]:
    """One of each kind."""
    draw = generator(3, "kinds", d)
    few = np.zeros(d, np.float32)
    few[draw.permutation(d)[: d // 500]] = 1.0
    periodic = np.zeros(d, np.float32)
    periodic[:: max(1, d // 32768)] = 5.0
    sorted_ = np.sort(heavy(d))
    return {
        "normal": draw.standard_normal(d).astype(np.float32),
        "heavy": heavy(d),
        "few nonzero": few,
        "zeros": np.zeros(d, np.float32),
        "constant": np.full(d, -2.5, np.float32),
        "ties": draw.integers(-3, 4, d).astype(np.float32),
        "periodic": periodic,
        "sorted": sorted_,
        "tiny": (draw.standard_normal(d) * 1e-42).astype(np.float32),
        "huge": (draw.uniform(-1, 1, d) * 3.4e38).astype(np.float32),
        "positive": np.abs(heavy(d)) + np.float32(1),
    }


def by_definition(u: Floats, k: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Top-k by its definition: magnitude down, then index up."""
    order = np.lexsort((np.arange(len(u)), -np.abs(u.astype(np.float64))))
    return np.sort(order[:k])
