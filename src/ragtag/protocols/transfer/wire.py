"""What a donor and a newcomer say to each other over TCP, and how both come to keys first.

Nothing here does I/O. The donor greets with a nonce. The newcomer answers with the first message of a Noise
handshake (``NNpsk0``, whose shared key is the crew's), and the donor with the second one, or with a refusal.
A peer without the key has then seen a nonce and a refusal, and has cost the donor one key pair. The nonce is
in the handshake's prologue: what was recorded is worth nothing in another connection. Integers are
little-endian.

    greeting  magic[4] version u8 0[3]          nonce[32]       alike in all versions
    hello     magic[4] version u8 suite u8 0[2] noise[48]       of persons: 290, with a proof in it
    verdict   magic[4] code u8    0[3]          noise[48]       zeros, unless it is a welcome

In a crew that takes persons the crew's key is not enough, as one that was put out has it, too. The newcomer's
first message holds its pass, and its person's signature over the donor's nonce and its own new key.

Frames follow (``frame``), under keys that nobody can compute later (forward secrecy).
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta, Struct

from ragtag.protocols.membership.passes import PROOF_BYTES_MAX
from ragtag.protocols.sealing.noise import TAG_BYTES, Handshake, HandshakeError, KeyPair
from ragtag.protocols.sealing.sessions import SUITES
from ragtag.protocols.transfer.types import BLOB_BYTES_MAX, CHUNK_BYTES_MAX, CHUNKS_MAX, Offer

MAGIC = b"RagX"
VERSION = 3
KEY_BYTES = NONCE_BYTES = HASH_BYTES = 32
_GREETING = struct.Struct("<4sB3x32s")
_HELLO = struct.Struct("<4sBB2x")
_VERDICT = struct.Struct("<4sB3x")
_NOISE_BYTES = 32 + TAG_BYTES
GREETING_BYTES = _GREETING.size
HELLO_BYTES, VERDICT_BYTES = _HELLO.size + _NOISE_BYTES, _VERDICT.size + _NOISE_BYTES
_PROLOGUE = b"ragtag transfer"
_PROOF = struct.Struct(f"<H{PROOF_BYTES_MAX}s")


def hello_bytes(persons: Prover | None) -> int:
    """How long a hello is. persons: those of the crew; ``None``: it takes none."""
    return HELLO_BYTES + (0 if persons is None else _PROOF.size)


class Prover(Protocol):
    """Whose process this is, and whom a state is given to, in a crew that takes persons."""

    def prove(self, what: bytes) -> bytes:
        """That this process is its person's: at most ``PROOF_BYTES_MAX`` bytes, good for ``what`` alone."""

    def proven(self, what: bytes, proof: bytes) -> bool:
        """Whether a proof is good for ``what``, and its person may be in the crew. From any thread."""


class WireError(ValueError):
    """The bytes are not what a peer with the crew's key sends."""


class Verdict(IntEnum):
    """A donor's answer to a newcomer's hello."""

    WELCOME = 0
    KEY = 1
    BUSY = 2
    VERSION = 3
    PERSON = 4


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
    replica: _U32

    @classmethod
    def of(cls, number: int, offer: Offer) -> Offering:
        """What is told of a snapshot."""
        o = offer
        return cls(number, o.round, o.step, o.schema, o.layout_hash, o.total_bytes, o.chunk_bytes, o.replica)

    def offer(self) -> Offer:
        """As the machine reads it."""
        return Offer(
            self.round,
            self.step,
            self.schema,
            self.layout_hash,
            self.total_bytes,
            self.chunk_bytes,
            self.replica,
        )


class Gone(Struct, array_like=True, tag=6, frozen=True):
    """What you ask for is not there any more."""

    number: _U32


class Behind(Struct, array_like=True, tag=7, frozen=True):
    """The donor has nothing to give: it catches up with the crew itself."""


Message = Status | Wanted | Want | Here | Offering | Gone | Behind


def chunk_hasher() -> hashlib.blake2b:
    """Computes the hash of a chunk from its bytes, piece by piece."""
    return hashlib.blake2b(digest_size=HASH_BYTES, person=b"ragtag-chunk")


# -- The handshake


class FrameKeys(NamedTuple):
    """What seals a connection's frames.

    suite: a cipher's name.
    ours, theirs: keys of 32 bytes, for what this end sends, and for what comes.
    what, proof: at a donor that asks for persons, what the newcomer's proof was good for, and the proof.
    """

    suite: str
    ours: bytes
    theirs: bytes
    what: bytes = b""
    proof: bytes = b""


