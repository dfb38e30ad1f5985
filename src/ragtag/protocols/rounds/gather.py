"""Rows of all peers to all peers, through owners that decide which are in: for sparse averages.

Peers offer rows that each decode alone (``codecs.sparse.wire``); how many differs, and may be none. Row i
of peer p belongs to block (p + i) mod n. Stage SCATTER: every peer sends each block's owner its rows of the
block. Stage GATHER: the owner sends everyone the rows that it has, unchanged; what it left out is in
nobody's sum.

Why by owners, and not each row straight to everyone: receivers lose different rows, and replicas that add
different sums drift apart for good. With one owner per row its message is the decision, for receivers (which
rows to add) and for senders (which fragments to commit, which to roll back) alike, as in RPS (ICML 2019). A
direct all-gather would need everyone's receipts for that, and of 16 peers, at 10 % loss, all others get a row
in one case of five. The detour costs one n-th of the bytes: k s (n - 1) (1 + 1/n) for k entries of s bytes.
Owners do not decode, so no arithmetic runs in a driver's thread; nor do they select again, which would send
less (2 k s (n - 1)/n; Li, Hoefler, "Near-optimal sparse allreduce", PPoPP 2022) and needs feedback of its
own: at density .001 and up to 16 peers a round's rows are a hundredth of a dense average.

A row counts by its sender's weight over the weight of all that the owner heard of or waited for: what was
lost is restored by its sender's error feedback, and must count as much when it comes.

What a peer lacks of an owner's message at its deadline it goes on asking for, for some rounds' time. Rows
that come while the machine is kept (``lane.BEHIND`` rounds) are part of a later outcome
(``Gathered.late``), so that all replicas add the same rows, some a round later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from ragtag.core.types import (
    Bools,
    Bytes,
    Done,
    Effect,
    Floats,
    Gathered,
    Outcome,
    PeerId,
    PeerSet,
    Run,
    Send,
    nobodys,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.at_once import at_once
from ragtag.protocols.channel.averager import Setting
from ragtag.protocols.channel.lane import BEHIND
from ragtag.protocols.rounds.awaiting import DONE, SCATTERING, WAITING
from ragtag.protocols.rounds.base import GATHER, NACK, NO_VALUES, SCATTER, Incoming, Round, Spec, bit, whole
from ragtag.protocols.rounds.layout import layout_of, rotating_owners
from ragtag.protocols.rounds.repair import Repairer
from ragtag.protocols.rounds.stages import Stages

_NO_ROWS: Bytes = np.zeros((1, CHUNK_BYTES), np.uint8)
_PATIENCE = 4.0  # a sum that all replicas share is worth standing by for
_LATE = 4.0  # what was decided is sent and asked for so many times as long as a round may take


def _counted(heard: PeerSet) -> Floats:
    """How many peers are in each set."""
    counts: Floats = np.unpackbits(heard.view(np.uint8)).reshape(len(heard), -1).sum(1, np.float32)
    return counts


def nothing_gathered(channel: int) -> Outcome:
    """The outcome of a round that never was: nobody has any rows, and all that was offered goes back."""
    one, gone = np.ones(1, np.bool_), np.zeros(1, np.bool_)
    nothing = Gathered(_NO_ROWS[:0], np.zeros(0, np.float32), np.zeros(0, np.int64), one, gone)
    return nobodys(channel, NO_VALUES, np.zeros(1, np.float32), np.zeros(1, np.uint64), nothing)


class _Message:
    """What has come of one message."""

    __slots__ = ("came", "fresh", "heard", "incoming", "rows", "weight")

    def __init__(self, total: int) -> None:
        self.incoming = Incoming(total)
        self.rows: Bytes = np.empty((total, CHUNK_BYTES), np.uint8)
        self.weight = np.zeros(total, np.float32)
        self.heard = np.zeros(total, np.uint64)
        self.came: Bools = np.zeros(total, np.bool_)
        self.fresh: Bools = np.zeros(total, np.bool_)

    def take(self, run: Run) -> None:
        for a, b in self.incoming.fresh(run):
            to = slice(run.first + a, run.first + b)
            self.rows[to] = run.payload[a:b]
            self.weight[to], self.heard[to] = run.weight[a:b], run.heard[a:b]
            self.came[to] = self.fresh[to] = True

    def handed(self) -> Bools:
        """The rows that have come since this was last asked; fillers are none, nor is a share above all."""
        rows, self.fresh = (
            self.fresh & (self.weight > 0) & (self.weight <= 1.0),
            np.zeros(len(self.fresh), np.bool_),
        )
        return rows


class Gather(Stages):
    """One round on one peer. Runs may come after ``Done``, too.

    Spec.layout: a block per peer; its chunks are how many rows a peer may offer at most.
    """

    def __init__(self, spec: Spec, earlier: tuple[Round, ...] = ()) -> None:
        mine = [j for j, owner in enumerate(spec.owners) if owner == spec.me]
        super().__init__(spec, mine, Repairer(spec))
        self._earlier = earlier
        self._scattered: dict[tuple[PeerId, int], _Message] = {}
        self._gathered: dict[tuple[PeerId, int], _Message] = {}
        self._late_until_s = 0.0
        self._whole = False

    def _owners(self) -> Collection[PeerId]:
        return set(self.spec.owners) - {self.spec.me}

    @property
    def _repairer(self) -> Repairer:
        """Rows are always repaired."""
        assert self._repair is not None
        return self._repair

    # -- Begin: rows to the owners

    def _scatter(self) -> Iterator[Send]:
        for block, owner in self._turn():
            if owner != self.spec.me:
                yield self._send(self._share(owner, block), self._scatter_until_s)

    @property
    def _late_s(self) -> float:
        return _LATE * (self._begun.scatter_s + self._begun.gather_s)

    def _own(self, block: int) -> Bytes:
        """This peer's rows of a block."""
        assert self._begun.rows is not None
        return self._begun.rows[(block - self.spec.me) % len(self.spec.owners) :: len(self.spec.owners)]

    def _share(self, owner: PeerId, block: int) -> Run:
        """The message to a block's owner; a row by nobody where there is none to send, to say so."""
        rows = self._own(block)
        heard = bit(self.spec.me) if len(rows) else np.uint64(0)
        rows = rows if len(rows) else _NO_ROWS
        k, weight = len(rows), self._begun.weight
        key = self.spec.key(SCATTER, block)
        return whole(owner, key, rows, np.full(k, weight, np.float32), np.full(k, heard, np.uint64))

    # -- Arrivals

    def _take(self, now_s: float, run: Run) -> list[Effect]:
        spec, stage, block = self.spec, run.key.stage, self.spec.block(run.key)
        if not 0 <= block < len(spec.owners) or run.peer not in spec.members or run.peer == spec.me:
            return []
        if stage & NACK:
            if self._state == WAITING:
                return []
            return self._repairer.answer(run, now_s + self._begun.gather_s)  # the other may have begun later
        if stage == SCATTER:
            self._gave.add(run.peer)
        most = spec.layout.n_chunks
        if stage == SCATTER and spec.owners[block] == spec.me and self._state <= SCATTERING:
            table = self._scattered
        elif stage == GATHER:
            self._told = True
            table, most = self._gathered, most * len(spec.owners)
        else:
            return []
        message = table.get((run.peer, block))
        total = run.total if message is None else message.incoming.total
        if not 0 < run.total == total <= max(1, most) or run.first + len(run.payload) > total:
            return []
        if message is None:
            message = table[run.peer, block] = _Message(total)
        message.take(run)
        self._came.add(run.peer)
        if stage == GATHER and self._state == SCATTERING and self._open and len(run.heard):
            self._go_on_without(run)
        return self._close(now_s, run, message.incoming, (run.peer, stage, block))

    def _ask(self, now_s: float, run: Run, incoming: Incoming, repair: Repairer) -> list[Effect]:
        if self._state == DONE:
            return self._ask_late(now_s, run, incoming)
        return super()._ask(now_s, run, incoming, repair)

    def _ask_late(self, now_s: float, run: Run, incoming: Incoming) -> list[Effect]:
        if now_s >= self._late_until_s:
            return []
        return self._repairer.ask(now_s, incoming, run.peer, run.key, self._late_until_s)

    # -- Decide: what came of this peer's blocks is told to every member

    def _reduce(self) -> Iterator[Send]:
        spec = self.spec
        for block in self._mine:
            decided = self._decided(block)
            self._gathered[spec.me, block] = decided
            for peer in self._others():
                run = whole(peer, spec.key(GATHER, block), decided.rows, decided.weight, decided.heard)
                yield self._send(run, self._round_until_s + self._late_s)

    def _awaited(self) -> Iterable[tuple[int, PeerId, Incoming | None]]:
        for block, owner in enumerate(self.spec.owners):
            message = self._gathered.get((owner, block))
            yield block, owner, None if message is None else message.incoming

    def _decided(self, block: int) -> _Message:
        """A block's rows with their factors; all name whom this owner heard of."""
        own = self._own(block)
        parts, weights = [own], [np.full(len(own), self._begun.weight, np.float32)]
        of = {self.spec.me: float(self._begun.weight)}
        for peer in self._others():
            message = self._scattered.get((peer, block))
            if message is None or not message.came.any():
                continue
            of[peer] = float(message.weight[message.came][0])
            some = message.came & (message.heard > 0)
            parts.append(message.rows[some])
            weights.append(message.weight[some])
        unheard = len(set(self._waited_for) - of.keys())
        total = sum(of.values()) * (1 + unheard / len(of))
        factor: Floats = np.concatenate(weights) / np.float32(total if total > 0 else 1)
        rows: Bytes = np.concatenate(parts)[factor > 0]
        factor = factor[factor > 0]
        if not len(rows):
            rows, factor = _NO_ROWS, np.zeros(1, np.float32)
        roll = np.full(len(rows), sum(1 << peer for peer in of), np.uint64)
        decided = _Message(len(rows))
        decided.take(whole(self.spec.me, self.spec.key(GATHER, block), rows, factor, roll))
        return decided

    def _finish(self, now_s: float) -> list[Effect]:
        self._state = DONE
        self._repairer.forget(SCATTER)
        self._late_until_s = now_s + self._late_s
        gathered, heard = self._collect(), np.zeros(len(self.spec.owners), np.uint64)
        for (_, block), message in self._gathered.items():
            heard[block] |= np.bitwise_or.reduce(message.heard[message.came], initial=np.uint64(0))
        self.outcome = Outcome(
            channel=self.spec.channel,
            round=self.spec.round,
            mean=NO_VALUES,
            weight=_counted(heard),
            heard=heard,
            averaged=gathered.whole,
            missed=tuple(sorted(self._missed)),
            waited_for=self._waited_for,
            started_s=self._started_s,
            scatter_s=self._reduced_s - self._started_s,
            gather_s=now_s - self._reduced_s,
            total_s=now_s - self._started_s,
            expired=self._expired,
            last=self._last,
            gathered=gathered,
        )
        return [Done(self.outcome)]

    # -- What came

    def _collect(self) -> Gathered:
        late: list[tuple[int, Gathered]] = []
        given_up: list[tuple[int, int]] = []
        for machine in self._earlier:
            if isinstance(machine, Gather) and machine.outcome is not None:
                was_whole, number, found = machine._whole, machine.spec.round, machine._fresh()
                if len(found.rows) or not was_whole:
                    late.append((number, found))
                if number <= self.spec.round - BEHIND:  # it is forgotten with the end of this round
                    given_up += [(number, int(block)) for block in np.flatnonzero(~found.whole)]
        self._earlier = ()
        new = self._fresh()
        return Gathered(new.rows, new.factor, new.block, new.whole, new.none, tuple(late), tuple(given_up))

    def _fresh(self) -> Gathered:
        """The rows that came since this was last asked, in the order of blocks."""
        n = len(self.spec.owners)
        whole, none = np.ones(n, np.bool_), np.ones(n, np.bool_)
        rows, factor, block = [_NO_ROWS[:0]], [np.zeros(0, np.float32)], [np.zeros(0, np.int64)]
        for (peer, j), message in sorted(self._gathered.items(), key=lambda entry: entry[0][::-1]):
            which = message.handed()
            whole[j] &= message.incoming.left == 0
            if (
                peer == self.spec.owners[j]
            ):  # who else takes itself for the owner decides on none of one's own
                none[j] = not message.came.any()
            rows.append(message.rows[which])
            factor.append(message.weight[which])
            block.append(np.full(int(which.sum()), j, np.int64))
        whole &= ~none
        self._whole = bool(whole.all())
        return Gathered(np.concatenate(rows), np.concatenate(factor), np.concatenate(block), whole, none)

    # -- Small change

    def _scattered_of(self, peer: PeerId, block: int) -> Incoming | None:
        message = self._scattered.get((peer, block))
        return None if message is None else message.incoming

    def _repair_again(self, now_s: float) -> list[Effect]:
        if self._state != DONE:
            return super()._repair_again(now_s)
        return self._repairer.again(now_s, self._late_until_s) if now_s < self._late_until_s else []


def _make(setting: Setting) -> Round:
    spec = Spec(
        me=setting.me,
        channel=setting.channel,
        round=setting.round,
        layout=layout_of(setting.n_chunks, setting.n),
        owners=rotating_owners(setting.seed, setting.round, setting.n, setting.live),
        members=frozenset(range(setting.n)),
        codec=setting.codec,
        repair_s=setting.repair_s,
        growth=setting.growth,
    )
    return Gather(spec, setting.earlier)


gather = at_once("gather", _make, patience=_PATIENCE, gathers=True)
"""Rows through owners, with repair while the deadline allows."""
