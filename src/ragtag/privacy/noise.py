"""Random numbers for privacy: a stream of AES-256 in counter mode, and noise drawn from it.

The key comes from the operating system (``os.urandom``), so that nobody can compute the noise and take it
off again. For simulations and tests it comes from a seed, a name and indices (``core.seed``): the same code
then gives the same numbers on every machine, and protects nothing.
"""

from __future__ import annotations

import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from ragtag.core.seed import stream_key

KEY_BYTES = 32
DEVIATION_MAX = 1 << 20
"""Of integer noise, so that all that is compared exactly has room in 64 bits."""
_FAR = 64
"""Integer noise beyond so many standard deviations is drawn anew: once in 2^2900 values."""
_AT_ONCE = 1 << 18

Integers = NDArray[np.int64]


class NoiseStream:
    """Random numbers of one key, each drawn once. key: 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    @staticmethod
    def fresh() -> NoiseStream:
        """One that nobody else can compute: its key is the operating system's."""
        return NoiseStream(os.urandom(KEY_BYTES))

    @staticmethod
    def of(seed: int, name: str, *indices: int) -> NoiseStream:
        """The one of a name: for simulations and tests, since whoever knows the seed has the numbers."""
        parts = [stream_key(seed, name, *indices, part) for part in range(KEY_BYTES // 8)]
        return NoiseStream(b"".join(part.to_bytes(8, "little") for part in parts))

    def words(self, n: int) -> NDArray[np.uint64]:
        """Uniform 64 bits each, ``[n]``."""
        return np.frombuffer(self._cipher.update(bytes(8 * n)), np.uint64)

    def uniforms(self, n: int) -> NDArray[np.float64]:
        """Uniform in [0, 1), multiples of 2^-53, ``[n]``."""
        return np.asarray((self.words(n) >> np.uint64(11)) * 2.0**-53, np.float64)

    def normals(self, n: int) -> NDArray[np.float64]:
        """Standard normal, ``[n]``: each the sum of four from Box and Muller's transform, halved.

        So which values a float can take no longer tells what was added to the noise (Holohan, Braghin,
        "Secure random sampling in differential privacy", ESORICS 2021, section 3).
        """
        out = np.empty(n)
        for first in range(0, n, _AT_ONCE):
            out[first : first + _AT_ONCE] = self._normals(min(_AT_ONCE, n - first))
        return out

    def _normals(self, n: int) -> NDArray[np.float64]:
        radius = np.sqrt(-2.0 * np.log1p(-self.uniforms(2 * n)))
        angle = (2 * math.pi) * self.uniforms(2 * n)
        four = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return np.asarray(four.reshape(4, n).sum(0) * 0.5)

    def discrete_gaussians(self, n: int, deviation: int) -> Integers:
        """Integers k with a chance in proportion to exp(-k^2 / (2 deviation^2)), exactly: int64 ``[n]``.

        Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020,
        algorithms 1 to 3), with discrete Laplace proposals of scale ``deviation``. All comparisons are of
        integers, so no rounding changes a chance.

        Raises ValueError: the deviation is not in 1 .. ``DEVIATION_MAX``.
        """
        if not 1 <= deviation <= DEVIATION_MAX:
            raise ValueError(f"discrete noise of deviation {deviation}; from 1 to {DEVIATION_MAX:,}")
        found: list[Integers] = []
        missing = n
        while missing > 0:
            tried = self._laplaces(min(_AT_ONCE, 2 * missing + 16), deviation)
            apart = np.abs(np.abs(tried) - deviation).astype(np.uint64)
            kept = tried[self._falls(apart * apart, 2 * deviation * deviation)][:missing]
            found.append(kept)
            missing -= len(kept)
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _laplaces(self, n: int, scale: int) -> Integers:
        """Discrete Laplace values of this scale: of ``n`` tries those that were accepted."""
        rest = self._below(n, scale)
        rest = rest[self._falls(rest, scale)]
        whole = np.zeros(len(rest), np.int64)
        going = np.arange(len(rest))
        while len(going):
            going = going[self._falls(np.ones(len(going), np.uint64), 1)]
            whole[going] += 1
        size = rest.astype(np.int64) + scale * whole
        minus = self.words(len(size)) >> np.uint64(63) == 1
        kept = (~minus | (size > 0)) & (size < _FAR * scale)
        return np.asarray(np.where(minus, -size, size)[kept], np.int64)

    def _below(self, n: int, bound: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Uniform integers from 0 to below ``bound``, ``[n]``."""
        bounds = np.broadcast_to(np.asarray(bound, np.uint64), (n,))
        last = np.uint64(2**64 - 1) - np.uint64(2**64 - 1) % bounds  # values from here on are not even
        found = self.words(n).copy()
        while (odd := np.flatnonzero(found >= last)).size:
            found[odd] = self.words(len(odd))
        return found % bounds

    def _falls(self, above: NDArray[np.uint64], below: int) -> NDArray[np.bool_]:
        """True with chance exp(-above / below), for each: bool ``[n]``."""
        whole, rest = np.divmod(above, np.uint64(below))
        lives = np.ones(len(above), bool)
        going = np.flatnonzero(whole)
        while going.size:
            passed = self._small(np.full(len(going), below, np.uint64), below)
            lives[going[~passed]] = False
            going = going[passed]
            whole[going] -= np.uint64(1)
            going = going[whole[going] > 0]
        going = np.flatnonzero(lives)
        lives[going] = self._small(rest[going], below)
        return lives

    def _small(self, above: NDArray[np.uint64], below: int) -> NDArray[np.bool_]:
        """The same where ``above`` is at most ``below``: the parity of how long falling chances hold."""
        steps = np.ones(len(above), np.uint64)
        going = np.arange(len(above))
        while going.size:
            bounds = steps[going] * np.uint64(below)
            going = going[self._below(len(going), bounds) < above[going]]
            steps[going] += np.uint64(1)
        return np.asarray(steps % np.uint64(2) == 1)
