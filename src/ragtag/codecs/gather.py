"""What a receiver makes of the fragments of one round: their sum, and who was heard with which."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ragtag.codecs.indices import HEADER_BYTES
from ragtag.codecs.sparse import FRAGMENTS_MAX, HEADER, Format, decode
from ragtag.core.types import Bools, Bytes, Floats, PeerId


class SparseSum:
    """Adds each fragment of a round once.

    form: what fragments must be of. members: whose fragments count. Once closed, the round is decided:
    what comes later is refused, because its sender gets it back and sends it again.
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
