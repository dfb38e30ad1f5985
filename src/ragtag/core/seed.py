"""Named, seeded random streams: the same names give the same numbers on every machine.

Counter-based: number ``i`` of a stream is a hash of (key, i), so a stream has no state to share or
to spoil, and what is drawn does not depend on the order in which things happen. The mixer is
SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014, section 4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers that scatters every bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=4096)
def _name_key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def stream_key(seed: int, name: str, *indices: int) -> int:
    """The 64-bit key of the stream ``name`` with these indices (peers, rounds, blocks, ...)."""
    key = _name_key(seed, name)
    for index in indices:
        key = mix((key ^ (index & _MASK)) + _GOLDEN & _MASK)
    return key


def bits(key: int, n: int) -> NDArray[np.uint64]:
    """The first ``n`` numbers of a stream, as 64 random bits each."""
    z = np.arange(1, n + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    _mix_all(z)
    return z


def uniforms(key: int, n: int) -> NDArray[np.float64]:
    """The first ``n`` numbers of a stream, uniform in [0, 1)."""
    return np.asarray((bits(key, n) >> np.uint64(11)) * 2.0**-53, np.float64)


def stream_keys(seed: int, name: str, *indices: Sequence[int]) -> NDArray[np.uint64]:
    """Many streams' keys at once: ``stream_key(seed, name, *column)`` for each column of ``indices``."""
    keys = np.full(len(indices[0]), _name_key(seed, name), np.uint64)
    for row in indices:
        keys ^= np.array(row, np.uint64)
        keys += np.uint64(_GOLDEN)
        _mix_all(keys)
    return keys


def first_uniforms(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The first number of each of many streams: ``uniform(key)`` for each key."""
    z = keys + np.uint64(_GOLDEN)
    _mix_all(z)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53, np.float64)


def _mix_all(z: NDArray[np.uint64]) -> None:
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)


def uniform(key: int, index: int = 0) -> float:
    """Number ``index`` of a stream, uniform in [0, 1): the same as ``uniforms(key, index + 1)[-1]``."""
    return (mix((key + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def permutation(key: int, n: int) -> tuple[int, ...]:
    """A random permutation of ``range(n)``."""
    return tuple(int(i) for i in np.argsort(bits(key, n), kind="stable"))


def generator(seed: int, name: str, *indices: int) -> np.random.Generator:
    """A numpy generator for what needs more than uniforms (initial weights, noise, shuffles)."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, name, *indices)))
