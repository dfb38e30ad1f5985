"""Invariants of averaging, held while a world runs.

Every weight in an average was sent in that round by a member, once. No message reaches the wrong round.
Nothing changes a payload in flight. A mean is the weighted mean of the values of the peers that it names. All
this is checked from outside: from what machines were asked, sent and answered.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import fp32
from ragtag.core.types import (
    PEERS_MAX,
    Arm,
    Arrived,
    Average,
    Bools,
    Bytes,
    Done,
    Effect,
    Event,
    Floats,
    Offer,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Send,
)
from ragtag.protocols.crew.board import BOARD
from ragtag.protocols.crew.meet import MEET
from ragtag.protocols.rounds.asking import ANSWERS
from ragtag.protocols.rounds.base import GATHER, NACK, SCATTER, peers_in
from ragtag.simulation.check.groups import GroupChecker
from ragtag.simulation.check.means import is_mean, rounding
from ragtag.simulation.check.rows import RowChecker

TOLERANCE = 1e-5
"""Relative, of weights and means: float32 sums in any order."""
VALUES_MAX = 1 << 16
"""Means of longer vectors are not recomputed."""
VALUES_KEPT = 16
"""For how many rounds of a channel values are kept. Means of older rounds are counted, and not recomputed."""
ROUNDS_KEPT = 1024
"""For how many rounds of a channel weights are kept."""


class InvariantBroken(AssertionError):
    """A machine, or the world itself, broke a rule. ``seed`` and ``replay`` say how to see it again."""

    def __init__(self, what: str, seed: int, replay: str) -> None:
        super().__init__(f"{what}\n  seed {seed}; replay: {replay}")
        self.what, self.seed, self.replay = what, seed, replay


@dataclass(slots=True)
class _Round:
    """A round of a channel.

    weight: float64 ``[n]``, of each peer.
    begun: the peers that began it, a bit each.
    checksums: of the values or rows of each peer.
    values: of each peer; ``None``: forgotten.
    """

    weight: NDArray[np.float64]
    begun: int = 0
    checksums: dict[PeerId, int] = field(default_factory=dict)
    values: dict[PeerId, Floats] | None = field(default_factory=dict)


class Checker:
    """Watches one world of ``n`` peers.

    grouped: the channels that are averaged in groups, by rules of their own (``check.groups``).
    outcomes: how many outcomes came.
    means: how many of these had their mean recomputed.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        replay: str,
        grouped: frozenset[int] = frozenset(),
    ) -> None:
        if n > PEERS_MAX and not grouped:  # groups number their members
            raise ValueError(f"a chunk names {PEERS_MAX} contributors; {n} peers cannot be checked")
        self._n, self._seed, self._replay = n, seed, replay
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._pending: dict[tuple[PeerId, int], Average | Offer] = {}
        self._rows = RowChecker()
        self._grouped, self._groups = set(grouped), GroupChecker(TOLERANCE)
        self._left_out = {BOARD, MEET}
        self._guarded: set[int] = set()
        self._quorum: dict[int, int] = {}
        self._codecs: dict[int, Codec] = {}
        self._passed_on: set[int] = set()
        self._auxiliary: frozenset[PeerId] = frozenset()
        self._active: dict[tuple[PeerId, int], int] = {}
        self._flying: dict[int, int] = {}
        self.outcomes = self.means = 0

    def broken(self, what: str) -> InvariantBroken:
        """The error for a broken rule, with this world's seed and how to replay it."""
        return InvariantBroken(what, self._seed, self._replay)

    def averages_in_groups(self, channel: int) -> None:
        """From now on a channel is held to the rules of groups."""
        self._grouped.add(channel)

    def guards(self, channel: int) -> None:
        """From now on a channel's averages are held to what any guard promises: no value lies outside of
        those that the contributors sent, and none weighs more than they claim.
        """
        self._guarded.add(channel)

    def demands(self, channel: int, quorum: int) -> None:
        """From now on a channel's averages are of so many peers at least. What fewer gave is told with their
        names and no weight, and is no average.
        """
        self._quorum[channel] = quorum

    def only_own(self, peers: frozenset[PeerId]) -> None:
        """From now on these peers are asked for no average, send averages only, and are in none."""
        self._auxiliary = peers

    def rounds(self, channel: int, codec: Codec, passed_on: bool = False) -> None:
        """From now on a channel's values are rounded on their way, by a codec that is not exact.

        passed_on: sums are rounded at each peer of a ring: means are not recomputed, all else is held.
        """
        self._codecs[channel] = codec
        if passed_on:
            self._passed_on.add(channel)

    def leave_out(self, channel: int) -> None:
        """Do not check a channel: of a central state, of fragments, or of chunks that are mixed."""
        self._left_out.add(channel)

    # -- What the world calls

    def posts(self, order: int, event: Event) -> None:
        """An event has been planned: note its payloads."""
        if isinstance(event, Arrived):
            self._flying[order] = _checksum(event)

    def delivers(self, now_s: float, order: int, peer: PeerId, event: Event) -> None:
        """An event is about to be given to its machine: its payloads must be as they were sent."""
        if isinstance(event, Arrived):
            if self._flying.pop(order) != _checksum(event):
                run = event.runs[0]
                raise self.broken(
                    f"a payload from peer {run.peer} to peer {peer} changed in flight ({run.key}): "
                    f"a machine wrote to what it had sent, or a caller to values or a mean under way"
                )
        elif isinstance(event, Average | Offer):
            if (peer, event.channel) in self._pending:
                raise self.broken(f"peer {peer} was asked for two averages at once, channel {event.channel}")
            self._pending[peer, event.channel] = event

    def drops(self, order: int) -> None:
        """An event was dropped: its peer has crashed."""
        self._flying.pop(order, None)

    def stepped(self, now_s: float, peer: PeerId, event: Event, effects: list[Effect]) -> None:
        """A machine has answered: all that it sends and says must follow from what it was asked."""
        if isinstance(event, Average | Offer) and event.channel not in self._left_out:
            self._begins(peer, event, effects)
        elif isinstance(event, Arrived):
            self._moves_on(peer, event, effects)
        for effect in effects:
            if isinstance(effect, Send) and effect.run.key.channel not in self._left_out:
                self._sends(now_s, peer, effect.run)
            elif isinstance(effect, Done):
                if effect.outcome.channel in self._left_out:
                    self._pending.pop((peer, effect.outcome.channel), None)
                else:
                    self._ends(now_s, peer, effect.outcome)

    # -- The rules

    def _moves_on(self, peer: PeerId, event: Arrived, effects: list[Effect]) -> None:
        """A peer may give what it was asked for in a later round than the one that most have left."""
        for channel in {run.key.channel for run in event.runs} - self._left_out - self._grouped:
            ask, number = self._pending.get((peer, channel)), self._active.get((peer, channel))
            if ask is None or number is None:
                continue
            for effect in effects:
                if (
                    isinstance(effect, Arm)
                    and effect.timer.channel == channel
                    and effect.timer.round > number
                ):
                    self._begins(peer, ask, [effect])
                    break

    def _begins(self, peer: PeerId, ask: Average | Offer, effects: list[Effect]) -> None:
        number = _round_of(ask.channel, effects)
        if number is None:
            raise self.broken(f"peer {peer} was asked for an average and neither sends, waits nor ends")
        if ask.channel in self._grouped:
            return  # a machine in groups knows its round only when it meets a group
        key = (ask.channel, number)
        round_ = self._rounds.get(key)
        if round_ is None:
            round_ = self._rounds[key] = _Round(np.zeros(self._n))
            self._forget(ask.channel)
        if round_.begun >> peer & 1:
            raise self.broken(f"peer {peer} began round {number} of channel {ask.channel} twice")
        round_.weight[peer] = np.float32(ask.weight)
        round_.begun |= 1 << peer
        self._active[peer, ask.channel] = number
        if isinstance(ask, Offer):
            round_.checksums[peer] = _crc(ask.rows)
            self._rows.offers(peer, number, ask)
            return
        round_.checksums[peer] = _crc(ask.values)
        if round_.values is not None and ask.values.size <= VALUES_MAX:
            round_.values[peer] = ask.values.copy()

    def _sends(self, now_s: float, peer: PeerId, run: Run) -> None:
        where = f"peer {peer} to peer {run.peer} at {now_s} s, {run.key}"
        if run.peer == peer or not 0 <= run.peer < self._n:
            raise self.broken(f"a run to no other member: {where}")
        k = len(run.payload)
        if run.first < 0 or run.first + k > run.total or len(run.weight) != k or len(run.heard) != k:
            raise self.broken(f"a run that does not fit its message: {where}")
        if run.mask is not None and len(run.mask) != k:
            raise self.broken(f"a mask that does not fit its run: {where}")
        if run.key.channel in self._grouped:
            ask = self._pending.get((peer, run.key.channel))
            wrong = self._groups.sends(peer, run, ask if isinstance(ask, Average) else None)
            if wrong:
                raise self.broken(f"{wrong}: {where}")
            return
        if run.key.stage in ANSWERS:  # a peer that has not begun answers, too
            return
        round_ = self._rounds.get((run.key.channel, run.key.round))
        owns = peer in self._auxiliary
        if round_ is None or not (owns or round_.begun >> peer & 1):
            raise self.broken(f"a message of a round that its sender has not begun: {where}")
        if owns and run.key.stage == SCATTER:
            raise self.broken(f"a share of a peer that has none to give: {where}")
        if run.key.stage == GATHER and run.peer in self._auxiliary:
            raise self.broken(f"an average for a peer that has no use for it: {where}")
        if not run.key.stage & NACK and not self._rows.knows(run.key.channel):
            here = slice(None) if run.mask is None else run.mask
            heard, weight = run.heard[here], run.weight[here]
            if run.key.stage == GATHER and run.key.channel in self._quorum:
                is_average = weight > 0
                heard, weight = heard[is_average], weight[is_average]
                self._has_quorum(run.key.channel, heard, where)
            guarded = run.key.channel in self._guarded
            self._adds_up(round_, heard, weight, where, guarded)

    def _ends(self, now_s: float, peer: PeerId, outcome: Outcome) -> None:
        where = f"peer {peer} at {now_s} s, channel {outcome.channel}, round {outcome.round}"
        ask = self._pending.pop((peer, outcome.channel), None)
        grouped = outcome.channel in self._grouped
        if ask is None or not (grouped or self._active.get((peer, outcome.channel)) == outcome.round):
            raise self.broken(f"an outcome that was not asked for, or came twice: {where}")
        self.outcomes += 1
        if grouped and isinstance(ask, Average):
            wrong = self._groups.ends(peer, ask, outcome, self._codec(outcome.channel))
            if wrong:
                raise self.broken(f"{wrong}: {where}")
            return
        round_ = self._rounds.get((outcome.channel, outcome.round))
        if isinstance(ask, Offer):
            wrong = self._rows.ends(peer, outcome)
            if round_ is not None and _crc(ask.rows) != round_.checksums[peer]:
                wrong = "rows changed while they were gathered"
            if wrong:
                raise self.broken(f"{wrong}: {where}")
            return
        if outcome.mean.shape != ask.values.shape:
            raise self.broken(f"an outcome of shape {outcome.mean.shape} for {ask.values.shape}: {where}")
        if round_ is None:
            return
        if _crc(ask.values) != round_.checksums[peer]:
            raise self.broken(f"values changed while they were averaged: {where}")
        averaged = outcome.averaged
        guarded = outcome.channel in self._guarded
        self._has_quorum(outcome.channel, outcome.heard[averaged], where)
        self._adds_up(round_, outcome.heard[averaged], outcome.weight[averaged], where, guarded)
        self._keeps(peer, outcome, ask, where)
        if round_.values and outcome.channel not in self._passed_on:
            if guarded:
                self._within(round_.values, outcome, where)
            else:
                self._means(round_.values, round_.weight, outcome, where)

    def _codec(self, channel: int) -> Codec:
        return self._codecs.get(channel, fp32)

    def _has_quorum(self, channel: int, heard: PeerSet, where: str) -> None:
        """Each average is of as many peers as the channel demands."""
        quorum = self._quorum.get(channel, 0)
        few = np.bitwise_count(heard) < quorum
        if few.any():
            gave = peers_in(int(heard[few][0]))
            raise self.broken(f"an average of {gave}, where {quorum} peers are demanded: {where}")

    def _adds_up(
        self, round_: _Round, heard: PeerSet, weight: Floats, where: str, guarded: bool = False
    ) -> None:
        """Each chunk's weight is the sum of the weights of the peers that it names, which have all begun; or,
        where a guard does not believe all of them, no more.
        """
        strange = heard & np.uint64(~round_.begun & (1 << 64) - 1)
        if strange.any():
            raise self.broken(
                f"contributors {peers_in(int(strange[strange > 0][0]))} have not begun this round: {where}"
            )
        bits = (heard[:, None] >> np.arange(self._n, dtype=np.uint64)) & np.uint64(1)
        expected = bits.astype(np.float64) @ round_.weight
        off = weight - expected
        wrong = (off if guarded else np.abs(off)) > TOLERANCE * np.abs(expected)
        if wrong.any():
            chunk = int(np.flatnonzero(wrong)[0])
            raise self.broken(
                f"chunk {chunk} carries weight {weight[chunk]}, its contributors "
                f"{peers_in(int(heard[chunk]))} brought {expected[chunk]}: {where}"
            )

    def _keeps(self, peer: PeerId, outcome: Outcome, ask: Average, where: str) -> None:
        """Where no average came a peer has its own values, bit for bit."""
        kept = ~outcome.averaged
        if not kept.any():
            return
        own = outcome.heard[kept] == np.uint64(1 << peer)
        weight = outcome.weight[kept]
        own &= (weight == np.float32(ask.weight)) | (weight == 0)
        if not own.all() or not np.array_equal(outcome.mean[kept], ask.values[kept]):
            raise self.broken(f"chunks without an average are not the peer's own: {where}")

    def _means(
        self, values: dict[PeerId, Floats], weight: NDArray[np.float64], outcome: Outcome, where: str
    ) -> None:
        """Each average is the weighted mean of the values of the peers that it names."""
        self.means += 1
        for heard in np.unique(outcome.heard[outcome.averaged]).tolist():
            chunks = outcome.averaged & (outcome.heard == np.uint64(heard))
            peers = peers_in(heard)
            shares, codec = [values[peer][chunks] for peer in peers], self._codec(outcome.channel)
            if not is_mean(outcome.mean[chunks], shares, weight[peers], TOLERANCE, codec):
                raise self.broken(f"a mean that is not that of {peers}, whom it names: {where}")

    def _within(self, values: dict[PeerId, Floats], outcome: Outcome, where: str) -> None:
        """Each average lies between the least and the greatest value of the peers that it names."""
        self.means += 1
        for heard in np.unique(outcome.heard[outcome.averaged]).tolist():
            chunks = outcome.averaged & (outcome.heard == np.uint64(heard))
            parts = np.stack([values[peer][chunks].astype(np.float64) for peer in peers_in(heard)])
            slack = TOLERANCE * np.abs(parts).max(axis=0)
            codec = self._codec(outcome.channel)
            slack += sum(rounding(codec, part) for part in (*parts, parts.mean(axis=0)))
            mean = outcome.mean[chunks]
            if (mean < parts.min(axis=0) - slack).any() or (mean > parts.max(axis=0) + slack).any():
                raise self.broken(f"an average beyond what {peers_in(heard)} sent, whom it names: {where}")

    def _forget(self, channel: int) -> None:
        """Bound what is kept of a channel's rounds: the oldest go first."""
        numbers = sorted(number for other, number in self._rounds if other == channel)
        for number in numbers[:-ROUNDS_KEPT]:
            del self._rounds[channel, number]
        for number in numbers[-ROUNDS_KEPT:-VALUES_KEPT]:
            self._rounds[channel, number].values = None


def _round_of(channel: int, effects: list[Effect]) -> int | None:
    """The round that a machine began, by its effects."""
    for effect in effects:
        if isinstance(effect, Send) and effect.run.key.channel == channel:
            return effect.run.key.round
        if isinstance(effect, Arm) and effect.timer.channel == channel:
            return effect.timer.round
        if isinstance(effect, Done) and effect.outcome.channel == channel:
            return effect.outcome.round
    return None


def _crc(array: Floats | Bytes | PeerSet | Bools, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data, start)


def _checksum(event: Arrived) -> int:
    crc = 0
    for run in event.runs:
        for array in (run.payload, run.weight, run.heard):
            crc = _crc(array, crc)
        if run.mask is not None:
            crc = _crc(run.mask, crc)
    return crc
