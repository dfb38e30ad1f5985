"""Reduce-scatter then all-gather through block owners: what RPS and direct all-reduce share.

Stage SCATTER: every peer sends its copy of each block to the block's owner, who averages what came.
Stage GATHER: the owner sends the average to every peer; where none comes, a peer keeps its own values.
A stage is over when all messages that are waited for have closed (all chunks are there, or the marked
last datagram shows that the rest will not come), or at its deadline.

With ``Spec.repair_s`` set, holes are asked for again while time remains; without, what is lost is lost.
"""

from __future__ import annotations

import numpy as np

from ragtag.core.types import (
    Arm,
    Arrived,
    Begin,
    Done,
    Effect,
    Event,
    Expired,
    Left,
    Outcome,
    PeerId,
    Run,
    Send,
)
from ragtag.protocols.base import GATHER, NACK, SCATTER, Incoming, Spec, bit, scratch_of, whole
from ragtag.protocols.repair import Repairer

WITNESSES = 2
"""Owners that must have gone on without a peer: one may have had bad luck (a mark overtook data)."""
_WAITING, _SCATTERING, _GATHERING, _DONE = range(4)


class ScatterGather:
    """One round of averaging on one peer.

    It may take runs before ``Begin`` (faster peers start earlier): they are added up at once, so that
    nothing has to be kept.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.outcome: Outcome | None = None
        self._state = _WAITING
        layout = spec.layout
        self._mean = scratch_of(spec)
        self._weight = np.zeros(layout.n_chunks, np.float32)
        self._heard = np.zeros(layout.n_chunks, np.uint64)
        self._mine = [j for j, owner in enumerate(spec.owners) if owner == spec.me and layout.sizes[j]]
        for block in self._mine:
            self._mean[self.spec.layout.spans[block]] = 0.0
        self._averaged = np.zeros(layout.n_chunks, np.bool_)
        self._incoming: dict[tuple[PeerId, int, int], Incoming] = {}
        self._gathered = {
            j: Incoming(layout.sizes[j])
            for j, o in enumerate(spec.owners)
            if o != spec.me and layout.sizes[j]
        }
        self._open: set[tuple[PeerId, int, int]] = set()
        self._waiting: set[PeerId] = set()
        self._came: set[PeerId] = set()
        self._missed: set[PeerId] = set()
        self._gave: set[PeerId] = set()
        self._reduced: dict[PeerId, int] = {}
        self._repair = Repairer(spec) if spec.repair_s is not None else None
        self._expired = False
        self._last = -1

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        if isinstance(event, Arrived):
            effects: list[Effect] = []
            for run in event.runs:
                effects += self._take(now_s, run)
            return effects if self._open else effects + self._advance(now_s)
        if isinstance(event, Begin):
            return self._begin(now_s, event)
        if isinstance(event, Expired):
            return self._expire(now_s, event.timer.name)
        if isinstance(event, Left):
            return self.passed(now_s, event.peer)
        return []

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Wait no more for a peer: what has not come from it was lost."""
        self._open = {entry for entry in self._open if entry[0] != peer}
        self._waiting -= {peer}
        return self._advance(now_s)

    def over(self) -> bool:
        """All averages of others have come."""
        return bool(self._gathered) and not any(incoming.left for incoming in self._gathered.values())

    def withheld(self) -> frozenset[PeerId]:
        """Heard, and waited for, but of their copies nothing came."""
        if not self._mine or self._state == _WAITING:
            return frozenset()
        return frozenset((set(self._waited_for) & self._came) - self._gave)

    def owed(self) -> dict[PeerId, bool]:
        """All peers owe an owner their copies; others are owed what owners send."""
        owners = {self.spec.owners[block] for block in self._gathered}
        return {peer: peer in self._came for peer in (self._others() if self._mine else sorted(owners))}

    # -- Begin: scatter own copies to the owners

    def _begin(self, now_s: float, begin: Begin) -> list[Effect]:
        spec = self.spec
        self._state = _SCATTERING
        self._begun = begin
        self._values = begin.values
        self._started_s = now_s
        self._waiting = set(begin.waiting) & spec.members - {spec.me}
        self._waited_for = tuple(sorted(self._waiting))
        self._scatter_until_s = now_s + begin.scatter_s
        self._round_until_s = self._scatter_until_s + begin.gather_s
        effects: list[Effect] = []
        spans, sizes = spec.layout.spans, spec.layout.sizes
        weights = np.full(max(sizes), begin.weight, np.float32)
        peers = np.full(max(sizes), bit(spec.me) if begin.weight > 0 else 0, np.uint64)
        for block, owner in self._turn():
            if owner == spec.me:
                self._add_own(block)
            else:
                k, payload = sizes[block], spec.codec.encode(begin.values[spans[block]])
                run = whole(owner, spec.key(SCATTER, block), payload, weights[:k], peers[:k])
                effects.append(self._send(run, self._scatter_until_s))
        for block in self._mine:
            for peer in self._waiting - begin.withheld:
                self._wait_for(peer, SCATTER, block, self._message(peer, SCATTER, block))
        effects.append(Arm(spec.timer("scatter"), self._scatter_until_s))
        if self._repair is not None:
            effects += self._repair.again(now_s, self._round_until_s)
        return effects + self._advance(now_s)

    def _turn(self) -> list[tuple[int, PeerId]]:
        """Blocks with their owners, starting behind oneself, so that not all send to one peer at first."""
        spec = self.spec
        blocks = [(j, o) for j, o in enumerate(spec.owners) if spec.layout.sizes[j]]
        me, n = spec.me, max(spec.members) + 1
        return sorted(blocks, key=lambda entry: (entry[1] - me) % n)

    def _add_own(self, block: int) -> None:
        span = self.spec.layout.spans[block]
        weight = np.float32(self._begun.weight)
        if self._weight[span].any() or weight != 1.0:
            self._mean[span] += self._values[span] * weight
        else:
            self._mean[span] = self._values[span]
        self._weight[span] += weight
        if weight > 0:
            self._heard[span] |= bit(self.spec.me)

    # -- Arrivals

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        stage, block = run.key.stage, self.spec.block(run.key)
        layout = self.spec.layout
        if not 0 <= block < layout.n_blocks or run.peer not in self.spec.members or run.peer == self.spec.me:
            return []
        if stage & NACK:
            if self._repair is None or self._state == _WAITING:
                return []
            return self._repair.answer(run, now_s + self._begun.gather_s)  # the other may have begun later
        if run.total != layout.sizes[block] or run.first + len(run.payload) > run.total:
            return []
        if stage == SCATTER:
            self._gave.add(run.peer)
        if stage == SCATTER and self.spec.owners[block] == self.spec.me and self._state <= _SCATTERING:
            incoming = self._message(run.peer, SCATTER, block)
            self._accumulate(run, incoming, layout.starts[block] + run.first)
        elif stage == GATHER and block in self._gathered and self._state <= _GATHERING:
            incoming = self._gathered[block]
            self._store(run, incoming, layout.starts[block] + run.first)
            if incoming.left == 0:  # the average is here, from whomever this peer takes for its owner
                self._open.discard((self.spec.owners[block], GATHER, block))
            if self._state == _SCATTERING and self._open and len(run.heard):
                self._go_on_without(run)
        else:
            return []
        self._came.add(run.peer)
        return self._close(now_s, run, incoming, (run.peer, stage, block))

    def _accumulate(self, run: Run, incoming: Incoming, at: int) -> None:
        payload, weight, heard = run.payload, run.weight, run.heard
        accumulate = self.spec.codec.accumulate
        for a, b in incoming.fresh(run):
            span = slice(at + a, at + b)
            accumulate(payload[a:b], weight[a:b], self._mean[span])
            if b - a == 1:  # for numpy an element costs a third of a slice
                self._weight[at + a] += weight[a]
                self._heard[at + a] |= heard[a]
                continue
            self._weight[span] += weight[a:b]
            self._heard[span] |= heard[a:b]

    def _store(self, run: Run, incoming: Incoming, at: int) -> None:
        payload, weight, heard = run.payload, run.weight, run.heard
        decode = self.spec.codec.decode
        for a, b in incoming.fresh(run):
            span = slice(at + a, at + b)
            decode(payload[a:b], self._mean[span])
            if b - a == 1:
                self._weight[at + a], self._heard[at + a] = weight[a], heard[a]
                self._averaged[at + a] = weight[a] > 0
                continue
            self._weight[span] = weight[a:b]
            self._heard[span] = heard[a:b]
            self._averaged[span] = weight[a:b] > 0

    def _close(
        self, now_s: float, run: Run, incoming: Incoming, entry: tuple[PeerId, int, int]
    ) -> list[Effect]:
        if self._repair is not None and incoming.ended and incoming.left:
            if self._state in (_SCATTERING, _GATHERING):
                return self._repair.ask(now_s, incoming, run.peer, run.key, self._round_until_s)
            if self._state == _WAITING:
                self._repair.later(incoming, run.peer, run.key)
            return []
        if incoming.closed and entry in self._open:
            self._open.discard(entry)
            if self._state == _SCATTERING and not self._open:
                self._last = run.peer
        return []

    def _go_on_without(self, run: Run) -> None:
        """Most owners have reduced without a peer: it gave nothing, so wait no longer for it either.

        Each peer's deadline comes from its own measurements. By this rule what counts is the middle one of
        the crew: a peer that would wait much longer does not hold up those that have gone on.
        """
        if run.peer not in self._reduced:
            self._reduced[run.peer] = int(np.bitwise_or.reduce(run.heard))
        if 2 * len(self._reduced) < len(self._waiting):
            return
        for peer in {entry[0] for entry in self._open}:
            others = self._waiting - {peer}
            without = sum(not self._reduced.get(other, -1) >> peer & 1 for other in others)
            if without >= WITNESSES and 2 * without > len(others):
                self._open = {entry for entry in self._open if entry[0] != peer}
                self._missed.add(peer)
                self._expired = True
                self._last = peer

    # -- From stage to stage

    def _advance(self, now_s: float) -> list[Effect]:
        if self._open or self._state not in (_SCATTERING, _GATHERING):
            return []
        if self._state == _SCATTERING:
            return self._reduce(now_s)
        return self._finish(now_s)

    def _reduce(self, now_s: float) -> list[Effect]:
        """Average what came, send it to every member, and wait for the others' averages."""
        spec = self.spec
        self._state = _GATHERING
        self._reduced_s = now_s
        # an owner may reduce as late as its scatter deadline: what it sends then is in time
        self._round_until_s = max(now_s, self._scatter_until_s) + self._begun.gather_s
        effects: list[Effect] = []
        for block in self._mine:
            span = self.spec.layout.spans[block]
            payload = self._average(span)
            for peer in self._others():
                run = whole(peer, spec.key(GATHER, block), payload, self._weight[span], self._heard[span])
                effects.append(self._send(run, self._round_until_s))
        silent = self._missed - self._came
        for block, incoming in self._gathered.items():
            owner = spec.owners[block]
            if owner in self._waiting and owner not in silent:
                self._wait_for(owner, GATHER, block, incoming)
        effects.append(Arm(spec.timer("gather"), self._round_until_s))
        return effects + self._advance(now_s)

    def _average(self, span: slice) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        weight, mean = self._weight[span], self._mean[span]
        some = weight > 0
        first = weight[0]
        if some.all() and (weight == first).all():
            if first != 1.0:
                mean *= np.float32(1.0) / first
        else:
            np.divide(mean, weight[:, None], out=mean, where=some[:, None])
            mean[~some] = self._values[span][~some]
        self._averaged[span] = some
        payload = self.spec.codec.encode(mean)
        if not self.spec.codec.exact:
            self.spec.codec.decode(payload, mean)
        return payload

    def _finish(self, now_s: float) -> list[Effect]:
        self._state = _DONE
        if self._repair is not None:
            self._repair.forget(SCATTER)  # all owners have reduced, or time is up; the values may change now
        kept = ~self._averaged
        if kept.any():
            self._weight, self._heard = self._weight.copy(), self._heard.copy()  # what was sent has views
            self._mean[kept] = self._values[kept]
            self._weight[kept] = self._begun.weight
            self._heard[kept] = bit(self.spec.me)
        self.outcome = Outcome(
            channel=self.spec.channel,
            round=self.spec.round,
            mean=self._mean,
            weight=self._weight,
            heard=self._heard,
            averaged=self._averaged,
            missed=tuple(sorted(self._missed)),
            waited_for=self._waited_for,
            started_s=self._started_s,
            scatter_s=self._reduced_s - self._started_s,
            gather_s=now_s - self._reduced_s,
            total_s=now_s - self._started_s,
            expired=self._expired,
            last=self._last,
        )
        return [Done(self.outcome)]

    def _expire(self, now_s: float, name: str) -> list[Effect]:
        if name == "repair":
            return self._repair_again(now_s)
        due = (name == "scatter" and self._state == _SCATTERING) or (
            name == "gather" and self._state == _GATHERING
        )
        if not due:
            return []
        self._expired = True
        overdue = {peer for peer, _, _ in self._open}
        self._missed |= overdue
        if self._state == _SCATTERING and overdue:
            self._last = min(overdue)
        self._open.clear()
        return self._advance(now_s)

    def _repair_again(self, now_s: float) -> list[Effect]:
        if self._repair is None or self._state not in (_SCATTERING, _GATHERING):
            return []
        return self._repair.again(now_s, self._round_until_s)

    # -- Small change

    def _send(self, run: Run, deadline_s: float) -> Send:
        return Send(run if self._repair is None else self._repair.remember(run), deadline_s)

    def _others(self) -> list[PeerId]:
        spec = self.spec
        n = max(spec.members) + 1
        return sorted(spec.members - {spec.me}, key=lambda peer: (peer - spec.me) % n)

    def _message(self, peer: PeerId, stage: int, block: int) -> Incoming:
        entry = (peer, stage, block)
        incoming = self._incoming.get(entry)
        if incoming is None:
            incoming = self._incoming[entry] = Incoming(self.spec.layout.sizes[block])
        return incoming

    def _wait_for(self, peer: PeerId, stage: int, block: int, incoming: Incoming) -> None:
        if not incoming.closed or (self._repair is not None and incoming.left):
            self._open.add((peer, stage, block))
