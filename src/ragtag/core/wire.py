"""Datagrams: packets of a 64-byte header and one chunk of at most 1,088 bytes.

1,152 bytes of UDP payload are 1,200 bytes on the wire over IPv6 (1,180 over IPv4), which every path
must carry without fragmentation (RFC 8200 section 5 asks for 1,280; RFC 9000 section 14 for 1,200).
Where a path is known to carry more (``network.control.mtu``), a datagram holds several such packets, one
after the other. Each has its own header, number and check; what is counted below are packets.
Header and chunk are multiples of 64 bytes, so a segmented train of datagrams is a table whose rows
numpy reads and writes in place. All integers are little-endian.

| offset | type | field | meaning |
|---|---|---|---|
| 0 | u8 | version | of this format |
| 1 | u8 | kind | DATA, END, ACK, END_ACK, PING (asks for an ACK), BYE, LAST (ends a message), ASK, |
| | | | PROBE (of the datagram's size, asks for a PROBE_ACK), PROBE_ACK |
| 2 | u16 | crew | of the hash of the crew's name |
| 4, 6 | u16 | sender, dest | peer ids |
| 8 | u32 | seq | the packet's number among those of its sender's process to this peer |
| 12 | u32 | epoch | when the sending process started, in tenths of a second |
| 16 | u64 | tag | a keyed check over header and chunk; 0 over a link that seals |
| 24 | u64 | seal | 8 bytes for a link that seals; else 0 |
| 32 | u32 | schema | hash of what is averaged: shapes, dtypes, order; with a channel's name |
| 36 | u32 | round | ACK: datagrams received so far |
| 40 | u8 | channel | 252: a named one; its schema's hash tells which |
| 41 | u8 | stage | |
| 42 | u16 | block | |
| 44 | u32 | chunk | ACK: the window granted, in packets; PROBE: which packet of the datagram |
| 48 | u32 | total | ACK: 1: all up to the highest have come; PROBE: packets in the datagram |
| 52 | f32 | weight | the chunk's weight in a mean; ACK: seconds since the highest number came |
| 56 | u64 | heard | the chunk's contributors, a bit each; a request for chunks: its number; |
| | | | ACK: the highest number; PROBE_ACK: the probe's |

No number is used twice by one flow for one of two purposes: what is counted (DATA, LAST, ASK, END, PING),
and what is not (ACK, END_ACK, BYE, PROBE, PROBE_ACK). The packets of a probe share one. 32
bits of a number travel; both ends know the rest of it, as in RFC 9000, 17.1. A link that seals writes another
form of the same size (``network/link/sealed``), with a tag.

Without it, the check finds corruption and strays. It is no signature: whoever knows the crew's name can forge
it. So a receiver takes a datagram only from its sender's address; a good-bye counts only where there is no
membership.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from operator import mul

import numpy as np
from numpy.typing import NDArray

from ragtag.core.seed import mix
from ragtag.core.types import Bools, Bytes

VERSION = 3
HEADER_BYTES = 64
CHUNK_BYTES = 1088
DATAGRAM_BYTES = HEADER_BYTES + CHUNK_BYTES
NAMED = 256
"""From here on channels and topics have numbers that stand for names (``core.channels``)."""
NAMED_BYTE = 252
"""The header's channel of all of these."""


class Kind(IntEnum):
    """What a datagram is."""

    DATA = 0
    END = 1
    ACK = 2
    END_ACK = 3
    PING = 4
    BYE = 5
    LAST = 6
    ASK = 7
    PROBE = 8
    PROBE_ACK = 9


KIND_MAX = max(Kind)
LONG_KINDS = (Kind.DATA, Kind.LAST, Kind.ASK, Kind.PROBE)
"""Kinds that have a chunk behind their header."""
ANSWERS = (Kind.ACK, Kind.END_ACK, Kind.BYE, Kind.PROBE, Kind.PROBE_ACK)
"""Kinds that are numbered apart from all others, which are counted and acknowledged."""


