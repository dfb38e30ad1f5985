"""What congestion control is asked, and what it is told.

A controller knows no clock, no peer and no datagram. Its path (``path``) numbers what is sent, measures, and
asks it two things: how many datagrams may be under way, and how fast they may leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

WINDOW_FIRST = 64
"""Datagrams before the first answer, on all busy paths of a peer together: about 75 KB, five times TCP's
first window (RFC 6928) at our size."""
QUANTUM_S = 1e-3
"""What is paced leaves in trains of a millisecond, as Linux' TCP sizes its own: all busy paths' together."""


@dataclass(slots=True)
class Delivery:
    """What one answer tells of a path. What is counted are packets (``core.wire``).

    passed: datagrams of which it is known since now that they came, or were lost.
    delivered: those of them that came.
    in_flight: datagrams under way just before.
    granted: datagrams that the receiver lets be under way.
    rtt_s: the path's round trip of the newest of them; ``None``: not measured.
    srtt_s: round trips so far, smoothed (RFC 6298), with what busy ends kept; 0: none.
    min_rtt_s: the shortest so far; inf: none.
    rate: datagrams a second that the path delivers, measured over a round trip or longer (the draft
        draft-cheng-iccrg-delivery-rate-estimation); ``None``: over less.
    app_limited: the rate is of what was sent while there was nothing more to send: the path may carry more.
    rounds: round trips so far, by what was sent: one is over when a datagram is answered that left after the
        one before was over. None is shorter than five trains.
    tx_in_flight: datagrams under way when what is answered left, at most (draft-ietf-ccwg-bbr,
        RS.tx_in_flight).
    kept_s: how long what was answered, and the answer, lay at the two ends, beside the round trip.
    together: how many are lost at once: those that leave in one datagram.
    at_least: datagrams a second that the path delivers at least, where it was all that there was to send, and
        was there before a rate could be measured; 0: not known.
    tx_first: datagrams under way when the first of what was passed left.
    tx_span_s: how long before the last of it that was.
    """

    now_s: float
    passed: int
    delivered: int
    in_flight: int
    granted: int
    rtt_s: float | None
    srtt_s: float
    min_rtt_s: float
    rate: float | None
    app_limited: bool
    rounds: int = 0
    tx_in_flight: int = 0
    kept_s: float = 0.0
    together: int = 1
    at_least: float = 0.0
    tx_first: int = 0
    tx_span_s: float = 0.0


class Controller(Protocol):
    """How much may be under way to one peer, and how fast it may leave."""

    busy: int
    """How many paths of this peer have something to send: they take turns, a train each."""
    fair: float
    """Datagrams a second that this path may claim: its part of what all busy paths of this peer deliver. They
    mostly share its uplink, and of what they carry the last to arrive is waited for."""
    part: float
    """How much of what it would send a path may: less than 1 where the busy ones' sum is more than goes
    through."""

    crowded: bool
    """Whether the busy paths of this peer claim more together than goes through, as far as is known: a queue
    that stands is their own."""

    makeup_s: float
    """For how long a train may make up whose driver was late; inf: as long as it was. It leaves at once, and
    what finds no room in the queue is lost."""

    @property
    def bandwidth(self) -> float:
        """Datagrams a second that the path delivers, as far as is known; 0: not known."""

    @property
    def found(self) -> bool:
        """Whether the path was sent as much as it takes. Before, it may deliver more than ``bandwidth``."""

    @property
    def train_s(self) -> float:
        """How long what leaves at once takes at this path's rate."""

    window: float
    """Datagrams that may be under way at once; at least 1. A path sets what it begins with."""

    @property
    def rate(self) -> float:
        """Datagrams a second that may leave; inf: as fast as the link takes them."""

    def sent(self, now_s: float, count: int, in_flight: int) -> None:
        """``count`` datagrams have left; with them ``in_flight`` are under way."""

    def acknowledged(self, sample: Delivery) -> None:
        """An answer has come. Losses are in it: nothing else tells of them."""
