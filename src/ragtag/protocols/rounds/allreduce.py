"""All-reduce with retransmission: the loss-free baseline, direct and as a ring.

Direct: every peer owns one block, reduces it and sends the sum to all. Ring: n-1 steps of
reduce-scatter, n-1 of all-gather, each to the next peer only (Patarasuk, Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 2009). Both wait for every member, as an
all-reduce does. Their deadline only bounds how long a dead member holds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from ragtag.codecs.base import finite_rows
from ragtag.core.types import (
    Arm,
    Arrived,
    Begin,
    Bools,
    Done,
    Effect,
    Event,
    Expired,
    Left,
    Noted,
    Outcome,
    PeerId,
    Run,
    Send,
)
from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.channel.averager import Averager, Setting, is_planned
from ragtag.protocols.rounds.base import (
    GATHER,
    NACK,
    SCATTER,
    UNSOUND,
    Incoming,
    Lesson,
    Round,
    Spec,
    bit,
    peers_in,
    scratch_of,
    sound,
    spans_of,
    whole_message,
    within,
)
from ragtag.protocols.rounds.layout import fixed_owners, layout_of
from ragtag.protocols.rounds.reduce import scatter_gather
from ragtag.protocols.rounds.repair import Repairer

_PATIENCE = 8.0  # a loss-free baseline waits several times as long as a lossy round would


def _spec(setting: Setting, n_blocks: int, owners: tuple[PeerId, ...], members: frozenset[PeerId]) -> Spec:
    return Spec(
        me=setting.me,
        channel=setting.channel,
        round=setting.round,
        layout=layout_of(setting.n_chunks, n_blocks),
        owners=owners,
        members=members,
        codec=setting.codec,
        repair_s=setting.repair_s,
        growth=setting.growth,
        scratch=setting.scratch,
        patience=setting.patience,
        reordering=setting.reordering,
        guard=setting.guard,
        live=setting.n_giving,
        auxiliary=setting.auxiliary & members,
    )


def _direct(setting: Setting) -> Round:
    spec = _spec(setting, setting.n, (), frozenset(range(setting.n)))
    if setting.shares:
        return scatter_gather(setting.shared(spec, tuple(range(len(setting.shares)))))
    owners = fixed_owners(setting.n, *setting.owning, setting.auxiliary)
    return scatter_gather(replace(spec, owners=owners))


def _ring(setting: Setting) -> Round:
    order = tuple(sorted(setting.present - setting.auxiliary))
    return Ring(_spec(setting, setting.n, order, frozenset(order)))


class Ring:
    """One round of ring all-reduce on one peer. A block goes on as soon as it is whole.

    The ring is of the peers that have not left. Block ``j`` starts at the ``j``-th of them, counted round and
    round. So peers that disagree about which have left still mean the same values by a block's number.

    Where a ring breaks off, some may have an average that does not come to others, and none can tell which.
    So an outcome does not say what was ``told``, and nothing of a target batch is carried into the next mean.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.outcome: Outcome | None = None
        self.told = False  # a ring waits for every peer
        order, n = spec.owners, len(spec.owners)
        self._at = order.index(spec.me)
        self._next, self._prev = order[(self._at + 1) % n], order[(self._at - 1) % n]
        layout = spec.layout
        self._sum = scratch_of(spec)
        self._sum[:] = 0.0
        self._weight = np.zeros(layout.n_chunks, np.float32)
        self._heard = np.zeros(layout.n_chunks, np.uint64)
        self._averaged = np.zeros(layout.n_chunks, np.bool_)
        full = [j for j in range(layout.n_blocks) if layout.sizes[j]]
        at = self._at  # this peer starts the blocks with this remainder, and receives no sum of them
        self._blocks = full
        self._last = {j for j in full if (j - at - 1) % n == 0}  # their sums end here
        self._end = {j for j in full if (j - at - 2) % n == 0}  # the next peer has had their averages first
        self._scattered = {j: Incoming(layout.sizes[j]) for j in full if (j - at) % n}
        self._gathered = {j: Incoming(layout.sizes[j]) for j in full if j not in self._last}
        self._passed: set[tuple[int, int]] = set()
        self._noted = self._gap = False
        self._repair = Repairer(spec)
        self._begun: Begin | None = None
        self._until_s = 0.0
        self._scatter_done_s: float | None = None

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take one event; ``Done`` comes once."""
        if isinstance(event, Arrived):
            effects: list[Effect] = []
            for run in event.runs:
                effects += self._take(now_s, run)
            return effects + self._advance(now_s)
        if isinstance(event, Begin):
            return self._begin(now_s, event)
        if isinstance(event, Expired) and self._begun is not None and self.outcome is None:
            if event.timer.name == "repair":
                return self._repair.again(now_s, self._until_s)
            return self._finish(now_s, expired=True)
        if isinstance(event, Left) and event.peer in self.spec.members and self.outcome is None:
            self._gap = True  # a ring with a gap passes nothing on
            return [] if self._begun is None else self._finish(now_s, expired=True)
        return []

    def passed(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Nothing happens: a ring waits for its neighbour or for its deadline."""
        return []

    def asked_from_next(self, now_s: float, peer: PeerId) -> list[Effect]:
        """Nothing happens, as in ``passed``."""
        return []

    def is_left(self) -> bool:
        """No: a ring ends for all or for none."""
        return False

    def goes_elsewhere(self, question: Run) -> bool:
        """No block does: peers agree on the ring, or it does not turn."""
        return False

    def apart(self, now_s: float, peer: PeerId) -> list[Effect]:
        """No peer is: a ring has no shares."""
        return []

    def lesson(self) -> Lesson:
        """All that comes is from the peer before this one."""
        tables = [*self._scattered.values(), *self._gathered.values()]
        came = any(incoming.left < incoming.total for incoming in tables)
        return Lesson({self._prev: came} if tables else {})

    def _begin(self, now_s: float, begin: Begin) -> list[Effect]:
        self._begun, self._started_s = begin, now_s
        self._until_s = now_s + begin.scatter_s + begin.gather_s
        weight, finite = np.float32(begin.weight), finite_rows(begin.values)
        for a, b in ((0, len(begin.values)),) if finite is None else spans_of(finite):
            with np.errstate(over="ignore", invalid="ignore"):
                self._sum[a:b] += begin.values[a:b] if weight == 1.0 else begin.values[a:b] * weight
            self._weight[a:b] += weight
            self._heard[a:b] |= bit(self.spec.me) if begin.weight > 0 else np.uint64(0)
        effects: list[Effect] = [Arm(self.spec.timer("round"), self._until_s)]
        if finite is not None:
            own = f"in round {self.spec.round}: its own values count for nothing"
            effects.append(Noted(UNSOUND, self.spec.me, own))
        if self._gap:
            return [*effects, *self._finish(now_s, expired=True)]
        return [*effects, *self._repair.again(now_s, self._until_s), *self._advance(now_s)]

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        layout, stage, block = self.spec.layout, run.key.stage, self.spec.block(run.key)
        if stage & NACK:
            if run.peer != self._next or self._begun is None:
                return []
            return self._repair.answer(run, now_s + self._begun.gather_s)  # the other may have begun later
        table = self._scattered if stage == SCATTER else self._gathered
        incoming = table.get(block)
        if run.peer != self._prev or incoming is None or self.outcome is not None:
            return []
        if stage != SCATTER and (stage != GATHER or (SCATTER, block) not in self._passed):
            return []  # an average comes round only after this peer's values went into it
        if run.total != layout.sizes[block] or run.first + len(run.payload) > run.total:
            return []
        at = layout.starts[block] + run.first
        good = sound(self.spec.codec, run)
        spans = incoming.fresh(run)
        for a, b in spans if good is None else within(spans, good):
            span = slice(at + a, at + b)
            if stage == SCATTER:
                self.spec.codec.accumulate(run.payload[a:b], np.ones(b - a, np.float32), self._sum[span])
                self._weight[span] += run.weight[a:b]
                self._heard[span] |= run.heard[a:b]
            else:
                self.spec.codec.decode(run.payload[a:b], self._sum[span])
                self._weight[span], self._heard[span] = run.weight[a:b], run.heard[a:b]
                self._averaged[span] = run.weight[a:b] > 0
        effects: list[Effect] = []
        if good is not None and spans and not self._noted:
            self._noted = True
            effects.append(
                Noted(UNSOUND, run.peer, f"in round {self.spec.round}: what it passed on counts for nothing")
            )
        if good is not None and stage == GATHER:
            self._lack(slice(at, at + len(good)), ~good)
        if incoming.closed and incoming.left and self._begun is None:
            self._repair.later(incoming, run.peer, run.key)
        elif self._begun is not None and incoming.left:
            self._repair.came(now_s, run.peer, run.key)
            ask = self._repair.ask if incoming.closed else self._repair.under_way
            effects += ask(now_s, incoming, run.peer, run.key, self._until_s)
        return effects

    def _lack(self, span: slice, rows: Bools) -> None:
        """Some rows have no average: what is passed on of them counts for nothing either."""
        at = np.arange(span.start, span.stop)[rows]
        at = at[~self._averaged[at]]  # a row whose average has come before stays
        self._sum[at], self._weight[at], self._heard[at] = 0.0, 0.0, 0

    def _advance(self, now_s: float) -> list[Effect]:
        if self._begun is None or self.outcome is not None:
            return []
        effects: list[Effect] = []
        for block in self._blocks:
            if (SCATTER, block) not in self._passed and self._whole(self._scattered, block):
                self._passed.add((SCATTER, block))
                effects += self._pass_sum(now_s, block)
            if (
                block not in self._last
                and (GATHER, block) not in self._passed
                and self._gathered[block].left == 0
            ):
                self._passed.add((GATHER, block))
                if block not in self._end:
                    effects.append(
                        self._pass(
                            GATHER, block, self.spec.codec.encode(self._sum[self.spec.layout.spans[block]])
                        )
                    )
        if len(self._passed) == 2 * len(self._blocks):
            effects += self._finish(now_s, expired=False)
        return effects

    def _whole(self, table: dict[int, Incoming], block: int) -> bool:
        return block not in table or table[block].left == 0

    def _pass_sum(self, now_s: float, block: int) -> list[Effect]:
        span = self.spec.layout.spans[block]
        payload = self.spec.codec.encode(self._sum[span])
        if block not in self._last:
            payload = payload.copy()  # the same rows take the average later
            return [self._pass(SCATTER, block, payload)]
        self._scatter_done_s = now_s
        some = self._weight[span] > 0
        with np.errstate(over="ignore", invalid="ignore"):
            np.divide(self._sum[span], self._weight[span][:, None], out=self._sum[span], where=some[:, None])
        finite, effects = finite_rows(self._sum[span]), list[Effect]()
        if finite is not None:
            some &= finite
            why = f"in round {self.spec.round}: what it and others sent has no finite mean, and is no average"
            peers = peers_in(int(np.bitwise_or.reduce(self._heard[span][~finite])))
            effects = [Noted(UNSOUND, peer, why) for peer in self.spec.members.intersection(peers)]
            self._lack(span, ~finite)
        self._averaged[span] = some
        payload = self.spec.codec.encode(self._sum[span])
        if not self.spec.codec.exact:
            self.spec.codec.decode(payload, self._sum[span])
        self._passed.add((GATHER, block))
        return [*effects, self._pass(GATHER, block, payload)] if len(self.spec.owners) > 1 else effects

    def _pass(self, stage: int, block: int, payload: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> Send:
        span = self.spec.layout.spans[block]
        run = whole_message(
            self._next,
            self.spec.key(stage, block),
            payload,
            self._weight[span].copy(),
            self._heard[span].copy(),
        )
        return Send(self._repair.remember(run), self._until_s)

    def _finish(self, now_s: float, expired: bool) -> list[Effect]:
        begun = self._begun
        assert begun is not None
        kept = ~self._averaged
        missed = expired and (kept.any() or len(self._passed) < 2 * len(self._blocks))
        if kept.any():
            self._sum = self._sum.copy()  # what was sent has views
            self._sum[kept] = begun.values[kept]
            self._weight[kept] = begun.weight
            self._heard[kept] = bit(self.spec.me)
        reduced_s = self._scatter_done_s if self._scatter_done_s is not None else now_s
        self.outcome = Outcome(
            channel=self.spec.channel,
            round=self.spec.round,
            mean=self._sum,
            weight=self._weight,
            heard=self._heard,
            averaged=self._averaged,
            missed=(self._prev,) if missed else (),
            waited_for=tuple(sorted(self.spec.members - {self.spec.me})),
            started_s=self._started_s,
            scatter_s=reduced_s - self._started_s,
            gather_s=now_s - reduced_s,
            total_s=now_s - self._started_s,
            expired=expired,
        )
        return [Done(self.outcome)]


direct = at_once("allreduce", _direct, patience=_PATIENCE, guards=True, written="AllReduce()")
"""Direct scatter-reduce, then all-gather."""

ring = _ring_averager = at_once(
    "ring", _ring, patience=_PATIENCE, owned=False, written="AllReduce(ring=True)"
)
"""Ring reduce-scatter, then ring all-gather."""


def AllReduce(ring: bool = False, shares: Literal["equal", "measured"] = "equal") -> Averager:
    """Average over everybody, with retransmission: the loss-free baseline, which waits for the slowest.

    ring: pass partial sums around a ring rather than straight to each block's owner.
    shares: "measured": each peer owns as much as its measured line is good for (``channel.shares``).
    Raises ValueError: there are no such ``shares``, or a ring is to have unlike ones.
    """
    if not is_planned(shares):
        return _ring_averager if ring else direct
    if ring:
        raise ValueError('AllReduce(ring=True) has no owners; leave out shares="measured", or the ring')
    return replace(
        direct,
        name=f"{direct.name}, measured shares",
        planned=True,
        written='AllReduce(shares="measured")',
    )
