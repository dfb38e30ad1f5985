"""Makers of datagrams that no peer of the crew has sent: random, damaged, spliced, foreign, stale, absurd."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ragtag.core.seed import generator
from ragtag.core.types import Bytes, MessageKey, Run
from ragtag.core.wire import (
    CHUNK_BYTES,
    DATAGRAM_BYTES,
    HEADER_BYTES,
    VERSION,
    Identity,
    Kind,
    headers_of,
    tags,
)
from ragtag.network.link.frame import Framer

ROWS = 448
"""Datagrams in a table: what one pass over a socket brings at most, about."""


@lru_cache(maxsize=2)
def _noise(seed: int) -> Bytes:
    return generator(seed, "noise").integers(0, 256, 16 << 20, dtype=np.uint8)


@dataclass
class Source:
    """Makes tables of datagrams to peer ``dest``; the same ones from the same seed and index."""

    seed: int
    index: int
    crew: str = "otters"
    sender: int = 1
    dest: int = 0
    epoch: int = 1000
    schema: int = 7

    def __post_init__(self) -> None:
        self.draws = generator(self.seed, "fuzz", self.index)
        self._pool = _noise(self.seed)

    def noise(self, size: int) -> Bytes:
        """Random bytes: a piece of a pool, from anywhere in it."""
        at = int(self.draws.integers(0, len(self._pool) - size))
        return self._pool[at : at + size].copy()

    def random(self, k: int = ROWS) -> Bytes:
        """Nothing but noise."""
        return self.noise(k * DATAGRAM_BYTES).reshape(k, DATAGRAM_BYTES)

    def framer(self) -> Framer:
        """What builds true datagrams of the sender."""
        framer = Framer(Identity(self.crew, self.sender), self.epoch)
        framer.schemas = dict.fromkeys(range(256), self.schema)
        return framer

    def valid(self, k: int = ROWS) -> Bytes:
        """Datagrams as the sender would send them, of one message."""
        draws = self.draws
        channel, stage, block = (int(n) for n in draws.integers(0, 4, 3))
        run = Run(
            self.dest,
            MessageKey(channel, int(draws.integers(0, 100)), stage, block),
            int(draws.integers(0, 50)),
            k + 50,
            self.noise(k * CHUNK_BYTES).reshape(k, CHUNK_BYTES),
            draws.standard_normal(k).astype(np.float32),
            draws.integers(0, 1 << 62, k, dtype=np.uint64),
        )
        seqs = np.arange(1, k + 1, dtype=np.uint64)
        return self.framer().data(run, run.first + np.arange(k), seqs).copy()

    def flipped(self, k: int = ROWS) -> tuple[Bytes, Bytes]:
        """Valid datagrams, and the same with 1 to 8 bits flipped in each, half of them in the header."""
        rows = self.valid(k)
        bad = rows.copy()
        draws = self.draws
        times = draws.integers(1, 9, k)
        for i in range(8):
            hit = np.flatnonzero(times > i)
            limit = np.where(draws.random(len(hit)) < 0.5, HEADER_BYTES, DATAGRAM_BYTES)
            column = (draws.random(len(hit)) * limit).astype(np.int64)
            bad[hit, column] ^= (1 << draws.integers(0, 8, len(hit))).astype(np.uint8)
        return rows, bad

    def truncated(self, k: int = ROWS) -> tuple[Bytes, Bytes]:
        """Valid datagrams, and the same with an end of random length set to zero, or to noise."""
        rows = self.valid(k)
        noise = self.random(k)
        noise[: k // 2] = 0
        cut = self.draws.integers(0, DATAGRAM_BYTES, k)
        return rows, _joined(rows, noise, cut)

    def spliced(self, k: int = ROWS) -> tuple[Bytes, Bytes]:
        """Valid datagrams, and the same with parts of headers, or chunks, of others."""
        rows, others = self.valid(k), self.valid(k)
        others = others[self.draws.permutation(k)]
        cut = 8 * self.draws.integers(4, HEADER_BYTES // 8 + 1, k)  # the tag is always of the first
        return rows, _joined(rows, others, cut)

    def absurd(self, k: int = ROWS) -> Bytes:
        """Datagrams with a right tag, of the right crew and to the right peer, and any other field random."""
        rows = self.random(k)
        headers, draws = headers_of(rows), self.draws
        headers["version"] = VERSION
        headers["crew"], headers["dest"] = Identity(self.crew, 0).crew_id, self.dest
        headers["kind"] = draws.choice(np.array([k.value for k in Kind], np.uint8), k)
        headers["schema"] = self.schema
        self._often(headers, "sender", [0, 1, 2, 3, 63, 64, 65535])
        self._often(headers, "round", [0, 1, 2, 5, 1 << 24, (1 << 32) - 1])
        self._often(headers, "channel", [0, 0, 0, 99, 254, 255, 255])
        self._often(headers, "stage", [0, 0, 1, 1, 0x80, 0x81, 77])
        self._often(headers, "block", [0, 1, 2, 3, 64, 65535])
        self._often(headers, "chunk", [0, 1, 5, 20, 21, 1 << 31, (1 << 32) - 1])
        self._often(headers, "total", [0, 1, 20, 21, 60, 965, (1 << 32) - 1])
        self._often(headers, "weight", [np.nan, np.inf, -np.inf, -1.0, 0.0, 1.0, 3e38])
        self._often(headers, "seq", [0, 1, 1000, 1 << 31, (1 << 32) - 1])
        self._often(headers, "epoch", [self.epoch, self.epoch, self.epoch, 0])
        headers["schema"][headers["channel"] == 255] = 0  # exchanges have none
        return signed(rows, self.crew)

    def _often(self, headers: NDArray[np.void], field: str, values: list[float]) -> None:
        """Nine times in ten one of these values, else noise."""
        which = self.draws.random(len(headers)) < 0.9
        chosen = np.array(values).astype(headers.dtype[field])
        headers[field][which] = self.draws.choice(chosen, int(which.sum()))


def _joined(rows: Bytes, others: Bytes, cut: NDArray[np.int64]) -> Bytes:
    """The first ``cut`` bytes of each row, and the rest of another's."""
    mixed = others.copy()
    for row, own, at in zip(mixed, rows, cut.tolist(), strict=True):
        row[:at] = own[:at]
    return mixed


def signed(rows: Bytes, crew: str) -> Bytes:
    """Rows with the tag that they should have."""
    headers_of(rows)["tag"] = tags(rows, Identity(crew, 0).key)
    return rows


def shorts_of(rows: Bytes, crew: str) -> list[bytes]:
    """The headers of rows as header-only datagrams, with their tag."""
    heads = np.ascontiguousarray(rows[:, :HEADER_BYTES])
    return [row.tobytes() for row in signed(heads, crew)]


def same(rows: Bytes, bad: Bytes) -> NDArray[np.bool_]:
    """Which rows a tag that sums up the chunk's words must take for the same: header equal, sum equal."""
    a, b = rows.view("<u8"), np.ascontiguousarray(bad).view("<u8")
    header = (a[:, :8] == b[:, :8]).all(axis=1)
    return np.asarray(header & (a[:, 8:].sum(axis=1) == b[:, 8:].sum(axis=1)), np.bool_)
