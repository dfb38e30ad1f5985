"""What a codec is: a value, not a class hierarchy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ragtag.core.types import Bytes, Floats


class Codec(NamedTuple):
    """How values become chunks. Every chunk decodes alone: scales and indices travel inside it.

    elements: values per chunk.
    encode: float32 ``[k, elements]`` to uint8 ``[k, chunk_bytes]`` (may share memory with its input).
    decode: chunks to float32 ``[k, elements]``, into the array given.
    accumulate: ``sum += weight * decode(chunks)``, with ``weight`` float32 ``[k]``, a weight per chunk.
    exact: whether decode(encode(x)) is x, bit for bit.
    """

    name: str
    elements: int
    encode: Callable[[Floats], Bytes]
    decode: Callable[[Bytes, Floats], None]
    accumulate: Callable[[Bytes, Floats, Floats], None]
    exact: bool