def greeting(nonce: bytes) -> bytes:
    """A donor's first bytes. nonce: 32 random bytes, for one connection."""
    return _GREETING.pack(MAGIC, VERSION, nonce)


class NewcomerEnd:
    """A newcomer's end of the handshake, from a greeting on.

    suite: the cipher for the connection, by its number in ``sealing.sessions``.
    ephemeral: a key pair for this connection alone.
    persons: in a crew that takes persons.

    Raises:
        WireError: the greeting is no donor's, or that of another version; the message says which.
    """

    def __init__(
        self, key: bytes, greeted: bytes, suite: int, ephemeral: KeyPair, persons: Prover | None = None
    ) -> None:
        magic, version, _ = _GREETING.unpack(greeted)
        if magic != MAGIC:
            raise WireError("what listens there is no donor of Ragtag")
        if version != VERSION:
            raise WireError(
                f"speaks version {version} of the transfer, and this peer {VERSION}; install the same "
                "version of Ragtag on both"
            )
        head = _HELLO.pack(MAGIC, VERSION, suite)
        self._suite = SUITES[suite]
        self._handshake = _handshake(key, self._suite, greeted + head, ephemeral, initiator=True)
        payload = b""
        if persons is not None:
            proof = persons.prove(_bound(greeted, head, ephemeral.public))
            payload = _PROOF.pack(len(proof), proof)
        self.data = head + self._handshake.write(payload)
        """The hello, to be sent."""

    def judged(self, answer: bytes) -> FrameKeys | Verdict:
        """What a donor answers: keys, or why not. A welcome counts only if it was made with the crew's key.

        Raises:
            WireError: it is no donor's.
        """
        magic, code = _VERDICT.unpack_from(answer)
        if magic != MAGIC or code not in list(Verdict):
            raise WireError("what listens there is no donor of Ragtag")
        if code != Verdict.WELCOME:
            return Verdict(code)
        try:
            self._handshake.read(answer[_VERDICT.size :])
        except HandshakeError:
            return Verdict.KEY
        ours, theirs = self._handshake.split()
        return FrameKeys(self._suite, ours, theirs)


def answered(
    key: bytes,
    greeted: bytes,
    hello: bytes,
    ephemeral: KeyPair,
    *,
    room: bool = True,
    persons: Prover | None = None,
) -> tuple[bytes, FrameKeys | Verdict]:
    """A donor's answer to a hello, and what follows from it: keys, or why there are none.

    ephemeral: a key pair for this connection alone.
    room: whether one more newcomer can be served.
    persons: in a crew that takes persons.
    """
    head, message = hello[: _HELLO.size], hello[_HELLO.size :]
    magic, version, suite = _HELLO.unpack(head)
    if magic != MAGIC or suite not in SUITES:
        return _refusal(Verdict.KEY)
    handshake = _handshake(key, SUITES[suite], greeted + head, ephemeral, initiator=False)
    what = proof = b""
    try:
        payload = handshake.read(message)
        if version != VERSION:
            return _refusal(Verdict.VERSION)
        if persons is not None:
            what, (size, padded) = _bound(greeted, head, message[:32]), _PROOF.unpack(payload)
            proof = padded[:size]
            if size > PROOF_BYTES_MAX or not persons.proven(what, proof):
                return _refusal(Verdict.PERSON)
        if not room:
            return _refusal(Verdict.BUSY)
        data = _VERDICT.pack(MAGIC, Verdict.WELCOME) + handshake.write()
    except HandshakeError:
        return _refusal(Verdict.KEY)
    theirs, ours = handshake.split()
    return data, FrameKeys(SUITES[suite], ours, theirs, what, proof)


def _bound(greeted: bytes, head: bytes, public: bytes) -> bytes:
    """What a newcomer's person signs: this connection, and the key that the newcomer has made for it."""
    return greeted + head + public


def _refusal(code: Verdict) -> tuple[bytes, Verdict]:
    return _VERDICT.pack(MAGIC, code) + bytes(_NOISE_BYTES), code


def _handshake(key: bytes, suite: str, said: bytes, ephemeral: KeyPair, *, initiator: bool) -> Handshake:
    """One end of a connection's handshake. said: what both ends have in clear."""
    return Handshake(
        "NNpsk0", suite, initiator=initiator, psk=key, prologue=_PROLOGUE + said, ephemeral=ephemeral
    )
