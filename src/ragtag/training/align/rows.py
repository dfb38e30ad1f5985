"""Rows of an alignment: what each peer has of each unit, in 32 bits; whole units for peers that differ; and
which rows of sparse averages are in these, where more are still to come.

A row is a chunk of 1,088 bytes and decodes alone: 32 bytes of header, 264 values of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.core.types import PEERS_MAX, Bytes, Floats, PeerId
from ragtag.core.wire import CHUNK_BYTES

HEADER_BYTES = 32
PER_ROW = (CHUNK_BYTES - HEADER_BYTES) // 4
"""Digests, values, or names of rows, in a row."""
DIGESTS, VALUES, CAME = 0xA1, 0xA2, 0xA3
_VERSION = 1
_HEADER = np.dtype(
    [
        ("kind", "u1"),
        ("version", "u1"),
        ("sender", "<u2"),
        ("round", "<u4"),
        ("unit", "<u4"),  # of digests: the first one's
        ("form", "<u4"),
        ("offset", "<u4"),
        ("total", "<u4"),
        ("votes", "<u2"),
        ("count", "<u2"),
        ("open", "<u4"),  # of values: whether rows of the last rounds may be missing in them
    ]
)
assert _HEADER.itemsize == HEADER_BYTES

Words = NDArray[np.uint32]
Digests = Words
Came = Mapping[int, Words]
"""By round of which more rows may come: the names of those that have (``codecs.sparse.gather.names``)."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What has come of a comparison: digests of the same units by peer, and which of these peers vote."""

    digests: dict[PeerId, Digests]
    voters: frozenset[PeerId]


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A unit as a peer gave it.

    form: what its values are (``units.Form.tag``).
    votes: how many peers had it so, as far as the giver knew.
    came: of sparse averages, which rows of the last rounds are in them; of rounds that are not named all are
        that will be.
    """

    unit: int
    sender: PeerId
    form: int
    votes: int
    values: Floats
    came: Came = field(default_factory=dict)


def rows_of(values: int) -> int:
    """How many rows so many digests, or values, take."""
    return math.ceil(values / PER_ROW)


def digest_rows(sender: PeerId, round_: int, first: int, digests: Digests, votes: bool = True) -> Bytes:
    """uint8 ``[k, 1088]``: a peer's digests of consecutive units, and whether they count."""
    rows, header = _rows(DIGESTS, sender, round_, digests.view(np.uint32))
    header["unit"], header["votes"] = first + header["offset"], votes
    return rows


def value_rows(given: Given, round_: int) -> Bytes:
    """uint8 ``[k, 1088]``: a unit's values."""
    rows, header = _rows(VALUES, given.sender, round_, given.values.view(np.uint32))
    header["unit"], header["form"], header["votes"] = given.unit, given.form, given.votes
    header["open"] = bool(given.came)
    return rows


def came_rows(sender: PeerId, round_: int, came: Came) -> Bytes:
    """uint8 ``[k, 1088]``: which rows of the last rounds are in what a peer gives after a round; by round its
    number, how many, and their names.
    """
    words = [np.array([number, len(names)], np.uint32) for number, names in came.items()]
    parts = [part for head, names in zip(words, came.values(), strict=True) for part in (head, names)]
    return _rows(CAME, sender, round_, np.concatenate([np.zeros(0, np.uint32), *parts]))[0]


def read_came(rows: Bytes, round_: int) -> dict[PeerId, Came]:
    """What each peer says of that; only peers whose rows all came, and make sense."""
    pieces: dict[tuple[int, int], dict[int, Words]] = {}
    for header, words in _of_kind(rows, CAME, round_):
        sender, total, offset, count = (int(header[name]) for name in ("sender", "total", "offset", "count"))
        if offset < total and offset % PER_ROW == 0 and count == min(PER_ROW, total - offset):
            pieces.setdefault((sender, total), {})[offset] = words[:count]
    found: dict[PeerId, Came] = {}
    for (sender, total), parts in sorted(pieces.items()):
        if len(parts) == rows_of(total):
            came = _by_round(np.concatenate([words for _, words in sorted(parts.items())]))
            if came:
                found.setdefault(sender, came)
    return found


