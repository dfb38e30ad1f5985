"""Rows of datagrams to runs, and runs to rows of datagrams."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from ragtag.core import fast
from ragtag.core.types import WEIGHT_MAX, Bools, Bytes, MessageKey, PeerId, Run
from ragtag.core.wire import (
    CHUNK_BYTES,
    DATAGRAM_BYTES,
    HEADER,
    HEADER_BYTES,
    KIND_MAX,
    MAGIC,
    NAMED,
    NAMED_BYTE,
    VERSION,
    Headers,
    Identity,
    Kind,
    Words,
    chunk_sums,
    headers_of,
    tag_of,
    tags,
)

_SHORT = struct.Struct("<HBBIQIHHIBBHIIQfIII")
assert _SHORT.size == HEADER_BYTES
_DATA, _LAST, _ASK = int(Kind.DATA), int(Kind.LAST), int(Kind.ASK)
_DATA_KINDS = (_DATA, _LAST, _ASK)
_U32 = 0xFFFFFFFF
_NOT_KIND = np.uint64(0xFFFFFFFF00FFFFFF)
Indices = NDArray[np.int64]
NO_ROWS: Bytes = np.empty((0, CHUNK_BYTES), np.uint8)
_NO_KEY = MessageKey(0, 0, 0, 0)
_NO_FLOATS = np.empty(0, np.float32)
_NO_SETS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Short:
    """A header-only datagram: an end marker, an answer, or a request for one."""

    kind: Kind
    sender: PeerId
    key: MessageKey
    schema: int
    chunk: int
    total: int
    received: int
    seq: int
    stamp: int
    epoch: int


@dataclass(slots=True)
class Refused:
    """Datagrams that were not accepted, by reason; ``schemas`` names who sent what.

    elsewhere: in the name of a peer, from another address than its own. leaps: of numbers that it cannot have
    come to.
    """

    malformed: int = 0
    foreign: int = 0
    corrupt: int = 0
    schema: int = 0
    version: int = 0
    elsewhere: int = 0
    leaps: int = 0
    schemas: dict[PeerId, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of them."""
        other = self.elsewhere + self.leaps
        return self.malformed + self.foreign + self.corrupt + self.schema + self.version + other


