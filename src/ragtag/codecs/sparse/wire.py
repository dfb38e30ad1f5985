"""A selection as datagrams, each of which decodes alone.

A *fragment* fills one chunk (``ragtag.core.wire``), zeros behind what it needs. Little-endian:

| offset | type | field | meaning |
|---|---|---|---|
| 0 | u8 | kind | 0xA in the high bits, then how indices (1 bit) and values (2 bits) are coded |
| 1 | u8 | density | 8 log2(d/k), rounded: an eighth of an octave |
| 2 | u16 | count | entries (11 bits), Rice's parameter (5 bits) |
| 4 | u32 | base | index of the first entry |
| 8, 10 | u16 | sender, fragment | |
| 12 | u16 | round | its low bits |
| 14 | bf16 | scales | for every 256 entries one (int8) or two levels (2 bits); else none |
| | | values | float32, bfloat16, int8 or 2 bits (four a byte), one per entry |
| | | indices | the others', after the base (``ragtag.codecs.sparse.indices``) |

What was forged decodes to entries within the vector and finite values, or is refused; a fragment never
costs more than its 2,047 entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ragtag.codecs.sparse.indices import (
    BLOCKS,
    COUNT_MAX,
    HEADER_BYTES,
    RICE,
    Indices,
    Malformed,
    unblocks,
    unrice,
)
from ragtag.codecs.sparse.pack import SIZES, VALUES, Values, cut, write
from ragtag.codecs.sparse.selection import Selection, require_k
from ragtag.codecs.values import from_2bit, from_bf16, from_int8, groups
from ragtag.core import fast
from ragtag.core.types import Bytes, Floats
from ragtag.core.wire import CHUNK_BYTES

HEADER = np.dtype(
    [
        ("kind", "u1"),
        ("density", "u1"),
        ("count", "<u2"),
        ("base", "<u4"),
        ("sender", "<u2"),
        ("fragment", "<u2"),
        ("round", "<u2"),
    ]
)
FRAGMENTS_MAX = 1 << 16
SIZE_MAX = 1 << 32


@dataclass(frozen=True, slots=True)
class Format:
    """What both ends of a round agree on.

    d: size of the vector.
    k: entries asked for (they say the density; a selector may choose some more).
    values: how values are sent.
    indices: how indices are ("auto": Rice where numba runs, else blocks); each fragment says which it was,
        and every receiver reads both.

    Raises ValueError for what cannot be.
    """

    d: int
    k: int
    values: Values = "int8"
    indices: Literal["auto", "rice", "blocks"] = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.d < SIZE_MAX:
            raise ValueError(f"a vector of {self.d} values: indices have 32 bits; cut it into several")
        require_k(self.k, self.d)
        if self.values not in VALUES:
            raise ValueError(f"values as {self.values!r}: give one of {', '.join(VALUES)}")
        if self.indices not in ("auto", "rice", "blocks"):
            raise ValueError(f"indices as {self.indices!r}: give auto, rice or blocks")

    @property
    def density(self) -> int:
        """k/d as fragments say it."""
        return min(255, round(8 * math.log2(self.d / self.k))) if self.d else 0


class Encoded(NamedTuple):
    """A selection as fragments.

    chunks: uint8 ``[n, 1088]``, a fragment each.
    starts: int64 ``[n + 1]``, the first entry of each.
    """

    chunks: Bytes
    starts: Indices


class Decoded(NamedTuple):
    """Entries of the fragments that were good, in their order.

    indices, values: ``[m]``.
    starts: int64 ``[n + 1]``: row i gave entries ``starts[i]`` to ``starts[i + 1]``.
    refused: rows that were not good, and why.
    """

    indices: Indices
    values: Floats
    starts: Indices
    refused: tuple[tuple[int, str], ...]


def encode(chosen: Selection, form: Format, round_: int, sender: int) -> Encoded:
    """A selection as fragments; one of nothing has none.

    Raises ValueError: indices that do not ascend within the vector, values that are not finite, or more
        than 65,536 fragments.
    """
    at, values = np.ascontiguousarray(chosen.indices), np.ascontiguousarray(chosen.values)
    n = len(at)
    if len(values) != n or (n and (at[0] < 0 or at[-1] >= form.d or not (at[1:] > at[:-1]).all())):
        raise ValueError(f"{n} indices that do not ascend within a vector of {form.d}")
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite are not sent")
    coding = VALUES.index(form.values)
    by_rice = form.indices == "rice" or (form.indices == "auto" and fast.compiled())
    pieces = cut(at, coding, by_rice)
    count = len(pieces.parameter)
    if count > FRAGMENTS_MAX:
        raise ValueError(f"{n} entries need {count} fragments: send the vector in several, 65,536 each")
    chunks = np.zeros((count, CHUNK_BYTES), np.uint8)
    header = chunks[:, :HEADER_BYTES].view(HEADER)[:, 0]
    header["kind"] = 0xA0 | (RICE if by_rice else BLOCKS) << 2 | coding
    header["density"] = form.density
    header["count"] = np.diff(pieces.starts) | pieces.parameter << 11
    header["base"] = at[pieces.starts[:-1]]
    header["sender"], header["fragment"], header["round"] = sender, np.arange(count), round_ & 0xFFFF
    write(chunks, at, values, pieces, coding, by_rice)
    return Encoded(chunks, pieces.starts)


def decode(chunks: Bytes, form: Format, *, round_: int | None = None, sender: int | None = None) -> Decoded:
    """Read fragments: uint8 ``[n, w]`` (rows may be strided; ``w`` below 1,088 where they were cut short).

    form: what is expected; another density or coding of values is refused by name.
    round_, sender: what the fragments must be of (``None``: of any).
    Refuses, never raises, whatever the chunks hold.
    """
    n, width = chunks.shape
    if width < HEADER_BYTES + 1:
        return _refuse_all(n, f"{width} bytes are no fragment")
    chunks = chunks.copy()  # one piece and writable: what the compiled loops are compiled for
    header = chunks[:, :HEADER_BYTES].view(HEADER)[:, 0]
    reasons = _reasons(header, form, round_, sender)
    count = (header["count"] & COUNT_MAX).astype(np.int64)
    count[[row for row, reason in enumerate(reasons) if reason]] = 0
    by_rice = (header["kind"] >> 2 & 1) == RICE
    indices, values = np.empty(int(count.sum()), np.int64), np.empty(int(count.sum()), np.float32)
    starts = np.concatenate([[0], np.cumsum(count)])
    quick = by_rice & (count > 0) if fast.compiled() else np.zeros(n, np.bool_)
    if quick.any():
        _read_quick(chunks, header, form, quick, starts, indices, values, reasons)
    for row in np.flatnonzero((count > 0) & ~quick).tolist():
        try:
            at, found = _read(chunks[row], header[row], form)
        except ValueError as error:
            reasons[row] = str(error)
        else:
            indices[starts[row] : starts[row + 1]], values[starts[row] : starts[row + 1]] = at, found
    return _kept(indices, values, starts, reasons)


def _kept(indices: Indices, values: Floats, starts: Indices, reasons: list[str]) -> Decoded:
    refused = tuple((row, reason) for row, reason in enumerate(reasons) if reason)
    if any(starts[row + 1] > starts[row] for row, _ in refused):
        counts = np.diff(starts)
        good = np.array([not reason for reason in reasons])
        keep = np.repeat(good, counts)
        indices, values = indices[keep], values[keep]
        starts = np.concatenate([[0], np.cumsum(counts * good)])
    return Decoded(indices, values, starts, refused)


def _refuse_all(n: int, reason: str) -> Decoded:
    none = np.zeros(n + 1, np.int64)
    return Decoded(none[:0], np.zeros(0, np.float32), none, tuple((row, reason) for row in range(n)))


def _reasons(
    header: np.ndarray[tuple[int], np.dtype[np.void]], form: Format, round_: int | None, sender: int | None
) -> list[str]:
    """Why each header is refused ("": it is not)."""
    coding, count = VALUES.index(form.values), header["count"] & COUNT_MAX
    checks: list[tuple[Any, Callable[[Any], str]]] = [
        (header["kind"] >> 3 != 0xA0 >> 3, lambda h: "it is no fragment, or of another version"),
        (
            header["kind"] & 3 != coding,
            lambda h: (
                f"it sends values as {_name(h)}, here they are {form.values}: set the same on all peers"
            ),
        ),
        (
            header["density"] != form.density,
            lambda h: (
                f"it sends about 1 in {2 ** (h['density'] / 8):.0f} values, here it is 1 in "
                f"{2 ** (form.density / 8):.0f}: set the same ratio on all peers"
            ),
        ),
        (count == 0, lambda h: "it has no entries"),
        (header["base"] >= form.d, lambda h: f"it begins at {h['base']} in a vector of {form.d}"),
    ]
    if round_ is not None:
        checks.append((header["round"] != round_ & 0xFFFF, lambda h: f"it is of round {h['round']}"))
    if sender is not None:
        checks.append((header["sender"] != sender, lambda h: f"it says that it is from peer {h['sender']}"))
    reasons = [""] * len(header)
    for wrong, say in checks:
        for row in np.flatnonzero(wrong).tolist():
            reasons[row] = reasons[row] or say(header[row])
    return reasons


def _name(header: np.void) -> str:
    return VALUES[int(header["kind"]) & 3]


def _read(row: Bytes, header: np.void, form: Format) -> tuple[Indices, Floats]:
    """One fragment whose header is good. Raises ValueError."""
    count, b = int(header["count"]) & COUNT_MAX, int(header["count"]) >> 11
    sizes, coding = SIZES[VALUES.index(form.values)], VALUES.index(form.values)
    middle = HEADER_BYTES + groups(count) * sizes.scale
    end = middle + sizes.values(count)
    if end > len(row):
        raise Malformed("its values are cut short")
    raw = np.ascontiguousarray(row[middle:end])
    if coding == 0:
        values = raw.view("<f4").astype(np.float32)
    elif coding == 1:
        values = from_bf16(raw.view("<u2").astype(np.uint16))
    else:
        scales = np.ascontiguousarray(row[HEADER_BYTES:middle]).view("<u2").astype(np.uint16)
        values = from_int8(scales, raw) if coding == 2 else from_2bit(scales, raw, count)
    if not np.isfinite(values).all():
        raise Malformed("it has values that are not finite")
    rest, base = np.ascontiguousarray(row[end:]), int(header["base"])
    by_rice = int(header["kind"]) >> 2 & 1 == RICE
    at = unrice(rest, base, count, b) if by_rice else unblocks(rest, base, count)
    if int(at[-1]) >= form.d:
        raise Malformed(f"its indices reach {int(at[-1])} in a vector of {form.d}")
    return at, values


_STATUS = (
    "",
    "its values are cut short",
    "its indices are cut short",
    "it has values that are not finite",
    "a scale is negative, not finite or too large",
    "its indices reach beyond the vector",
    "a level is negative or not finite",
)


def _read_quick(
    chunks: Bytes,
    header: np.ndarray[tuple[int], np.dtype[np.void]],
    form: Format,
    rows: np.ndarray[tuple[int], np.dtype[np.bool_]],
    starts: Indices,
    indices: Indices,
    values: Floats,
    reasons: list[str],
) -> None:
    from ragtag.codecs.sparse import kernels_wire

    status = np.zeros(len(chunks), np.uint8)
    base, b = header["base"].astype(np.int64), (header["count"] >> 11).astype(np.int64)
    coding = VALUES.index(form.values)
    kernels_wire.read(chunks, rows, base, b, coding, form.d, starts, indices, values, status)
    for row in np.flatnonzero(status).tolist():
        reasons[row] = _STATUS[status[row]]
