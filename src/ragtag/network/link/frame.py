"""Rows of datagrams to runs, and runs to rows of datagrams."""

from __future__ import annotations

import math
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
    LONG_KINDS,
    NAMED,
    NAMED_BYTE,
    TAG_WORD,
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

_SHORT = struct.Struct("<BBHHHIIQQIIBBHIIfQ")
assert _SHORT.size == HEADER_BYTES
_DATA, _LAST, _ASK, _PROBE = int(Kind.DATA), int(Kind.LAST), int(Kind.ASK), int(Kind.PROBE)
_U32 = 0xFFFFFFFF
_HALF = np.uint64(32)
_FIRST = np.uint64(0xFFFF0000FFFF00FF)  # all of the first word but the kind and the sender
_NEXT = np.uint64(1 << 32)  # what a header's sixth word grows by from one chunk to the next
Indices = NDArray[np.int64]
NO_ROWS: Bytes = np.empty((0, CHUNK_BYTES), np.uint8)
_NO_KEY = MessageKey(0, 0, 0, 0)
_NO_FLOATS = np.empty(0, np.float32)
_NO_SETS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Short:
    """A header-only datagram: an end marker, an answer, or a request for one.

    received: in an answer, how many datagrams have come.
    highest: in an answer, the highest number of these, or the number of the probe that is answered.
    waited_s: in an answer, how long ago the newest of these came.
    """

    kind: Kind
    sender: PeerId
    key: MessageKey
    schema: int
    chunk: int
    total: int
    received: int
    highest: int
    seq: int
    epoch: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SizeProbe:
    """The last packet of a datagram that was sent to find out whether the path takes its size."""

    sender: PeerId
    number: int
    epoch: int


