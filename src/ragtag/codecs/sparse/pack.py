"""What a fragment holds behind its header: which entries fit, their values, their indices.

The layout is ``ragtag.codecs.sparse.wire``'s.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ragtag.codecs.sparse.indices import (
    HEADER_BYTES,
    Indices,
    Pieces,
    Sizes,
    blocks,
    cut_blocks,
    cut_rice,
    rice,
)
from ragtag.codecs.values import to_2bit, to_bf16, to_int8
from ragtag.core import fast
from ragtag.core.types import Bytes, Floats

Values = Literal["fp32", "bf16", "int8", "2bit"]
VALUES = ("fp32", "bf16", "int8", "2bit")
"""How values may be sent, by the number that fragments carry."""
SIZES = (Sizes(32, 0), Sizes(16, 0), Sizes(8, 2), Sizes(2, 4))
TWO_BITS = VALUES.index("2bit")


def cut(at: Indices, coding: int, by_rice: bool) -> Pieces:
    """Which indices go together into a fragment."""
    sizes = SIZES[coding]
    if not by_rice:
        return cut_blocks(at, sizes)
    if not fast.compiled():
        return cut_rice(at, sizes)
    from ragtag.codecs.sparse import kernels_wire

    starts, parameter = np.empty(len(at) + 1, np.int64), np.empty(len(at), np.int64)
    n = kernels_wire.cut_rice(at, sizes.bits, sizes.scale, starts, parameter)
    return Pieces(starts[: n + 1], parameter[:n])


def write(chunks: Bytes, at: Indices, values: Floats, pieces: Pieces, coding: int, by_rice: bool) -> None:
    """Values and indices of all fragments, behind their headers."""
    if by_rice and fast.compiled():
        from ragtag.codecs.sparse import kernels_wire

        if coding == TWO_BITS:  # few sorts in float64, the same for both paths
            _write_values(chunks, values, pieces)
        kernels_wire.write(chunks, at, values, pieces.starts, pieces.parameter, coding)
        return
    spans = zip(pieces.starts[:-1].tolist(), pieces.starts[1:].tolist(), strict=True)
    for row, (a, b), parameter in zip(chunks, spans, pieces.parameter.tolist(), strict=True):
        parts = [*_values(values[a:b], coding)]
        parts.append(rice(at[a:b], parameter) if by_rice else blocks(at[a:b]))
        data = np.concatenate(parts)
        row[HEADER_BYTES : HEADER_BYTES + len(data)] = data


def _values(values: Floats, coding: int) -> list[Bytes]:
    if coding == 0:
        return [values.astype("<f4").view(np.uint8)]
    if coding == 1:
        return [to_bf16(values).astype("<u2").view(np.uint8)]
    scales, steps = to_int8(values) if coding == 2 else to_2bit(values)
    return [scales.astype("<u2").view(np.uint8).reshape(-1), steps]


def _write_values(chunks: Bytes, values: Floats, pieces: Pieces) -> None:
    for row, a, b in zip(chunks, pieces.starts[:-1].tolist(), pieces.starts[1:].tolist(), strict=True):
        data = np.concatenate(_values(values[a:b], TWO_BITS))
        row[HEADER_BYTES : HEADER_BYTES + len(data)] = data
