"""Which part of the vector each peer owns, as the crew agrees on it.

A *plan* names shares by peer, and the first round of a channel that goes by them. One peer posts it on the
notice board, and the others repeat it there (``training.planning`` says which, and when). It counts once two
tell it, or the only other. So one that lies changes nobody's shares, whatever it tells. For a round all peers
take, of the plans that count and name it or an earlier one as their first, the one that begins last; of two,
the one with the greater shares. So peers that have the same posts agree.

A peer that has another plan for a round is noticed by its first message (``rounds.stages``): a block is named
by where it begins, and has as many chunks as its message says. It counts as missed in that round, and nothing
of it is mixed with other values. No agreement is needed for an average to be right, only for it to be whole.

A peer that was told to go by shares and knows of no plan owns as much as all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from ragtag.core.types import PEERS_MAX, RATE_MAX, RATE_MIN, PeerId

SHARE_MAX = (1 << 16) - 1
PLANS_MAX = 4
"""So many plans fit a post, of a channel each. Of each peer plans of so many channels are kept, and so many
of each channel."""
TELLERS = 2
"""A plan counts once so many peers tell it."""
_U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
NEWS = 1.25
"""A rate is told anew once it is so many times what was told, or less than one such part: rate control probes
by a quarter beyond what it knows (``network.control.bbr``)."""
_Peer = Annotated[int, Meta(ge=0, lt=PEERS_MAX)]
_Rate = Annotated[float, Meta(ge=RATE_MIN, le=RATE_MAX)]
_Share = Annotated[int, Meta(ge=0, le=SHARE_MAX)]


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """Who owns which share of a channel.

    first_round: of the channel, that goes by these shares.
    shares: by peer, in whole numbers; empty: all own as much from then on.
    """

    channel: _U32
    first_round: _U32
    shares: Annotated[tuple[_Share, ...], Meta(max_length=PEERS_MAX)]

    def __post_init__(self) -> None:
        if self.shares and not any(self.shares):
            raise ValueError("shares that are all 0: nobody would own anything")


class Line(msgspec.Struct, array_like=True, frozen=True):
    """What a peer tells of its line.

    rates: bytes a second that its way to each other peer delivers, as it has measured.
    solves: whether it can solve a plan.
    auxiliary: it computes nothing.
    """

    rates: Annotated[dict[_Peer, _Rate], Meta(max_length=PEERS_MAX)]
    solves: bool = False
    auxiliary: bool = False

    def __post_init__(self) -> None:
        if not all(RATE_MIN <= rate <= RATE_MAX for rate in self.rates.values()):  # so is NaN
            raise ValueError(f"rates are {RATE_MIN:g} to {RATE_MAX:g} bytes a second")

    def differs(self, told: Line | None) -> bool:
        """Whether it is to be told anew: another peer, or a rate that is other by more than ``NEWS``."""
        if told is None or (told.rates.keys(), told.solves) != (self.rates.keys(), self.solves):
            return True
        return any(not 1 / NEWS < self.rates[peer] / rate < NEWS for peer, rate in told.rates.items())


_decoder = msgspec.msgpack.Decoder(list[Plan])
_lines = msgspec.msgpack.Decoder(Line)


def write_plans(plans: Iterable[Plan]) -> bytes:
    """Plans as they are posted. Raises ValueError: there are more than a post has room for."""
    plans = list(plans)
    if len(plans) > PLANS_MAX:
        raise ValueError(f"plans of {len(plans)} channels; {PLANS_MAX} fit a post")
    return msgspec.msgpack.encode(plans)


def read_plans(blob: bytes) -> list[Plan]:
    """The plans in a post. Raises ValueError: it has none, or they cannot be."""
    try:
        return _decoder.decode(blob)[:PLANS_MAX]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no plans of shares: {error}") from None


def write_line(line: Line) -> bytes:
    """A line as it is posted."""
    return msgspec.msgpack.encode(line)


def read_line(blob: bytes) -> Line:
    """The line in a post. Raises ValueError: it has none, or an absurd one."""
    try:
        return _lines.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no rates of a line: {error}") from None


def whole_shares(shares: Iterable[float]) -> tuple[int, ...]:
    """Shares in whole numbers, the largest of which is ``SHARE_MAX``. One above 0 stays above 0.

    Raises ValueError: one is below 0 or not finite, or all are 0.
    """
    parts = list(shares)
    most = max(parts, default=0.0)
    if not (0 < most < float("inf") and all(0 <= part <= most for part in parts)):
        raise ValueError(f"shares are finite, 0 or more and not all 0; these are {parts}")
    return tuple(max(round(part / most * SHARE_MAX), int(part > 0)) for part in parts)


class Plans:
    """The plans that a peer knows of: of each channel the newest of each peer.

    Each peer that tells plans has room of its own, so none can keep out what others tell.
    """

    def __init__(self) -> None:
        self._known: dict[PeerId, dict[int, list[Plan]]] = {}

    def take(self, peer: PeerId, blob: bytes) -> None:
        """A peer's newest post came. Raises ValueError: it holds no plans."""
        plans = read_plans(blob)
        told = self._known.setdefault(peer, {})
        for plan in plans:
            if plan.channel not in told and len(told) >= PLANS_MAX:
                continue
            known = told.setdefault(plan.channel, [])
            if plan not in known:
                known.append(plan)
                del known[:-PLANS_MAX]

    def shares(self, channel: int, round_: int, trainers: int = TELLERS) -> tuple[int, ...]:
        """The shares of a round, by peer; empty: all own as much.

        trainers: how many peers could tell a plan. What one tells that is alone nobody repeats.
        """
        told = Counter(
            plan
            for plans in self._known.values()
            for plan in plans.get(channel, ())
            if plan.first_round <= round_
        )
        counted = [plan for plan, times in told.items() if times >= min(TELLERS, trainers)]
        return max(counted, key=lambda plan: (plan.first_round, plan.shares)).shares if counted else ()

    def told(self, peer: PeerId, channel: int) -> Plan | None:
        """What a peer tells of a channel; ``None``: it tells no plan."""
        plans = self._known.get(peer, {}).get(channel)
        return plans[-1] if plans else None
