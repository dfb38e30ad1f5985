"""Invariants of gathering rows, held while a world runs.

A row in an outcome was offered in its round by a peer with a weight. A peer has it once, and all peers that
have it count it alike.
"""

from __future__ import annotations

import zlib

import numpy as np

from ragtag.core.types import Gathered, Offer, Outcome, PeerId

ROUNDS_KEPT = 64
"""For how many rounds offers are kept. Rows come late by fewer."""


class _Round:
    def __init__(self) -> None:
        self.offered: set[int] = set()
        self.had: set[tuple[PeerId, int]] = set()
        self.factor: dict[int, float] = {}


class RowChecker:
    """Checks gathered rows on the channels of one world. ``ends`` returns what is wrong, or nothing."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._channels: set[int] = set()

    def knows(self, channel: int) -> bool:
        """Whether rows are gathered on a channel."""
        return channel in self._channels

    def offers(self, peer: PeerId, number: int, ask: Offer) -> None:
        """A peer begins a round."""
        self._channels.add(ask.channel)
        round_ = self._rounds.setdefault((ask.channel, number), _Round())
        if ask.weight > 0:
            round_.offered |= {_crc(row) for row in ask.rows}
        for old in [k for k in self._rounds if k[0] == ask.channel and k[1] < number - ROUNDS_KEPT]:
            del self._rounds[old]

    def ends(self, peer: PeerId, outcome: Outcome) -> str:
        """A peer's round is over."""
        if outcome.gathered is None:
            return "an outcome without rows for what was offered"
        for number, part in [(outcome.round, outcome.gathered), *outcome.gathered.late]:
            round_ = self._rounds.get((outcome.channel, number))
            wrong = "" if round_ is None else self._part(round_, peer, part)
            if wrong:
                return wrong
        return ""

    def _part(self, round_: _Round, peer: PeerId, part: Gathered) -> str:
        for row, factor, block in zip(part.rows, part.factor.tolist(), part.block.tolist(), strict=True):
            crc = _crc(row)
            if crc not in round_.offered:
                return f"a row in block {block} that nobody has offered with a weight"
            if (peer, crc) in round_.had:
                return f"a row in block {block} that came before"
            if round_.factor.setdefault(crc, factor) != factor or not 0 < factor <= 1:
                return f"a row in block {block} that counts {factor} here, elsewhere {round_.factor[crc]}"
            round_.had.add((peer, crc))
        return ""


def _crc(row: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return zlib.crc32(np.ascontiguousarray(row).data)