HEADER = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("crew", "<u2"),
        ("sender", "<u2"),
        ("dest", "<u2"),
        ("seq", "<u4"),
        ("epoch", "<u4"),
        ("tag", "<u8"),
        ("seal", "<u8"),
        ("schema", "<u4"),
        ("round", "<u4"),
        ("channel", "u1"),
        ("stage", "u1"),
        ("block", "<u2"),
        ("chunk", "<u4"),
        ("total", "<u4"),
        ("weight", "<f4"),
        ("heard", "<u8"),
    ]
)
assert HEADER.itemsize == HEADER_BYTES

Headers = NDArray[np.void]
Words = NDArray[np.uint64]
_U64 = (1 << 64) - 1
ODD_INTS = [mix(i + 1) | 1 for i in range(8)]
TAG_WORD = 2
_SUM_ODD = ODD_INTS[TAG_WORD]  # the tag's own word is left out; its multiplier is the chunk's
_ODD_INTS = [0 if i == TAG_WORD else odd for i, odd in enumerate(ODD_INTS)]
_ODD = np.array(_ODD_INTS, dtype="<u8")
FINAL = 0xD6E8FEB86659FD93
_SUM_ODD_U64, _FINAL_U64, _HALF = np.uint64(_SUM_ODD), np.uint64(FINAL), np.uint64(32)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose datagrams are accepted: one crew, one peer, one schema."""

    crew: str
    peer: int
    schema: int = 0

    @property
    def crew_id(self) -> int:
        """The crew's name as the header carries it: enough to sort out strays, of which the check decides."""
        return name_hash(self.crew) & 0xFFFF

    @property
    def key(self) -> int:
        """What the tag is keyed with."""
        digest = hashlib.blake2b(b"tag/" + self.crew.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def name_hash(name: str) -> int:
    """32 bits of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def tags(
    datagrams: Bytes, key: int, words: Words | None = None, sums: Words | None = None
) -> NDArray[np.uint64]:
    """The tag of each row of ``datagrams``, uint8 ``[k, 64 + chunk bytes]`` with C-contiguous rows.

    words: its headers as uint64 ``[k, 8]``, and sums: ``chunk_sums`` of its chunks, where at hand.
    A multiply-and-add hash (Carter, Wegman 1979) of the header's words and the sum of the chunk's,
    finalised by a bijection: any single change to a header or a chunk is found; two opposite changes of
    the same bit may cancel (13 of 716,800 damaged datagrams passed). UDP's own checksum stands before it.
    """
    if words is None:
        words = datagrams.view("<u8")[:, :8]
    total: NDArray[np.uint64] = words @ _ODD  # unsigned arrays wrap silently
    if datagrams.shape[1] > HEADER_BYTES:
        total += (chunk_sums(datagrams) if sums is None else sums) * _SUM_ODD_U64
    total += np.uint64(key)
    total ^= total >> _HALF
    total *= _FINAL_U64
    total ^= total >> _HALF
    return total


def chunk_sums(datagrams: Bytes) -> Words:
    """The sum of each row's chunk as 64-bit words."""
    sums: Words = np.einsum("ij->i", datagrams.view("<u8")[:, 8:])  # np.add.reduce takes half as long again
    return sums


def tag_of(header: bytes | bytearray, key: int) -> int:
    """The tag of one header-only datagram: the same as ``tags`` of one row."""
    total: int = key + sum(map(mul, struct.unpack("<8Q", header), _ODD_INTS))
    total &= _U64
    total ^= total >> 32
    total = total * FINAL & _U64
    return total ^ (total >> 32)


def headers_of(datagrams: Bytes) -> Headers:
    """The header fields of each row, as a view."""
    return datagrams[:, :HEADER_BYTES].view(HEADER)[:, 0]


def n_chunks(n_values: int, elements: int) -> int:
    """How many chunks of ``elements`` values hold ``n_values``."""
    return -(-n_values // elements)


def wellformed(headers: Headers, identity: Identity) -> Bools:
    """Which rows speak this version of the format, to this peer of this crew. The tag comes apart."""
    ok = headers["version"] == VERSION
    ok &= headers["crew"] == identity.crew_id
    ok &= headers["dest"] == identity.peer
    ok &= headers["kind"] <= KIND_MAX
    return np.asarray(ok, np.bool_)
