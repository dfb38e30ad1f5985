"""Membership's datagrams: a 32-byte header, and one message as msgpack, encrypted with the crew's key.

All integers of the header are little-endian. At most 1,152 bytes, as for every datagram of Ragtag.

| offset | type | field | meaning |
|---|---|---|---|
| 0 | u16 | magic | 0x4D52 ("RM") |
| 2 | u8 | version | of this format |
| 3 | u8 | - | 0 |
| 4 | u32 | crew | hash of the crew's key |
| 8 | u64 | source | the sender's epoch |
| 16 | u64 | dest | the receiver's epoch; 0: not known yet (only to be introduced) |
| 24 | u64 | number | counts the sender's datagrams; none is taken twice |
| 32 | 16 bytes | tag | of header and message |
| 48 | | | the message, encrypted |

The cipher is AES-256-SIV (RFC 5297) for all. Its nonce is its tag: a keyed hash of all that the datagram
holds. So there is no number that must never be used twice. Two processes that have one epoch (a clock that
was set back, a machine that was copied while it ran), or one number for two receivers, give nothing away. Nor
does a receiver keep a key for each sender. AES-GCM is twice as fast; but of a member at most 200 datagrams a
second are taken, at 2 microseconds each.

A datagram is bound to one sending and one receiving process. So a recorded one cannot be sent to another
member, nor to the same one after a restart; within one process its number stops it. An unknown process must
first return a cookie (as in RFC 9293's SYN cookies or RFC 6347, section 4.2.1), so a recorded introduction is
worth nothing either. Only the header can be read without the crew's key.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from hmac import compare_digest
from typing import Annotated, NamedTuple, cast

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from msgspec import Meta, Raw, Struct

from ragtag.protocols.membership.passes import REVOCATION_BYTES_MAX
from ragtag.protocols.membership.types import HOST_BYTES_MAX, NAME_BYTES_MAX, Address, Member, Status

MAGIC = 0x4D52
VERSION = 2
DATAGRAM_BYTES_MAX = 1152
_HEADER = struct.Struct("<HBBIQQQ")
TAG_BYTES = 16
HEADER_BYTES = _HEADER.size + TAG_BYTES
COOKIE_BYTES = 16
_COOKIE_LIFE_S = 30.0
ACCUSERS_MAX = 8
REVOCATIONS_EACH = 8
"""Revocations on one datagram."""

_Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Blob = Annotated[bytes, Meta(max_length=DATAGRAM_BYTES_MAX)]
_Notice = Annotated[bytes, Meta(max_length=REVOCATION_BYTES_MAX)]


class Record(Struct, array_like=True, frozen=True):
    """A belief about one member. It has address and metadata only when ALIVE, accusers only when SUSPECT."""

    name: _Name
    epoch: _Count
    incarnation: _Count
    status: Annotated[int, Meta(ge=0, le=int(max(Status)))]
    host: Annotated[str, Meta(max_length=HOST_BYTES_MAX)] = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    metadata: _Blob = b""
    accusers: Annotated[tuple[_Count, ...], Meta(max_length=ACCUSERS_MAX)] = ()


_Records = Annotated[list[Record], Meta(max_length=128)]


class Ping(Struct, array_like=True, tag=1, frozen=True):
    """Are you there?"""

    source: _Name
    nonce: _Count
    gossip: _Records = []


class Ack(Struct, array_like=True, tag=2, frozen=True):
    """The answer to ``nonce``. there: from a helper, whether the subject has answered it."""

    source: _Name
    nonce: _Count
    there: bool = True
    gossip: _Records = []


class Ask(Struct, array_like=True, tag=3, frozen=True):
    """Please ping ``subject`` for me (SWIM's ping-req)."""

    source: _Name
    nonce: _Count
    subject: _Name
    gossip: _Records = []


class Introduce(Struct, array_like=True, tag=4, frozen=True):
    """This is me; let me in. The cookie is empty at first."""

    record: Record
    cookie: _Blob = b""


class Challenge(Struct, array_like=True, tag=5, frozen=True):
    """I do not know you: introduce yourself with this cookie."""

    cookie: _Blob


class Page(Struct, array_like=True, tag=6, frozen=True):
    """Part of the sender's view, in order of names; ``more`` follows after the last."""

    source: _Name
    more: bool
    gossip: _Records


class Pull(Struct, array_like=True, tag=7, frozen=True):
    """Send me your view, from the first name above ``after``."""

    source: _Name
    after: Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
    gossip: _Records = []


class Refused(Struct, array_like=True, tag=8, frozen=True):
    """Another process, at ``host:port``, has this name. If it were dead, that would show in ``within_s``."""

    name: _Name
    epoch: _Count
    host: str
    port: int
    within_s: float


class Gossip(Struct, array_like=True, tag=9, frozen=True):
    """News, and no answer wanted."""

    source: _Name
    gossip: _Records


class Barred(Struct, array_like=True, tag=10, frozen=True):
    """``name`` may not be in the crew, or not any more. bar: why (``passes.Bar``).

    unix_s: the sender's clock.
    revocation: what proves it (``passes.Revocation``); empty: nothing does.
    """

    name: _Name
    bar: Annotated[int, Meta(ge=0, le=255)]
    unix_s: float
    revocation: _Notice = b""


class Revoked(Struct, array_like=True, tag=11, frozen=True):
    """Revocations that the sender knows of (``passes.Revocation``)."""

    source: _Name
    told: Annotated[list[_Notice], Meta(max_length=REVOCATIONS_EACH)]


Message = Ping | Ack | Ask | Introduce | Challenge | Page | Pull | Refused | Gossip | Barred | Revoked
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
CHALLENGE_BYTES = HEADER_BYTES + len(_encoder.encode(Challenge(bytes(COOKIE_BYTES))))
"""Of a datagram with a challenge."""


class Opened(NamedTuple):
    """The contents of a datagram that is the crew's and for this process."""

    source_epoch: int
    dest_epoch: int
    number: int
    message: Message


class Seal:
    """Makes and opens datagrams under one crew's key. What cannot be opened is counted, never raised."""

    def __init__(self, key: bytes, epoch: int) -> None:
        self._key, self._epoch = key, epoch
        self._cipher = AESSIV(hashlib.blake2b(key=key, digest_size=64, person=b"ragtag-member").digest())
        self._crew = crew_id(key)
        self._number = 0
        self.refused: Counter[str] = Counter()
        """Why datagrams were not taken: malformed, version, foreign (another crew), misdirected, forged."""

    def seal(self, message: Message, dest_epoch: int) -> bytes:
        """A datagram with ``message`` for the process ``dest_epoch``."""
        self._number += 1
        header = _HEADER.pack(MAGIC, VERSION, 0, self._crew, self._epoch, dest_epoch, self._number)
        return header + self._cipher.encrypt(_encoder.encode(message), [header])

    def open(self, data: bytes) -> Opened | None:
        """The contents of a datagram; ``None``: it is not the crew's, damaged, or not for this process."""
        opened = self._opened(data)
        if isinstance(opened, str):
            self.refused[opened] += 1
            return None
        return opened

    def ours(self, data: bytes) -> bool:
        """Whether a datagram was made with the crew's key, for any process."""
        return HEADER_BYTES < len(data) <= DATAGRAM_BYTES_MAX and self._decrypted(data) is not None

    def stray(self, data: bytes) -> int | None:
        """The epoch of a process of another crew or version that asks to be let in here; else ``None``."""
        if not HEADER_BYTES < len(data) <= DATAGRAM_BYTES_MAX:
            return None
        magic, version, _, crew, source, dest, _ = _HEADER.unpack_from(data)
        other = magic == MAGIC and (version != VERSION or crew != self._crew)
        return int(source) if other and dest == 0 and source else None

    def _opened(self, data: bytes) -> Opened | str:
        """The contents of a datagram, or why it is not taken."""
        if not HEADER_BYTES < len(data) <= DATAGRAM_BYTES_MAX:
            return "malformed"
        magic, version, _, crew, source, dest, number = _HEADER.unpack_from(data)
        if magic != MAGIC:
            return "malformed"
        if version != VERSION:
            return "version"
        if crew != self._crew:
            return "foreign"
        body = self._decrypted(data)
        if body is None:
            return "forged"
        if dest not in (self._epoch, 0):
            return "misdirected"
        try:
            message = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "malformed"
        if dest == 0 and not isinstance(message, Introduce):
            return "misdirected"
        return Opened(source, dest, number, message)

    def cookie(self, now_s: float, address: Address, age: int = 0) -> bytes:
        """A value that only this process can make, for one address, good for half a minute."""
        what = repr((self._epoch, int(now_s / _COOKIE_LIFE_S) - age, address)).encode()
        return hashlib.blake2b(
            what, key=self._key, digest_size=COOKIE_BYTES, person=b"ragtag-cookie"
        ).digest()

    def knows_cookie(self, cookie: bytes, now_s: float, address: Address) -> bool:
        """Whether ``cookie`` was made here, for that address, and is not old."""
        return any(compare_digest(cookie, self.cookie(now_s, address, age)) for age in (0, 1))

    def _decrypted(self, data: bytes) -> bytes | None:
        """The encoded message of a datagram; ``None``: it is not the crew's, or damaged."""
        try:
            return self._cipher.decrypt(data[_HEADER.size :], [data[: _HEADER.size]])
        except InvalidTag:
            return None


def crew_id(key: bytes) -> int:
    """32 bits that tell a crew's datagrams from another's."""
    digest = hashlib.blake2b(key, digest_size=4, person=b"ragtag-crew").digest()
    return int.from_bytes(digest, "little")


def record_of(member: Member, accusers: Sequence[int] = ()) -> Record:
    """A member as it is told to others."""
    who = (member.name, member.epoch, member.incarnation, int(member.status))
    if member.status is not Status.ALIVE:
        return Record(*who, accusers=tuple(accusers[:ACCUSERS_MAX]))
    return Record(*who, *member.address, member.metadata)


def packed(record: Record) -> Raw:
    """A record as it stands in a datagram."""
    return Raw(_encoder.encode(record))


def gossip_of(records: Sequence[Raw]) -> list[Record]:
    """Packed records as a message's field, written as they are."""
    return cast("list[Record]", list(records))