def _by_round(words: Words) -> dict[int, Words]:
    came: dict[int, Words] = {}
    at = 0
    while at + 2 <= len(words):
        number, count = (int(word) for word in words[at : at + 2])
        came[number] = words[at + 2 : at + 2 + count]
        at += 2 + count
    return came if at == len(words) else {}


def read_digests(rows: Bytes, round_: int, first: int, n: int) -> View:
    """What each peer has of ``n`` units from ``first`` on after a round; only peers whose rows all came."""
    found: dict[PeerId, Digests] = {}
    known: dict[PeerId, NDArray[np.bool_]] = {}
    mute: set[PeerId] = set()
    for header, words in _of_kind(rows, DIGESTS, round_):
        start, count = int(header["unit"]) - first, int(header["count"])
        sender = int(header["sender"])
        if start < 0 or start + count > n:
            continue
        if sender not in found:
            found[sender], known[sender] = np.zeros(n, np.uint32), np.zeros(n, np.bool_)
        found[sender][start : start + count] = words[:count]
        known[sender][start : start + count] = True
        if not header["votes"]:
            mute.add(sender)
    whole = {sender: found[sender] for sender in sorted(found) if known[sender].all()}
    return View(whole, frozenset(whole.keys() - mute))


def read_values(rows: Bytes, round_: int, sizes: Sequence[int]) -> list[Given]:
    """The units that came whole, with finite values (and with what their giver had of the last rounds, where
    that was not all); of several givers' of one unit, the one that had most peers behind it, then the lowest.
    sizes: how many values each unit may have at most.
    """
    pieces: dict[tuple[int, int, int, int, int, int], dict[int, Words]] = {}
    for header, words in _of_kind(rows, VALUES, round_):
        unit, total, offset, count = (int(header[name]) for name in ("unit", "total", "offset", "count"))
        if unit >= len(sizes) or not 0 < total <= sizes[unit] or offset % PER_ROW:
            continue
        if count == min(PER_ROW, total - offset):
            votes, open_ = int(header["votes"]), int(header["open"])
            key = (unit, -votes, int(header["sender"]), int(header["form"]), total, open_)
            pieces.setdefault(key, {})[offset] = words[:count]
    best: dict[int, Given] = {}
    came = read_came(rows, round_)
    for key in sorted(pieces):
        unit, votes, sender, form, total, open_ = key
        if unit in best or len(pieces[key]) < rows_of(total) or (open_ and sender not in came):
            continue
        values: Floats = np.concatenate([words for _, words in sorted(pieces[key].items())]).view(np.float32)
        if np.isfinite(values).all():
            best[unit] = Given(unit, sender, form, -votes, values, came[sender] if open_ else {})
    return list(best.values())


def _rows(
    kind: int, sender: PeerId, round_: int, words: Words
) -> tuple[Bytes, np.ndarray[tuple[int], np.dtype[np.void]]]:
    k = rows_of(len(words))
    rows: Bytes = np.zeros((k, CHUNK_BYTES), np.uint8)
    header = rows[:, :HEADER_BYTES].view(_HEADER)[:, 0]
    header["kind"], header["version"], header["sender"], header["round"] = kind, _VERSION, sender, round_
    header["offset"] = np.arange(k) * PER_ROW
    header["total"] = len(words)
    header["count"] = np.minimum(PER_ROW, len(words) - np.arange(k) * PER_ROW)
    padded = np.zeros(k * PER_ROW, "<u4")
    padded[: len(words)] = words
    rows[:, HEADER_BYTES:] = padded.view(np.uint8).reshape(k, CHUNK_BYTES - HEADER_BYTES)
    return rows, header


def _of_kind(rows: Bytes, kind: int, round_: int) -> Iterator[tuple[np.void, Words]]:
    """Headers and words of the rows of a kind and round."""
    if not len(rows):
        return
    headers = rows[:, :HEADER_BYTES].copy().view(_HEADER)[:, 0]
    good = (headers["kind"] == kind) & (headers["version"] == _VERSION) & (headers["round"] == round_)
    good &= (headers["sender"] < PEERS_MAX) & (headers["count"] <= PER_ROW) & (headers["count"] > 0)
    words = rows[good, HEADER_BYTES:].copy().view("<u4")
    yield from zip(headers[good], words, strict=True)
