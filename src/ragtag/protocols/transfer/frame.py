"""Frames between a donor and a newcomer: encrypted for one place in one connection. Nothing here does I/O.

    length u32, kind u8, 0[3], body[length], whose last 16 bytes are the tag     (integers are little-endian)

Each direction has a key from the handshake, and a frame's number in its direction is its nonce. The head is
authenticated with the body. So no frame can be read, changed, replayed, reflected, or moved to another
connection. A body is one message as msgpack, a chunk (offer u32, index u32, bytes u32, hash[32]), or the next
piece of that chunk's bytes. A piece has 256 KiB at most, so that a donor never works long at a time. The hash
sees what the tag does not: a donor computes it once, and its memory may fail afterwards.

A connection may carry all of the largest state under one key. That is 2^34 blocks of AES, which differ from
noise with a chance of 2^-60.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hmac import compare_digest
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag

from ragtag.protocols.sealing.noise import TAG_BYTES, cipher_of, nonce_of
from ragtag.protocols.transfer.types import CHUNK_BYTES_MAX
from ragtag.protocols.transfer.wire import FrameKeys, Message, WireError, chunk_hasher

_HEAD = struct.Struct("<IB3x")
_CHUNK = struct.Struct("<III32s")
HEAD_BYTES = _HEAD.size
CONTROL_BYTES_MAX = 1024
PIECE_BYTES = 1 << 18
FRAME_BYTES_MAX = HEAD_BYTES + PIECE_BYTES + TAG_BYTES
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Kind(IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    CHUNK = 2
    PIECE = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as it came.

    number: the offer's.
    intact: its bytes have the hash that came with them.
    data: a view of the seal's buffer, valid until it opens the next frame.
    """

    number: int
    index: int
    intact: bool
    data: memoryview


class Frame(NamedTuple):
    """One frame as it came. body: a view of the reader's buffer, valid until it reads on."""

    head: bytes
    kind: int
    body: memoryview


class _Coming:
    """A chunk of which pieces are still to come. data: all its bytes; ``got`` of them are there."""

    def __init__(self, number: int, index: int, digest: bytes, data: memoryview) -> None:
        self.number, self.index, self.data = number, index, data
        self.got = 0
        self._digest, self._hasher = digest, chunk_hasher()

    def took(self, n_bytes: int) -> Chunk | None:
        """``n_bytes`` more are in their place: the chunk, once it is complete."""
        self._hasher.update(self.data[self.got : self.got + n_bytes])
        self.got += n_bytes
        if self.got < len(self.data):
            return None
        intact = compare_digest(self._digest, self._hasher.digest())
        return Chunk(self.number, self.index, intact, self.data)


