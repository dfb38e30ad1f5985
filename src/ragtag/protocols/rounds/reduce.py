"""Reduce-scatter, then all-gather, through block owners: what RPS and direct all-reduce share.

Stage SCATTER: every peer sends its copy of each block to the block's owner, which averages what came.
Stage GATHER: the owner sends the average to every peer. Where none comes, a peer keeps its own values.
With ``Spec.repair_s`` holes are asked for again while time remains. Without it, what is lost is lost.

A chunk that is not sound (``base.sound``: not finite, huge, or of an absurd weight) counts for nothing. An
owner averages without it, even if it is its own, and a peer that gets it as an average keeps its own values.
Where sound values overflow when they are added up, their owner tells no average.

With ``Spec.guard`` an owner adds nothing up as it comes. It keeps the shares of its blocks apart, and reduces
them by the guard's rule when the first stage is over (``robust``).

With ``Spec.quorum`` an owner tells no average of what too few peers gave. With ``Spec.spread`` all this is of
transformed chunks, and the outcome of what they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from ragtag.codecs.base import finite_rows
from ragtag.core.types import Bools, Bytes, Effect, Floats, Noted, PeerId, Run
from ragtag.protocols.rounds.base import (
    GATHER,
    NO_VALUES,
    SCATTER,
    UNSOUND,
    Incoming,
    Spec,
    bit,
    peers_in,
    scratch_of,
    sound,
    spans_of,
    whole_message,
    within,
)
from ragtag.protocols.rounds.progress import GATHERING, SCATTERING
from ragtag.protocols.rounds.repair import Repairer
from ragtag.protocols.rounds.robust import Shares
from ragtag.protocols.rounds.stages import Result, Stages


def scatter_gather(spec: Spec) -> Stages:
    """One round of averaging on one peer, as RPS, direct all-reduce and the members of a group do it."""
    return Stages(spec, Values(spec), Repairer(spec) if spec.repair_s is not None else None)


class Values:
    """What a round of averages exchanges: copies to owners, averages back.

    Copies that come before the round begins here are added up at once, so they need not be kept.
    """

    def __init__(self, spec: Spec) -> None:
        layout = spec.layout
        self.spec = spec
        self.mine = mine = [j for j, owner in enumerate(spec.owners) if owner == spec.me and layout.sizes[j]]
        self._mean = scratch_of(spec)
        self._own = NO_VALUES
        self._weight = np.zeros(layout.n_chunks, np.float32)
        self._heard = np.zeros(layout.n_chunks, np.uint64)
        self._shares: Shares | None = None
        if spec.guard is None:
            for block in mine:
                self._mean[layout.spans[block]] = 0.0
        else:
            sizes = {block: layout.sizes[block] for block in mine}
            self._shares = Shares(spec.guard, spec.live, sizes, spec.codec.elements)
        self._averaged = np.zeros(layout.n_chunks, np.bool_)
        self._copies: dict[int, dict[PeerId, Incoming]] = {
            j: {} for j, owner in enumerate(spec.owners) if owner == spec.me
        }
        self._unsound: set[PeerId] = set()
        self._gathered = {
            j: Incoming(layout.sizes[j])
            for j, o in enumerate(spec.owners)
            if o != spec.me and layout.sizes[j]
        }

    def owners(self) -> AbstractSet[PeerId]:
        """See ``stages.Content``."""
        sizes = self.spec.layout.sizes
        return {owner for j, owner in enumerate(self.spec.owners) if owner != self.spec.me and sizes[j]}

    # -- Begin: scatter own copies to the owners

    def scatter(self, stages: Stages) -> Iterator[Effect]:
        """See ``stages.Content``."""
        spec, begin = self.spec, stages.begun
        self._own = values = begin.values if spec.spread is None else spec.spread.forward(begin.values)
        spans, sizes = spec.layout.spans, spec.layout.sizes
        me = bit(spec.me) if begin.weight > 0 else 0
        rows = {k: (np.full(k, begin.weight, np.float32), np.full(k, me, np.uint64)) for k in set(sizes)}
        for block, owner in stages.turn():
            if owner == spec.me and sizes[block]:
                yield from self._add_own(block, begin.weight)
            elif sizes[block]:
                payload = spec.codec.encode(values[spans[block]])
                run = whole_message(owner, spec.key(SCATTER, block), payload, *rows[sizes[block]])
                yield stages.send(run, stages.shares_until_s)

    def _add_own(self, block: int, own_weight: float) -> list[Effect]:
        span = self.spec.layout.spans[block]
        values, weight = self._own[span], np.float32(own_weight)
        finite = finite_rows(values)
        for a, b in ((0, len(values)),) if finite is None else spans_of(finite):
            at = slice(span.start + a, span.start + b)
            if self._shares is not None:
                own = self._shares.of(self.spec.me, block)
                own.values[a:b], own.weight[a:b] = values[a:b], weight
                continue
            if self._weight[at].any() or weight != 1.0:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._mean[at] += values[a:b] * weight
            else:
                self._mean[at] = values[a:b]
            self._weight[at] += weight
            if weight > 0:
                self._heard[at] |= bit(self.spec.me)
        return [] if finite is None else self._refused(self.spec.me)

    # -- Arrivals

    def take(
        self, stages: Stages, now_s: float, run: Run, block: int
    ) -> tuple[Incoming | None, list[Effect]]:
        """See ``stages.Content``."""
        stage, layout, waiting = run.key.stage, self.spec.layout, stages.waiting
        if run.total != layout.sizes[block] or run.first + len(run.payload) > run.total:
            return None, []
        at = layout.starts[block] + run.first
        if stage == SCATTER:
            copies = self._copies.get(block)
            if copies is None or waiting.stage > SCATTERING:
                return None, []
            incoming = copies.get(run.peer)
            if incoming is None:
                incoming = copies[run.peer] = Incoming(run.total)
            if self._shares is not None:
                return incoming, self._keep(self._shares, run, incoming, block)
            return incoming, self._accumulate(run, incoming, at)
        if stage != GATHER:
            return None, []
        stages.tellers.add(run.peer)
        owner = self.spec.owners[block]
        if owner == self.spec.me:
            return None, stages.owns_it_too(now_s, run, block)
        incoming = self._gathered.get(block)
        if incoming is None or waiting.stage > GATHERING:
            return None, []
        noted = self._store(run, incoming, at)
        if incoming.left == 0 and run.peer != owner:  # the average is here, though another sent it
            waiting.closed(now_s, (owner, GATHER, block))
        return incoming, noted

    def _accumulate(self, run: Run, incoming: Incoming, at: int) -> list[Effect]:
        payload, weight, heard = run.payload, run.weight, run.heard
        accumulate = self.spec.codec.accumulate
        good = sound(self.spec.codec, run)
        spans = incoming.fresh(run)
        for a, b in spans if good is None else within(spans, good):
            span = slice(at + a, at + b)
            if b - a == 1:  # for numpy an element costs a third of a slice
                self._weight[at + a] += weight[a]
                self._heard[at + a] |= heard[a]
            else:
                self._weight[span] += weight[a:b]
                self._heard[span] |= heard[a:b]
            if b - a == len(payload):
                accumulate(payload, weight, self._mean[span])
            else:
                accumulate(payload[a:b], weight[a:b], self._mean[span])
        return [] if good is None else self._refused(run.peer)

    def _keep(self, shares: Shares, run: Run, incoming: Incoming, block: int) -> list[Effect]:
        """Keep a peer's share apart, for the guard to judge."""
        good = sound(self.spec.codec, run)
        spans = incoming.fresh(run)
        if spans:
            share = shares.of(run.peer, block)
            for a, b in spans if good is None else within(spans, good):
                at = slice(run.first + a, run.first + b)
                self.spec.codec.decode(run.payload[a:b], share.values[at])
                share.weight[at] = run.weight[a:b]
        return [] if good is None else self._refused(run.peer)

    def _store(self, run: Run, incoming: Incoming, at: int) -> list[Effect]:
        payload, weight, heard = run.payload, run.weight, run.heard
        decode = self.spec.codec.decode
        good = sound(self.spec.codec, run)
        spans = incoming.fresh(run)
        for a, b in spans if good is None else within(spans, good):
            span = slice(at + a, at + b)
            decode(payload if b - a == len(payload) else payload[a:b], self._mean[span])
            if b - a == 1:
                self._weight[at + a], self._heard[at + a] = weight[a], heard[a]
                self._averaged[at + a] = weight[a] > 0
                continue
            self._weight[span] = weight[a:b]
            self._heard[span] = heard[a:b]
            self._averaged[span] = weight[a:b] > 0
        return [] if good is None else self._refused(run.peer)

    def _refused(self, peer: PeerId, why: str = "it counts for nothing") -> list[Effect]:
        """Values of a peer were not sound: note it once in a round."""
        if peer in self._unsound:
            return []
        self._unsound.add(peer)
        return [Noted(UNSOUND, peer, f"in round {self.spec.round}: {why}")]

    # -- Reduce: average what came, and send it to every member

    def reduce(self, stages: Stages) -> Iterator[Effect]:
        """See ``stages.Content``."""
        spec = self.spec
        for block in self.mine:
            span = spec.layout.spans[block]
            payload, overflown = self._average(block)
            for peer in spec.members.intersection(overflown):
                yield from self._refused(
                    peer, "what it and others sent has no finite mean, and is no average"
                )
            key, weight, heard = spec.key(GATHER, block), self._weight[span], self._heard[span]
            for peer in stages.others():
                run = whole_message(peer, key, payload, weight, heard)
                yield stages.send(run, stages.waiting.until_s)
        self._copies.clear()  # nothing asks any more what has come of them

    def awaited(self) -> Iterable[tuple[int, PeerId, Incoming]]:
        """See ``stages.Content``."""
        return [(block, self.spec.owners[block], incoming) for block, incoming in self._gathered.items()]

    def _average(self, block: int) -> tuple[Bytes, list[PeerId]]:
        """A block's average as it is sent, and the peers whose values have no finite average."""
        span = self.spec.layout.spans[block]
        weight, mean = self._weight[span], self._mean[span]
        if self._shares is not None:
            self._shares.reduce(block, mean, weight, self._heard[span])
            some = weight > 0
        else:
            some = weight > 0
            _divide(mean, weight, some)
        finite, overflown = finite_rows(mean), list[PeerId]()
        if finite is not None:
            overflown = peers_in(int(np.bitwise_or.reduce(self._heard[span][~finite])))
            weight[~finite] = 0.0
            some &= finite
        if self.spec.quorum:
            few = np.bitwise_count(self._heard[span]) < self.spec.quorum
            weight[few] = 0.0
            some &= ~few
        if not some.all() and self.spec.gives:  # an auxiliary has no values of its own
            mean[~some] = self._own[span][~some]
        self._averaged[span] = some
        payload = self.spec.codec.encode(mean)
        if not self.spec.codec.exact:
            self.spec.codec.decode(payload, mean)
        return payload, overflown

    def result(self, stages: Stages) -> Result:
        """See ``stages.Content``."""
        kept, begin = ~self._averaged, stages.begun
        if kept.any() and self.spec.gives:
            self._weight, self._heard = self._weight.copy(), self._heard.copy()  # what was sent has views
            self._mean[kept] = self._own[kept]
            self._weight[kept] = begin.weight
            self._heard[kept] = bit(self.spec.me)
        told = np.ones(len(self._averaged), np.bool_)
        for block, incoming in self._gathered.items():
            told[self.spec.layout.spans[block]] = incoming.closed or incoming.left < incoming.total
        self._gathered.clear()  # nor of these
        judged = None if self._shares is None else self._shares.judged()
        if self.spec.spread is not None:
            came = self.spec.spread.undone(
                self._mean, self._weight, self._heard, self._averaged, told, begin.values
            )
            return Result(**came._asdict(), judged=judged)
        return Result(self._mean, self._weight, self._heard, self._averaged, judged=judged, told=told)

    def scattered_of(self, peer: PeerId, block: int) -> Incoming | None:
        """See ``stages.Content``."""
        return self._copies[block].get(peer)


def _divide(mean: Floats, weight: Floats, some: Bools) -> None:
    """Make means of sums, in place. some: which chunks have a weight."""
    first = weight[0]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if some.all() and (weight == first).all():
            if first != 1.0:
                mean *= np.float32(1.0) / first
        else:
            np.divide(mean, weight[:, None], out=mean, where=some[:, None])