@dataclass(slots=True)
class Refused:
    """How many datagrams were not accepted, by reason.

    malformed: of no size or kind that there is, or with a weight out of range.
    foreign: of another crew, or for another peer.
    corrupt: with a wrong tag.
    schema: with another hash than the channel's.
    version: in another version of the wire format.
    elsewhere: in the name of a peer, but not from its address.
    leaps: with a number that the peer cannot have come to.
    schemas: by peer, the hash that was refused last.
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
    """Builds and checks the datagrams of one peer.

    sealed: whether the link lets nothing through that was damaged or made up, so that the check is left out.
    """

    def __init__(self, identity: Identity, epoch: int, sealed: bool = False) -> None:
        self.identity = identity
        self.epoch, self._sealed = epoch, sealed
        self.refused = Refused()
        self.schemas: dict[int, int] = {}
        """By open channel, the hash that its datagrams carry."""
        self._named: dict[int, int] = {}  # the way back: by hash, a named channel's number
        self.strays: list[tuple[PeerId, int, int, int, bool]] = []
        """Rows of another schema in the last ``runs``: sender, first row, end row, epoch, and whether one
        asks for an answer. They give no run, but count as come."""
        self.probes: list[SizeProbe] = []
        """Those that came since the caller last cleared it: for each row that is parsed one at most."""
        self._key = identity.key
        self._crew_id = identity.crew_id
        self._first = VERSION | self._crew_id << 16  # what each header begins with, but for kind and peers
        self._mine = np.uint64(self._first | identity.peer << 48)
        self._slab = np.zeros((0, DATAGRAM_BYTES), np.uint8)
        self._words = self._slab.view("<u8")
        self._payload: Bytes | None = None
        self._which = (0, 0, 0)
        self._headers, self._sums = np.zeros((0, 8), "<u8"), np.zeros(0, "<u8")
        self._key_word = np.uint64(self._key)
        self._kernels: ModuleType | None = None

    def open(self, channel: int, schema: int) -> None:
        """Have a channel's datagrams carry the hash ``schema`` from now on.

        Raises ValueError: another named channel has the same hash (by chance once in 2^32 pairs).
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
        """The channel that a header names; a number of no channel where a named one is not open here."""
        return self._named.get(schema, byte) if byte == NAMED_BYTE else byte

    def compile(self) -> None:
        """Use compiled loops from now on where numba is installed. The results are the same.

        This takes a second or so. A thread of its own calls it, and the others go on meanwhile.
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
        last: bool = False,
        ask: bool = False,
        schema: int | None = None,
    ) -> Bytes:
        """Datagrams with chunks of a run, uint8 ``[k, 1152]``. The table is valid until the next call.

        chunks: their indices in the message, ascending, ``[k]``.
        seqs: the datagrams' numbers, ``[k]``; 32 bits of each travel.
        last: whether the last datagram ends the message.
        ask: whether the last datagram asks for an answer.
        schema: the hash that they carry; ``None``: the channel's.
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
        first = self._first | self.identity.peer << 32 | run.peer << 48
        schema_round = self._schema(run.key, schema) | run.key.round << 32
        which = _byte(run.key) | run.key.stage << 8 | run.key.block << 16
        weight, heard = np.ascontiguousarray(run.weight[at]), np.ascontiguousarray(run.heard[at])
        if self._kernels is not None and all(a.flags.carray for a in (seqs, chunks, weight, heard)):
            common = (first | _DATA << 8, self.epoch << 32, schema_round, which, run.total)
            self._kernels.head(headers, seqs, chunks, weight, heard, *map(np.uint64, common))
        else:
            headers[:, 0] = first | _DATA << 8
            headers[:, 1] = seqs & np.uint64(_U32) | np.uint64(self.epoch << 32)
            headers[:, 4] = schema_round
            headers[:, 5] = chunks.astype(np.uint64) << _HALF | np.uint64(which)
            headers[:, 6] = weight.view("<u4").astype(np.uint64) << _HALF | np.uint64(run.total)
            headers[:, 7] = heard
        if last or ask:
            headers[-1, 0] = first | (_LAST if last else _ASK) << 8
        span = (low, high, k)
        if run.payload is not self._payload or span != self._which:
            # else the chunks are here already: an owner sends its average to one peer after the other
            self._payload, self._which = (run.payload, span) if high - low == k else (None, span)
            self._fill(words, headers, run.payload[at])
        else:
            self._stamp(words, headers)
        return rows

    def _fill(self, words: Words, headers: Words, payload: Bytes) -> None:
        """Write whole datagrams, and keep the sums of their chunks for the next peer's headers."""
        k = len(words)
        chunks = payload.view("<u8")
        if self._kernels is not None and not self._sealed and chunks.flags.carray:
            self._kernels.fill(words, headers, chunks, self._sums[:k], self._key_word)
            return
        words[:, 8:] = chunks
        if not self._sealed:
            self._sums[:k] = chunk_sums(words.view(np.uint8))
        self._stamp(words, headers)

    def _stamp(self, words: Words, headers: Words) -> None:
        """Write the headers, and unless the link seals their tags. The sums of the chunks are known."""
        if self._kernels is not None and not self._sealed:
            self._kernels.stamp(words, headers, self._sums[: len(words)], self._key_word)
            return
        words[:, :8] = headers
        if not self._sealed:
            words[:, TAG_WORD] = tags(words.view(np.uint8), self._key, headers, self._sums[: len(words)])

    def _schema(self, key: MessageKey, given: int | None) -> int:
        return self.schemas.get(key.channel, 0) if given is None else given

    def forget(self) -> None:
        """Forget the chunks that were framed last: their memory may change from now on."""
        self._payload = None

    def probe(self, dest: PeerId, number: int, count: int) -> Bytes:
        """The packets of a datagram by which a size is probed, uint8 ``[count, 1152]``."""
        rows = np.zeros((count, DATAGRAM_BYTES), np.uint8)
        headers = headers_of(rows)
        headers["version"], headers["kind"], headers["crew"] = VERSION, _PROBE, self._crew_id
        headers["sender"], headers["dest"], headers["epoch"] = self.identity.peer, dest, self.epoch
        headers["seq"], headers["chunk"], headers["total"] = number & _U32, np.arange(count), count
        if not self._sealed:
            headers["tag"] = tags(rows, self._key)
        return rows

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
        highest: int = 0,
        seq: int = 0,
        waited_s: float = 0.0,
    ) -> bytes:
        """A header-only datagram."""
        mask = 0xFFFFFFFF
        number = received & mask if kind == Kind.ACK else key.round
        packed = bytearray(
            _SHORT.pack(
                VERSION,
                kind,
                self._crew_id,
                self.identity.peer,
                dest,
                seq & mask,
                self.epoch,
                0,
                0,
                self._schema(key, schema),
                number,
                _byte(key),
                key.stage,
                key.block,
                chunk & mask,
                total,
                waited_s,
                highest & mask,
            )
        )
        if not self._sealed:
            packed[16:24] = tag_of(packed, self._key).to_bytes(8, "little")
        return bytes(packed)

    def parse_short(self, data: bytes) -> Short | None:
        """A header-only datagram, read; ``None``: refused, and counted in ``refused``."""
        fields = _SHORT.unpack(data)
        version, kind, crew, sender, dest, seq, epoch, tag, _, schema, number = fields[:11]
        channel, stage, block, chunk, total, waited_s, highest = fields[11:]
        if crew != self._crew_id or dest != self.identity.peer:
            self.refused.foreign += 1
            return None
        if version != VERSION:
            self.refused.version += 1
            return None
        if kind > KIND_MAX or kind in LONG_KINDS:
            self.refused.malformed += 1
            return None
        if not self._sealed and tag != tag_of(data, self._key):
            self.refused.corrupt += 1
            return None
        key = MessageKey(self._channel(channel, schema), number, stage, block)
        if not 0.0 <= waited_s < math.inf:
            self.refused.malformed += 1
            return None
        return Short(Kind(kind), sender, key, schema, chunk, total, number, highest, seq, epoch, waited_s)

    def whole(self, table: Bytes, ends: list[int], senders: list[int]) -> Headers | None:
        """A copy of the headers of ``table``, where all its rows are the crew's data, as nearly always.

        ends, senders: of each train the row after its last one, and the peer that sends from where it came.
        ``None``: some rows are not, or are in another peer's name; or loops are not compiled. Nothing is
        counted.
        """
        if self._kernels is None or self._sealed:
            return None
        words = np.empty((len(table), 8), "<u8")
        if not self._kernels.check(table.view("<u8"), words, self._mine, self._key_word):
            return None
        theirs = self._kernels.of_their_trains(words, np.array(ends, np.int64), np.array(senders, np.int64))
        return words.view(HEADER)[:, 0] if theirs else None

    def parse(self, table: Bytes) -> tuple[Bytes, Headers]:
        """The rows of ``table`` that are the crew's data, and a copy of their headers.

        Probes of the path's MTU go to ``probes``. The others are counted in ``refused``.
        """
        words = table.view("<u8")[:, :8].copy()  # side by side, so that columns stay in the cache
        kind = words[:, 0] >> np.uint64(8) & np.uint64(0xFF)
        ok = words[:, 0] & _FIRST == self._mine
        ok &= (kind == _DATA) | (kind == _LAST) | (kind == _ASK)
        if not ok.all():
            rest = ~ok & ~self._take_probes(table, words, kind)
            self._refuse(headers_of(table)[rest])
        tag = ok if self._sealed else words[:, TAG_WORD] == tags(table, self._key, words)
        headers = words.view(HEADER)[:, 0]
        fit = (headers["weight"] >= 0) & (headers["weight"] <= WEIGHT_MAX)
        if tag.all() and ok.all() and fit.all():
            return table, headers
        self.refused.corrupt += int((ok & ~tag).sum())
        ok &= tag
        self.refused.malformed += int((ok & ~fit).sum())
        ok &= fit
        return table[ok], headers[ok]

    def _take_probes(self, table: Bytes, words: Words, kind: Words) -> Bools:
        """Take the probes among rows, for this peer; which of the rows are of probes, whether true or not."""
        of: Bools = (words[:, 0] & _FIRST == self._mine) & (kind == _PROBE)
        if of.any():
            rows = table[of]
            true = (
                np.ones(len(rows), np.bool_)
                if self._sealed
                else tags(rows, self._key) == headers_of(rows)["tag"]
            )
            self.refused.corrupt += int((~true).sum())
            headers = headers_of(rows)[true]
            ends = headers[headers["chunk"] + np.uint64(1) == headers["total"]]  # all others came with it
            senders, numbers, epochs = (ends[name].tolist() for name in ("sender", "seq", "epoch"))
            self.probes += map(SizeProbe, senders, numbers, epochs)
        return of

    def _refuse(self, headers: Headers) -> None:
        ours = headers["crew"] == self._crew_id
        other = ours & (headers["version"] != VERSION)
        here = ours & ~other & (headers["dest"] == self.identity.peer)
        self.refused.version += int(other.sum())
        self.refused.malformed += int(here.sum())
        self.refused.foreign += int((~other & ~here).sum())

    def runs(self, rows: Bytes, headers: Headers) -> list[tuple[Run, int, int, int, bool]]:
        """Runs of consecutive chunks in the rows that ``parse`` has returned.

        Each comes with its first row, its end row, its sender's epoch, and whether it asks for an answer.
        """
        self.strays.clear()
        if len(rows) == 0:
            return []
        words = headers.view("<u8").reshape(-1, 8)
        edges, asks, ends = self._cut(words)
        payload, heard = rows[:, HEADER_BYTES:], words[:, 7]
        weight = (words[:, 6] >> _HALF).astype("<u4").view("<f4")
        runs = []
        for (a, b), asked, ended in zip(pairwise(edges), asks, ends, strict=True):
            who_a, number, _, _, what_a, which_a, whole_a, _ = words[a].tolist()
            schema, sender, began = what_a & _U32, who_a >> 32 & 0xFFFF, number >> 32
            channel = self._channel(which_a & 0xFF, schema)
            if schema != self.schemas.get(channel, 0):
                self._refuse_schema(sender, schema, b - a)
                self.strays.append((sender, a, b, began, asked))
                continue
            key = MessageKey(channel, what_a >> 32, which_a >> 8 & 0xFF, which_a >> 16 & 0xFFFF)
            first = which_a >> 32
            run = Run(sender, key, first, whole_a & _U32, payload[a:b], weight[a:b], heard[a:b], None, ended)
            runs.append((run, a, b, began, asked))
        return runs

    def _cut(self, words: Words) -> tuple[list[int], list[bool], list[bool]]:
        """Cut headers, uint64 ``[k, 8]``, into runs of consecutive chunks.

        Returns the first row of each and ``k``; whether one of its rows asks for an answer; and whether its
        last row ends a message.
        """
        k = len(words)
        if self._kernels is not None and words.flags.carray:
            first, some = np.empty(k, np.int64), np.empty(k, np.bool_)
            count = self._kernels.cut(words, first, some)
            edges, asks = [*first[:count].tolist(), k], some[:count].tolist()
        else:
            kind = words[:, 0] >> np.uint64(8) & np.uint64(0xFF)
            who, what, which = words[:, 0] & ~np.uint64(0xFF00), words[:, 4], words[:, 5]
            epoch, total = words[:, 1] >> _HALF, words[:, 6] & np.uint64(_U32)
            broken = (who[1:] != who[:-1]) | (what[1:] != what[:-1]) | (which[1:] - which[:-1] != _NEXT)
            broken |= (epoch[1:] != epoch[:-1]) | (total[1:] != total[:-1]) | (kind[:-1] == _LAST)
            edges = [0, *(np.flatnonzero(broken) + 1).tolist(), k]
            asks = np.logical_or.reduceat(kind >= _LAST, edges[:-1]).tolist()
        return edges, asks, [int(words[edge - 1, 0]) >> 8 & 0xFF == _LAST for edge in edges[1:]]

    def _refuse_schema(self, sender: PeerId, schema: int, count: int) -> None:
        self.refused.schema += count
        if len(self.refused.schemas) < 1024:
            self.refused.schemas[sender] = schema

    @staticmethod
    def ending(peer: PeerId, key: MessageKey, total: int) -> Run:
        """An empty run: it says that nothing more of a message will come."""
        return Run(peer, key, 0, total, NO_ROWS, _NO_FLOATS, _NO_SETS, ended=True)


def _byte(key: MessageKey) -> int:
    """The byte of a header that names a key's channel: the same for all named ones."""
    return key.channel if key.channel < NAMED else NAMED_BYTE
