"""Whether to send fewer bytes: not where selecting and coding cost more than the link saves.

Compression won in 6 of over 200 data-centre set-ups (Agarwal, Wang, Venkataraman, Papailiopoulos, "On the
utility of gradient compression in distributed training systems", MLSys 2022): so a codec is by-passed when
its time would be no shorter than dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragtag.codecs.sparse.density import break_even_bytes_per_s


@dataclass(frozen=True, slots=True)
class Choice:
    """What to send, and why: seconds of a round either way, and the rate at which they are equal.

    sparse: whether to send the coded message; where it is no faster, dense is sent.
    """

    sparse: bool
    dense_s: float
    sparse_s: float
    break_even_bytes_per_s: float

    @property
    def gain(self) -> float:
        """How many times as fast as dense the coded message is (below 1: dense is faster)."""
        return self.dense_s / self.sparse_s if self.sparse_s else math.inf


def choose(
    dense_bytes: int,
    sparse_bytes: int,
    select_s: float,
    encode_s: float,
    rate_bytes_per_s: float,
    decode_s: float = 0.0,
) -> Choice:
    """Dense, or selected and coded, for one round over a link of this rate.

    dense_bytes, sparse_bytes: what one peer sends in the round.
    select_s, encode_s, decode_s: what selecting and coding take longer than dense does.
    rate_bytes_per_s: as measured; infinite where the link is free.

    Raises ValueError: a size below 0, a time that is below 0 or not finite, a rate that is not above 0.
    """
    if dense_bytes < 0 or sparse_bytes < 0:
        raise ValueError(f"messages of {dense_bytes} and {sparse_bytes} bytes: sizes are 0 or more")
    for name, time_s in (("selecting", select_s), ("encoding", encode_s), ("decoding", decode_s)):
        if not (0 <= time_s < math.inf):
            raise ValueError(f"{name} takes {time_s} s: give what was measured, 0 or more")
    if not rate_bytes_per_s > 0:
        raise ValueError(f"a rate of {rate_bytes_per_s} bytes per second: give what was measured, above 0")
    dense_s = dense_bytes / rate_bytes_per_s
    sparse_s = select_s + encode_s + decode_s + sparse_bytes / rate_bytes_per_s
    even = break_even_bytes_per_s(dense_bytes, sparse_bytes, select_s, encode_s, decode_s)
    return Choice(sparse_s < dense_s, dense_s, sparse_s, even)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a way of sending costs one peer: its message, and the time that it takes beyond dense's.

    dense: every value is sent, so that a reduction sends less than one message to each of the others.
    decode_s: of one message.
    """

    name: str
    message_bytes: int
    select_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    dense: bool = False

    def sent_bytes(self, peers: int) -> int:
        """What a peer sends in a round of so many peers.

        Dense: its copies to the blocks' owners and its own block's average to all, 2 (n - 1) / n messages.
        Sparse: its message to each of the others (sums of selections do not stay small).
        """
        others = max(0, peers - 1)
        return (
            -(-2 * others * self.message_bytes // max(1, peers))
            if self.dense
            else others * self.message_bytes
        )

    def read_s(self, peers: int) -> float:
        """The time for decoding what comes in a round."""
        others = max(0, peers - 1)
        return 2 * others / peers * self.decode_s if self.dense else others * self.decode_s


def choose_for(dense: Cost, cost: Cost, peers: int, rate_bytes_per_s: float) -> Choice:
    """``choose`` for a crew of 2 peers or more. Raises ValueError: see ``choose``; fewer peers."""
    if peers < 2:
        raise ValueError(f"{peers} peers: a crew that sends something has 2 or more")
    return choose(
        dense.sent_bytes(peers),
        cost.sent_bytes(peers),
        cost.select_s,
        cost.encode_s,
        rate_bytes_per_s,
        cost.read_s(peers),
    )


def fastest(dense: Cost, costs: Iterable[Cost], peers: int, rate_bytes_per_s: float) -> Cost:
    """The way that takes the least time in a round; ``dense`` where none is faster."""
    best, least_s = dense, dense.sent_bytes(peers) / rate_bytes_per_s
    for cost in costs:
        choice = choose_for(dense, cost, peers, rate_bytes_per_s)
        if choice.sparse and choice.sparse_s < least_s:
            best, least_s = cost, choice.sparse_s
    return best
