"""What a receiver makes of the fragments of one round: their sum, and which peers sent which."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.base import finite_rows
from ragtag.codecs.sparse.indices import HEADER_BYTES, Indices
from ragtag.codecs.sparse.pack import Values
from ragtag.codecs.sparse.wire import FRAGMENTS_MAX, HEADER, Decoded, Format, decode
from ragtag.core.types import Bools, Bytes, Floats, PeerId
from ragtag.core.wire import CHUNK_BYTES

_WHOLE = 0xB0
"""The kind of a row that is no fragment: its sender is for sending the round whole."""


def whole_mark(sender: PeerId, round_: int) -> Bytes:
    """uint8 ``[1, 1088]``: in place of fragments, that this peer is for a round without a selection."""
    row = np.zeros((1, CHUNK_BYTES), np.uint8)
    header = row[:, :HEADER_BYTES].view(HEADER)[:, 0]
    header["kind"], header["sender"], header["round"] = _WHOLE, sender, round_ & 0xFFFF
    return row


def whole_marks(rows: Bytes) -> Bools:
    """bool ``[m]``: which rows are such marks."""
    marks: Bools = rows[:, 0] == _WHOLE
    return marks


def senders(rows: Bytes) -> set[PeerId]:
    """Whose rows these are, by what they say."""
    return set(rows[:, :HEADER_BYTES].copy().view(HEADER)[:, 0]["sender"].tolist())


class SparseSum:
    """Adds each fragment of a round once.

    form: what fragments must be of.
    members: whose fragments count.

    Once closed, the round is decided: what comes later is refused, because its sender gets it back and sends
    it again.
    """

    def __init__(self, form: Format, round_: int, members: Collection[PeerId]) -> None:
        self.form, self.round = form, round_
        self.total: Floats = np.zeros(form.d, np.float32)
        self._heard: dict[PeerId, Bools] = {peer: np.zeros(0, np.bool_) for peer in members}
        self._closed = False

    def add(self, sender: PeerId, chunks: Bytes) -> list[str]:
        """Add what is good of ``chunks`` (uint8 ``[n, w]``); why the rest was refused."""
        refusal = self._refusal(sender)
        if refusal:
            return [refusal] * len(chunks)
        got = decode(chunks, self.form, round_=self.round, sender=sender)
        reasons = [reason for _, reason in got.refused]
        bad = {row for row, _ in got.refused}
        fresh = []
        for row in range(len(chunks)):
            if row not in bad:
                fragment = int(chunks[row, :HEADER_BYTES].copy().view(HEADER)["fragment"][0])
                if self._mark(sender, fragment):
                    fresh.append(slice(int(got.starts[row]), int(got.starts[row + 1])))
                else:
                    reasons.append(f"fragment {fragment} came before")
        if len(fresh) + len(bad) == len(chunks):
            np.add.at(self.total, got.indices, got.values)
        else:
            for span in fresh:
                self.total[got.indices[span]] += got.values[span]
        return reasons

    def close(self) -> None:
        """Decide the round: nothing is added from now on."""
        self._closed = True

    def heard(self, sender: PeerId, fragments: int) -> Bools:
        """bool ``[fragments]``: which of a sender's fragments are in the sum."""
        came = self._heard[sender][:fragments]
        return np.concatenate([came, np.zeros(fragments - len(came), np.bool_)])

    def mean(self) -> Floats:
        """The sum over all members, heard or not: what was lost comes in a later round instead."""
        return self.total / np.float32(max(1, len(self._heard)))

    def _refusal(self, sender: PeerId) -> str:
        if sender not in self._heard:
            return f"peer {sender} is no member of round {self.round}"
        return f"it is late: round {self.round} is decided" if self._closed else ""

    def _mark(self, sender: PeerId, fragment: int) -> bool:
        came = self._heard[sender]
        if fragment >= len(came):
            size = min(FRAGMENTS_MAX, max(2 * len(came), fragment + 1))
            came = self._heard[sender] = np.concatenate([came, np.zeros(size - len(came), np.bool_)])
        if came[fragment]:
            return False
        came[fragment] = True
        return True


def names(rows: Bytes) -> NDArray[np.uint32]:
    """uint32 ``[m]``: sender and number of each fragment, which no other one of its round has."""
    header = rows[:, :HEADER_BYTES].copy().view(HEADER)[:, 0]
    name: NDArray[np.uint32] = header["sender"].astype(np.uint32) << 16 | header["fragment"]
    return name


class Added(NamedTuple):
    """What became of rows.

    sender, fragment: int64 ``[m]``, of the rows that were good.
    refused: why the others were not.
    unsound: whose rows held values too large to be averaged (see ``finite_rows``).
    """

    sender: Indices
    fragment: Indices
    refused: tuple[str, ...]
    unsound: frozenset[PeerId] = frozenset()


def add_rows(total: Floats, rows: Bytes, factor: Floats, values: Values) -> Added:
    """``total += factor * row`` for fragments of several peers: uint8 ``[m, 1088]``, factor float32 ``[m]``.

    They are added by sender and fragment, so that peers that have the same rows come to the same sum, bit for
    bit, in whatever order these came. Each may say another density: peers that missed rounds are elsewhere in
    the warm-up. values: how all send them.
    """
    header = rows[:, :HEADER_BYTES].copy().view(HEADER)[:, 0]
    sender, fragment = header["sender"].astype(np.int64), header["fragment"].astype(np.int64)
    name = names(rows)
    order = np.argsort(name, kind="stable")
    twice = np.zeros(len(rows), np.bool_)
    twice[1:] = name[order][1:] == name[order][:-1]
    refused = [f"fragment {fragment[row]} of peer {sender[row]} came before" for row in order[twice].tolist()]
    order, good, unsound = order[~twice], [], set[PeerId]()
    for density in np.unique(header["density"][order]).tolist():
        these = order[header["density"][order] == density]
        got = decode(rows[these], _form(len(total), density, values))
        huge = _huge(got)
        refused += ["its values are too large"] * len(huge)
        unsound.update(sender[these[huge]].tolist())
        weights = np.repeat(factor[these], np.diff(got.starts))
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the sum
            np.add.at(total, got.indices, got.values * weights)
        bad = [row for row, _ in got.refused] + huge
        refused += [reason for _, reason in got.refused]
        good.append(np.delete(these, bad))
    kept = np.concatenate([order[:0], *good])
    return Added(sender[kept], fragment[kept], tuple(refused), frozenset(unsound))


def _huge(got: Decoded) -> list[int]:
    """The rows whose values come to more than may be averaged: they become zeros."""
    if finite_rows(got.values[None]) is None:
        return []
    spans = [slice(a, b) for a, b in pairwise(got.starts.tolist())]
    huge = [row for row, span in enumerate(spans) if finite_rows(got.values[None, span]) is not None]
    for row in huge:
        got.values[spans[row]] = 0.0
    return huge


def _form(d: int, density: int, values: Values) -> Format:
    """A format of this density (the rows say which; where there is none such, all of them are refused)."""
    about = min(max(1, d), max(1, round(d / 2 ** (density / 8))))
    forms = [Format(d, k, values) for k in (about, about + 1, about - 1) if 0 < k <= max(1, d)]
    return next((form for form in forms if form.density == density), forms[0])
