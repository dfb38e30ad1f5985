"""Frames between a donor and a newcomer: sealed for one place in one connection. Nothing here does I/O.

    length u32, kind u8, 0[3], number u64, tag[16], body[length]            (integers are little-endian)

Each direction has a key made from both nonces of the handshake, and its frames are numbered. So none can be
replayed, reflected, or moved to another connection. The tag is keyed BLAKE2b (RFC 7693) over what stands
before it and the body. The body is one message as msgpack, or a chunk (offer u32, index u32, hash[32],
bytes). The tag leaves out a chunk's bytes, which the hash covers. So a donor hashes only chunks that it
gives, and each once, however many newcomers read it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hmac import compare_digest
from typing import NamedTuple

import msgspec

from ragtag.protocols.transfer.wire import Message, WireError, hash_of, keyed

_TAG_BYTES = 16
_HEAD = struct.Struct("<IB3xQ")
_CHUNK = struct.Struct("<II32s")
HEAD_BYTES = _HEAD.size + _TAG_BYTES
CONTROL_BYTES_MAX = 1024
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Kind(IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    CHUNK = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as it came.

    number: the offer's.
    intact: its bytes have the hash that came with them.
    data: a view of the reader's buffer.
    """

    number: int
    index: int
    intact: bool
    data: memoryview


class Frame(NamedTuple):
    """One frame as it came. body: a view of the reader's buffer, valid until it reads on."""

    head: bytes
    kind: int
    number: int
    tag: bytes
    body: memoryview


class FrameSeal:
    """Seals and opens the frames of one connection. donor: this end is the donor's."""

    def __init__(self, key: bytes, greeted: bytes, proved: bytes, *, donor: bool) -> None:
        keys = [keyed(key, greeted + proved, person) for person in (b"ragtag-x-give", b"ragtag-x-take")]
        self._out, self._in = keys if donor else keys[::-1]
        self._sent = self._taken = 0

    def seal(self, message: Message) -> bytes:
        """A frame with a message."""
        body = _encoder.encode(message)
        head = self._head(len(body), Kind.MESSAGE)
        return b"".join((head, keyed(self._out, head + body, b"ragtag-x-frame", _TAG_BYTES), body))

    def seal_chunk(self, number: int, index: int, digest: bytes, n_bytes: int) -> bytes:
        """What goes before a chunk's ``n_bytes`` bytes."""
        prefix = _CHUNK.pack(number, index, digest)
        head = self._head(len(prefix) + n_bytes, Kind.CHUNK)
        return b"".join((head, keyed(self._out, head + prefix, b"ragtag-x-frame", _TAG_BYTES), prefix))

    def open(self, frame: Frame) -> Message | Chunk:
        """What is in a frame.

        Raises:
            WireError: it was not sealed for this place in this connection, or makes no sense.
        """
        chunk = frame.kind == Kind.CHUNK
        covered = frame.body[: _CHUNK.size] if chunk else frame.body
        tag = keyed(self._in, frame.head + covered, b"ragtag-x-frame", _TAG_BYTES)
        if frame.number != self._taken or not compare_digest(tag, frame.tag):
            raise WireError("sent a frame that is forged, or was damaged on its way")
        self._taken += 1
        if chunk:
            number, index, digest = _CHUNK.unpack_from(frame.body)
            data = frame.body[_CHUNK.size :]
            return Chunk(number, index, compare_digest(digest, hash_of(data)), data)
        try:
            return _decoder.decode(frame.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"sent a message that makes no sense ({error})") from None

    def _head(self, length: int, kind: Kind) -> bytes:
        self._sent += 1
        return _HEAD.pack(length, kind, self._sent - 1)


class Reader:
    """Gathers what comes over a stream: first the handshake's parts, then frames.

    Read into ``space()``, and say how much came. A peer can make it hold its largest frame at most.

    chunk_bytes_max: the largest chunk that is expected; 0: none is.
    """

    def __init__(self, first_bytes: int) -> None:
        self.chunk_bytes_max = 0
        self._buffer = bytearray(max(first_bytes, HEAD_BYTES))
        self._need, self._got = first_bytes, 0
        self._handshake = True
        self._head: tuple[bytes, int, int, bytes] | None = None

    @property
    def begun(self) -> bool:
        """Whether something has come that is not complete."""
        return self._got > 0 or self._head is not None

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
        self._handshake = next_bytes > 0
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
        length, kind, number = _HEAD.unpack_from(head)
        least, most = 1, CONTROL_BYTES_MAX
        if kind == Kind.CHUNK and self.chunk_bytes_max:
            least, most = _CHUNK.size + 1, _CHUNK.size + self.chunk_bytes_max
        elif kind != Kind.MESSAGE:
            raise WireError(f"sent a frame of kind {kind}, which is not expected")
        if not least <= length <= most:
            raise WireError(f"sent a frame of {length} bytes where {least} to {most} are expected")
        self._head = head[: _HEAD.size], kind, number, head[_HEAD.size :]
        self._expect(length)

    def _expect(self, need: int) -> None:
        self._need, self._got = need, 0
        if need > len(self._buffer):
            self._buffer = bytearray(need)
