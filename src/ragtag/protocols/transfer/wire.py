"""What a donor and a newcomer say to each other over TCP, after each has shown that it has the crew's key.

Nothing here does I/O. The donor greets with a nonce. The newcomer proves with another that it has the key.
The donor proves the same, or refuses (mutual authentication by challenge and response, as in ISO/IEC 9798-4).
A peer without the key has then seen a nonce and a refusal. Integers are little-endian.

    greeting  magic[4] version u8 0[3] nonce[32]
    proof     magic[4] version u8 0[3] nonce[32] tag[32]
    verdict   magic[4] code u8    0[3] tag[32]

Frames follow (``frame``). The contents are authenticated, not secret.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from hmac import compare_digest
from typing import Annotated

from msgspec import Meta, Struct

from ragtag.protocols.transfer.types import BLOB_BYTES_MAX, CHUNK_BYTES_MAX, CHUNKS_MAX, Offer

MAGIC = b"RagX"
VERSION = 1
KEY_BYTES = NONCE_BYTES = HASH_BYTES = 32
_GREETING = struct.Struct("<4sB3x32s")
GREETING_BYTES = VERDICT_BYTES = _GREETING.size
PROOF_BYTES = _GREETING.size + 32


class WireError(ValueError):
    """The bytes are not what a peer with the crew's key sends."""


class Verdict(IntEnum):
    """A donor's answer to a proof."""

    WELCOME = 0
    KEY = 1
    BUSY = 2
    VERSION = 3


# -- Messages

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones


class Status(Struct, array_like=True, tag=1, frozen=True):
    """How far are you?"""


class Wanted(Struct, array_like=True, tag=2, frozen=True):
    """Offer the snapshot of ``round``, or of the first after it."""

    round: _Count


class Want(Struct, array_like=True, tag=3, frozen=True):
    """Send a chunk of what you offered under this number."""

    number: _U32
    index: Annotated[int, Meta(ge=0, lt=CHUNKS_MAX)]


class Here(Struct, array_like=True, tag=4, frozen=True):
    """The donor has finished ``round`` (-1: none), and takes ``round_s`` for one (0: not known yet)."""

    round: Annotated[int, Meta(ge=-1, lt=1 << 62)]
    round_s: Annotated[float, Meta(ge=0, le=1e9)]


class Offering(Struct, array_like=True, tag=5, frozen=True):
    """A snapshot, and the number by which its chunks are asked for."""

    number: _U32
    round: _Count
    step: _Count
    schema: _U64
    layout_hash: _U64
    total_bytes: Annotated[int, Meta(ge=1, le=BLOB_BYTES_MAX)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES_MAX)]

    def offer(self) -> Offer:
        """As the machine reads it."""
        return Offer(self.round, self.step, self.schema, self.layout_hash, self.total_bytes, self.chunk_bytes)


class Gone(Struct, array_like=True, tag=6, frozen=True):
    """What you ask for is not there any more."""

    number: _U32


class Behind(Struct, array_like=True, tag=7, frozen=True):
    """The donor has nothing to give: it catches up with the crew itself."""


Message = Status | Wanted | Want | Here | Offering | Gone | Behind


def hash_of(data: bytes | memoryview) -> bytes:
    """The hash of a chunk's bytes."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=b"ragtag-chunk").digest()


# -- The handshake


def greeting(nonce: bytes) -> bytes:
    """A donor's first bytes."""
    return _GREETING.pack(MAGIC, VERSION, nonce)


def proof(key: bytes, greeted: bytes, nonce: bytes) -> bytes:
    """A newcomer's answer.

    Raises:
        WireError: the greeting is no donor's, or that of another version; the message says which.
    """
    magic, version, _ = _GREETING.unpack(greeted)
    if magic != MAGIC:
        raise WireError("what listens there is no donor of Ragtag")
    if version != VERSION:
        raise WireError(
            f"speaks version {version} of the transfer, and this peer {VERSION}; install the same version of "
            "Ragtag on both"
        )
    head = _GREETING.pack(MAGIC, VERSION, nonce)
    return head + keyed(key, greeted + head, b"ragtag-x-proof")


def examined(key: bytes, greeted: bytes, proved: bytes, *, room: bool = True) -> Verdict:
    """A donor's verdict on a proof: a welcome only for a peer with the key, and where there is room."""
    head, tag = proved[: _GREETING.size], proved[_GREETING.size :]
    magic, version, _ = _GREETING.unpack(head)
    if magic != MAGIC or not compare_digest(tag, keyed(key, greeted + head, b"ragtag-x-proof")):
        return Verdict.KEY
    if version != VERSION:
        return Verdict.VERSION
    return Verdict.WELCOME if room else Verdict.BUSY


def verdict(key: bytes, greeted: bytes, proved: bytes, code: Verdict) -> bytes:
    """A donor's answer to a proof. Only a welcome shows that the donor has the key, too."""
    tag = keyed(key, greeted + proved, b"ragtag-x-welc") if code is Verdict.WELCOME else bytes(32)
    return _GREETING.pack(MAGIC, code, tag)


def judged(key: bytes, greeted: bytes, proved: bytes, answer: bytes) -> Verdict:
    """What a donor's answer says. A welcome counts only with the key. Raises WireError: it is no donor's."""
    magic, code, tag = _GREETING.unpack(answer)
    if magic != MAGIC or code not in list(Verdict):
        raise WireError("what listens there is no donor of Ragtag")
    if code == Verdict.WELCOME and not compare_digest(tag, keyed(key, greeted + proved, b"ragtag-x-welc")):
        return Verdict.KEY
    return Verdict(code)


def keyed(key: bytes, data: bytes, person: bytes, size: int = 32) -> bytes:
    """Keyed BLAKE2b of some bytes. person: names the purpose."""
    return hashlib.blake2b(data, key=key, digest_size=size, person=person).digest()