class Framer:
    """Builds and checks the datagrams of one peer."""

    def __init__(self, identity: Identity, epoch: int) -> None:
        self.identity = identity
        self.epoch = epoch
        self.refused = Refused()
        self.schemas: dict[int, int] = {}
        """The hash that each open channel's datagrams carry."""
        self._named: dict[int, int] = {}  # and back: a named channel's number by it
        self.strays: list[tuple[PeerId, int, int, int, bool]] = []
        """Of the last ``runs``: rows of another schema, in its words without the run. They have come, too."""
        self._key = identity.key
        self._crew_id = identity.crew_id
        self._first = MAGIC | VERSION << 16 | self._crew_id << 32  # a header's first word, but for the kind
        self._slab = np.zeros((0, DATAGRAM_BYTES), np.uint8)
        self._words = self._slab.view("<u8")
        self._payload: Bytes | None = None
        self._which = (0, 0, 0)
        self._headers, self._sums = np.zeros((0, 8), "<u8"), np.zeros(0, "<u8")
        self._key_word = np.uint64(self._key)
        self._kernels: ModuleType | None = None

    def open(self, channel: int, schema: int) -> None:
        """The datagrams of a channel carry ``schema``, from now on.

        Raises ValueError: another named channel has the same one (once in 2^32 pairs by chance).
        """
        if channel >= NAMED and self._named.get(schema, channel) != channel:
            raise ValueError(
                "two channels cannot be told apart by their hashes: give one of them another name"
            )
        if channel >= NAMED:
            self._named.pop(self.schemas.get(channel, 0), None)
            self._named[schema] = channel
        self.schemas[channel] = schema

    def _channel(self, byte: int, schema: int) -> int:
        """The channel that a header names; of a named one that is not open here: a number that none has."""
        return self._named.get(schema, byte) if byte == NAMED_BYTE else byte

    def compile(self) -> None:
        """Let compiled loops do the tables from now on, with the same results, where numba is installed.

        It takes a second or so, and is for a thread of its own; the others go on meanwhile.
        """
        if fast.compiled():
            from ragtag.network.link import kernels

            kernels.warm()
            self._kernels = kernels

    def data(
        self,
        run: Run,
        chunks: Indices,
        seqs: NDArray[np.uint64],
        stamp: int,
        last: bool = False,
        ask: bool = False,
        schema: int | None = None,
    ) -> Bytes:
        """Datagrams, uint8 ``[k, 1152]``, for ``chunks`` (indices into the message) with these numbers.

        last: the final one ends the message; ask: it asks for an answer. schema: the channel's, unless given.
        The table is valid until the next call.
        """
        k = len(chunks)
        if len(self._slab) < k:
            self._slab = np.zeros((k, DATAGRAM_BYTES), np.uint8)
            self._words = self._slab.view("<u8")
            self._headers, self._sums = np.zeros((k, 8), "<u8"), np.zeros(k, "<u8")
            self._payload = None
        rows, words = self._slab[:k], self._words[:k]
        low, high = int(chunks[0]) - run.first, int(chunks[-1]) - run.first + 1
        at = slice(low, high) if high - low == k else chunks - run.first
        headers = self._headers[:k]
        headers[:, 0] = self._first | _DATA << 24
        headers[:, 2] = self._schema(run.key, schema) | self.identity.peer << 32 | run.peer << 48
        headers[:, 3] = run.key.round | _byte(run.key) << 32 | run.key.stage << 40 | run.key.block << 48
        headers[:, 4] = chunks.astype(np.uint64) | np.uint64(run.total << 32)
        headers[:, 5] = run.heard[at]
        headers[:, 6] = np.ascontiguousarray(run.weight[at]).view("<u4") | seqs << np.uint64(32)
        headers[:, 7] = stamp & _U32 | self.epoch << 32
        if last or ask:
            headers[-1, 0] = self._first | (_LAST if last else _ASK) << 24
        which = (int(chunks[0]), int(chunks[-1]), k)
        if run.payload is not self._payload or which != self._which:
            # an owner sends its average to one peer after the other: the chunks are here already
            self._payload, self._which = (run.payload, which) if high - low == k else (None, which)
            self._fill(words, headers, run.payload[at])
        else:
            words[:, :8] = headers
            words[:, 1] = tags(rows, self._key, headers, self._sums[:k])
        return rows

    def _fill(self, words: Words, headers: Words, payload: Bytes) -> None:
        """Whole datagrams; the sums of their chunks are kept."""
        k = len(words)
        chunks = payload.view("<u8")
        if self._kernels is not None and chunks.flags.carray:
            self._kernels.fill(words, headers, chunks, self._sums[:k], self._key_word)
            return
        words[:, :8], words[:, 8:] = headers, chunks
        rows = words.view(np.uint8)
        self._sums[:k] = chunk_sums(rows)
        words[:, 1] = tags(rows, self._key, headers, self._sums[:k])

    def _schema(self, key: MessageKey, given: int | None) -> int:
        return self.schemas.get(key.channel, 0) if given is None else given

    def forget(self) -> None:
        """Forget the chunks that were sent last: their memory may change now."""
        self._payload = None

    def short(
        self,
        kind: Kind,
        dest: PeerId,
        *,
        key: MessageKey = _NO_KEY,
        schema: int | None = None,
        chunk: int = 0,
        total: int = 0,
        received: int = 0,
        seq: int = 0,
        stamp: int = 0,
    ) -> bytes:
        """A header-only datagram."""
        mask = 0xFFFFFFFF
        number = received & mask if kind == Kind.ACK else key.round
        packed = bytearray(
            _SHORT.pack(
                MAGIC,
                VERSION,
                kind,
                self._crew_id,
                0,
                self._schema(key, schema),
                self.identity.peer,
                dest,
                number,
                _byte(key),
                key.stage,
                key.block,
                chunk & mask,
                total,
                0,
                0.0,
                seq & mask,
                stamp & mask,
                self.epoch,
            )
        )
        packed[8:16] = tag_of(packed, self._key).to_bytes(8, "little")
        return bytes(packed)

    def parse_short(self, data: bytes) -> Short | None:
        """A header-only datagram, or None where it is not the crew's."""
        fields = _SHORT.unpack(data)
        magic, version, kind, crew, tag, schema, sender, dest, number, channel, stage, block = fields[:12]
        chunk, total = fields[12:14]
        seq, stamp, epoch = fields[16:]
        if magic != MAGIC or crew != self._crew_id or dest != self.identity.peer:
            self.refused.foreign += 1
            return None
        if version != VERSION:
            self.refused.version += 1
            return None
        if kind > KIND_MAX or kind in _DATA_KINDS:
            self.refused.malformed += 1
            return None
        if tag != tag_of(data, self._key):
            self.refused.corrupt += 1
            return None
        key = MessageKey(self._channel(channel, schema), number, stage, block)
        return Short(Kind(kind), sender, key, schema, chunk, total, number, seq, stamp, epoch)

    def parse(self, table: Bytes) -> tuple[Bytes, Headers]:
        """The rows of ``table`` that are the crew's data, with a copy of their headers."""
        if self._kernels is not None:
            words = np.empty((len(table), 8), "<u8")
            first, me = np.uint64(self._first), np.uint64(self.identity.peer)
            if self._kernels.check(table.view("<u8"), words, first, me, self._key_word):
                return table, words.view(HEADER)[:, 0]
        words = table.view("<u8")[:, :8].copy()  # side by side: columns of it stay in the cache
        kind = words[:, 0] >> np.uint64(24) & np.uint64(0xFF)
        ok = words[:, 0] & _NOT_KIND == self._first
        ok &= words[:, 2] >> np.uint64(48) == self.identity.peer
        ok &= (kind == _DATA) | (kind == _LAST) | (kind == _ASK)
        if not ok.all():
            self._refuse(headers_of(table), ok)
        tag = words[:, 1] == tags(table, self._key, words)
        headers = words.view(HEADER)[:, 0]
        fit = (headers["weight"] >= 0) & (headers["weight"] <= WEIGHT_MAX)
        if tag.all() and ok.all() and fit.all():
            return table, headers
        self.refused.corrupt += int((ok & ~tag).sum())
        ok &= tag
        self.refused.malformed += int((ok & ~fit).sum())
        ok &= fit
        return table[ok], headers[ok]

    def _refuse(self, headers: Headers, ok: Bools) -> None:
        ours = (headers["magic"] == MAGIC) & (headers["crew"] == self._crew_id)
        other = ours & (headers["version"] != VERSION)
        here = ours & ~other & (headers["dest"] == self.identity.peer) & ~ok
        self.refused.version += int(other.sum())
        self.refused.malformed += int(here.sum())
        self.refused.foreign += int((~ok & ~other & ~here).sum())

    def runs(self, rows: Bytes, headers: Headers) -> list[tuple[Run, int, int, int, bool]]:
        """Runs of consecutive chunks: each with its first row, its end row, its sender's epoch, and
        whether it asks for an answer."""
        self.strays.clear()
        if len(rows) == 0:
            return []
        words = headers.view("<u8").reshape(-1, 8)
        who, what, which = words[:, 2], words[:, 3], words[:, 4]
        kind = words[:, 0] >> np.uint64(24) & np.uint64(0xFF)
        last, asks = kind == _LAST, kind >= _LAST
        broken = (who[1:] != who[:-1]) | (what[1:] != what[:-1]) | (which[1:] - which[:-1] != 1) | last[:-1]
        broken |= words[1:, 7] >> np.uint64(32) != words[:-1, 7] >> np.uint64(32)  # epochs
        edges = [0, *(np.flatnonzero(broken) + 1).tolist(), len(rows)]
        payload, heard = rows[:, HEADER_BYTES:], words[:, 5]
        weight = (words[:, 6] & np.uint64(_U32)).astype("<u4").view("<f4")
        runs = []
        for a, b in pairwise(edges):
            _, _, who_a, what_a, which_a, _, _, end = words[a].tolist()
            schema, sender = who_a & _U32, who_a >> 32 & 0xFFFF
            channel = self._channel(what_a >> 32 & 0xFF, schema)
            if schema != self.schemas.get(channel, 0):
                self._refuse_schema(sender, schema, b - a)
                self.strays.append((sender, a, b, end >> 32, bool(asks[a:b].any())))
                continue
            key = MessageKey(channel, what_a & _U32, what_a >> 40 & 0xFF, what_a >> 48)
            first, total = which_a & _U32, which_a >> 32
            ended = bool(last[b - 1])
            run = Run(sender, key, first, total, payload[a:b], weight[a:b], heard[a:b], None, ended)
            runs.append((run, a, b, end >> 32, bool(asks[a:b].any())))
        return runs

    def _refuse_schema(self, sender: PeerId, schema: int, count: int) -> None:
        self.refused.schema += count
        if len(self.refused.schemas) < 1024:
            self.refused.schemas[sender] = schema

    @staticmethod
    def ending(peer: PeerId, key: MessageKey, total: int) -> Run:
        """An empty run that says that nothing more of a message will come."""
        return Run(peer, key, 0, total, NO_ROWS, _NO_FLOATS, _NO_SETS, ended=True)


def _byte(key: MessageKey) -> int:
    """A key's channel as the header carries it."""
    return key.channel if key.channel < NAMED else NAMED_BYTE
