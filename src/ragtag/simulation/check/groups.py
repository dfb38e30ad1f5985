"""Invariants of averaging in groups, held while a world runs.

A peer's values go into the averages of one group in a round, with its weight, once. A mean is the weighted
mean of the values of the peers that it names, all of one group. Each round that a peer is asked for ends
once, and rounds only go forward. Groups number their members: ``Outcome.members`` says which peer a bit
means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32
from ragtag.core.types import Average, Floats, Outcome, PeerId, Run
from ragtag.protocols.groups.group import BLOCK_BITS
from ragtag.protocols.rounds.base import GATHER, SCATTER, peers_in
from ragtag.simulation.check.means import is_mean

ROUNDS_KEPT = 64
"""For how many rounds of a channel values are kept. Messages and outcomes come late by fewer."""


@dataclass(slots=True)
class _Round:
    """The peers that average in a round: the tag of each one's group, its values and its weight."""

    group: dict[PeerId, int] = field(default_factory=dict)
    values: dict[PeerId, Floats] = field(default_factory=dict)
    weight: dict[PeerId, float] = field(default_factory=dict)


class GroupChecker:
    """Checks averages in groups on the channels of one world. Its methods return what is wrong, or nothing.

    tolerance: relative, of weights, and of means relative to the mean of magnitudes.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._done: dict[tuple[PeerId, int], int] = {}
        self.means = 0

    def sends(self, peer: PeerId, run: Run, ask: Average | None) -> str:
        """A peer sends a run of a round. ask: the average that it was asked for; ``None``: none."""
        if run.key.stage not in (SCATTER, GATHER):
            return ""  # matchmaking, questions, requests for repair: no values
        number, tag = run.key.round, run.key.block >> BLOCK_BITS
        round_ = self._round(run.key.channel, number)
        if peer not in round_.group:
            if ask is None or number <= self._done.get((peer, run.key.channel), -1):
                return "values of a round that its sender is not in"
            round_.group[peer] = tag
            self._joins(round_, peer, ask)
        return "" if round_.group[peer] == tag else "values of one peer for two groups in one round"

    def ends(self, peer: PeerId, ask: Average, outcome: Outcome, codec: Codec = fp32) -> str:
        """A peer's round is over. codec: of the channel."""
        channel, number, members = outcome.channel, outcome.round, outcome.members
        if number <= self._done.get((peer, channel), -1):
            return "an outcome of a round that has ended, or of one before it"
        self._done[peer, channel] = number
        if peer not in members or len(set(members)) < len(members):
            return f"an outcome of a group {members} in which its peer does not stand once"
        if (outcome.heard >> np.uint64(len(members))).any():
            return f"contributors that are no members of the group of {len(members)}"
        round_ = self._round(channel, number)
        self._joins(round_, peer, ask)
        if not np.array_equal(round_.values[peer], ask.values):
            return "values that changed while they were averaged"
        return self._keeps(peer, ask, outcome) or self._averages(round_, peer, outcome, codec)

    def _joins(self, round_: _Round, peer: PeerId, ask: Average) -> None:
        if peer not in round_.values:
            round_.values[peer], round_.weight[peer] = ask.values.copy(), float(np.float32(ask.weight))

    def _keeps(self, peer: PeerId, ask: Average, outcome: Outcome) -> str:
        """Where no average came a peer has its own values, bit for bit."""
        kept = ~outcome.averaged
        own = outcome.heard[kept] == np.uint64(1 << outcome.members.index(peer))
        weight = outcome.weight[kept]
        own &= (weight == np.float32(ask.weight)) | (weight == 0)
        if own.all() and np.array_equal(outcome.mean[kept], ask.values[kept]):
            return ""
        return "chunks without an average that are not the peer's own"

    def _averages(self, round_: _Round, peer: PeerId, outcome: Outcome, codec: Codec) -> str:
        """Each average is the weighted mean of the values of the members that it names, all of this group."""
        for heard in np.unique(outcome.heard[outcome.averaged]).tolist():
            peers = [outcome.members[i] for i in peers_in(heard)]
            if any(round_.group.get(other) != round_.group.get(peer) for other in peers):
                return f"an average of {peers}, not all of whom gave their values to this group"
            chunks = outcome.averaged & (outcome.heard == np.uint64(heard))
            weights = np.array([round_.weight[p] for p in peers])
            total = weights.sum()
            if (np.abs(outcome.weight[chunks] - total) > self._tolerance * total).any():
                return f"an average of {peers} with another weight than theirs, {total}"
            shares = [round_.values[p][chunks] for p in peers]
            if not is_mean(outcome.mean[chunks], shares, weights, self._tolerance, codec):
                return f"a mean that is not that of {peers}, whom it names"
            self.means += 1
        return ""

    def _round(self, channel: int, number: int) -> _Round:
        round_ = self._rounds.get((channel, number))
        if round_ is None:
            round_ = self._rounds[channel, number] = _Round()
            numbers = sorted(n for other, n in self._rounds if other == channel)
            for old in numbers[:-ROUNDS_KEPT]:
                del self._rounds[channel, old]
        return round_