class FrameSeal:
    """Seals and opens the frames of one connection."""

    def __init__(self, keys: FrameKeys) -> None:
        self._suite = keys.suite
        self._sealing, self._opening = (cipher_of(keys.suite, key) for key in (keys.ours, keys.theirs))
        self._sent = self._taken = 0
        self._coming: _Coming | None = None
        self._buffer = bytearray()

    def seal(self, message: Message) -> bytes:
        """A frame with a message."""
        return self._sealed(Kind.MESSAGE, _encoder.encode(message))

    def seal_chunk(self, number: int, index: int, digest: bytes, n_bytes: int) -> bytes:
        """What goes before a chunk's ``n_bytes`` bytes."""
        return self._sealed(Kind.CHUNK, _CHUNK.pack(number, index, n_bytes, digest))

    def seal_piece(self, data: memoryview, into: memoryview) -> memoryview:
        """A frame with the next piece of a chunk, made in ``into``.

        data: at most ``PIECE_BYTES``.
        into: memory for ``FRAME_BYTES_MAX``.
        """
        head = _HEAD.pack(len(data) + TAG_BYTES, Kind.PIECE)
        frame = into[: HEAD_BYTES + len(data) + TAG_BYTES]
        frame[:HEAD_BYTES] = head
        self._sealing.encrypt_into(self._next(), data, head, frame[HEAD_BYTES:])
        return frame

    def open(self, frame: Frame) -> Message | Chunk | None:
        """What is in a frame; ``None``: part of a chunk of which more is to come.

        Raises:
            WireError: it was not sealed for this place in this connection, or makes no sense.
        """
        try:
            return self._piece(frame) if frame.kind == Kind.PIECE else self._whole(frame)
        except InvalidTag:
            raise WireError("sent a frame that is forged, or was damaged on its way") from None

    def _whole(self, frame: Frame) -> Message | None:
        body = self._opening.decrypt(self._place(), bytes(frame.body), frame.head)
        self._taken += 1
        if frame.kind == Kind.CHUNK:
            self._begin(*_CHUNK.unpack(body))
            return None
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"sent a message that makes no sense ({error})") from None

    def _begin(self, number: int, index: int, n_bytes: int, digest: bytes) -> None:
        if self._coming is not None:
            raise WireError(f"sent chunk {index} before all of the one before it")
        if not 1 <= n_bytes <= CHUNK_BYTES_MAX:
            raise WireError(f"sent a chunk of {n_bytes} bytes; 1 to {CHUNK_BYTES_MAX} are expected")
        if n_bytes > len(self._buffer):
            self._buffer = bytearray(n_bytes)
        self._coming = _Coming(number, index, digest, memoryview(self._buffer)[:n_bytes])

    def _piece(self, frame: Frame) -> Chunk | None:
        n_bytes, coming = len(frame.body) - TAG_BYTES, self._coming
        if coming is None or n_bytes > len(coming.data) - coming.got:
            raise WireError("sent more of a chunk than it has")
        into = coming.data[coming.got : coming.got + n_bytes]
        self._opening.decrypt_into(self._place(), frame.body, frame.head, into)
        self._taken += 1
        chunk = coming.took(n_bytes)
        if chunk is not None:
            self._coming = None
        return chunk

    def _sealed(self, kind: Kind, plain: bytes) -> bytes:
        head = _HEAD.pack(len(plain) + TAG_BYTES, kind)
        return head + self._sealing.encrypt(self._next(), plain, head)

    def _next(self) -> bytes:
        """The nonce of the frame that is sealed now."""
        self._sent += 1
        return nonce_of(self._suite, self._sent - 1)

    def _place(self) -> bytes:
        """The nonce of the frame that comes next."""
        return nonce_of(self._suite, self._taken)


class Reader:
    """Gathers what comes over a stream: first the handshake's parts, then frames.

    Read into ``space()``, and say how much came. A peer can make it hold its largest frame at most.

    takes_chunks: whether chunks are expected.
    """

    def __init__(self, first_bytes: int) -> None:
        self.takes_chunks = False
        self._buffer = bytearray(max(first_bytes, HEAD_BYTES))
        self._need, self._got = first_bytes, 0
        self._head: tuple[bytes, int] | None = None

    def space(self) -> memoryview:
        """The memory for the next bytes, never empty."""
        return memoryview(self._buffer)[self._got : self._need]

    def part(self, n: int, next_bytes: int) -> bytes | None:
        """``n`` bytes of the handshake came: the whole part, once it is there.

        next_bytes: the size of the next part; 0: frames follow.
        """
        self._got += n
        if self._got < self._need:
            return None
        whole = bytes(self._buffer[: self._need])
        self._expect(next_bytes or HEAD_BYTES)
        return whole

    def filled(self, n: int) -> Frame | None:
        """``n`` bytes came: the frame, once it is complete.

        Raises:
            WireError: no frame that is expected here begins like that.
        """
        self._got += n
        if self._got < self._need:
            return None
        if self._head is None:
            self._begin(bytes(self._buffer[:HEAD_BYTES]))
            return None
        frame = Frame(*self._head, memoryview(self._buffer)[: self._need])
        self._head = None
        self._need, self._got = HEAD_BYTES, 0
        return frame

    def _begin(self, head: bytes) -> None:
        length, kind = _HEAD.unpack(head)
        if kind == Kind.MESSAGE:
            least, most = 1, CONTROL_BYTES_MAX
        elif kind == Kind.CHUNK and self.takes_chunks:
            least = most = _CHUNK.size
        elif kind == Kind.PIECE and self.takes_chunks:
            least, most = 1, PIECE_BYTES
        else:
            raise WireError(f"sent a frame of kind {kind}, which is not expected")
        if not least <= length - TAG_BYTES <= most:
            expected = f"{least + TAG_BYTES} to {most + TAG_BYTES}"
            raise WireError(f"sent a frame of {length} bytes where {expected} are expected")
        self._head = head, kind
        self._expect(length)

    def _expect(self, need: int) -> None:
        self._need, self._got = need, 0
        if need > len(self._buffer):
            self._buffer = bytearray(need)
