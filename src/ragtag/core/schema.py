"""What a channel averages, so that peers with different models refuse each other before anything is lost.

A schema is compared in full when peers meet (``Schema.difference`` names the first tensor that differs);
its 32-bit hash then travels in every datagram, so that what another model sends is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Annotated

import msgspec

from ragtag.core.errors import Error
from ragtag.core.wire import n_chunks

SCHEMA_BYTES_MAX = 1_000_000
"""An encoded schema's size: peers tell each other at most a megabyte; 10,000 tensors or so."""
TENSORS_MAX = 1 << 16
VALUES_MAX = 1 << 40
FRAGMENTS_MAX = 1 << 12
ALIGN = 16
"""Every tensor begins at a multiple of 16 float32 values (64 bytes), so that kernels may read it in place."""

_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=VALUES_MAX)]
_Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]


class SchemaMismatch(Error, RuntimeError):
    """Peers do not average the same thing; the message names the first tensor that differs."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its name, shape and dtype ("float32", "bfloat16", ...) on this peer.

    order: its dimensions from the slowest to the fastest in memory, less those of size 1; empty: row by
    row. Values travel in the order of memory, so a channels-last weight is not a contiguous one.
    """

    name: _Name
    shape: _Sizes
    dtype: _Name
    order: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()

    @property
    def n_values(self) -> int:
        """How many values it has."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self._form}"

    @property
    def _form(self) -> str:
        order = f" in memory order {self.order}" if self.order else ""
        return f"{self.shape} {self.dtype}{order}"

    def beside(self, other: TensorSpec) -> str:
        """This tensor in words, without its name where ``other`` has the same one."""
        return self._form if self.name == other.name else str(self)


def offsets_of(tensors: Iterable[TensorSpec]) -> tuple[int, ...]:
    """Where each tensor begins in the flat vector, and last the vector's length (in values)."""
    sizes = (-(-tensor.n_values // ALIGN) * ALIGN for tensor in tensors)
    return tuple(accumulate(sizes, initial=0))


def fragment_chunks(n_values: int, elements: int, fragments: int) -> int:
    """How many chunks of ``elements`` values each of the equal parts has that a vector is cut into."""
    return -(-n_chunks(n_values, elements) // fragments)


def _words_apart(here: str, there: str) -> tuple[str, str]:
    """Of two contents, ``what (a 1, b 2)``, the settings that differ; all, where more than these does."""
    (what, _, mine), (theirs_what, _, theirs) = here.partition(" ("), there.partition(" (")
    pairs = list(zip(mine.removesuffix(")").split(", "), theirs.removesuffix(")").split(", "), strict=False))
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    if what != theirs_what or mine.count(", ") != theirs.count(", ") or not apart:
        return here, there
    ours, others = (", ".join(words) for words in zip(*apart, strict=True))
    return f"{what} with {ours}", f"with {others}"


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The tensors of a channel in their order, and how they are averaged.

    codec, method: their names.
    content: what the tensors are ("models" or "gradients").
    fragments: of how many parts, all of one length, a round averages one: round ``r`` part ``r`` mod
        ``fragments``.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    codec: _Name
    method: _Name
    content: _Name = "models"
    fragments: Annotated[int, msgspec.Meta(ge=1, le=FRAGMENTS_MAX)] = 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """As ``offsets_of``."""
        return offsets_of(self.tensors)

    @property
    def n_values(self) -> int:
        """Length of the flat vector, with the gaps that alignment leaves."""
        return self.offsets[-1]

    def n_chunks(self, elements: int) -> int:
        """How many chunks of ``elements`` values are averaged in a round."""
        return fragment_chunks(self.n_values, elements, self.fragments)

    def edges(self, elements: int) -> tuple[int, ...]:
        """The chunks of ``elements`` values at which tensors begin; one that has values of several tensors
        lies between two edges, alone.
        """
        inner = offsets_of(self.tensors)[1:-1]
        return tuple(sorted({edge for at in inner for edge in (at // elements, -(-at // elements))}))

    def hash32(self) -> int:
        """32 bits that go into the header of every datagram."""
        return int.from_bytes(hashlib.blake2b(self.encode(), digest_size=4).digest(), "little")

    def encode(self) -> bytes:
        """As JSON, always the same bytes for the same schema.

        Raises ValueError when it would be longer than ``SCHEMA_BYTES_MAX``.
        """
        data = msgspec.json.encode(self)
        if len(data) > SCHEMA_BYTES_MAX:
            raise ValueError(
                f"a schema of {len(self.tensors)} tensors takes {len(data)} bytes; "
                f"at most {SCHEMA_BYTES_MAX} are sent: average fewer tensors on one channel"
            )
        return data

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Schema:
        """Read what ``encode`` wrote. Raises ValueError on anything else."""
        if len(data) > SCHEMA_BYTES_MAX:
            raise ValueError(f"a schema of {len(data)} bytes; at most {SCHEMA_BYTES_MAX} are read")
        try:
            schema = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no schema: {error}") from error
        if any(tensor.n_values > VALUES_MAX for tensor in schema.tensors) or schema.n_values > VALUES_MAX:
            raise ValueError(f"no schema: more than {VALUES_MAX} values")
        return schema

    def difference(self, other: Schema) -> str | None:
        """What differs first between this peer's schema and another's; ``None``: nothing."""
        for what, here, there in (
            ("averages", self.content, other.content),
            ("averages by", self.method, other.method),
            ("sends as", self.codec, other.codec),
            ("averages one part in", self.fragments, other.fragments),
        ):
            if here != there:
                if what == "averages":
                    here, there = _words_apart(str(here), str(there))
                return f"this peer {what} {here}, the other {there}"
        for at, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine != theirs:
                return f"tensor {at}: {mine} here, {theirs.beside(mine)} there"
        mine_n, theirs_n = len(self.tensors), len(other.tensors)
        if mine_n > theirs_n:
            return f"tensor {theirs_n}: {self.tensors[theirs_n]} here, none there"
        if mine_n < theirs_n:
            return f"tensor {mine_n}: none here, {other.tensors[mine_n]} there"
        return None
